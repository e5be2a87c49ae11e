"""Every operation, called in every form that Python allows, and refused with one clear error."""

import inspect

import pytest
import torch
from sample_calls import call_with_targets, copied, operations, same_bytes, sample_call

from anymla.ops._check import overlaps
from anymla.ops.device import INTERPRETED, has_numba, has_triton

OPERATIONS = operations()
# Ids begin with the family, so that `make family` finds them.
EVERY = [
    pytest.param(name, id=f"{found.__module__.split('.')[2]}.{name}")
    for name, found in sorted(OPERATIONS.items())
]
BACKENDS = [None, "reference", "torch", *(["triton"] if INTERPRETED and has_triton() else [])]


def _of_cpu_tensors(operation):
    """The backend that the sample call takes; numba mostly leaves activations in float32."""
    taken = operation.name in ("fp8_block_linear", "mxfp4_linear")
    return "numba" if has_numba() and taken else "torch"


def _positional(operation):
    parameters = inspect.signature(operation._contract).parameters.values()
    return [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]


def _forms(operation, call):
    """(name, args, kwargs) of the same call; tensors are copied for each."""
    leading = [name for name in _positional(operation) if name in call]
    for form, taken in (("positions", len(leading)), ("keywords", 0), ("mixed", 1)):
        given = {name: copied(value) for name, value in call.items()}
        args = [given.pop(name) for name in leading[:taken]]
        yield form, args, dict(reversed(given.items()))


@pytest.mark.parametrize("name", EVERY)
def test_a_keyword_that_there_is_not_is_refused_with_the_nearest(name):
    operation, call = OPERATIONS[name], sample_call(name)
    last = list(call)[-1]
    for backend in BACKENDS:
        with pytest.raises(TypeError, match=rf"^{name}: no argument '{last}_': did you mean "):
            operation(**call, **{f"{last}_": 1}, backend=backend)
    with pytest.raises(TypeError, match=r"no argument 'zzzzzz': it takes \w+, "):
        operation.resolve(**call, zzzzzz=1)
    assert inspect.signature(operation).parameters["backend"].default is None
    assert repr(operation) == f"<operation {name}{inspect.signature(operation)}>"


def test_every_operation_has_a_sample_call():
    for name, operation in OPERATIONS.items():
        call = sample_call(name)
        assert list(call) == [each for each in operation._signature.parameters if each in call]


@pytest.mark.parametrize("name", EVERY)
def test_keywords_and_positions_mean_the_same(name):
    operation, call = OPERATIONS[name], sample_call(name)
    for backend in BACKENDS:
        found = {}
        for form, args, kwargs in _forms(operation, call):
            if not operation.supports(*args, backend=backend, **kwargs):
                assert backend == "triton"
                continue
            result = operation(*args, backend=backend, **kwargs)
            results = result if isinstance(result, tuple) else (result,)
            bound = operation._signature.bind(*args, **kwargs).arguments
            found[form] = (*results, *(bound.get(each) for each in operation._mutates))
        for form, given in found.items():
            for one, other in zip(found["positions"], given, strict=True):
                assert (one is None and other is None) or same_bytes(one, other), (backend, form)


@pytest.mark.parametrize("name", EVERY)
def test_explain_takes_keywords(name):
    operation, call = OPERATIONS[name], sample_call(name)
    answers = [operation.explain(*args, **kwargs) for _, args, kwargs in _forms(operation, call)]
    assert answers[0] == answers[1] == answers[2]
    chosen, by_backend = answers[0]
    assert chosen == _of_cpu_tensors(operation)
    assert set(by_backend) == set(operation.backends)


def test_what_is_left_out_between_keywords_has_its_default():
    """``lengths`` may be left out, and an argument after it given."""
    operation, call = OPERATIONS["sparse_attention_rows"], sample_call("sparse_attention_rows")
    del call["lengths"]
    q, kv, indices = call.values()
    sink = torch.zeros(2)
    got = operation(sink=sink, indices=indices, kv=kv, q=q)
    want = operation(q, kv, indices, None, sink=sink)
    assert all(map(same_bytes, got, want))
    for wrong, message in (({"tokens": q}, "tokens"), ({"sink": sink, "q": q}, "kv")):
        with pytest.raises(TypeError, match=message):
            operation(**wrong)


@pytest.mark.parametrize("name", EVERY)
def test_inputs_that_require_grad_are_refused(name):
    """Every tensor in turn; without gradients the same call runs."""
    operation = OPERATIONS[name]
    floats = (torch.float16, torch.bfloat16, torch.float32)
    for argument, value in sample_call(name).items():
        first = value
        while isinstance(first, list | tuple) and first:
            first = first[0]
        if not isinstance(first, torch.Tensor) or first.dtype not in floats:
            continue
        call = sample_call(name)
        changed = call[argument]
        while isinstance(changed, list | tuple):
            changed = changed[0]
        changed.requires_grad_()
        message = rf"{name}: {argument} must be detached or .*no_grad.*, got requires_grad=True"
        with torch.enable_grad():
            for ask in (operation, operation.supports, operation.explain):
                with pytest.raises(ValueError, match=message):
                    ask(**call)
        operation(**call)


WRITTEN = [(name, each) for name, found in OPERATIONS.items() for each in found._mutates]


@pytest.mark.parametrize(("name", "argument"), WRITTEN)
def test_written_tensors_that_overlap_are_refused(name, argument):
    operation, call = OPERATIONS[name], call_with_targets(name)
    operation(**call)
    good = call[argument]
    wide = max(range(good.ndim), key=lambda axis: (good.shape[axis] > 1, -axis))
    assert good.shape[wide] > 1
    for stride in (0, good.stride(wide) // 2):
        strides = list(good.stride())
        strides[wide] = stride
        bad = good.as_strided(good.shape, strides)
        with pytest.raises(ValueError, match=rf"{name}: {argument} must be .*"):
            operation(**call | {argument: bad})


@pytest.mark.parametrize(
    ("shape", "strides", "overlapping"),
    [
        ((2, 3), (3, 1), False),
        ((2, 3), (1, 2), False),
        ((2, 3), (2, 1), True),
        ((2, 3), (0, 1), True),
        ((1, 3), (0, 1), False),
        ((0, 3), (0, 0), False),
        ((2, 3, 4), (40, 4, 1), False),
        ((2, 3, 4), (11, 4, 1), True),
    ],
)
def test_overlaps(shape, strides, overlapping):
    assert overlaps(torch.zeros(100).as_strided(shape, strides)) == overlapping


TURNING = [name for name, found in OPERATIONS.items() if "cos_sin_cache" in found._leading]


@pytest.mark.parametrize("name", TURNING)
@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((0, 64), r"\[L, R\] with L >= 1"),
        ((8, 63), r"\[L, R\] with R even"),
        ((8, 0), r"\[L, R\] with R even"),
        ((8, 514), r"\[L, R\] with R even and 2 <= R <= D="),
        ((64,), r"float32 or float64 \[L, R\]"),
    ],
)
def test_a_rotary_table_must_turn_every_token(name, shape, expected):
    """Kernels read the table unchecked."""
    call = sample_call(name) | {"cos_sin_cache": torch.rand(shape)}
    with pytest.raises(ValueError, match=f"{name}: cos_sin_cache must be {expected}"):
        OPERATIONS[name](**call)


@pytest.mark.parametrize("name", TURNING)
def test_a_rotary_table_is_wide_and_with_the_tokens(name):
    call = sample_call(name)
    table = call["cos_sin_cache"]
    with pytest.raises(TypeError, match=f"{name}: cos_sin_cache must be float32 or float64"):
        OPERATIONS[name](**call | {"cos_sin_cache": table.half()})
    with pytest.raises(ValueError, match=f"{name}: cos_sin_cache must be on cpu, got meta"):
        OPERATIONS[name](**call | {"cos_sin_cache": table.to("meta")})


def _hostile(value):
    """Arguments that differ from a good one in one thing."""
    if isinstance(value, list):
        first = _hostile(value[0]) if value else [3]
        return [[], value[:1], 3, None, *([each, *value[1:]] for each in first)]
    if not isinstance(value, torch.Tensor):
        return [None, -1, 1.5, "", True, [], {}]
    wide = torch.empty(2, *value.shape, dtype=value.dtype)
    dtype = torch.int16 if value.dtype != torch.int16 else torch.int32
    found = [None, 3, [value], value.to(dtype), value.to("meta"), value[None], wide.unbind()[1]]
    if value.ndim:
        twice = torch.cat((value.view(torch.uint8), value.view(torch.uint8)), -1)
        found += [value[:0], value[:1].expand(value.shape), twice.view(value.dtype)]
    if value.ndim > 1:
        found += [value.mT.contiguous().mT, value[..., :-1]]
    return found


def _outcome(ask, call):
    """What a call is told: its backend, or its error."""
    try:
        return ask(**call).name
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("backend", [None, "torch"])
def test_a_good_call_vouches_for_no_other(name, backend):
    """What differs from it in one argument is told the same as when it comes first."""
    operation, call = OPERATIONS[name], call_with_targets(name)

    def ask(**call):
        return operation.resolve(backend=backend, **call)

    usual = backend or _of_cpu_tensors(operation)
    wrong = [call | {argument: value} for argument in call for value in _hostile(call[argument])]
    alone = []
    for each in wrong:
        operation.forget()
        alone.append(_outcome(ask, each))
    operation.forget()
    for each, expected in zip(wrong, alone, strict=True):
        assert ask(**call).name == usual
        assert _outcome(ask, each) == expected
        assert _outcome(ask, each) == expected
    assert {usual} < {*alone}

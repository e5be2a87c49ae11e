"""What every operation owes its callers, whatever it computes."""

import importlib
import inspect
import itertools
import pkgutil

import pytest
import torch
from sample_calls import call_with_targets, int32, int64, listed, quantised_call, sample_call

import anymla.ops
from anymla.ops import attention
from anymla.ops.device import has_triton
from anymla.ops.registry import Operation


def _operations():
    for module in pkgutil.iter_modules(anymla.ops.__path__):
        if not module.ispkg:
            continue
        interface = importlib.import_module(f"anymla.ops.{module.name}.interface")
        family = importlib.import_module(f"anymla.ops.{module.name}")
        for name, value in vars(interface).items():
            if isinstance(value, Operation):
                yield pytest.param(family, value, id=f"{module.name}.{name}")


OPERATIONS = list(_operations())


def test_there_are_operations():
    assert len(OPERATIONS) >= 25


@pytest.mark.parametrize(("family", "operation"), OPERATIONS)
def test_backends_take_what_the_contract_takes(family, operation):
    """Defaults are not filled in on the way, so a backend must have the same ones."""
    contract = inspect.signature(operation._contract).parameters
    assert set(operation.backends) >= {"reference", "torch"}
    for backend in operation.backends.values():
        if backend.name == "triton" and not has_triton():
            continue
        taken = inspect.signature(backend.run).parameters
        assert list(taken) == list(contract)
        for name, parameter in contract.items():
            assert taken[name].default == parameter.default
            assert taken[name].kind == parameter.kind


@pytest.mark.parametrize(("family", "operation"), OPERATIONS)
def test_operations_are_public_documented_and_registered(family, operation):
    assert getattr(family, operation.name) is operation
    assert operation.name in family.__all__
    for section in ("Args:", "Raises:"):
        assert section in operation.__doc__
    assert hasattr(torch.ops.anymla, operation.name)
    assert operation.schema().endswith("-> ()")


def moved(value):
    """The argument with one tensor on another device, for each that it holds."""
    if isinstance(value, torch.Tensor):
        yield value.to("meta")
    elif isinstance(value, list | tuple):
        for place, each in enumerate(value):
            for other in moved(each):
                members = [*value[:place], other, *value[place + 1 :]]
                yield value._make(members) if hasattr(value, "_make") else members


def elsewhere(given):
    """The arguments with one tensor on another device, for each; and the argument's name."""
    tensors = [value for value in given.values() if isinstance(value, torch.Tensor | list)]
    for name, value in given.items() if len(tensors) > 1 else ():
        for other in moved(value):
            yield name, given | {name: other}


def two_caches(operation):
    """A call over two caches, with a sink."""
    given = sample_call(operation) | {"sink": torch.zeros(2)}
    given["rows"].append(listed(int32([0, 5], [3, -1]), int32(2, 1)))
    return given


@pytest.mark.parametrize(("family", "operation"), OPERATIONS)
def test_every_tensor_is_on_one_device(family, operation):
    calls = [call_with_targets(operation.name)]
    if operation.name in ("sparse_attention", "prefill_attention"):
        calls.append(quantised_call(operation.name))
    if operation.name == "sparse_attention":
        calls.append(two_caches(operation.name))
    for given in calls:
        operation(**given)
    for name, changed in itertools.chain(*map(elsewhere, calls)):
        for _ in range(2):  # nor is it taken for a call of a known kind
            with pytest.raises(ValueError, match=rf"{operation.name}: .* must be on ") as raised:
                operation(**changed)
            assert name in str(raised.value) or "on meta" in str(raised.value)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("indices", torch.zeros(1, 3, dtype=torch.int32)),
        ("indices", torch.zeros(2, 3)),
        ("indices", None),
        ("lengths", int32(1)),
        ("cache", torch.zeros(3, 4, 528, dtype=torch.uint8)),
        ("cache", None),
    ],
)
def test_the_rows_of_both_caches_fit_the_queries(place, name, wrong):
    given = two_caches("sparse_attention")
    given["rows"][place] = given["rows"][place]._replace(**{name: wrong})
    with pytest.raises((TypeError, ValueError), match=rf"sparse_attention: rows\[{place}\].{name}"):
        attention.sparse_attention(**given)


@pytest.mark.parametrize("name", ["sparse_attention", "prefill_attention"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": int64(1)}, "positions must be"),
        ({"positions": int32(3, 4)}, "positions must be"),
        ({"cos_sin_cache": torch.zeros(8, 3)}, "cos_sin_cache must be"),
        ({"n_groups": 3}, "multiple of 3 groups"),
        ({"n_groups": 0}, "multiple of 0 groups"),
    ],
)
def test_an_epilogue_fits_the_queries(name, change, message):
    operation, given = getattr(attention, name), quantised_call(name)
    changed = given | {"epilogue": given["epilogue"]._replace(**change)}
    with pytest.raises((TypeError, ValueError), match=f"{name}: .*{message}"):
        operation(**changed)
    with pytest.raises(ValueError, match=f"{name}: out must be None with an epilogue"):
        operation(**given, out=torch.zeros(2, 2, 512))

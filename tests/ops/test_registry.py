"""The contract machinery: checks, choice of backends, and torch.library registration."""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from anymla.ops import registry
from anymla.ops.registry import (
    FLOATS,
    Backend,
    BackendUnavailable,
    Support,
    check,
    operation,
    require,
    skip_checks,
)
from anymla.ops.streams import Workspace, scratch


def _like_x(x, **_):
    return (torch.empty_like(x),)


@operation(outputs=_like_x)
def contract_probe_add(x: Tensor, y: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
    """Return x + scale * y."""
    check("contract_probe_add", x=(x, "T 4", FLOATS), y=(y, "T+ 4", FLOATS))


@operation(mutates=("cache",))
def contract_probe_fill(cache: Tensor, value: float, names: list[Tensor]) -> None:
    """Fill the cache with value times the number of names."""
    check("contract_probe_fill", cache=(cache, "_", FLOATS))


class Weighted(NamedTuple):
    """Values with a factor and maybe an offset."""

    values: Tensor
    factor: int
    offset: Tensor | None = None


@operation(outputs=_like_x)
def contract_probe_sum(
    x: Tensor, parts: Sequence[Weighted], *, last: Weighted | None = None
) -> Tensor:
    """Return x and the sum of factor * values + offset over all parts and the last."""
    for each in (*parts, *([] if last is None else [last])):
        check("contract_probe_sum", values=(each.values, "T 4", FLOATS))


def _sum(x, parts, *, last=None):
    every = [*parts, *([] if last is None else [last])]
    offsets = [each.offset for each in every if each.offset is not None]
    return x + sum([each.factor * each.values for each in every] + offsets)


contract_probe_sum.register("reference", _sum)


def _add(x, y=None, *, scale=1.0):
    return x if y is None else x + scale * y[: len(x)]


contract_probe_add.register("reference", _add)
contract_probe_add.register(
    "triton",
    lambda x, y=None, *, scale=1.0: _add(x, y, scale=scale) + 0,
    supports=lambda x, y=None, *, scale=1.0: Support(x.is_cuda, "needs a GPU"),
)


def _fill(cache, value, names):
    cache.fill_(value * len(names))


contract_probe_fill.register("reference", _fill)

X = torch.ones(3, 4)


def test_the_best_supported_backend_runs():
    assert list(contract_probe_add.backends) == ["triton", "reference"]
    assert torch.equal(contract_probe_add(X, X, scale=2.0), 3 * X)
    assert contract_probe_add.supports(X)
    support = contract_probe_add.supports(X, backend="triton")
    assert not support
    assert "needs a GPU" in support.reason


def test_a_named_backend_runs_or_says_why_not():
    with pytest.raises(BackendUnavailable, match=r"contract_probe_add: backend 'triton': needs a"):
        contract_probe_add(X, backend="triton")
    with pytest.raises(BackendUnavailable, match=r"no backend 'cuda'; there are: triton, refer"):
        contract_probe_add(X, backend="cuda")


def test_no_backend_at_all_lists_every_reason():
    @operation(outputs=_like_x)
    def contract_probe_lonely(x: Tensor) -> Tensor:
        """Nothing can run this."""

    for name in ("triton", "torch"):
        contract_probe_lonely.register(
            name, _add, supports=lambda x, name=name: Support(False, f"no {name} here")
        )
    with pytest.raises(
        BackendUnavailable, match=r"\(triton: no triton here; torch: no torch here\)"
    ):
        contract_probe_lonely(X)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (
            (X.int(),),
            TypeError,
            r"contract_probe_add: x must be .*float64 \[T, 4\], got int32 \[3, 4\]",
        ),
        ((X[:, :3],), ValueError, r"x must be .* \[T=3, 4\], got float32 \[3, 3\]"),
        ((X[0],), ValueError, r"x must be .* \[T, 4\], got float32 \[4\]"),
        ((X, X[:2]), ValueError, r"y must be .*\[T=3 or more, 4\], got float32 \[2, 4\]"),
        ((3.0,), TypeError, r"x must be a tensor \[T 4\], got float"),
        ((X, X.to("meta")), ValueError, r"y must be on cpu, got meta"),
    ],
)
def test_errors_name_operation_argument_expected_and_got(args, error, message):
    with pytest.raises(error, match=message):
        contract_probe_add(*args)


def test_check_binds_letters():
    dims = check("op", dims={"D": 4}, a=(X, "T D", FLOATS), b=(None, "Z", FLOATS))
    assert dims == {"T": 3, "D": 4}
    with pytest.raises(ValueError, match=r"\[T=3, D=5\]"):
        check("op", dims={"D": 5}, a=(X, "T D", FLOATS))
    with pytest.raises(ValueError, match="op: k must be positive, got 0"):
        require(False, "op", "k", "positive", 0)


def test_schemas():
    assert contract_probe_add.schema() == (
        "(Tensor x, Tensor? y=None, *, float scale=1.0, str? backend=None, "
        "Tensor(a!)[] results) -> ()"
    )
    assert contract_probe_fill.schema() == (
        "(Tensor(a!) cache, float value, Tensor[] names, *, str? backend=None, "
        "Tensor(b!)[] results) -> ()"
    )


def test_arguments_that_are_named_tuples_are_flat_in_the_schema():
    assert contract_probe_sum.schema() == (
        "(Tensor x, Tensor[] parts_values, SymInt[] parts_factor, Tensor?[] parts_offset, *, "
        "Tensor? last_values=None, SymInt? last_factor=None, Tensor? last_offset=None, "
        "str? backend=None, Tensor(a!)[] results) -> ()"
    )
    parts = [Weighted(X, 2), Weighted(X, 3, X)]
    for last, want in ((None, 7 * X), (Weighted(X, 4), 11 * X), (Weighted(X, 4, X), 12 * X)):
        assert torch.equal(contract_probe_sum(X, parts, last=last), want)
        out = torch.empty_like(X)
        flat = [[X, X], [2, 3], [None, X]]
        more = {} if last is None else dict(zip(FLAT, last, strict=True))
        torch.ops.anymla.contract_probe_sum(X, *flat, **more, results=[out])
        assert torch.equal(out, want)


FLAT = ("last_values", "last_factor", "last_offset")


def test_kinds_of_calls_know_the_fields_of_named_tuples():
    contract_probe_sum.forget()
    parts = [Weighted(X, 2)]
    contract_probe_sum(X, parts)
    contract_probe_sum(X, [Weighted(2 * X, 2)])
    assert len(contract_probe_sum._resolved) == 1
    for other in ([Weighted(X, 3)], [Weighted(X, 2, X)], [*parts, *parts], [Weighted(X[:1], 2)]):
        known = len(contract_probe_sum._resolved)
        contract_probe_sum(X, other)
        assert len(contract_probe_sum._resolved) == known + 1
    with pytest.raises(ValueError, match="values must be"):
        contract_probe_sum(X, [Weighted(X[:, :3], 2)])
    wanted = Weighted(X.clone().requires_grad_(), 2)
    with torch.enable_grad(), pytest.raises(ValueError, match="parts must be detached"):
        contract_probe_sum(X, [wanted])


@pytest.mark.compiles
def test_torch_compile_sees_through_named_tuples():
    def both(x, y):
        return contract_probe_sum(x, [Weighted(x, 2), Weighted(x, 3, y)], last=Weighted(y, 1)) + 1

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(X, 2 * X), both(X, 2 * X))


@pytest.mark.compiles
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_torch_compile_sees_through(compiler):
    def both(x, cache):
        contract_probe_fill(cache, 2.0, [x, x])
        return contract_probe_add(x * 2, x, scale=3.0) + contract_probe_add(x)

    cache = torch.zeros(5)
    compiled = torch.compile(both, backend=compiler, fullgraph=True)
    assert torch.equal(compiled(X, cache), 6 * X)
    assert torch.equal(cache, torch.full((5,), 4.0))


def test_every_operation_is_registered_under_its_name():
    assert hasattr(torch.ops.anymla, "contract_probe_add")
    assert contract_probe_add.__doc__ == "Return x + scale * y."


_checked = []


@operation(mutates=("out",))
def contract_probe_resolve(
    x: Tensor,
    out: Tensor | None = None,
    parts: list[Tensor] | None = None,
    *,
    k: int = 1,
    label: str = "",
) -> None:
    """Nothing is computed."""
    _checked.append(k)
    name = "contract_probe_resolve"
    check(name, x=(x, "T D", FLOATS), out=(out, "T D", FLOATS))
    require(type(k) is int and k > 0, name, "k", "a positive integer", k)


class _Asked:
    """An operation without backends; those that it gets note how often they are asked, and run."""

    def __init__(self):
        self.operation = contract_probe_resolve
        for name in [*self.operation.backends]:
            self.operation.unregister(name)
        _checked.clear()
        self.asked, self.ran = [], []

    @property
    def checked(self):
        return len(_checked)

    def add(self, name, supports=None, **given):
        def answer(*args, **kwargs):
            self.asked.append(name)
            return supports(*args, **kwargs)

        run = lambda *args, **kwargs: self.ran.append(name)  # noqa: E731, names are arguments
        self.operation.register(name, run, supports=supports and answer, **given)
        return self


def _few(x, out=None, parts=None, *, k=1, label=""):
    return Support(len(x) <= 4, "at most four tokens")


def _aligned(x, out=None, parts=None, *, k=1, label=""):
    return Support(x.data_ptr() % 16 == 0 and x.stride(0) % 4 == 0, "multiples of 16 bytes")


def _all_aligned(x, out=None, parts=None, *, k=1, label=""):
    return Support(not any(part.data_ptr() % 16 for part in parts), "multiples of 16 bytes")


WIDE = torch.zeros(8, 16)


def test_a_kind_of_call_is_checked_and_chosen_once():
    probe = _Asked().add("torch", _few).add("reference")
    for values in (WIDE[:3], WIDE[3:6], WIDE[:3] + 1):
        probe.operation(values)
        assert probe.operation.resolve(values).name == "torch"
    assert (probe.checked, probe.asked, probe.ran) == (1, ["torch"], ["torch"] * 3)
    probe.operation(x=WIDE[:3])  # in another form
    assert probe.checked == 1


def test_another_number_of_tokens_is_another_choice():
    probe = _Asked().add("torch", _few).add("reference")
    for tokens in (4, 5, 4, 5, 0, 8):
        probe.operation(WIDE[:tokens])
    assert probe.ran == ["torch", "reference", "torch", "reference", "torch", "reference"]
    assert len(probe.asked) == 4


def test_addresses_and_strides_are_part_of_a_choice():
    probe = _Asked().add("torch", _aligned).add("reference")
    for x in (WIDE[:, :8], WIDE[:, 4:12], WIDE[:, 1:9], torch.zeros(8, 9)[:, :8], WIDE[:, :8]):
        probe.operation(x)
    assert probe.ran == ["torch", "torch", "reference", "reference", "torch"]


def test_addresses_matter_wherever_a_storage_begins():
    probe = _Asked().add("torch", _aligned).add("reference")
    start = -torch.frombuffer(memory := bytearray(256), dtype=torch.uint8).data_ptr() % 16
    for shift in (0, 4, 8, 16):
        x = torch.frombuffer(memory, dtype=torch.float32, count=32, offset=start + shift)
        assert not x.storage_offset()
        probe.operation(x.view(4, 8))
    assert probe.ran == ["torch", "reference", "reference", "torch"]


@pytest.mark.parametrize("changed", [{"k": 2}, {"label": "b"}, {"out": WIDE[:3].clone()}])
def test_other_arguments_are_another_choice(changed):
    answers = {"k": 1, "label": "", "out": None}

    def supports(x, out=None, parts=None, *, k=1, label=""):
        same = {"k": k, "label": label, "out": out}
        return Support(all(same[name] is value for name, value in answers.items()), "changed")

    probe = _Asked().add("torch", supports).add("reference")
    for given in ({}, changed, {}, changed):
        probe.operation(WIDE[:3], **given)
    assert probe.ran == ["torch", "reference"] * 2


def test_lists_are_looked_through_in_every_call():
    """Their first tensors alone are part of the kind."""
    probe = _Asked().add("torch", _all_aligned).add("reference")
    flat = torch.zeros(64)
    good, bad = [flat[:8], flat[8:16]], [flat[:8], flat[9:17]]
    for parts in (good, bad, good):
        probe.operation(WIDE, None, parts)
    assert probe.ran == ["torch", "reference", "torch"]


def test_a_named_backend_is_asked_for_itself():
    probe = _Asked().add("triton", _few).add("torch")
    probe.operation(WIDE)
    with pytest.raises(BackendUnavailable, match="at most four tokens"):
        probe.operation(WIDE, backend="triton")
    probe.operation(WIDE[:3])
    probe.operation(WIDE[:3], backend="triton")
    assert probe.operation.resolve(WIDE[:3], backend="triton").name == "triton"
    assert probe.ran == ["torch", "torch", "triton"]  # kernels do not run on a CPU unasked
    assert probe.asked == ["triton", "triton"]
    probe = _Asked().add("torch", _few).add("reference")
    for named in ("reference", None, "torch", "reference"):
        probe.operation(WIDE[:3], backend=named)
    assert probe.ran == ["reference", "torch", "torch", "reference"]


def test_what_comes_after_a_good_call_is_checked_as_before():
    probe = _Asked().add("torch")
    good = WIDE[:3]
    probe.operation(good, k=1)
    probe.operation(good, good.clone(), k=1)
    for wrong, error in (
        ({"x": good[0]}, ValueError),
        ({"x": good.int()}, TypeError),
        ({"x": good.to("meta"), "out": good}, ValueError),
        ({"x": [good]}, TypeError),
        ({"x": good, "out": good[:2]}, ValueError),
        ({"x": good, "out": good[:1].expand(3, 16)}, ValueError),
        ({"x": good, "out": good.as_strided((3, 16), (8, 1))}, ValueError),
        ({"x": good, "k": True}, ValueError),
        ({"x": good, "k": 1.0}, ValueError),
        ({"x": good, "k": {}}, ValueError),
        ({"x": good, "label": "", "unknown": 1}, TypeError),
        ({"k": 1}, TypeError),
    ):
        for call in (probe.operation, probe.operation.resolve):
            with pytest.raises(error):
                call(**{"k": 1} | wrong)
    with torch.enable_grad(), pytest.raises(ValueError, match="no_grad"):
        probe.operation(good.clone().requires_grad_(), k=1)
    assert len(probe.ran) == 2


def test_what_has_no_backend_stays_without():
    probe = _Asked().add("torch", _few)
    for _ in range(2):
        with pytest.raises(BackendUnavailable, match="four tokens"):
            probe.operation(WIDE)
    assert probe.asked == ["torch", "torch"]  # only what can run is remembered


def test_backends_that_come_and_go_are_chosen_among_anew():
    probe = _Asked().add("reference")
    run = probe.operation
    run(WIDE)
    probe.add("torch")
    run(WIDE)
    mine = Backend("mine", lambda *args, **kwargs: probe.ran.append("mine"), None)
    with run.with_backends([mine]):
        run(WIDE)
        with run.with_backends([run.backends["mine"], *run.backends.values()]):
            run(WIDE)
    run(WIDE)
    run.unregister("torch")
    run(WIDE)
    assert probe.ran == ["reference", "torch", "mine", "mine", "torch", "reference"]
    with pytest.raises(TypeError):
        run.backends["torch"] = mine


def test_a_lazy_backend_is_imported_when_it_first_runs(monkeypatch, tmp_path):
    @operation(outputs=_like_x)
    def contract_probe_lazy(x: Tensor) -> Tensor:
        """Return -x."""

    (tmp_path / "lazy_probe.py").write_text("def contract_probe_lazy(x):\n    return -x\n")
    monkeypatch.syspath_prepend(tmp_path)
    contract_probe_lazy.register_lazy("torch", "lazy_probe")
    contract_probe_lazy.register("reference", lambda x: x)
    assert contract_probe_lazy.explain(X)[0] == "torch"
    assert "lazy_probe" not in sys.modules
    for _ in range(2):
        assert torch.equal(contract_probe_lazy(X), -X)
    # From then on nothing stands between a call and the function.
    own = sys.modules.pop("lazy_probe").contract_probe_lazy
    assert contract_probe_lazy.backends["torch"].run is own
    assert list(contract_probe_lazy.backends) == ["torch", "reference"]


def test_a_lazy_backend_is_imported_without_checks_too(monkeypatch, tmp_path):
    @operation(outputs=_like_x)
    def contract_probe_unchecked(x: Tensor) -> Tensor:
        """Return -x."""

    text = "def contract_probe_unchecked(x):\n    return -x\n"
    (tmp_path / "unchecked_probe.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    contract_probe_unchecked.register_lazy("torch", "unchecked_probe")
    with skip_checks():
        assert torch.equal(contract_probe_unchecked(X), -X)
    own = sys.modules.pop("unchecked_probe").contract_probe_unchecked
    assert contract_probe_unchecked.backends["torch"].run is own


def test_memory_of_kinds_is_bounded():
    probe = _Asked().add("torch")
    for k in range(1, 2 * registry._MOST_KINDS):
        probe.operation(WIDE, k=k)
        assert len(probe.operation._resolved) <= registry._MOST_KINDS
    probe.operation(WIDE, k=0 + k)
    assert probe.checked == k


def test_explain_and_supports_ask_every_time():
    probe = _Asked().add("torch", _few).add("reference")
    probe.operation(WIDE[:3])
    for times in (2, 3):
        chosen, answers = probe.operation.explain(WIDE[:3])
        assert chosen == "torch" == probe.operation.resolve(WIDE[:3]).name
        assert all(answers.values())
        assert len(probe.asked) == times
    assert probe.operation.supports(WIDE[:3])
    assert len(probe.asked) == 4


def test_what_a_workspace_lends_is_given_back_where_kernels_run():
    probe, workspace = _Asked(), Workspace("cpu")
    probe.operation.register(
        "triton", lambda *_, **__: scratch((64,), torch.uint8, torch.device("cpu"))
    )
    with workspace.active():
        for _ in range(3):
            probe.operation(WIDE, backend="triton")
    assert workspace.needed_bytes == 256


@pytest.mark.compiles
def test_what_is_traced_does_not_resolve_for_others():
    """The traced call runs on the same backend as an eager one, and checks what it gets."""
    probe = _Asked().add("torch", _few).add("reference")
    compiled = torch.compile(lambda x: probe.operation(x), backend="eager", fullgraph=True)
    for tokens in (3, 8, 3):
        compiled(WIDE[:tokens])
        probe.operation(WIDE[:tokens])
    assert probe.ran == ["torch", "torch", "reference", "reference", "torch", "torch"]


def test_checks_are_skipped_where_no_choice_is_to_be_made():
    probe = _Asked().add("triton", _few).add("torch")
    with skip_checks():
        probe.operation(WIDE[0])
        with skip_checks(False), pytest.raises(ValueError, match="x must be"):
            probe.operation(WIDE[0])
        with pytest.raises(BackendUnavailable, match="at most four"):  # asked as ever
            probe.operation(WIDE, backend="triton")
        with pytest.raises(ValueError, match="x must be"):
            probe.operation(WIDE[0], backend="triton")
        assert probe.operation.resolve(WIDE[0]).name == "torch"
    with pytest.raises(ValueError, match="x must be"):
        probe.operation(WIDE[0])
    assert probe.ran == ["torch"]


def test_a_backend_asked_by_kind_knows_cpu_tensors_by_dtype_and_shape():
    probe = _Asked().add("numba", _few, by_kind=True).add("torch")
    for x in (WIDE[:2], torch.zeros(40)[1:33].view(2, 16), WIDE[:5], WIDE[:2]):
        probe.operation(x, None, [x, x])
    assert probe.ran == ["numba", "numba", "torch", "numba"]
    assert probe.asked == ["numba", "numba"]


def test_where_checks_are_skipped_a_choice_is_made_by_dtypes_and_sizes():
    probe = _Asked().add("numba", _few, by_kind=True).add("torch")
    with skip_checks():
        for x in (WIDE[:2], WIDE[:4:2], WIDE[:5], WIDE[:2]):
            probe.operation(x, None, [x, x])
        assert probe.ran == ["numba", "numba", "torch", "numba"]
        assert probe.asked == ["numba", "numba"]  # sizes that are new; strides say nothing
        with pytest.raises(ValueError, match="x must be"):  # no call of its size has been checked
            probe.operation(WIDE[0])
    probe.operation(WIDE[:2], None, [WIDE[:2]])
    assert probe.asked == ["numba"] * 3  # elsewhere a kind is known by more


def test_a_backend_that_is_not_automatic_is_not_asked():
    probe = _Asked().add("numba", _few, automatic=False).add("torch")
    probe.operation(WIDE[:2])
    probe.operation(WIDE[:2], backend="numba")
    assert probe.ran == ["torch", "numba"]
    assert probe.asked == ["numba"]

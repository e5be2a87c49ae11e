"""The contract machinery: checks, choice of backends, and torch.library registration."""

import pytest
import torch
from torch import Tensor

from anymla.ops.linear import linear
from anymla.ops.registry import (
    FLOATS,
    BackendUnavailable,
    Support,
    check,
    operation,
    require,
    skip_checks,
)


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


def test_what_is_vouched_for_is_not_checked_again():
    x, weight = torch.ones(1, 2), torch.ones(3, 2)
    wrong = torch.ones(1, 7)
    with skip_checks(True):
        assert linear(x, weight).tolist() == [[2, 2, 2]]
        with skip_checks(False), pytest.raises(ValueError, match="linear: weight must be"):
            linear(wrong, weight)
        with pytest.raises(RuntimeError):  # nobody looks before torch does
            linear(wrong, weight)
    with pytest.raises(ValueError, match="linear: weight must be"):
        linear(wrong, weight)

"""Error bounds with their derivation, and comparisons that print what they observed.

A bound is a float that remembers its derivation, so that a failing test reports the excess and the
origin of the limit. docs/numerics.md explains the models.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor


class Bound(float):
    """A non-negative error bound and its derivation (``why``)."""

    why: str

    def __new__(cls, value: float, why: str) -> Bound:
        """Make a bound.

        Raises:
            ValueError: the value is negative or not finite.
        """
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"Bound: value must be finite and >= 0, got {value}")
        bound = super().__new__(cls, value)
        bound.why = why
        return bound

    def __add__(self, other: float) -> Bound:
        return Bound(float(self) + float(other), f"{self.why} + {_why(other)}")

    def __mul__(self, factor: float) -> Bound:
        if isinstance(factor, Tensor):
            return NotImplemented  # a tensor of bounds carries no reason
        return Bound(float(self) * float(factor), f"{float(factor):g} * ({self.why})")

    __rmul__ = __mul__


def ulps(dtype: torch.dtype, n: float) -> Bound:
    """Relative error of n units in the last place of ``dtype``.

    One unit is at most eps = finfo(dtype).eps of the value (exactly eps at a power of two). One
    correct rounding to nearest costs half a unit.
    """
    return Bound(n * torch.finfo(dtype).eps, f"{n:g} ulps of {_name(dtype)}")


def accumulation(n: int, dtype: torch.dtype, c: float = 2.0) -> Bound:
    """Error of a sum or dot product of n terms, relative to the sum of the terms' magnitudes.

    n roundings with independent signs add like a random walk: c * sqrt(n) * eps. Pass the sum of
    magnitudes as ``scale`` to ``assert_close``; relative to the result itself no bound exists,
    since terms may cancel.
    """
    value = c * math.sqrt(max(n, 1)) * torch.finfo(dtype).eps
    return Bound(value, f"{c:g} * sqrt({n}) * eps({_name(dtype)})")


_observed: ContextVar[list[float] | None] = ContextVar("observed", default=None)


@contextlib.contextmanager
def observed_errors() -> Iterator[list[float]]:
    """List what ``assert_close`` returns inside: each largest error over what is allowed."""
    errors: list[float] = []
    token = _observed.set(errors)
    try:
        yield errors
    finally:
        _observed.reset(token)


def assert_close(
    got: Tensor,
    want: Tensor,
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
    scale: Tensor | float = 1.0,
    name: str = "result",
) -> float:
    """Require ``|got - want| <= atol * scale + rtol * |want|`` and print the largest error.

    NaN, +inf and -inf must be at the same positions in both; only finite values are subtracted.

    Args:
        got: result of any real dtype.
        want: expected result of the same shape; compared in float64.
        atol: bound on the error, in units of ``scale``.
        rtol: bound on the error relative to ``want``.
        scale: magnitude that ``atol`` refers to; broadcast against ``want``.
        name: name of the result in messages.

    Returns:
        The largest error divided by the allowed error there (0 for empty tensors).

    Raises:
        AssertionError: shapes differ, masks differ, or an error exceeds its bound.
    """
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shape {list(got.shape)}, expected {list(want.shape)}")
    if got.numel() == 0:
        return 0.0
    got64, want64 = got.detach().double(), want.detach().double()
    for kind, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = test(got64) != test(want64)
        if wrong.any():
            raise AssertionError(
                f"{name}: {int(wrong.sum())} of {wrong.numel()} elements differ in being {kind}; "
                f"{_first(wrong, got64, want64)}"
            )
    finite = want64.isfinite()
    error = torch.where(finite, (got64 - want64).abs(), 0.0)
    scale64 = scale.double().to(want64.device) if isinstance(scale, Tensor) else scale
    allowed = float(atol) * scale64 + float(rtol) * torch.where(finite, want64.abs(), 0.0)
    allowed = torch.as_tensor(allowed, dtype=torch.float64).expand_as(error)
    excess = torch.where(error == 0, 0.0, error / allowed)
    worst = float(excess.max())
    at = int(error.argmax())
    observed = (
        f"{name}: max |error| {float(error.flatten()[at]):.3g} "
        f"(|want| {float(want64.flatten()[at].abs()):.3g} there), "
        f"{worst:.3g} of what is allowed: atol {_why(atol)}, rtol {_why(rtol)}"
    )
    print(observed)
    errors = _observed.get()
    if errors is not None:
        errors.append(worst)
    wrong = excess > 1
    if wrong.any():
        raise AssertionError(
            f"{observed}; {int(wrong.sum())} of {wrong.numel()} elements exceed it; "
            f"{_first(wrong, got64, want64)}"
        )
    return worst


def assert_identical(got: Tensor, want: Tensor, *, name: str = "result") -> None:
    """Require equal dtype, shape and bits (so -0 differs from 0, and NaN equals itself).

    Raises:
        AssertionError: the tensors differ; the message has the coordinates and values of the first
            difference.
    """
    if got.dtype != want.dtype or got.shape != want.shape:
        raise AssertionError(
            f"{name}: {got.dtype} {list(got.shape)}, expected {want.dtype} {list(want.shape)}"
        )
    wrong = _bits(got) != _bits(want)
    if wrong.any():
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} elements differ in their bits; "
            f"{_first(wrong, got, want)}"
        )


def assert_unbiased(rounded: Tensor, exact: Tensor, *, name: str = "rounding") -> None:
    """Require that rounding goes down about as often as up.

    Of n inexact roundings with independent directions, the share that went down has standard
    deviation 0.5 / sqrt(n); 10 / sqrt(n) is twenty of them, so only a bias can fail.
    """
    difference = rounded.double() - exact.double()
    moved = difference != 0
    n = int(moved.sum())
    if n == 0:
        return
    share = float((difference < 0).sum()) / n
    print(f"{name}: {share:.4f} of {n} inexact values were rounded down")
    if abs(share - 0.5) > 10 / math.sqrt(n):
        raise AssertionError(f"{name}: {share:.4f} of {n} inexact values were rounded down")


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest ``|got - want|`` divided by the largest ``|want|`` (float64; 0 if empty)."""
    if want.numel() == 0:
        return 0.0
    difference = (got.double() - want.double()).abs().max()
    return float(difference / want.double().abs().max().clamp(min=torch.finfo(torch.float64).tiny))


def relative_l2(got: Tensor, want: Tensor) -> float:
    """Length of ``got - want`` divided by that of ``want`` (float64)."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


def _bits(x: Tensor) -> Tensor:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(integer[x.dtype.itemsize]) if x.dtype != torch.bool else x


def _first(wrong: Tensor, got: Tensor, want: Tensor) -> str:
    place = [int(i) for i in wrong.nonzero()[0]]
    got_value, want_value = got[tuple(place)], want[tuple(place)]
    return f"first at {place}: got {got_value.item()!r}, expected {want_value.item()!r}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _why(bound: float) -> str:
    return f"{float(bound):.3g} ({bound.why})" if isinstance(bound, Bound) else f"{bound:.3g}"

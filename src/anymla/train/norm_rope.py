"""RMS norms and RoPE with gradients; the forward pass is the operation that serves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from anymla.ops import norm_rope as ops
from anymla.ops.registry import wide_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply ``ops.norm_rope.rms_norm`` with gradients for x [..., D] and weight [D]."""
    normed: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normed


def rope(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, inverse: bool = False) -> Tensor:
    """Apply ``ops.norm_rope.rope`` with a gradient for x [T, H, D]."""
    rotated: Tensor = _Rope.apply(x, positions, cos_sin_cache, inverse)  # type: ignore[no-untyped-call]
    return rotated


def rms_norm_grad(x: Tensor, weight: Tensor, eps: float, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Differentiate ``y = x n weight`` with ``n = 1 / sqrt(mean(x^2) + eps)``.

        dx = n (dy weight - x n^2 mean(dy weight x))        dweight = sum of dy x n over the rows

    Args:
        x: rows of the forward pass, [..., D] float32 or float64.
        weight: weight of the norm, [D].
        eps: number added to the mean square.
        dy: gradient of y, [..., D] of x's dtype.

    Returns:
        dx [..., D] and dweight [D], of x's dtype.
    """
    inverse = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    normed = x * inverse
    dweight = (dy * normed).flatten(0, -2).sum(0)
    return _through_norm(normed, inverse, dy * weight.to(x.dtype)), dweight


def plain_norm_grad(x: Tensor, eps: float, dy: Tensor) -> Tensor:
    """Return dx of ``rms_norm_grad`` for a norm without a weight."""
    inverse = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return _through_norm(x * inverse, inverse, dy)


def _through_norm(normed: Tensor, inverse: Tensor, weighed: Tensor) -> Tensor:
    return inverse * (weighed - normed * (weighed * normed).mean(-1, keepdim=True))


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return ops.rms_norm(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wide = wide_dtype(x.dtype)
        dx, dweight = rms_norm_grad(x.to(wide), weight, ctx.eps, dy.to(wide))
        return dx.to(x.dtype), dweight.to(weight.dtype), None


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor, table: Tensor, inverse: bool) -> Tensor:
        ctx.save_for_backward(positions, table)
        ctx.inverse = inverse
        return ops.rope(x, positions, table, inverse=inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        positions, table = ctx.saved_tensors
        return ops.rope(dy, positions, table, inverse=not ctx.inverse), None, None, None

"""RMS norms and RoPE with gradients; the forward pass is the operation that serves."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from anymla.ops import norm_rope as ops
from anymla.ops.registry import wide_dtype
from anymla.train.operator import Gradients, differentiable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply ``ops.norm_rope.rms_norm`` with gradients for x [..., D] and weight [D]."""
    normed: Tensor = _normed(x, weight, eps)
    return normed


def rope(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, inverse: bool = False) -> Tensor:
    """Apply ``ops.norm_rope.rope`` with a gradient for x [T, H, D]."""
    rotated: Tensor = _rotated(x, positions, cos_sin_cache, inverse)
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


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return ops.rms_norm(x, weight, eps)


def _rms_norm_backward(
    grads: list[Tensor],
    needs: list[bool],
    kept: list[Tensor],
    x: Tensor,
    weight: Tensor,
    eps: float,
) -> Gradients:
    wide = wide_dtype(x.dtype)
    dx, dweight = rms_norm_grad(x.to(wide), weight, eps, grads[0].to(wide))
    return dx.to(x.dtype), dweight.to(weight.dtype)


def _rope(x: Tensor, positions: Tensor, table: Tensor, inverse: bool) -> Tensor:
    return ops.rope(x, positions, table, inverse=inverse)


def _rope_backward(
    grads: list[Tensor],
    needs: list[bool],
    kept: list[Tensor],
    x: Tensor,
    positions: Tensor,
    table: Tensor,
    inverse: bool,
) -> Gradients:
    return (ops.rope(grads[0], positions, table, inverse=not inverse),)


def _like_first(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


_normed = differentiable(_rms_norm, _rms_norm_backward, _like_first, learns=2)
_rotated = differentiable(_rope, _rope_backward, _like_first, learns=1)

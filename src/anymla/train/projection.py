"""Products with gradients whose forward pass is an operation that serves."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from anymla.layers.linear import Linear, PackedWeight, WeightKind
from anymla.ops import linear as ops
from anymla.ops.norm_rope import rope as rotate
from anymla.ops.registry import wide_dtype
from anymla.train.operator import Gradients, differentiable


def grouped_projection(o: Tensor, wo_a: Tensor, positions: Tensor, rope: Tensor) -> Tensor:
    """Rotate attention's heads back, then project every group of them with its own matrix.

    ``z[t, g] = wo_a[g] @ concat of R^-1(position t) o[t, h]`` over the heads h of group g; the
    forward pass is ``ops.linear.grouped_output_projection``.

    Args:
        o: heads of attention's output, [T, H, D] floating point, H a multiple of G.
        wo_a: weights of the groups, [G, rank, H / G * D] of o's dtype.
        positions: positions of the queries, [T] int64.
        rope: rotary table, [L, R] float32 (or float64).

    Returns:
        Projections [T, G * rank] of o's dtype. Gradients reach o and wo_a.

    Raises:
        TypeError, ValueError: if a dtype, shape or device is wrong.
    """
    z: Tensor = _projected(o, wo_a, positions, rope)
    return z


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight^T`` in float32, as the projections of compressors are.

    Args:
        x: activations, [T, K] floating point.
        weight: weight of any floating-point dtype, [N, K].

    Returns:
        Products [T, N] in float32 (float64 if an operand is). Gradients reach both arguments.
    """
    product: Tensor = _product(x, weight)
    return product


class FrozenLinear(nn.Module):
    """A linear layer by the product that serves, its weight as a checkpoint stores it.

    For fine-tuning beside quantised weights: an FP8 or MXFP4 layer quantises its input in blocks
    if the checkpoint asks for it, as when serving. Only the input has a gradient, that of the
    decoded weight, straight through the quantisation.
    """

    def __init__(self, packed: PackedWeight, *, quantize_activations: bool = False) -> None:
        """Take a weight.

        Args:
            packed: weight [N, K] as stored, such as ``layers.linear.Linear.packed``.
            quantize_activations: True for checkpoints with ``activation_scheme: dynamic``.
        """
        super().__init__()
        self.kind, self.block, self.quantize = packed.kind, packed.block, quantize_activations
        for name in ("weight", "scale", "global_scale"):
            self.register_buffer(name, getattr(packed, name))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N] of the same dtype."""
        y: Tensor = _served(
            x, self.weight, self.scale, self.global_scale, self.kind, self.block, self.quantize
        )
        return y


def _frozen_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    global_scale: Tensor | None,
    kind: str,
    block: int,
    quantize: bool,
) -> Tensor:
    packed = PackedWeight(cast("WeightKind", kind), weight, scale, global_scale, block)
    y: Tensor = Linear(packed, quantize_activations=quantize)(x)
    return y


def _frozen_linear_backward(
    grads: list[Tensor],
    needs: list[bool],
    kept: list[Tensor],
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    global_scale: Tensor | None,
    kind: str,
    block: int,
    quantize: bool,
) -> Gradients:
    packed = PackedWeight(cast("WeightKind", kind), weight, scale, global_scale, block)
    return (grads[0] @ packed.dense(grads[0].dtype),)


def _frozen_linear_fake(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


def _linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    return ops.linear_float32(x, weight)


def _linear_float32_backward(
    grads: list[Tensor], needs: list[bool], kept: list[Tensor], x: Tensor, weight: Tensor
) -> Gradients:
    (dy,) = grads
    dx = (dy @ weight.to(dy.dtype)).to(x.dtype) if needs[0] else None
    return dx, (dy.T @ x.to(dy.dtype)).to(weight.dtype) if needs[1] else None


def _linear_float32_fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(len(x), len(weight), dtype=wide_dtype(x.dtype, weight.dtype))


def _grouped_projection(o: Tensor, wo_a: Tensor, positions: Tensor, rope: Tensor) -> Tensor:
    return ops.grouped_output_projection(o, positions, rope, wo_a)


def _grouped_projection_backward(
    grads: list[Tensor],
    needs: list[bool],
    kept: list[Tensor],
    o: Tensor,
    wo_a: Tensor,
    positions: Tensor,
    rope: Tensor,
) -> Gradients:
    by_group = grads[0].unflatten(1, wo_a.shape[:2]).transpose(0, 1)
    do = dwo_a = None
    if needs[0]:
        rotated = torch.bmm(by_group, wo_a).transpose(0, 1).reshape(o.shape)
        do = rotate(rotated, positions, rope)
    if needs[1]:
        heads = rotate(o, positions, rope, inverse=True).view(len(o), len(wo_a), wo_a.shape[2])
        dwo_a = torch.bmm(by_group.transpose(1, 2), heads.transpose(0, 1))
    return do, dwo_a


def _grouped_projection_fake(o: Tensor, wo_a: Tensor, *_: Tensor) -> Tensor:
    return o.new_empty(len(o), wo_a.shape[0] * wo_a.shape[1])


_served = differentiable(_frozen_linear, _frozen_linear_backward, _frozen_linear_fake, learns=1)
_product = differentiable(_linear_float32, _linear_float32_backward, _linear_float32_fake, learns=2)
_projected = differentiable(
    _grouped_projection, _grouped_projection_backward, _grouped_projection_fake, learns=2
)

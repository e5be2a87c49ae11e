"""Products with gradients whose forward pass is an operation that serves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from anymla.ops import linear as ops
from anymla.ops.norm_rope import rope as rotate


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
    z: Tensor = _Projection.apply(o, wo_a, positions, rope)  # type: ignore[no-untyped-call]
    return z


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight^T`` in float32, as the projections of compressors are.

    Args:
        x: activations, [T, K] floating point.
        weight: weight of any floating-point dtype, [N, K].

    Returns:
        Products [T, N] in float32 (float64 if an operand is). Gradients reach both arguments.
    """
    product: Tensor = _LinearFloat32.apply(x, weight)  # type: ignore[no-untyped-call]
    return product


class _LinearFloat32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return ops.linear_float32(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = (dy @ weight.to(dy.dtype)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dweight = (dy.T @ x.to(dy.dtype)).to(weight.dtype)
        return dx, dweight


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, wo_a: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(o, wo_a, positions, table)
        return ops.grouped_output_projection(o, positions, table, wo_a)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        o, wo_a, positions, table = ctx.saved_tensors
        by_group = dz.unflatten(1, wo_a.shape[:2]).transpose(0, 1)
        do = dwo_a = None
        if ctx.needs_input_grad[0]:
            rotated = torch.bmm(by_group, wo_a).transpose(0, 1).reshape(o.shape)
            do = rotate(rotated, positions, table)
        if ctx.needs_input_grad[1]:
            heads = rotate(o, positions, table, inverse=True)
            dwo_a = torch.bmm(
                by_group.transpose(1, 2),
                heads.view(len(o), len(wo_a), wo_a.shape[2]).transpose(0, 1),
            )
        return do, dwo_a, None, None

"""Rows as a cache gives them back, straight through: forward rounded, backward as if not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from anymla.formats.hadamard import hadamard_transform
from anymla.formats.page_layout import get_layout
from anymla.ops.kv_cache import dequant_gather_slots, quantize_and_insert_k_cache
from anymla.ops.norm_rope import qnorm_rope_kv_insert, rope
from anymla.ops.registry import wide_dtype
from anymla.train.norm_rope import plain_norm_grad
from anymla.train.norm_rope import rope as rotate

# Rows of a page; kernels are compiled for it.
_PAGE = 64


def round_rows(
    rows: Tensor, layout: str, *, dtype: torch.dtype | None = None, hadamard: bool = False
) -> Tensor:
    """Encode rows in a cache layout and decode them; the gradient passes straight through.

    Products of the forward and the backward pass use the rounded row, and its gradient is handed
    to the row unchanged. No scale saturates, so that there is nothing to mask.

    Args:
        rows: rows [N, D] floating point, D channels of the layout.
        layout: identifier of a cache layout, as ``v4_main_fp8`` or ``v41_compressed_nvfp4``.
        dtype: dtype of the result; None for that of ``rows``.
        hadamard: True to multiply by the normalised Hadamard matrix first, as MXFP4 index keys.

    Returns:
        Rows as the cache gives them back, [N, D] of ``dtype``.

    Raises:
        TypeError, ValueError: an unknown layout, or rows of another width.
    """
    rounded: Tensor = _Round.apply(rows, layout, dtype or rows.dtype, hadamard)  # type: ignore[no-untyped-call]
    return rounded


def heads_and_rows(
    q: Tensor,
    kv: Tensor,
    positions: Tensor,
    rope: Tensor,
    *,
    eps: float,
    layout: str,
    norms: bool = True,
) -> tuple[Tensor, Tensor]:
    """Norm and rotate query heads; rotate key-value rows and round them as the cache does.

    The forward pass is ``ops.norm_rope.qnorm_rope_kv_insert``, and reads its rows back.

    Args:
        q: projected query heads, [T, H, D] floating point.
        kv: key-value rows that are already normed, [T, D] of q's dtype.
        positions: positions of the tokens, [T] int64.
        rope: rotary table, [L, R] float32 (or float64).
        eps: number added to the mean square of a head.
        layout: identifier of the window cache's layout.
        norms: False for heads that are rotated only, as V4.1's.

    Returns:
        Query heads [T, H, D] and rows [T, D], of q's dtype. Gradients reach q and kv, the latter
        straight through the rounding.
    """
    if not norms:
        rows = rotate(kv.unsqueeze(1), positions, rope).squeeze(1)
        return rotate(q, positions, rope), round_rows(rows, layout, dtype=q.dtype)
    return _HeadsAndRows.apply(q, kv, positions, rope, eps, layout)  # type: ignore[no-untyped-call]


def _cache(layout: str, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return an empty cache and the slots of its first ``count`` rows."""
    cache = get_layout(layout).allocate(max(1, -(-count // _PAGE)), _PAGE, device)
    return cache, torch.arange(count, device=device)


def _decoded(cache: Tensor, slots: Tensor, layout: str, dtype: torch.dtype) -> Tensor:
    size = len(slots), get_layout(layout).channels
    out = torch.empty(size, dtype=dtype, device=cache.device)
    dequant_gather_slots(out, cache, slots.int(), layout=layout)
    return out


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, layout: str, dtype: torch.dtype, hadamard: bool) -> Tensor:
        ctx.dtype, ctx.hadamard = rows.dtype, hadamard
        cache, slots = _cache(layout, len(rows), rows.device)
        given = hadamard_transform(rows) if hadamard else rows
        quantize_and_insert_k_cache(given, cache, slots, layout=layout)
        return _decoded(cache, slots, layout, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        # The transform is symmetric.
        drows = hadamard_transform(dout) if ctx.hadamard else dout
        return drows.to(ctx.dtype), None, None, None


class _HeadsAndRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, positions: Tensor, table: Tensor, eps: float, layout: str
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, positions, table)
        ctx.eps, ctx.dtype = eps, kv.dtype
        cache, slots = _cache(layout, len(kv), kv.device)
        heads = qnorm_rope_kv_insert(q, kv, cache, slots, positions, table, eps, layout=layout)
        return heads, _decoded(cache, slots, layout, q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dheads: Tensor, drows: Tensor) -> tuple[Tensor | None, ...]:
        q, positions, table = ctx.saved_tensors
        dq = dkv = None
        if ctx.needs_input_grad[0]:
            wide = wide_dtype(q.dtype)
            rotated = rope(dheads.to(wide), positions, table, inverse=True)
            dq = plain_norm_grad(q.to(wide), ctx.eps, rotated).to(q.dtype)
        if ctx.needs_input_grad[1]:
            rotated = rope(drows.unsqueeze(1), positions, table, inverse=True)
            dkv = rotated.squeeze(1).to(ctx.dtype)
        return dq, dkv, None, None, None, None

"""Rows as a cache gives them back, straight through: forward rounded, backward as if not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anymla.formats.hadamard import hadamard_transform
from anymla.formats.page_layout import get_layout
from anymla.ops.kv_cache import dequant_gather_slots, quantize_and_insert_k_cache
from anymla.ops.norm_rope import qnorm_rope_kv_insert, rope
from anymla.ops.registry import wide_dtype
from anymla.train.norm_rope import plain_norm_grad
from anymla.train.norm_rope import rope as rotate
from anymla.train.operator import Gradients, differentiable

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
    get_layout(layout)
    rounded: Tensor = _rounded(rows, layout, dtype or rows.dtype, hadamard)
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
    found: tuple[Tensor, Tensor] = _inserted(q, kv, positions, rope, eps, layout)
    return found


def _cache(layout: str, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return an empty cache and the slots of its first ``count`` rows."""
    cache = get_layout(layout).allocate(max(1, -(-count // _PAGE)), _PAGE, device)
    return cache, torch.arange(count, device=device)


def _decoded(cache: Tensor, slots: Tensor, layout: str, dtype: torch.dtype) -> Tensor:
    size = len(slots), get_layout(layout).channels
    out = torch.empty(size, dtype=dtype, device=cache.device)
    dequant_gather_slots(out, cache, slots.int(), layout=layout)
    return out


def _round_rows(rows: Tensor, layout: str, dtype: torch.dtype, hadamard: bool) -> Tensor:
    cache, slots = _cache(layout, len(rows), rows.device)
    given = hadamard_transform(rows) if hadamard else rows
    quantize_and_insert_k_cache(given, cache, slots, layout=layout)
    return _decoded(cache, slots, layout, dtype)


def _round_rows_backward(
    grads: list[Tensor],
    needs: list[bool],
    kept: list[Tensor],
    rows: Tensor,
    layout: str,
    dtype: torch.dtype,
    hadamard: bool,
) -> Gradients:
    # The transform is symmetric.
    drows = hadamard_transform(grads[0]) if hadamard else grads[0]
    return (drows.to(rows.dtype, copy=True),)


def _round_rows_fake(rows: Tensor, layout: str, dtype: torch.dtype, hadamard: bool) -> Tensor:
    return rows.new_empty(rows.shape, dtype=dtype)


def _heads_and_rows(
    q: Tensor, kv: Tensor, positions: Tensor, table: Tensor, eps: float, layout: str
) -> tuple[Tensor, Tensor]:
    cache, slots = _cache(layout, len(kv), kv.device)
    heads = qnorm_rope_kv_insert(q, kv, cache, slots, positions, table, eps, layout=layout)
    return heads, _decoded(cache, slots, layout, q.dtype)


def _heads_and_rows_backward(
    grads: list[Tensor],
    needs: list[bool],
    kept: list[Tensor],
    q: Tensor,
    kv: Tensor,
    positions: Tensor,
    table: Tensor,
    eps: float,
    layout: str,
) -> Gradients:
    dheads, drows = grads
    dq = dkv = None
    if needs[0]:
        wide = wide_dtype(q.dtype)
        rotated = rope(dheads.to(wide), positions, table, inverse=True)
        dq = plain_norm_grad(q.to(wide), eps, rotated).to(q.dtype)
    if needs[1]:
        dkv = rope(drows.unsqueeze(1), positions, table, inverse=True).squeeze(1).to(kv.dtype)
    return dq, dkv


def _heads_and_rows_fake(q: Tensor, kv: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(kv.shape)


_rounded = differentiable(_round_rows, _round_rows_backward, _round_rows_fake, learns=1)
_inserted = differentiable(
    _heads_and_rows, _heads_and_rows_backward, _heads_and_rows_fake, learns=2, results=2
)

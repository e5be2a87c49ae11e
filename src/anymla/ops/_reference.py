"""Formulas in plain torch that the references of several families share."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK, HEAD_AMAX_FLOOR, quantize_fp8_rows
from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.formats.pages import pages_of


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Reference of ``norm_rope.rms_norm``; ``weight=None`` leaves the weight out."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(wide)
    return y.to(x.dtype)


def rope(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, inverse: bool = False) -> Tensor:
    """Reference of ``norm_rope.rope``; see its contract."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rope_dim = cos_sin_cache.shape[1]
    known = positions.clamp(0, len(cos_sin_cache) - 1)
    cos, sin = cos_sin_cache[known].to(wide).unsqueeze(1).chunk(2, dim=-1)
    if inverse:
        sin = -sin
    tail = x[..., -rope_dim:].to(wide)
    even, odd = tail[..., 0::2], tail[..., 1::2]
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((x[..., :-rope_dim], rotated.to(x.dtype)), dim=-1)


def quantize_and_insert_k_cache(
    k: Tensor, k_cache: Tensor, slot_mapping: Tensor, *, layout: str = MAIN_FP8
) -> None:
    """Reference of ``kv_cache.quantize_and_insert_k_cache``; see its contract."""
    row_layout, cache = get_layout(layout), pages_of(k_cache)
    pages, entries = cache.shape[:2]
    data_plane, scale_plane = row_layout.planes(cache)
    for token, slot in enumerate(slot_mapping.tolist()):
        if not 0 <= slot < pages * entries:
            continue
        page, offset = divmod(slot, entries)
        data, scales = row_layout.encode(k[token : token + 1])
        data_plane[page, offset] = data[0]
        if scale_plane is not None and scales is not None:
            scale_plane[page, offset] = scales[0]


def attend(
    q: Tensor, rows: Tensor, sink: Tensor | None, scale: float | None, value_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend with one token's heads q [H, D] to rows [n, D], all of them valid.

    Returns:
        Output [H, value_dim], lse [H] and largest score [H], in float32 or wider.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    rows = rows.to(wide)
    scores = q.to(wide) @ rows.T * (q.shape[-1] ** -0.5 if scale is None else scale)
    lse = scores.logsumexp(-1)
    if not len(rows):
        return rows.new_zeros(len(q), value_dim), lse, lse
    out = torch.exp(scores - lse.unsqueeze(-1)) @ rows[:, :value_dim]
    if sink is not None:
        out = out * torch.sigmoid(lse - sink.to(wide)).unsqueeze(-1)
    return out, lse, scores.amax(-1)


def inverse_rope_fp8_quant(
    o: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    n_groups: int,
    quant_block: int = FP8_BLOCK,
    amax_floor: float = HEAD_AMAX_FLOOR,
) -> tuple[Tensor, Tensor]:
    """Reference of ``linear.inverse_rope_fp8_quant``; see its contract."""
    wide = o.to(torch.promote_types(o.dtype, torch.float32))
    rotated = rope(wide, positions, cos_sin_cache, inverse=True)
    width = o.shape[1] // n_groups * o.shape[2]
    groups = rotated.reshape(len(o), n_groups, width)
    codes, scales = quantize_fp8_rows(groups, quant_block, amax_floor)
    return codes.view(torch.float8_e4m3fn), scales

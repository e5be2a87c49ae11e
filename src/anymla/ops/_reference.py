"""Formulas that the references of several families are made of, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.formats.pages import pages_of


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See ``norm_rope.rms_norm``; ``weight=None`` leaves the weight out."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(wide)
    return y.to(x.dtype)


def rope(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, inverse: bool = False) -> Tensor:
    """See ``norm_rope.rope``."""
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
    """See ``kv_cache.quantize_and_insert_k_cache``."""
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

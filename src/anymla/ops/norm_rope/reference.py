"""Root-mean-square norms and rotary positions, as formulas."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.page_layout import MAIN_FP8
from anymla.ops._quantized import fill_codes
from anymla.ops.kv_cache.reference import quantize_and_insert_k_cache


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See ``interface.rms_norm``; ``weight=None`` leaves the weight out."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(wide)
    return y.to(x.dtype)


def rope(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, inverse: bool = False) -> Tensor:
    """See ``interface.rope``."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rope_dim = cos_sin_cache.shape[1]
    known = positions.clamp(0, len(cos_sin_cache) - 1)
    cos, sin = cos_sin_cache[known].to(wide).unsqueeze(1).chunk(2, dim=-1)
    if inverse:
        sin = -sin
    tail = x[..., -rope_dim:].to(wide)
    even, odd = tail[..., 0::2], tail[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((x[..., :-rope_dim], turned.to(x.dtype)), dim=-1)


def fused_q_kv_rmsnorm(
    qr: Tensor,
    kv: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    eps: float,
    *,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``interface.fused_q_kv_rmsnorm``."""
    latent = rms_norm(qr, q_weight, eps)
    fill_codes(latent, codes, code_scales)
    return latent, rms_norm(kv, kv_weight, eps)


def qnorm_rope_kv_insert(
    q: Tensor,
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    *,
    layout: str = MAIN_FP8,
    out: Tensor | None = None,
) -> Tensor:
    """See ``interface.qnorm_rope_kv_insert``."""
    wide = torch.promote_types(q.dtype, torch.float32)
    heads = rope(rms_norm(q.to(wide), None, eps), positions, cos_sin_cache).to(q.dtype)

    rows = kv.to(torch.promote_types(kv.dtype, torch.float32)).unsqueeze(1)
    rows = rope(rows, positions, cos_sin_cache).squeeze(1)
    quantize_and_insert_k_cache(rows, k_cache, slot_mapping, layout=layout)
    return heads if out is None else out.copy_(heads)

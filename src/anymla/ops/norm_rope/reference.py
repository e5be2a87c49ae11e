"""Reference of the fused norms, and of a step's norm, RoPE and insertion, in plain torch."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from anymla.formats.page_layout import MAIN_FP8
from anymla.ops._quantized import fill_codes
from anymla.ops._reference import quantize_and_insert_k_cache, rms_norm, rope


def norm_both(
    rms_norm: Callable[[Tensor, Tensor, float], Tensor],
    qr: Tensor,
    kv: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    eps: float,
    *,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compose ``interface.fused_q_kv_rmsnorm`` of a backend's ``rms_norm``."""
    latent = rms_norm(qr, q_weight, eps)
    fill_codes(latent, codes, code_scales)
    return latent, rms_norm(kv, kv_weight, eps)


fused_q_kv_rmsnorm = functools.partial(norm_both, rms_norm)


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
    """Reference of ``interface.qnorm_rope_kv_insert``; see its contract."""
    wide = torch.promote_types(q.dtype, torch.float32)
    heads = rope(rms_norm(q.to(wide), None, eps), positions, cos_sin_cache).to(q.dtype)

    rows = kv.to(torch.promote_types(kv.dtype, torch.float32)).unsqueeze(1)
    rows = rope(rows, positions, cos_sin_cache).squeeze(1)
    quantize_and_insert_k_cache(rows, k_cache, slot_mapping, layout=layout)
    return heads if out is None else out.copy_(heads)

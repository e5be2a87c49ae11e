"""Query norm and rotation, and the insertion of rotated rows, in blocks that stay in cache."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.page_layout import MAIN_FP8
from anymla.ops import _host
from anymla.ops._pages import write_rows
from anymla.ops._torch_norm_rope import BLOCK_ELEMENTS, freqs_cis, norm_heads, rotate_


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
    cis = freqs_cis(positions, cos_sin_cache, wide)
    tokens, heads, width = q.shape
    block = max(1, BLOCK_ELEMENTS // max(1, heads * width))
    step = block if _host.on_host(q) else tokens
    if tokens <= step:
        rotated = rotate_(norm_heads(q, wide, eps), cis)
        result = rotated.to(q.dtype) if out is None else out.copy_(rotated)
    else:
        result = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        for start in range(0, tokens, step):
            part = slice(start, start + step)
            result[part] = rotate_(norm_heads(q[part], wide, eps), cis[part])

    inserted = slot_mapping.shape[0]
    kv_wide = torch.promote_types(kv.dtype, torch.float32)
    cis = (
        cis[:inserted]
        if kv_wide == wide
        else freqs_cis(positions[:inserted], cos_sin_cache, kv_wide)
    )
    rows = kv[:inserted].to(kv_wide, copy=True, memory_format=torch.contiguous_format)
    write_rows(k_cache, slot_mapping, rotate_(rows, cis), layout)
    return result

"""Norms of the fused projection, and a step's queries and cache rows, in torch.

``rms_norm`` and ``rope`` themselves are in ``ops._torch_norm_rope``.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from anymla.formats.page_layout import MAIN_FP8
from anymla.ops import _host
from anymla.ops._torch_norm_rope import BLOCK_ELEMENTS, freqs_cis, norm_heads, rms_norm, rotate_
from anymla.ops._torch_pages import write_rows
from anymla.ops.norm_rope.reference import norm_both

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
    """Backend of ``interface.qnorm_rope_kv_insert`` in torch, in blocks that fit a CPU's cache."""
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
    if kv_wide == wide:
        cis = cis[:inserted]
    else:
        cis = freqs_cis(positions[:inserted], cos_sin_cache, kv_wide)
    rows = kv[:inserted].to(kv_wide, copy=True, memory_format=torch.contiguous_format)
    write_rows(k_cache, slot_mapping, rotate_(rows, cis), layout)
    return result

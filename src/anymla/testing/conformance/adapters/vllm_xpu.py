"""vLLM's sparse decode for Intel XPU, portable Triton (vllm-project/vllm)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anymla.formats.page_layout import MAIN_FP8
from anymla.ops.attention import CacheRows
from anymla.ops.registry import BackendUnavailable
from anymla.testing.conformance.adapters import Adapter, require_module
from anymla.testing.conformance.registry import NotApplicable

_MODULES = ("vllm.models.deepseek_v4.xpu.xpu_sparse_decode_fp8", "xpu_sparse_decode_fp8")
_TRANSLATES = (
    "lists are given as its callers give them: valid rows first, -1 behind, lengths of the former",
    "a missing sink becomes -inf",
)


def adapter() -> Adapter:
    """Return the adapter of vLLM's own package, or of its file on sys.path."""
    problems = []
    for name in _MODULES:
        try:
            module = require_module(name, name)
        except BackendUnavailable as unavailable:
            problems.append(str(unavailable))
            continue
        return _adapter_of(module)
    raise BackendUnavailable("; ".join(problems))


def _adapter_of(module: Any) -> Adapter:
    def decode(
        q: Tensor,
        rows: Sequence[CacheRows],
        *,
        sink: Tensor | None = None,
        scale: float | None = None,
        **rest: Any,
    ) -> tuple[Tensor, None]:
        if any(each.layout != MAIN_FP8 for each in rows):
            raise NotApplicable(f"reads {MAIN_FP8} only")
        if q.dtype != torch.bfloat16:
            raise NotApplicable(f"takes bfloat16 queries, not {q.dtype}")
        if rest.get("batch_invariant"):
            raise NotApplicable("has no batch-invariant mode")
        out = torch.empty_like(q)
        entries, topk, topk_lens = None, None, None
        for each in rows[1:]:
            entries = each.cache
            topk, topk_lens = _listed(each)
        window, window_lens = _listed(rows[0])
        module.xpu_sparse_decode_fp8(
            q=q,
            kv_cache=entries,
            swa_kv_cache=rows[0].cache,
            swa_only=entries is None,
            topk_indices=topk,
            topk_lens=topk_lens,
            swa_indices=window,
            swa_lens=window_lens,
            attn_sink=torch.full((q.shape[1],), -torch.inf).to(q.device) if sink is None else sink,
            softmax_scale=q.shape[2] ** -0.5 if scale is None else scale,
            head_dim=512,
            nope_head_dim=448,
            rope_head_dim=64,
            out=out,
        )
        return out, None

    return Adapter(
        "vllm_xpu",
        {"sparse_attention": decode},
        translates=_TRANSLATES,
        excused={
            "A2": "returns no lse",
            "A7": "has no batch-invariant mode",
            "L8": "has no layout ids",
        },
    )


def _listed(rows: CacheRows) -> tuple[Tensor, Tensor]:
    """Return indices [T, 1, K] with the valid rows first, and the number of valid rows."""
    cache, _, flat, lengths = rows.dense()
    inside = (flat >= 0) & (flat < cache.shape[0] * cache.shape[1])
    if lengths is not None:
        inside &= torch.arange(flat.shape[1], device=flat.device) < lengths.unsqueeze(1)
    order = inside.int().argsort(dim=1, descending=True, stable=True)
    listed = torch.where(inside, flat, -1).gather(1, order)
    return listed.unsqueeze(1).contiguous(), inside.sum(1, dtype=torch.int32)

"""DeepGEMM's index scores (deepseek-ai/DeepGEMM)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from anymla.formats.page_layout import INDEX_FP8
from anymla.testing.conformance.adapters import Adapter, require_module
from anymla.testing.conformance.registry import NotApplicable
from anymla.testing.tolerance import Bound

_HEADS, _PAGE = (32, 64), 64

_TRANSLATES = (
    "queries and keys that e4m3 holds exactly are passed as e4m3",
    "heads are padded to 32 or 64 with weights of 0",
    "columns behind a row's length, which it leaves unspecified, become -inf",
    "one length a request becomes one a row",
)
# The FP8 matrix instruction of sm_90 keeps about 13 bits of a sum of 32 products.
_DOT_ERROR = Bound(2 * (128 / 32) ** 0.5 * 2.0**-13, "2 * sqrt(128 / 32) * 2^-13, FP8 instructions")


def adapter() -> Adapter:
    """Return the adapter of the installed DeepGEMM."""
    return adapter_of(require_module("deep_gemm", "deep_gemm"), "deep_gemm")


def adapter_of(module: Any, name: str, *, needs_gpu: bool = True) -> Adapter:
    """Return an adapter of a module with ``fp8_mqa_logits`` and ``fp8_paged_mqa_logits``."""

    def dense(
        q: Tensor,
        k: Tensor,
        k_scale: Tensor | None,
        weights: Tensor,
        starts: Tensor,
        ends: Tensor,
        *,
        q_scales: Tensor | None = None,
        **rest: Any,
    ) -> Tensor:
        _claims(q_scales, rest)
        q, weights = _padded_heads(_coded(q), weights.float())
        scale = torch.ones(len(k), device=k.device) if k_scale is None else k_scale.float()
        keys = _coded(k)
        scores: Tensor = module.fp8_mqa_logits(q, (keys, scale), weights, starts, ends, False)
        column = torch.arange(len(k), device=k.device)
        inside = (column >= starts.unsqueeze(1)) & (column < ends.unsqueeze(1))
        return torch.where(inside, scores[:, : len(k)].float(), -torch.inf)

    def paged(
        q: Tensor,
        index_cache: Tensor,
        weights: Tensor,
        context_lens: Tensor,
        block_table: Tensor,
        *,
        max_context: int,
        layout: str = INDEX_FP8,
        q_scales: Tensor | None = None,
        **rest: Any,
    ) -> Tensor:
        _claims(q_scales, rest)
        if layout != INDEX_FP8:
            raise NotApplicable(f"reads {INDEX_FP8} only")
        cache = index_cache if index_cache.ndim == 4 else index_cache.unsqueeze(2)
        if cache.shape[1] != _PAGE:
            raise NotApplicable(f"reads pages of {_PAGE} entries only, not {cache.shape[1]}")
        requests, rows = q.shape[:2]
        if rows > 2:
            raise NotApplicable("takes 1 or 2 rows a request on this architecture")
        coded, padded = _padded_heads(_coded(q), weights.float())
        lens = context_lens if context_lens.ndim == 2 else context_lens.unsqueeze(1)
        lens = lens.expand(requests, rows).contiguous()
        plan = module.get_paged_mqa_logits_metadata(lens, _PAGE, module.get_num_sms())
        columns = -(-max_context // 256) * 256
        scores: Tensor = module.fp8_paged_mqa_logits(
            coded, cache, padded, lens, block_table.contiguous(), plan, columns, False
        )
        column = torch.arange(max_context, device=q.device)
        inside = column < lens.reshape(-1, 1)
        return torch.where(inside, scores[:, :max_context].float(), -torch.inf)

    return Adapter(
        name,
        {"mqa_logits": dense, "paged_mqa_logits": paged},
        version=str(getattr(module, "__version__", "")),
        translates=_TRANSLATES,
        excused={"I7": "allocates its result itself", "L4": "a case of this package's strides"},
        needs_gpu=needs_gpu,
        dot_error=_DOT_ERROR,
    )


def _claims(q_scales: Tensor | None, rest: dict[str, Any]) -> None:
    if q_scales is not None:
        raise NotApplicable("takes FP8 queries on this architecture, not MXFP4")
    if rest.get("out") is not None:
        raise NotApplicable("the adapter passes no out=")


def _coded(x: Tensor) -> Tensor:
    if x.dtype == torch.float8_e4m3fn:
        return x.contiguous()
    coded = x.to(torch.float8_e4m3fn)
    if not torch.equal(coded.float(), x.float()):
        raise NotApplicable("takes FP8, and these numbers are not")
    return coded.contiguous()


def _padded_heads(q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    heads = q.shape[-2]
    fitting = [count for count in _HEADS if count >= heads]
    if not fitting:
        raise NotApplicable(f"takes 32 or 64 heads, not {heads}")
    missing = fitting[0] - heads
    codes = pad(q.view(torch.uint8), (0, 0, 0, missing)).view(torch.float8_e4m3fn)
    return codes.contiguous(), pad(weights, (0, missing)).contiguous()

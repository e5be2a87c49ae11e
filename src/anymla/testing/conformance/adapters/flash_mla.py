"""FlashMLA's sparse attention (deepseek-ai/FlashMLA), and libraries with the same functions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.ops.attention import CacheRows
from anymla.ops.registry import BackendUnavailable
from anymla.testing.conformance.adapters import Adapter, require_module
from anymla.testing.conformance.registry import NotApplicable

_MODULES = ("flash_mla", "vllm.third_party.flashmla.flash_mla_interface")
_HEADS = (64, 128)
_DECODE_COLUMNS, _PREFILL_COLUMNS = 64, 128
_PAGE_ALIGNMENT = 576

_TRANSLATES = (
    "heads are padded to 64 or 128 (sink -inf), and cut off again",
    "index lists are padded to a multiple of 64 columns (128 for plain rows) with -1",
    "decode: indices that point nowhere become -1, the only such index of its documentation",
    "pages whose stride is not a multiple of 576 bytes, or that begin off 16 bytes, are copied",
    "the lse of an empty row, +inf, becomes -inf",
)
_EXCUSED = {
    "A3": "takes 64 or 128 heads; the adapter pads",
    "A7": "has no batch-invariant mode",
    "L4": "the adapter's copies would take as long as the case",
    "L8": "has no layout ids",
}


def adapter() -> Adapter:
    """Return the adapter of the installed FlashMLA, or of the copy inside vLLM."""
    problems = []
    for name in _MODULES:
        try:
            return adapter_of(require_module(name, name), "flash_mla")
        except BackendUnavailable as unavailable:
            problems.append(str(unavailable))
    raise BackendUnavailable("; ".join(problems))


def adapter_of(module: ModuleType, name: str, *, needs_gpu: bool = True) -> Adapter:
    """Return an adapter of a module with FlashMLA's decode, metadata and prefill functions."""
    return Adapter(
        name,
        {
            "sparse_attention": functools.partial(_decode, module),
            "sparse_attention_rows": functools.partial(_prefill, module),
        },
        version=str(getattr(module, "__version__", "")),
        translates=_TRANSLATES,
        excused=_EXCUSED,
        needs_gpu=needs_gpu,
    )


def _decode(
    module: Any,
    q: Tensor,
    rows: Sequence[CacheRows],
    *,
    sink: Tensor | None = None,
    scale: float | None = None,
    **rest: Any,
) -> tuple[Tensor, Tensor]:
    _claims(q, rest)
    if any(each.layout != MAIN_FP8 for each in rows):
        raise NotApplicable(f"reads {MAIN_FP8} only")
    heads = q.shape[1]
    q, sink = _padded_heads(q, sink)
    metadata, _ = module.get_mla_metadata()
    extra: dict[str, Any] = {}
    for each in rows[1:]:
        extra = {
            "extra_k_cache": _pages(each.cache),
            "extra_indices_in_kvcache": _listed(each.indices, each.cache, _DECODE_COLUMNS),
            "extra_topk_length": each.lengths,
        }
    window = rows[0]
    out, lse = module.flash_mla_with_kvcache(
        q.unsqueeze(1).contiguous(),
        _pages(window.cache),
        None,
        None,
        512,
        metadata,
        None,
        scale,
        False,
        True,
        _listed(window.indices, window.cache, _DECODE_COLUMNS),
        sink,
        topk_length=window.lengths,
        **extra,
    )
    return out[:, 0, :heads], _minus_inf(lse[:, :heads, 0])


def _prefill(
    module: Any,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lengths: Tensor | None = None,
    *,
    sink: Tensor | None = None,
    scale: float | None = None,
    **rest: Any,
) -> tuple[Tensor, Tensor]:
    _claims(q, rest)
    if kv.dtype != torch.bfloat16:
        raise NotApplicable(f"takes bfloat16 rows, not {kv.dtype}")
    heads = q.shape[1]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    q, sink = _padded_heads(q, sink)
    rows = indices if indices.ndim == 3 else indices.unsqueeze(1)
    rows = pad(rows, (0, -rows.shape[2] % _PREFILL_COLUMNS), value=-1).contiguous()
    kv = kv if kv.ndim == 3 else kv.unsqueeze(1)
    out, _, lse = module.flash_mla_sparse_fwd(
        q.contiguous(), kv, rows, scale, 512, sink, topk_length=lengths
    )
    return out[:, :heads], _minus_inf(lse[:, :heads])


def _claims(q: Tensor, rest: dict[str, Any]) -> None:
    """Raise unless the library's documentation covers the arguments."""
    if q.dtype != torch.bfloat16 or q.shape[2] != 512:
        raise NotApplicable(f"takes bfloat16 queries of 512 channels, not {q.dtype}")
    if not len(q):
        raise NotApplicable("takes at least one token")
    if rest.get("batch_invariant"):
        raise NotApplicable("has no batch-invariant mode")
    if rest.get("out") is not None:
        raise NotApplicable("the adapter passes no out=")


def _padded_heads(q: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor | None]:
    missing = next(heads for heads in (*_HEADS, q.shape[1]) if heads >= q.shape[1]) - q.shape[1]
    padded = pad(q, (0, 0, 0, missing))
    return padded, None if sink is None else pad(sink.float(), (0, missing), value=-torch.inf)


def _listed(indices: Tensor, cache: Tensor, columns: int) -> Tensor:
    """Return indices [T, 1, K] with -1 for invalid ones, K a multiple of ``columns``."""
    flat = indices if indices.ndim == 2 else indices.squeeze(1)
    inside = (flat >= 0) & (flat < cache.shape[0] * cache.shape[1])
    flat = pad(torch.where(inside, flat, -1), (0, -flat.shape[1] % columns), value=-1)
    return flat.unsqueeze(1).contiguous()


def _pages(cache: Tensor) -> Tensor:
    """Return pages [P, B, 1, 584] with a page stride that is a multiple of 576."""
    cache = cache if cache.ndim == 3 else cache.squeeze(2)
    if cache.stride(0) % _PAGE_ALIGNMENT or cache.data_ptr() % 16:
        layout = get_layout(MAIN_FP8)
        copy = layout.allocate(cache.shape[0], cache.shape[1], cache.device, fill=0xFF)
        for target, source in zip(layout.planes(copy), layout.planes(cache), strict=True):
            assert target is not None
            assert source is not None
            target.copy_(source)
        cache = copy
    return cache.unsqueeze(2)


def _minus_inf(lse: Tensor) -> Tensor:
    return torch.where(lse == torch.inf, -torch.inf, lse)

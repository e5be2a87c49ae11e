"""FlashMLA's functions in SGLang computed by anymla, with a rank's own number of heads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor

from anymla.compat import flash_mla
from anymla.engines.sglang.pinned import BACKEND, FLASH_MLA, LAYER

_LOG = logging.getLogger("sglang.plugins.anymla")
# Entries of DeepSeek-V4 and V4.1 by their bytes; V3.2's have 656, and its models keep FlashMLA.
_ENTRY_BYTES = (584, 528, 288)
_KEPT = "_anymla_plan"  # attribute of FlashMLA's scheduling metadata

# True once a backend was built whose attention goes through FlashMLA's functions.
_flash_mla_runs = False


def register() -> None:
    """Register the hooks."""
    add = HookRegistry.register
    add(f"{FLASH_MLA}.flash_mla_with_kvcache", flash_mla_with_kvcache, HookType.AROUND)
    add(f"{FLASH_MLA}.flash_mla_sparse_fwd", flash_mla_sparse_fwd, HookType.AROUND)
    add(f"{LAYER}._kernel_num_heads", kernel_num_heads, HookType.AROUND)
    add(f"{BACKEND}.__init__", backend_built, HookType.AFTER)


def flash_mla_with_kvcache(
    original: Callable[..., Any],
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    head_dim_v: int = 512,
    tile_scheduler_metadata: Any = None,
    *args: Any,
    use_legacy: bool = True,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Run sparse decode over V4's caches by anymla; leave other calls to the original.

    The plan of a step's layers is kept in the scheduling metadata, which SGLang's layers share.

    Args:
        original: SGLang's function, called for all else.
        q: queries of the heads, [b, s, H, 512].
        k_cache: pages of cached entries, [P, B, 1, bytes].
        block_table: ignored, see ``anymla.compat.flash_mla``.
        cache_seqlens: ignored as well.
        head_dim_v: channels of the value.
        tile_scheduler_metadata: the ``FlashMLASchedMeta`` of FlashMLA that layers share.
        *args: further arguments of the function, by position.
        use_legacy: True for pages that hold all values before all scales.
        **kwargs: further arguments, by name.

    Returns:
        Output [b, s, H, 512] and lse [b, H, s], as the original.
    """
    tensors = isinstance(tile_scheduler_metadata, Tensor)
    ours = kwargs.get("indices") is not None and k_cache.shape[-1] in _ENTRY_BYTES
    if args or tensors or not ours or q.shape[-1] != 512:
        given = (q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, *args)
        result: tuple[Tensor, Tensor] = original(*given, use_legacy=use_legacy, **kwargs)
        return result
    plan = getattr(tile_scheduler_metadata, _KEPT, None)
    if plan is None:
        plan = flash_mla.FlashMLASchedMeta()
        setattr(tile_scheduler_metadata, _KEPT, plan)
    return flash_mla.flash_mla_with_kvcache(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        plan,
        use_legacy=use_legacy,
        **kwargs,
    )


def flash_mla_sparse_fwd(
    original: Callable[..., Any],
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    *,
    use_legacy: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Run sparse prefill over decoded rows by anymla; leave other dtypes to the original.

    Args:
        original: SGLang's function, called for all else.
        q: queries of the heads, [s, H, d].
        kv: rows of keys and values, [s_kv, 1, d].
        indices: rows of each query, int32 [s, 1, topk].
        sm_scale: factor of the scores.
        d_v: channels of the value.
        attn_sink: logit per head that carries no value, float32 [H].
        topk_length: columns of ``indices`` in use, int32 [s].
        use_legacy: True for statistics in base 2, as the older kernels return them.

    Returns:
        Output [s, H, d_v], largest scores [s, H] and lse [s, H], as the original.
    """
    if not q.is_floating_point() or q.dtype.itemsize == 1:
        given = (q, kv, indices, sm_scale, d_v, attn_sink, topk_length)
        result: tuple[Tensor, Tensor, Tensor] = original(*given, use_legacy=use_legacy)
        return result
    return flash_mla.flash_mla_sparse_fwd(
        q,
        kv,
        indices,
        sm_scale,
        d_v,
        attn_sink,
        topk_length,
        return_log2_lse=True if use_legacy else None,
    )


def kernel_num_heads(original: Callable[..., int], layer: Any, num_tokens: int) -> int:
    """Return a rank's own number of heads: SGLang pads it to 64 for FlashMLA."""
    heads: int = layer.n_local_heads if _flash_mla_runs else original(layer, num_tokens)
    return heads


def backend_built(result: None, backend: Any, *args: Any, **kwargs: Any) -> None:
    """Note whether a backend calls FlashMLA's functions, and say so if it does not."""
    global _flash_mla_runs
    others = [name for name in ("trtllm_attn", "mega_attn") if getattr(backend, name, False)]
    if others:
        _LOG.warning("anymla's attention is not called: SGLang chose %s", others[0])
        return
    _flash_mla_runs = True

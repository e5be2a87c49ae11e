"""Selection of index entries in SGLang by ``select_topk``, in memory that does not grow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor

from anymla.engines.sglang.pinned import INDEXER
from anymla.formats.page_layout import INDEX_FP8
from anymla.ops.indexer import select_topk

# Entries of ratio 4 in a page of SGLang's pool, which has 256 tokens, and bytes of an entry.
_ENTRIES, _BYTES = 64, 132


def register() -> None:
    """Register the hook."""
    HookRegistry.register(f"{INDEXER}.forward_c4_indexer", forward_c4_indexer, HookType.AROUND)


def forward_c4_indexer(
    original: Callable[..., None],
    backend: Any,
    x: Tensor,
    q_lora: Tensor,
    c4_indexer: Any,
    forward_batch: Any,
    alt_streams: list[Any] | None = None,
    enable_multi_stream: bool = False,
    q_lora_ready: Any = None,
    skip_compressor: bool = False,
    q_lora_quant: Any = None,
) -> None:
    """Select each token's entries and write their slots where attention reads them.

    SGLang's own query and compressor run as before. Left to the original: FP4 index keys, HiSparse,
    lists that come from outside, and the capturer of indices.

    Args:
        original: SGLang's method, called for all else.
        backend: the ``DeepseekV4AttnBackend`` whose lists are written.
        x: hidden states of the tokens.
        q_lora: latent queries of the tokens.
        c4_indexer: the layer's indexer.
        forward_batch: SGLang's description of the batch.
        alt_streams: streams beside the current one.
        enable_multi_stream: True if the query is made on one of them.
        q_lora_ready: event after which ``q_lora`` is complete.
        skip_compressor: True if the index keys are written elsewhere.
        q_lora_quant: ``q_lora`` in FP8, if another layer quantised it.
    """
    if forward_batch.forward_mode.is_idle():
        return
    if not _selects(backend, c4_indexer):
        original(
            backend,
            x,
            q_lora,
            c4_indexer,
            forward_batch,
            alt_streams=alt_streams,
            enable_multi_stream=enable_multi_stream,
            q_lora_ready=q_lora_ready,
            skip_compressor=skip_compressor,
            q_lora_quant=q_lora_quant,
        )
        return
    core = backend.forward_metadata.core_metadata
    rows = min(len(x), len(q_lora), len(core.positions))
    given = {
        "x": x[:rows],
        "q_lora": q_lora[:rows],
        "c4_indexer": c4_indexer,
        "positions": core.positions[:rows],
        "forward_batch": forward_batch,
    }
    if enable_multi_stream:
        streams = {"alt_streams": alt_streams, "q_lora_ready": q_lora_ready}
        q, weights = backend._forward_prepare_multi_stream(**given, **streams)
    else:
        quantised = q_lora_quant if len(q_lora) == rows else None
        q, weights = backend._forward_prepare_normal(
            **given, skip_compressor=skip_compressor, q_lora_quant=quantised
        )
    keys = backend.token_to_kv_pool.get_index_k_with_scale_buffer(layer_id=c4_indexer.layer_id)
    select(q, weights, keys, backend.forward_metadata.indexer_metadata, core)


def _selects(backend: Any, c4_indexer: Any) -> bool:
    """True if anymla selects here."""
    from sglang.srt.state_capturer.indexer_topk import get_global_indexer_capturer

    outside = getattr(backend, "debug_use_external_c4_sparse_indices", False)
    return not (
        c4_indexer.use_fp4_indexer
        or outside
        or backend.hisparse_coordinator is not None
        or get_global_indexer_capturer() is not None
    )


def select(q: Tensor, weights: Tensor, keys: Tensor, pages: Any, core: Any) -> None:
    """Write slots, and entries where SGLang keeps them, of the entries that each token selects.

    Args:
        q: index queries of the heads, float8_e4m3fn [T, Hi, 128].
        weights: weights of the heads with the query's scale, float32 [T, Hi, 1].
        keys: a layer's pool of index keys, uint8 [P, bytes].
        pages: SGLang's ``PagedIndexerMetadata``: page table and number of entries per token.
        core: SGLang's ``DSV4AttnMetadata``, whose lists are written; rows beyond T stay.
    """
    slots = core.c4_sparse_page_indices
    lengths = pages.compressed_seq_lens.flatten()
    count = min(len(q), len(slots), len(lengths), len(pages.page_table))
    table = pages.page_table[:count].int()
    raw = core.c4_sparse_raw_indices
    select_topk(
        q[:count],
        keys.view(torch.uint8)[:, : _ENTRIES * _BYTES].view(len(keys), _ENTRIES, _BYTES),
        weights[:count].flatten(1).float(),
        lengths[:count].int(),
        table,
        slots.shape[1],
        layout=INDEX_FP8,
        out=None if raw is None else raw[:count],
        slot_table=table,
        slot_page_size=pages.compressed_page_size,
        slots=slots[:count],
    )

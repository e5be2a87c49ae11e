"""Lower bounds of the memory that an engine's sizes take, computed before any allocation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from anymla.formats.page_layout import get_layout
from anymla.layers.caches import CacheFormat
from anymla.layers.spec import LayerSpec
from anymla.model.config import ModelConfig
from anymla.ops.memory import require_memory
from anymla.runtime.cache_groups import CacheGroup, ceil_div
from anymla.runtime.cache_size import page_bytes
from anymla.runtime.options import EngineOptions
from anymla.runtime.sizing import block_size, drafts_blocks

# Bytes of Python's own objects: an integer in a list, and an empty deque.
_NUMBER_BYTES, _DEQUE_BYTES = 40, 600
# Bytes of a slot in a list of rows: the data that it is computed from, or the list and a copy.
_SLOT_BYTES = 8


def require_engine_memory(
    config: ModelConfig,
    specs: Sequence[LayerSpec],
    groups: Sequence[CacheGroup],
    cache_format: CacheFormat,
    pages: Mapping[str, int],
    options: EngineOptions,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ngram_bytes: int = 0,
    ngram_buffers: bool = False,
    padded: bool = False,
) -> None:
    """Raise unless the device and the host have the memory that an engine needs at least.

    Args:
        config: configuration of the model.
        specs: specs of the layers that have caches.
        groups: cache groups of those layers.
        cache_format: row formats of the caches.
        pages: number of usable pages by group.
        options: sizes of the engine.
        dtype: dtype of the activations.
        device: device of the model.
        ngram_bytes: bytes of a token's n-gram rows, summed over the layers that read some.
        ngram_buffers: True if decode steps keep n-gram rows at fixed addresses.
        padded: True to assume steps as large as the options allow, even if no requests could fill
            them.

    Raises:
        NotEnoughMemory: the device or the host has less.
    """
    parts = {
        "caches": sum(
            (pages[group.name] + 1)
            * page_bytes(group, specs[group.layers[0]], cache_format)
            * len(group.layers)
            for group in groups
        ),
        "block tables": sum(
            4 * (options.max_requests + 1) * ceil_div(options.max_seq_len, group.tokens_per_page)
            for group in groups
        ),
        **_blocks(config, specs, cache_format, options, dtype.itemsize),
        "rotary table": 4 * options.max_seq_len * config.qk_rope_head_dim,
        **_largest_step(config, groups, options, dtype.itemsize, ngram_bytes, padded=padded),
    }
    buffers = {}
    if ngram_bytes and ngram_buffers:
        rows = options.max_requests * (1 + options.draft_tokens)
        buffers["n-gram buffers"] = rows * ngram_bytes
    parts |= buffers
    bookkeeping = {
        "page and request lists": _NUMBER_BYTES * sum(pages.values())
        + (_DEQUE_BYTES * len(groups) + _NUMBER_BYTES) * options.max_requests
    }
    what = (
        f"an engine for {options.max_requests} requests of up to {options.max_seq_len} tokens, "
        f"{options.batch_tokens} in a step,"
    )
    if device.type == "cpu":
        require_memory(what, parts | bookkeeping)
    else:
        require_memory(what, parts, device)
        require_memory(what, bookkeeping | buffers)  # copied from as many on the host


def _blocks(
    config: ModelConfig,
    specs: Sequence[LayerSpec],
    cache_format: CacheFormat,
    options: EngineOptions,
    itemsize: int,
) -> dict[str, int]:
    """Return the bytes of a DSpark drafter besides its context: block rows and taps."""
    if not drafts_blocks(specs):
        return {}
    assert config.dspark is not None
    size = block_size(config.dspark.block_size, options)
    page = get_layout(cache_format.main).page_stride_bytes(size)
    taps = len(config.dspark.target_layer_ids) * config.hidden_size * itemsize
    return {
        "blocks of drafts": options.max_requests * page,
        "taps of a step": options.max_requests * (1 + options.draft_tokens) * taps,
    }


def _largest_step(
    config: ModelConfig,
    groups: Sequence[CacheGroup],
    options: EngineOptions,
    itemsize: int,
    ngram_bytes: int,
    *,
    padded: bool,
) -> dict[str, int]:
    """Return the bytes of the largest step: streams, logits, n-gram rows, and lists of rows."""
    held = options.max_requests * options.max_seq_len
    tokens, chosen = options.batch_tokens, options.max_requests * (1 + options.draft_tokens)
    if not padded:
        tokens, chosen = min(tokens, held), min(chosen, held)
    listed = 0
    for group in groups:
        if group.kind == "window":
            listed += group.retention or 0
        elif group.kind == "compressed" and group.lists_entries(options.max_seq_len):
            listed += options.max_seq_len // group.ratio
    return {
        # Input and output of a layer.
        "streams of a step": 2 * tokens * config.hc_mult * config.hidden_size * itemsize,
        "logits of a step": 4 * chosen * config.vocab_size,
        "n-gram rows of a step": tokens * ngram_bytes,
        "row lists of a step": _SLOT_BYTES * tokens * listed,
    }

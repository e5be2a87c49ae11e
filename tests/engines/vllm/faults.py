"""Faults that are put into a worker, each as an engine has it; ``audited.py`` looks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.forward_context import get_forward_context

from anymla.engines.vllm import attention, compressor, indexer
from anymla.engines.vllm.metadata import WindowBuilder
from anymla.formats.page_layout import INDEX_FP8, MAIN_FP8, get_layout
from anymla.ops.norm_rope import rope

Undo = Callable[[], None]


def _patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Undo:
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    return lambda: setattr(owner, name, original)


def sink_dropped(model: Any) -> Undo:
    def make(operation: Any) -> Any:
        return lambda *args, **kwargs: operation(*args, **{**kwargs, "sink": None})

    return _patched(attention, "sparse_attention", make)


def window_off_by_one(model: Any) -> Undo:
    """The oldest row of each window is left out by the kernel, not by the list."""

    def make(operation: Any) -> Any:
        def run(q: Any, rows: Any, **kwargs: Any) -> Any:
            window = rows[0]._replace(lengths=rows[0].lengths - 1)
            return operation(q, [window, *rows[1:]], **kwargs)

        return run

    return _patched(attention, "sparse_attention", make)


def wrong_slot(model: Any) -> Undo:
    """One slot of one list of a step is another request's."""

    def make(build: Any) -> Any:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            built = build(self, *args, **kwargs)
            if built.num_decode_tokens:
                built.decode_swa_indices[0].view(-1)[0] ^= 1
            return built

        return run

    return _patched(WindowBuilder, "build", make)


def scale_byte_wrong(model: Any) -> Undo:
    """The writer of window rows is off by one in the first scale of every row."""

    def make(operation: Any) -> Any:
        def run(q: Any, kv: Any, cache: Any, slots: Any, *args: Any, **kwargs: Any) -> Any:
            result = operation(q, kv, cache, slots, *args, **kwargs)
            scales = get_layout(MAIN_FP8).planes(cache)[1]
            assert scales is not None
            for slot in slots[slots >= 0].tolist():
                scales[slot // cache.shape[1], slot % cache.shape[1], 0] += 1
            return result

        return run

    return _patched(attention, "qnorm_rope_kv_insert", make)


def stale_index_row(model: Any) -> Undo:
    """Index keys are not written: what lay in the page before is searched."""

    def make(operation: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if kwargs["layout"] != INDEX_FP8:
                operation(*args, **kwargs)

        return run

    return _patched(compressor, "compress_norm_rope_insert", make)


def index_keys_missing(first: int, end: int) -> Undo:
    """Index keys of entries that close at positions [first, end) are not written."""

    def make(operation: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            positions, slots = args[4], args[9]
            if kwargs["layout"] == INDEX_FP8:
                slots = torch.where((positions >= first) & (positions < end), -1, slots)
            return operation(*args[:9], slots, *args[10:], **kwargs)

        return run

    return _patched(compressor, "compress_norm_rope_insert", make)


def best_entry_missed(model: Any) -> Undo:
    """The selection takes one entry fewer and repeats the first."""

    def make(operation: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            chosen = operation(*args, **kwargs)
            chosen[:, 1] = chosen[:, 0]
            return chosen

        return run

    return _patched(indexer, "select_topk", make)


def page_freed_early(model: Any) -> Undo:
    """The first entries of every request are written over by one another.

    They are all that the shorter of ``audited.py``'s prompts has, 40 tokens: the audit looks again
    at some that it draws, and what it draws depends on how many steps there were before.
    """
    entries = 40 // 4
    layer = next(
        m
        for m in model.modules()
        if getattr(m, "compress_ratio", 0) == 4 and hasattr(m, "wo_a_groups")
    )
    forward = layer.forward_mqa

    def run(*args: Any) -> None:
        forward(*args)
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, dict):
            data = get_layout(MAIN_FP8).planes(layer.kv_cache)[0]
            for page in set(metadata[layer.prefix].block_table[:, 0].tolist()):
                data[page, :entries] = data[page, :entries].roll(1, 0)

    layer.forward_mqa = run
    return lambda: setattr(layer, "forward_mqa", forward)


def without_inverse_rope(model: Any) -> Undo:
    """Heads are projected as they come from attention."""

    def make(operation: Any) -> Any:
        def run(o: Any, positions: Any, *args: Any, **kwargs: Any) -> Any:
            return operation(o, torch.zeros_like(positions), *args, **kwargs)

        return run

    return _patched(attention, "grouped_output_projection", make)


def score_bias_lost(model: Any) -> Undo:
    """A compressor's states lack the bias of their place in the window."""

    def make(operation: Any) -> Any:
        def run(kv: Any, score: Any, ape: Any, *args: Any, **kwargs: Any) -> Any:
            return operation(kv, score, torch.zeros_like(ape), *args, **kwargs)

        return run

    return _patched(compressor, "save_partial_states", make)


def rotated_back_unsaid(model: Any) -> Undo:
    """Attention rotates heads back, as vLLM's own does on ROCm, and the projection does not."""

    def attend(original: Any) -> Any:
        def run(self: Any, q: Any, positions: Any, metadata: Any, output: Any) -> None:
            original(self, q, positions, metadata, output)
            heads, table = output[: len(positions)], self.rotary_emb.cos_sin_cache
            heads.copy_(rope(heads, positions, table, inverse=True))

        return run

    def project(operation: Any) -> Any:
        def run(o: Any, positions: Any, table: Any, *args: Any, **kwargs: Any) -> Any:
            return operation(rope(o, positions, table), positions, table, *args, **kwargs)

        return run

    undone = [
        _patched(attention.AttentionAdapter, "_attend", attend),
        _patched(attention, "grouped_output_projection", project),
    ]

    def take_out() -> None:
        for undo in undone:
            undo()

    return take_out


def rotated_back(model: Any) -> Undo:
    """The same, in layers with the attribute by which vLLM's own says so."""
    layers = [each for each in model.modules() if hasattr(each, "swa_cache_layer")]
    for layer in layers:
        layer._wo_a_fp8_weight = None
    undo = rotated_back_unsaid(model)

    def take_out() -> None:
        undo()
        for layer in layers:
            del layer._wo_a_fp8_weight

    return take_out


FAULTS: dict[str, Callable[[Any], Undo]] = {
    "sink dropped": sink_dropped,
    "window off by one": window_off_by_one,
    "wrong slot": wrong_slot,
    "scale byte wrong": scale_byte_wrong,
    "stale index row": stale_index_row,
    "best entry missed": best_entry_missed,
    "page freed early": page_freed_early,
    "without inverse RoPE": without_inverse_rope,
    "score bias lost": score_bias_lost,
    "rotated back, unsaid": rotated_back_unsaid,
    "rotated back": rotated_back,
}

"""Speed cases of what surrounds attention: norms, rotations, cache rows and the compressor.

Sizes are those of DeepSeek-V4 Flash. Up to 64 tokens a step is decoding, every token of another
request and, for the compressor, at the end of a window; beyond, it is one request's prefill.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from anymla.bench.kernels import DECODING, TimedCall, backend, normal, step_call
from anymla.formats.page_layout import INDEX_FP8, INDEX_MXFP4, MAIN_FP8, get_layout
from anymla.formats.quantized_rows import QuantizedRows
from anymla.formats.state_layout import allocate_states
from anymla.ops.compressor import compress_norm_rope_insert, save_partial_states
from anymla.ops.compressor.shapes import V4_INDEX, V4_RATIO4, V4_RATIO128, CompressorShape
from anymla.ops.kv_cache import (
    dequant_gather_slots,
    dequantize_and_gather_k_cache,
    quantize_and_insert_k_cache,
)
from anymla.ops.kv_cache.shapes import PAGE_SIZE
from anymla.ops.norm_rope import (
    cos_sin_table,
    fused_q_kv_rmsnorm,
    inv_freq,
    qnorm_rope_kv_insert,
    rms_norm,
    rope,
)
from anymla.ops.norm_rope.shapes import V4_FLASH

TOKENS = (1, 64, 4096, 32768)
_HEADS, _DIM, _RANK = V4_FLASH.heads, V4_FLASH.channels, V4_FLASH.q_rank
_EPS = 1e-6

# Compressors by name, with their sizes, the layout of their entries, and Hadamard.
_COMPRESSORS = (
    ("C4", V4_RATIO4, MAIN_FP8, False),
    ("C128", V4_RATIO128, MAIN_FP8, False),
    ("index", V4_INDEX, INDEX_FP8, False),
    ("index", V4_INDEX, INDEX_MXFP4, True),
)


def cases(tokens: Sequence[int] = TOKENS) -> Iterator[TimedCall]:
    """Yield every operation at every number of tokens."""
    row = get_layout(MAIN_FP8).entry_bytes
    for count in tokens:
        heads = 2 * 2 * _HEADS * _DIM
        turns = 8 + 4 * V4_FLASH.rope
        normed = 2 * 2 * (_RANK + _DIM) + _RANK
        for name, setup, moved in (
            ("rms_norm", _rms_norm, 2 * 2 * V4_FLASH.hidden * count),
            ("fused_q_kv_rmsnorm", _fused_norms, normed * count),
            ("rope", _rope, (heads + turns) * count),
            ("qnorm_rope_kv_insert", _qnorm_insert, (heads + turns + 2 * _DIM + 8 + row) * count),
            ("quantize_and_insert_k_cache", _insert, (2 * _DIM + 8 + row) * count),
            ("dequant_gather_slots", _gather_slots, (2 * _DIM + 4 + row) * count),
            ("dequantize_and_gather_k_cache", _gather_rows, (2 * _DIM + row) * count),
        ):
            yield step_call(
                f"{name}, {count} tokens", functools.partial(setup, count), moved, count
            )
        for kind in _COMPRESSORS:
            yield from _compressor_cases(kind, count)


def _table(positions: int) -> Tensor:
    return cos_sin_table(
        inv_freq(V4_FLASH.rope, 10000.0).to(torch.get_default_device()), 0, positions
    )


def _pages(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Make a cache for that many rows, one request's pages in any order, and the rows' slots."""
    pages = -(-rows // PAGE_SIZE)
    with torch.device("cpu"):
        table = torch.randperm(pages)
    table = table.to(torch.get_default_device())
    position = torch.arange(rows)
    slots = table[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
    cache = get_layout(MAIN_FP8).allocate(pages, PAGE_SIZE, device=slots.device)
    return cache, table.int(), slots


def _rms_norm(tokens: int) -> Callable[[], object]:
    x, weight = normal(tokens, V4_FLASH.hidden), normal(V4_FLASH.hidden)
    return lambda: rms_norm(x, weight, _EPS, backend=backend())


def _fused_norms(tokens: int) -> Callable[[], object]:
    qr, kv = normal(tokens, _RANK + _DIM).split((_RANK, _DIM), dim=1)
    weights = normal(_RANK), normal(_DIM)
    quantised = QuantizedRows.empty(tokens, _RANK, qr.device)
    codes = {"codes": quantised.codes, "code_scales": quantised.scales}
    return lambda: fused_q_kv_rmsnorm(qr, kv, *weights, _EPS, **codes, backend=backend())


def _rope(tokens: int) -> Callable[[], object]:
    x, positions, table = normal(tokens, _HEADS, _DIM), torch.arange(tokens), _table(tokens)
    return lambda: rope(x, positions, table, inverse=True, backend=backend())


def _qnorm_insert(tokens: int) -> Callable[[], object]:
    q, kv, out = (
        normal(tokens, _HEADS, _DIM),
        normal(tokens, _DIM),
        normal(tokens, _HEADS, _DIM),
    )
    (cache, _, slots), table = _pages(tokens), _table(tokens)
    positions = torch.arange(tokens)
    return lambda: qnorm_rope_kv_insert(
        q, kv, cache, slots, positions, table, _EPS, out=out, backend=backend()
    )


def _insert(tokens: int) -> Callable[[], object]:
    (cache, _, slots), rows = _pages(tokens), normal(tokens, _DIM)
    return lambda: quantize_and_insert_k_cache(rows, cache, slots, backend=backend())


def _gather_slots(tokens: int) -> Callable[[], object]:
    (cache, _, slots), out = _pages(tokens), normal(tokens, _DIM)
    indices = slots.int()
    return lambda: dequant_gather_slots(out, cache, indices, backend=backend())


def _gather_rows(tokens: int) -> Callable[[], object]:
    (cache, table, _), out = _pages(tokens), normal(1, tokens, _DIM)
    lengths = torch.full((1,), tokens, dtype=torch.int32)
    return lambda: dequantize_and_gather_k_cache(
        out, cache, lengths, None, table.unsqueeze(0), backend=backend()
    )


def _compressor_cases(
    kind: tuple[str, CompressorShape, str, bool], tokens: int
) -> Iterator[TimedCall]:
    name, shape, layout, hadamard = kind
    window, entries = shape.window, shape.page_size
    ratio, dim, width, page = window.ratio, window.channels, window.width, window.page_size
    decoding = tokens <= DECODING
    closed = tokens if decoding else tokens // ratio
    states = window.states

    def scene() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Make a state cache, block tables, and the tokens' state slots, requests and positions."""
        if decoding:
            requests, positions = torch.arange(tokens), torch.full((tokens,), states - 1)
        else:
            requests, positions = torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens)
        columns = -(-(states if decoding else tokens) // page)
        pages = columns * (tokens if decoding else 1)
        state = allocate_states(pages, page, width, device=positions.device)
        state.normal_()
        tables = torch.arange(pages, dtype=torch.int32).view(-1, columns).flip(1).contiguous()
        slots = tables[requests, positions // page].long() * page + positions % page
        return state, tables, slots, requests.int(), positions

    def save(_: int) -> Callable[[], object]:
        state, _tables, slots, _requests, positions = scene()
        kv, score = torch.randn(tokens, 2 * width).split(width, dim=1)
        ape = torch.randn(ratio, width)
        return lambda: save_partial_states(
            kv, score, ape, positions, state, slots, compress_ratio=ratio, backend=backend()
        )

    def compress(_: int) -> Callable[[], object]:
        state, tables, slots, requests, positions = scene()
        cache = get_layout(layout).allocate(-(-closed // entries), entries, device=slots.device)
        ends = (positions + 1) % ratio == 0
        target = torch.arange(tokens) if decoding else torch.where(ends, positions // ratio, -1)
        weight, table = torch.randn(dim), _table(tokens + states)
        return lambda: compress_norm_rope_insert(
            state,
            tables,
            slots,
            requests,
            positions,
            weight,
            _EPS,
            table,
            cache,
            target,
            compress_ratio=ratio,
            overlap=window.overlap,
            layout=layout,
            hadamard=hadamard,
            backend=backend(),
        )

    size = f"{name}, {tokens} tokens"
    if layout != INDEX_MXFP4:  # the states do not depend on the entries' format
        saved = (2 * 2 * width * 4 + 16) * tokens
        yield step_call(
            f"save_partial_states {size}", functools.partial(save, tokens), saved, tokens
        )
    read = 2 * states * dim * 4
    moved = (read + get_layout(layout).entry_bytes) * closed + 28 * tokens
    label = f"compress_norm_rope_insert {size}, {layout}{' with Hadamard' if hadamard else ''}"
    setup = functools.partial(compress, tokens)
    if decoding and moved > 2**24:  # latency no longer dominates
        yield TimedCall(label, setup, moved, beside_copy=True)
    else:
        yield step_call(label, setup, moved, tokens)

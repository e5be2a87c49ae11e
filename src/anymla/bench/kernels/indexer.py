"""Speed cases of the indexer: queries, scores and top-k, and the rows that attention then reads.

64 heads of 128 channels, FP8 keys in pages of 64. Decoding is one query a request over 8k or 32k
entries (32k or 128k tokens of context); prefill is 2048 queries of one request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from anymla.bench.kernels import TimedCall, backend, normal
from anymla.formats.page_layout import INDEX_FP8, get_layout
from anymla.ops.indexer import (
    indexer_q_rope_quant,
    mqa_logits,
    paged_mqa_logits,
    topk_per_row,
)
from anymla.ops.step_indices import compute_global_topk_indices_and_lens, window_rows

_HEADS, _WIDTH, _PAGE = 64, 128, 64
_TOPK = 512
_DECODES = (1, 32, 128)
_ENTRIES = (8192, 32_768)


def cases() -> Iterator[TimedCall]:
    """Yield all cases of the indexer."""
    yield from _queries()
    for batch in _DECODES:
        for entries in _ENTRIES:
            yield from _decode(batch, entries)
    yield from _prefill(2048, 8192)
    for rows, columns in ((1, 32_768), (32, 32_768), (128, 32_768), (2048, 8192), (8, 262_144)):
        yield _topk(rows, columns)
    yield from _selection()


def _queries() -> Iterator[TimedCall]:
    for tokens in (1, 64, 4096):

        def setup(tokens: int = tokens) -> Callable[[], object]:
            q = normal(tokens, _HEADS, _WIDTH)
            weights = normal(tokens, _HEADS)
            positions = torch.randint(0, 65_536, (tokens,))
            table = torch.rand(65_536, 64)
            return lambda: indexer_q_rope_quant(
                q,
                weights,
                positions,
                table,
                softmax_scale=_WIDTH**-0.5,
                head_scale=_HEADS**-0.5,
                backend=backend(),
            )

        moved = tokens * _HEADS * (_WIDTH * 3 + 2 + 4)
        yield TimedCall(f"indexer_q_rope_quant fp8, {tokens} tokens", setup, moved)


def _codes(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


def _paged_keys(requests: int, entries: int) -> tuple[Tensor, Tensor]:
    """Make a cache of coded keys and a block table of shuffled pages."""
    layout = get_layout(INDEX_FP8)
    pages = requests * entries // _PAGE
    cache = layout.allocate(pages, _PAGE, device=torch.get_default_device())
    data, scales = layout.planes(cache)
    data.copy_(_codes(pages, _PAGE, _WIDTH).view(torch.uint8))
    assert scales is not None
    scales.copy_(torch.full((pages, _PAGE, 1), 0.25).view(torch.uint8))
    table = torch.randperm(pages).view(requests, -1).int()
    return cache, table


def _flops(rows: int, keys: int) -> int:
    return 2 * rows * keys * _HEADS * _WIDTH


def _decode(batch: int, entries: int) -> Iterator[TimedCall]:
    def inputs() -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        cache, table = _paged_keys(batch, entries)
        weights = torch.randn(batch, _HEADS)
        lens = torch.full((batch,), entries, dtype=torch.int32)
        arguments = (_codes(batch, 1, _HEADS, _WIDTH), cache, weights, lens, table)
        return arguments, {"max_context": entries, "backend": backend()}

    def scores() -> Callable[[], object]:
        arguments, options = inputs()
        return lambda: paged_mqa_logits(*arguments, **options)

    def both() -> Callable[[], object]:
        arguments, options = inputs()
        lens = arguments[3]
        starts = torch.zeros_like(lens)

        def run() -> Tensor:
            logits = paged_mqa_logits(*arguments, **options)
            best: Tensor = topk_per_row(logits, starts, lens, _TOPK, backend=backend())
            return best

        return run

    keys = batch * entries * (_WIDTH + 4)
    sizes = f"{batch} x {entries} keys"
    logits = batch * entries * 4
    yield TimedCall(f"paged_mqa_logits, {sizes}", scores, keys + logits, _flops(batch, entries))
    moved = keys + 2 * logits + batch * _TOPK * 4
    yield TimedCall(
        f"paged_mqa_logits and topk_per_row {_TOPK}, {sizes}", both, moved, _flops(batch, entries)
    )


def _prefill(rows: int, keys: int) -> Iterator[TimedCall]:
    def dense() -> Callable[[], object]:
        starts = torch.zeros(rows, dtype=torch.int32)
        arguments = (
            _codes(rows, _HEADS, _WIDTH),
            _codes(keys, _WIDTH),
            torch.rand(keys) + 0.5,
            torch.randn(rows, _HEADS),
            starts,
            torch.full_like(starts, keys),
        )
        return lambda: mqa_logits(*arguments, backend=backend())

    def paged() -> Callable[[], object]:
        cache, table = _paged_keys(1, keys)
        weights = torch.randn(rows, _HEADS)
        lens = torch.full((1, rows), keys, dtype=torch.int32)
        q = _codes(1, rows, _HEADS, _WIDTH)
        return lambda: paged_mqa_logits(
            q, cache, weights, lens, table, max_context=keys, backend=backend()
        )

    moved = rows * _HEADS * (_WIDTH + 4) + keys * (_WIDTH + 4) + rows * keys * 4
    yield TimedCall(f"mqa_logits, {rows} x {keys} keys", dense, moved, _flops(rows, keys))
    yield TimedCall(f"paged_mqa_logits, {rows} x {keys} keys", paged, moved, _flops(rows, keys))


def _topk(rows: int, columns: int) -> TimedCall:
    def setup() -> Callable[[], object]:
        logits = torch.randn(rows, columns)
        starts = torch.zeros(rows, dtype=torch.int32)
        ends = torch.full_like(starts, columns)
        return lambda: topk_per_row(logits, starts, ends, _TOPK, backend=backend())

    moved = rows * (columns + _TOPK) * 4
    return TimedCall(f"topk_per_row {_TOPK}, {rows} x {columns}", setup, moved)


def _selection() -> Iterator[TimedCall]:
    for tokens in (64, 4096):

        def arguments(tokens: int = tokens) -> tuple[Tensor, Tensor, Tensor]:
            requests = min(tokens, 64)
            table = torch.randperm(requests * 512).view(requests, 512).int()
            request = torch.arange(tokens, dtype=torch.int32) % requests
            positions = torch.randint(1000, 512 * _PAGE, (tokens,))
            return positions, request, table

        def selected(tokens: int = tokens) -> Callable[[], object]:
            positions, request, table = arguments(tokens)
            chosen = torch.randint(0, 8192, (tokens, _TOPK)).int()
            valid = torch.ones_like(positions, dtype=torch.bool)
            return lambda: compute_global_topk_indices_and_lens(
                chosen, request, table, _PAGE, valid, backend=backend()
            )

        def window(tokens: int = tokens) -> Callable[[], object]:
            positions, request, table = arguments(tokens)
            return lambda: window_rows(
                positions, request, table, block_size=_PAGE, window=128, backend=backend()
            )

        yield TimedCall(
            f"compute_global_topk_indices_and_lens, {tokens} tokens",
            selected,
            tokens * _TOPK * 8,
        )
        yield TimedCall(f"window_rows, {tokens} tokens", window, tokens * (128 * 4 + 16))

"""Probes of what chooses and attends: indexer, sparse_attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from anymla.bench.doctor.trial import Probe, Trial, host
from anymla.formats.page_layout import INDEX_FP8, MAIN_FP8, get_layout
from anymla.ops.indexer import paged_mqa_logits, topk_per_row
from anymla.ops.sparse_attention import sparse_attention
from anymla.testing.conformance.expected import attend, index_scale, index_scores
from anymla.testing.oracle.row_formats import ROW_FORMATS, read_entries
from anymla.testing.tolerance import Bound, assert_close, assert_identical

_PAGE, _DIM, _HEADS = 64, 512, 64
_INDEX_HEADS, _INDEX_DIM, _CONTEXT, _CHOSEN = 64, 128, 4096, 512
_WINDOW, _ENTRIES = 128, 512
_FEW = {"check": 2, "cpu": 4, "gpu": 64}
# A sum of 32 products of FP8 codes keeps about 13 bits in the instructions of some GPUs.
_FP8_DOT = Bound(2 * (_INDEX_DIM / 32) ** 0.5 * 2.0**-13, "2 * sqrt(4) * 2^-13, FP8 instructions")


def probes() -> Iterator[Probe]:
    """In the order in which a layer calls them."""
    yield Probe("indexer", "scores of paged keys", _scores, _FEW, fp8=True)
    yield Probe("indexer", "top 512", _topk, {"check": 3, "cpu": 16, "gpu": 256})
    yield Probe("sparse_attention", "window + top 512, sink", _attention, _FEW, fp8=True)


def _filled(layout_id: str, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A cache of ``rows`` random rows, and their float64 values by slot."""
    layout = get_layout(layout_id)
    cache = layout.allocate(-(-rows // _PAGE), _PAGE, fill=0xFF)
    layout.write(cache, torch.arange(rows), torch.randn(rows, layout.channels))
    values = ROW_FORMATS[layout_id].decode(*read_entries(cache, torch.arange(rows), layout_id))
    placed = layout.allocate(cache.shape[0], _PAGE, device)
    placed.copy_(cache)
    return placed, values


def _scores(tokens: int, device: torch.device) -> Trial:
    """One query a request, each over its own order of the same pages."""
    cache, keys = _filled(INDEX_FP8, _CONTEXT, device)
    pages = cache.shape[0]
    q = torch.randn(tokens, 1, _INDEX_HEADS, _INDEX_DIM, device=device).to(torch.float8_e4m3fn)
    weights = torch.randn(tokens, _INDEX_HEADS, device=device)
    tables = torch.stack([torch.randperm(pages) for _ in range(tokens)]).int().to(device)
    lens = torch.full((tokens,), _CONTEXT - 5, dtype=torch.int32, device=device)

    def verify(got: Tensor) -> float:
        worst = 0.0
        inside = torch.arange(_CONTEXT) < _CONTEXT - 5
        for row in range(tokens):
            order = host(tables[row]).long().unsqueeze(1) * _PAGE + torch.arange(_PAGE)
            own = keys[order.flatten()]
            query, weight = host(q[row].float()), host(weights[row : row + 1])
            want = torch.where(inside, index_scores(query, own, weight), -torch.inf)
            scale = index_scale(query, own, weight)
            name = f"scores of request {row}"
            row_scores = host(got[row : row + 1])
            worst = max(
                worst, assert_close(row_scores, want, atol=_FP8_DOT, scale=scale, name=name)
            )
        return worst

    moved = tokens * (_CONTEXT * (get_layout(INDEX_FP8).entry_bytes + 4) + q[0].nbytes)
    flops = 2 * tokens * _CONTEXT * _INDEX_HEADS * _INDEX_DIM
    args = (q, cache, weights, lens, tables)
    return Trial(paged_mqa_logits, args, {"max_context": _CONTEXT}, moved, verify, flops)


def _topk(tokens: int, device: torch.device) -> Trial:
    logits = torch.randn(tokens, 4 * _CONTEXT, device=device)
    starts = torch.zeros(tokens, dtype=torch.int32, device=device)
    ends = torch.full((tokens,), 4 * _CONTEXT - 3, dtype=torch.int32, device=device)

    def verify(chosen: Tensor) -> float:
        want = host(logits)[:, : 4 * _CONTEXT - 3].double().topk(_CHOSEN).indices
        assert_identical(host(chosen).long(), want, name="the best 512, best first")
        return 0.0

    moved = logits.nbytes + tokens * 4 * _CHOSEN
    return Trial(topk_per_row, (logits, starts, ends, _CHOSEN), {}, moved, verify)


def _attention(tokens: int, device: torch.device) -> Trial:
    window, window_rows = _filled(MAIN_FP8, 4 * _WINDOW, device)
    entries, entry_rows = _filled(MAIN_FP8, 4 * _ENTRIES, device)
    q = torch.randn(tokens, _HEADS, _DIM, device=device).bfloat16()
    sink = torch.randn(_HEADS, device=device)
    listed = [
        torch.stack([torch.randperm(4 * width)[:width] for _ in range(tokens)]).int().to(device)
        for width in (_WINDOW, _ENTRIES)
    ]

    def verify(result: tuple[Tensor, Tensor]) -> float:
        rows = [
            torch.cat((window_rows[host(near).long()], entry_rows[host(far).long()]))
            for near, far in zip(*listed, strict=True)
        ]
        out, lse = (host(each) for each in result)
        return attend(host(q), rows, host(sink)).check((out, lse))

    row = get_layout(MAIN_FP8).entry_bytes + 4
    moved = tokens * ((_WINDOW + _ENTRIES) * row + _HEADS * (2 * 2 * _DIM + 4))
    flops = 4 * tokens * _HEADS * (_WINDOW + _ENTRIES) * _DIM
    keywords = {"sink": sink, "extra_cache": entries, "extra_indices": listed[1]}
    return Trial(sparse_attention, (q, window, listed[0]), keywords, moved, verify, flops)

"""Probes of what chooses and attends: indexer, sparse_attention and its variants."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from anymla.bench.doctor.trial import Probe, Trial, host
from anymla.formats.page_layout import INDEX_FP8, MAIN_FP8, get_layout
from anymla.ops.attention import prefill_attention, sparse_attention, sparse_attention_fp8_quant
from anymla.ops.indexer import paged_mqa_logits, topk_per_row
from anymla.testing.conformance.expected import (
    Attention,
    attend,
    index_scale,
    index_scores,
    table,
    v4_config,
)
from anymla.testing.oracle.rope import frequencies, rotate
from anymla.testing.oracle.row_formats import ROW_FORMATS, read_entries
from anymla.testing.tolerance import Bound, assert_close, assert_identical, ulps

_PAGE, _DIM, _HEADS = 64, 512, 64
_INDEX_HEADS, _INDEX_DIM, _CONTEXT, _CHOSEN = 64, 128, 4096, 512
_WINDOW, _ENTRIES = 128, 512
_FEW = {"check": 2, "cpu": 4, "gpu": 64}
_CHUNK = {"check": 3, "cpu": 16, "gpu": 2048}
# A sum of 32 products of FP8 codes keeps about 13 bits in the instructions of some GPUs.
_FP8_DOT = Bound(2 * (_INDEX_DIM / 32) ** 0.5 * 2.0**-13, "2 * sqrt(4) * 2^-13, FP8 instructions")


def probes() -> Iterator[Probe]:
    """In the order in which a layer calls them."""
    yield Probe("indexer", "scores of paged keys", _scores, _FEW, fp8=True)
    yield Probe("indexer", "top 512", _topk, {"check": 3, "cpu": 16, "gpu": 256})
    yield Probe("sparse_attention", "window + top 512, sink", _attention, _FEW, fp8=True)
    yield Probe("prefill_attention", "window + top 512 of a chunk", _prefill, _CHUNK)
    yield Probe("sparse_attention", "attention, rotated back, FP8", _quantised, _FEW, fp8=True)


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


@dataclasses.dataclass(frozen=True)
class _Decode:
    """Queries over a window and over entries, and what each of them sees."""

    q: Tensor
    sink: Tensor
    window: Tensor
    entries: Tensor
    near: Tensor
    far: Tensor
    near_rows: Tensor
    far_rows: Tensor

    @classmethod
    def draw(cls, tokens: int, device: torch.device) -> _Decode:
        window, near_rows = _filled(MAIN_FP8, 4 * _WINDOW, device)
        entries, far_rows = _filled(MAIN_FP8, 4 * _ENTRIES, device)
        near, far = (
            torch.stack([torch.randperm(4 * width)[:width] for _ in range(tokens)]).int()
            for width in (_WINDOW, _ENTRIES)
        )
        q = torch.randn(tokens, _HEADS, _DIM, device=device).bfloat16()
        sink = torch.randn(_HEADS, device=device)
        near, far = near.to(device), far.to(device)
        return cls(q, sink, window, entries, near, far, near_rows, far_rows)

    def expected(self) -> Attention:
        """The oracle's result."""
        rows = [
            torch.cat((self.near_rows[host(near).long()], self.far_rows[host(far).long()]))
            for near, far in zip(self.near, self.far, strict=True)
        ]
        return attend(host(self.q), rows, host(self.sink))

    @property
    def keywords(self) -> dict[str, Any]:
        """Of the operations."""
        extra = {"extra_cache": self.entries, "extra_indices": self.far}
        return {"sink": self.sink, **extra}

    @property
    def flops(self) -> int:
        """Of both products."""
        return 4 * len(self.q) * _HEADS * (_WINDOW + _ENTRIES) * _DIM

    @property
    def rows_bytes(self) -> int:
        """Of the rows that are read, and of the lists that name them."""
        return len(self.q) * (_WINDOW + _ENTRIES) * (get_layout(MAIN_FP8).entry_bytes + 4)


def _attention(tokens: int, device: torch.device) -> Trial:
    given = _Decode.draw(tokens, device)

    def verify(result: tuple[Tensor, Tensor]) -> float:
        out, lse = (host(each) for each in result)
        return given.expected().check((out, lse))

    moved = given.rows_bytes + tokens * _HEADS * (2 * 2 * _DIM + 4)
    args = (given.q, given.window, given.near)
    return Trial(sparse_attention, args, given.keywords, moved, verify, given.flops)


def _quantised(tokens: int, device: torch.device) -> Trial:
    given, groups = _Decode.draw(tokens, device), 8
    positions = torch.arange(700, 700 + tokens, device=device)

    def verify(result: tuple[Tensor, Tensor]) -> float:
        want = given.expected()
        inv_freq = frequencies(v4_config(), compressed=True)
        rotated = rotate(want.out, host(positions), inv_freq, inverse=True).flatten(1)
        codes, scales = host(result[0].float()).double(), host(result[1]).double()
        wide = scales.repeat_interleave(128, -1)
        # Half a step of e4m3, which is even below its smallest normal, on top of attention's error.
        steps = wide.flatten(1) * 2**-10
        size = want.weight.flatten(1) * ulps(torch.bfloat16, 2)
        got, rtol = (codes * wide).flatten(1), 2**-4 + ulps(torch.bfloat16, 2)
        return assert_close(got, rotated, atol=1.0, rtol=rtol, scale=steps + size, name="codes")

    moved = given.rows_bytes + tokens * _HEADS * (2 * _DIM + _DIM + _DIM // 128 * 4)
    cos_sin = table(700 + tokens, compressed=True).to(device)
    args = (given.q, given.window, given.near, None, positions, cos_sin)
    keywords = {**given.keywords, "n_groups": groups}
    return Trial(sparse_attention_fp8_quant, args, keywords, moved, verify, given.flops)


def _prefill(tokens: int, device: torch.device) -> Trial:
    """The last tokens of a long text: whole windows, and more entries than a token takes."""
    near, far = tokens + _WINDOW - 1, 4 * _ENTRIES
    rows = torch.randn(near + far, _DIM, device=device).bfloat16()
    q = torch.randn(tokens, _HEADS, _DIM, device=device).bfloat16()
    sink = torch.randn(_HEADS, device=device)
    numbers = torch.arange(tokens)
    ranges = torch.tensor([[0, _WINDOW, near, _ENTRIES]]).repeat(tokens, 1)
    ranges[:, 0] = numbers
    lists = torch.stack([torch.randperm(far)[:_ENTRIES] for _ in range(tokens)])

    def verify(result: tuple[Tensor, Tensor]) -> float:
        held = host(rows).double()
        seen = [
            torch.cat((held[token : token + _WINDOW], held[near + lists[token]]))
            for token in range(tokens)
        ]
        out, lse = (host(each) for each in result)
        return attend(host(q), seen, host(sink)).check((out, lse))

    args = (q, rows, ranges.int().to(device), lists.int().to(device))
    keywords = {"window": _WINDOW, "entries": _ENTRIES, "sink": sink}
    moved = rows.nbytes + 2 * q.nbytes + lists.numel() * 4
    flops = 4 * tokens * _HEADS * (_WINDOW + _ENTRIES) * _DIM
    return Trial(prefill_attention, args, keywords, moved, verify, flops)

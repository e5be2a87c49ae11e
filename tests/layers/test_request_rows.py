"""Rows decoded once a request for all of its queries: they are what the queries' lists say."""

import pytest
import torch
from torch import Tensor

from anymla.formats.page_layout import INDEX_FP8, MAIN_FP8, V41_COMPRESSED_NVFP4, get_layout
from anymla.layers.caches import CACHE_FORMATS, CacheFormat, LayerCache
from anymla.layers.request_rows import request_rows
from anymla.layers.rows import GroupStep, RequestRows
from anymla.ops.attention import CacheRows, prefill_attention, sparse_attention
from anymla.ops.attention.plan import decoding_pays_in_steps
from anymla.ops.step_indices import compressed_rows, window_rows

WINDOW, PAGE, ENTRY_PAGE, QUERIES, RATIO = 16, 8, 4, 6, 4
LAYOUT = get_layout(MAIN_FP8)
# Position of the first query and queries of each request: the start, before and behind the end of
# the first window, page boundaries, one query, none.
REQUESTS = ((0, 6), (3, 5), (11, 6), (15, 2), (16, 6), (37, 1), (0, 0), (58, 6))


def cache_of(pages: int, entries: int) -> Tensor:
    cache = LAYOUT.allocate(pages, entries)
    LAYOUT.write(cache, torch.arange(pages * entries), torch.randn(pages * entries, 512))
    return cache


def table_of(rows: int, columns: int) -> Tensor:
    return torch.randperm(rows * columns).view(rows, columns).int()


class Step:
    """Queries of all requests, as a step of fixed size has them: QUERIES rows a request."""

    def __init__(self) -> None:
        offset = torch.arange(QUERIES).repeat(len(REQUESTS))
        starts, counts = torch.tensor(REQUESTS).T
        valid = offset < counts.repeat_interleave(QUERIES)
        request = torch.arange(len(REQUESTS)).repeat_interleave(QUERIES)
        self.positions = torch.where(valid, starts.repeat_interleave(QUERIES) + offset, 0)
        self.token_to_req = torch.where(valid, request, -1).int()
        self.stops = (starts + counts).int()
        longest = int(self.stops.max())
        self.window_table = table_of(len(REQUESTS), -(-longest // PAGE))
        self.entry_table = table_of(len(REQUESTS), -(-longest // RATIO // ENTRY_PAGE))
        self.window = cache_of(self.window_table.numel(), PAGE)
        self.entries = cache_of(self.entry_table.numel(), ENTRY_PAGE)
        self.longest = longest

    def lists(self, kind: str) -> tuple[Tensor, Tensor]:
        where = (self.positions, self.token_to_req)
        if kind == "window":
            return window_rows(*where, self.window_table, block_size=PAGE, window=WINDOW)
        slots, _, lengths = compressed_rows(
            *where,
            self.entry_table,
            ratio=RATIO,
            block_size=ENTRY_PAGE,
            width=self.longest // RATIO,
        )
        return slots, lengths

    def rows(self, *, entries: bool) -> RequestRows:
        more = {}
        if entries:
            group = GroupStep(self.entry_table, torch.empty(0), ENTRY_PAGE)
            more = {"compressed": group, "ratio": RATIO, "entries": self.longest // RATIO}
        return request_rows(
            self.positions, self.token_to_req, self.stops,
            GroupStep(self.window_table, torch.empty(0), PAGE), window=WINDOW, queries=QUERIES,
            **more,
        )  # fmt: skip


@pytest.mark.parametrize("entries", [None, MAIN_FP8, V41_COMPRESSED_NVFP4])
def test_queries_see_what_their_lists_say(entries):
    step = Step()
    kinds = CacheFormat(MAIN_FP8, INDEX_FP8, entries)
    if entries is not None:
        slots = torch.arange(step.entries.shape[0] * ENTRY_PAGE)
        written = LAYOUT.read(step.entries, slots, torch.float32)
        step.entries = get_layout(entries).allocate(len(step.entries), ENTRY_PAGE)
        get_layout(entries).write(step.entries, slots, written)
    q, sink = torch.randn(len(step.positions), 3, 512), torch.ones(3)
    listed = [CacheRows(step.window, MAIN_FP8, *step.lists("window"))]
    if entries:
        listed.append(CacheRows(step.entries, entries, *step.lists("entries")))
    want, want_lse = sparse_attention(q, listed, sink=sink)

    made = step.rows(entries=entries is not None)
    cache = LayerCache(kinds, step.window, step.entries)
    rows = made.decode(cache, torch.float32)
    assert len(rows) == len(REQUESTS) * (WINDOW + QUERIES - 1 + made.entries)
    # Nothing that was not written is seen, though it be NaN.
    poisoned = torch.full_like(rows, torch.nan)
    kept = made.decode(cache, torch.float32)
    for first, count, more, seen in made.ranges.tolist():
        for start, number in ((first, count), (more, seen)):
            poisoned[start : start + number] = kept[start : start + number]
    out, lse = prefill_attention(
        q, poisoned, made.ranges, window=made.window, entries=made.entries, sink=sink
    )
    torch.testing.assert_close(out, want, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse, want_lse, atol=2e-5, rtol=2e-5)
    assert not out[step.token_to_req < 0].any()


def test_each_row_is_decoded_once_a_request():
    """Ranges of neighbouring queries overlap: a request's rows are its last, not its queries'."""
    step = Step()
    made = step.rows(entries=False)
    for r, (start, count) in enumerate(REQUESTS):
        lowest = max(start - WINDOW + 1, 0)
        assert int(made.held[r]) == min(start + count, WINDOW + QUERIES - 1)
        ranges = made.ranges[r * QUERIES : r * QUERIES + count]
        if count:
            base = r * made.width + int(made.held[r]) - (start + count)
            assert (ranges[:, 0] - base).tolist() == [
                max(start + j - WINDOW + 1, 0) for j in range(count)
            ]
            assert int(ranges[0, 0]) - base == lowest


@pytest.mark.parametrize("wrong", ["first", "count"])
def test_runs_that_are_off_by_one_are_noticed(wrong):
    step = Step()
    q = torch.randn(len(step.positions), 2, 512)
    window = CacheRows(step.window, MAIN_FP8, *step.lists("window"))
    want, _ = sparse_attention(q, [window])
    made = step.rows(entries=False)
    made.ranges[:, 0 if wrong == "first" else 1] += 1
    cache = LayerCache(CACHE_FORMATS["fp8"], step.window)
    rows = made.decode(cache, torch.float32)
    out, _ = prefill_attention(q, rows, made.ranges, window=WINDOW + 1)
    assert not ((out - want).abs() < 1e-2).all()


@pytest.mark.parametrize(
    ("requests", "queries", "heads", "entries", "pays"),
    [
        (32, 8, 64, 0, True), (32, 6, 64, 0, True), (32, 8, 64, 64, True), (32, 8, 64, 1024, True),
        (32, 6, 64, 1024, False), (8, 8, 64, 0, False), (8, 8, 64, 1024, False),
        (1, 8, 64, 0, False), (32, 8, 128, 0, True), (32, 8, 128, 1024, True),
        (8, 8, 128, 0, False), (8, 8, 128, 1024, True), (256, 1, 64, 0, False),
        (64, 8, 16, 0, False),
        (32, 8, 128, 8192, False),
    ],
)  # fmt: skip
def test_steps_decode_beforehand_where_that_was_faster(requests, queries, heads, entries, pays):
    assert decoding_pays_in_steps(requests, queries, heads, entries, 132) is pays

"""Windows of neighbouring queries: what each query sees, and how many share a CTA."""

import pytest
import torch

from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.ops.sparse_attention import sparse_attention, sparse_attention_windows
from anymla.ops.sparse_attention.config import choose_window_group

LAYOUT = get_layout(MAIN_FP8)


def call_of(requests=3, queries=4, window=6, heads=2):
    cache = LAYOUT.allocate(5, 16)
    LAYOUT.write(cache, torch.arange(80), torch.randn(80, 512))
    slots = torch.randint(-1, 81, (requests, window + queries - 1)).int()
    return torch.randn(requests * queries, heads, 512), cache, slots


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("counted", [False, True])
def test_a_query_sees_the_columns_from_its_own_number_on(backend, counted):
    q, cache, slots = call_of()
    counts = torch.tensor([4, 0, 2], dtype=torch.int32) if counted else None
    sink = torch.randn(2)
    out, lse = sparse_attention_windows(
        q, cache, slots, counts, queries=4, sink=sink, scale=0.1, backend=backend
    )
    for token in range(12):
        r, j = divmod(token, 4)
        seen = slots[r : r + 1, j : j + 6]
        if counts is not None and j >= counts[r]:
            seen = torch.full_like(seen, -1)
        want, want_lse = sparse_attention(
            q[token : token + 1], cache, seen, sink=sink, scale=0.1, backend="reference"
        )
        torch.testing.assert_close(out[token : token + 1], want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[token : token + 1], want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("counted", [False, True])
def test_all_queries_of_a_request_see_its_first_entries(counted):
    q, cache, slots = call_of()
    entries = torch.randint(-1, 81, (3, 5)).int()
    lengths = torch.randint(0, 6, (12,)).int()
    counts = torch.tensor([4, 0, 2], dtype=torch.int32) if counted else None
    out, lse = sparse_attention_windows(
        q, cache, slots, counts, queries=4,
        extra_cache=cache, extra_slots=entries, extra_lengths=lengths,
    )  # fmt: skip
    for token in range(12):
        r, j = divmod(token, 4)
        there = counts is None or j < counts[r]
        seen = torch.cat((slots[r, j : j + 6], entries[r, : lengths[token]]))
        seen = seen.unsqueeze(0) if there else seen[:0].unsqueeze(0)
        want, want_lse = sparse_attention(q[token : token + 1], cache, seen, backend="reference")
        torch.testing.assert_close(out[token : token + 1], want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[token : token + 1], want_lse, atol=1e-5, rtol=1e-5)


def test_entries_are_given_whole():
    q, cache, slots = call_of()
    with pytest.raises(ValueError, match="extra_slots"):
        sparse_attention_windows(q, cache, slots, queries=4, extra_cache=cache)


@pytest.mark.parametrize(("queries", "tokens"), [(0, 12), (10, 12), (3, 12)])
def test_queries_must_fit(queries, tokens):
    q, cache, slots = call_of()
    with pytest.raises(ValueError, match="sparse_attention_windows"):
        sparse_attention_windows(q[:tokens], cache, slots, queries=queries)


@pytest.mark.parametrize(
    ("requests", "queries", "tiles", "group"),
    [(1, 6, 1, 1), (8, 8, 1, 1), (32, 6, 1, 2), (32, 8, 1, 2), (32, 8, 2, 4), (8, 8, 2, 1)],
)
def test_queries_share_a_tile_where_tiles_would_not_fit_in_a_wave(requests, queries, tiles, group):
    assert choose_window_group(requests, queries, tiles, 132) == group

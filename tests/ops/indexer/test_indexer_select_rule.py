"""What is selected, for any scores and by every config of a call, in bounded memory."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from index_scores import D, i32
from index_selection import a_call, arbitrary_scores, by_rule, integers, keys_in
from paged import BACKENDS, make_cache, runnable, use_backend

from anymla.formats.page_layout import INDEX_FP8, ROWS_FP32_128, get_layout
from anymla.ops.indexer import config as configs
from anymla.ops.indexer import select_topk, torch_select
from anymla.testing.allocation import LargestAllocation

LEAST = 1 << 24


@pytest.fixture(params=(*BACKENDS, "triton"))
def run(request, monkeypatch):
    return use_backend(request.param, monkeypatch)


SPECIAL = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, -math.nan, 1e-40, 3.0]


@pytest.mark.parametrize("name", runnable(("torch", "torch without looking at values", "triton")))
def test_rule_for_any_scores(name, monkeypatch):
    run = use_backend(name, monkeypatch)

    @settings(max_examples=6 if run == "triton" else 40, deadline=None)
    @given(st.data())
    def check(data):
        count = data.draw(st.integers(1, 40), label="entries")
        score = st.one_of(st.sampled_from(SPECIAL), st.floats(-8, 8, width=16))
        scores = data.draw(st.lists(score, min_size=count, max_size=count), label="scores")
        k = data.draw(st.integers(1, count + 2), label="k")
        entries = data.draw(st.sampled_from([1, 4, 16]), label="page size")
        last = data.draw(st.integers(0, count + 3), label="length")
        q, keys, weights = arbitrary_scores([scores])
        pages = -(-count // entries)
        table = torch.randperm(pages + 1)[None, :pages].int()
        cache, _ = keys_in(ROWS_FP32_128, table, entries, count, keys=keys)
        got = select_topk(
            q,
            cache,
            weights,
            i32([last]),
            table,
            k,
            max_context=count,
            layout=ROWS_FP32_128,
            backend=run,
        )
        want = by_rule(scores[: min(last, count)], k)
        assert got[0].tolist() == want + [-1] * (k - len(want))

    check()


def test_ties_go_to_the_first(run):
    # Conformance I4: relu makes exact zeros, far more than are kept.
    scores = [0.0] * 70
    scores[50], scores[3] = 2.0, -1.0
    q, keys, weights = arbitrary_scores([scores])
    table = torch.arange(5)[None].int()
    cache, _ = keys_in(ROWS_FP32_128, table, 16, 70, keys=keys)
    arguments = (q, cache, weights, i32([70]), table)
    for k in (1, 3, 20):
        got = select_topk(*arguments, k, layout=ROWS_FP32_128, backend=run)
        assert got[0].tolist() == [*[n for n in range(50) if n != 3][: k - 1], 50]


def test_pages_that_are_not_there_score_lowest(run):
    table, k = i32([[1, -1, 0, 900]]), 20
    cache, keys = keys_in(ROWS_FP32_128, table[:, [0, 2]], 16, 32)
    q, weights = integers(1, 2, D), integers(1, 2)
    scores = weights[0].double() @ (q[0].double() @ keys[0].double().T).relu()
    lost = [-math.inf] * 16
    every = [*scores[:16].tolist(), *lost, *scores[16:].tolist(), *lost]
    for kept in (k, 40):
        got = select_topk(
            q, cache, weights, i32([64]), table, kept, layout=ROWS_FP32_128, backend=run
        )
        assert got[0].tolist() == by_rule(every, kept)
    empty = cache[:0]
    got = select_topk(q, empty, weights, i32([64]), table, k, layout=ROWS_FP32_128, backend=run)
    assert got[0].tolist() == list(range(k))


def test_short_contexts_are_not_scored(run, monkeypatch):
    # Nothing is read: pages that do not exist, queries of NaN.
    if run == "triton":
        module = pytest.importorskip("anymla.ops.indexer.triton_scores")
        monkeypatch.setattr(module, "choose_score_config", None)
    monkeypatch.setattr(torch_select, "_select", None)
    cache = make_cache(INDEX_FP8, 1, 16).tensor
    q, weights = torch.full((3, 2, D), torch.nan), torch.full((3, 2), torch.nan)
    lengths, table = i32([12, 0, 5]), torch.full((3, 4), 10**6, dtype=torch.int32)
    if run == "reference":
        table.zero_()
    got = select_topk(q, cache, weights, lengths, table, 12, max_context=12, backend=run)
    assert got.tolist() == [list(range(n)) + [-1] * (12 - n) for n in (12, 0, 5)]


def force_config(monkeypatch, **sizes):
    """Make Triton's launcher take a config of these sizes."""
    module = pytest.importorskip("anymla.ops.indexer.triton_select")

    def choose(rows, entries, k, **limits):
        usual = configs.choose_select_config(rows, entries, k, **limits)
        if usual.algorithm == "all":
            return usual
        return dataclasses.replace(usual, **{"chunk": rows, "samples": 64, "block": 64, **sizes})

    monkeypatch.setattr(module, "choose_select_config", choose)


CONFIGS = (
    {},
    {"chunk": 1},
    {"algorithm": "groups", "elements": 0, "groups": 64},
    {"algorithm": "groups", "elements": 0, "groups": 64, "chunk": 3},
    {"algorithm": "samples", "elements": 0, "capacity": 128},
    {"algorithm": "samples", "elements": 0, "capacity": 256, "chunk": 2},
    {"algorithm": "samples", "elements": 0, "capacity": 64, "splits": 2},
    {"algorithm": "samples", "elements": 0, "capacity": 128, "splits": 4},
)


@pytest.mark.parametrize("sizes", CONFIGS, ids=str)
def test_every_config_selects_alike(sizes, monkeypatch):
    # Conformance I7: chunks, splits and algorithms are of no consequence. Row 3 misleads samples:
    # ascending scores, and the next one descending; row 5 is one tie.
    run = use_backend("triton", monkeypatch)
    if run != "triton":
        pytest.skip("configs are Triton's")
    force_config(monkeypatch, **sizes)
    rows = torch.stack(
        (
            torch.randn(300).mul(8).round(),
            torch.randint(-1, 2, (300,)).float(),
            torch.randn(300),
            torch.arange(300).float(),
            -torch.arange(300).float(),
            torch.zeros(300),
        )
    ).tolist()
    q, keys, weights = arbitrary_scores(rows)
    table = torch.randperm(6 * 5).view(6, 5).int()
    cache, _ = keys_in(ROWS_FP32_128, table, 64, 300, keys=keys)
    lengths = [300, 299, 250, 300, 300, 200]
    got = select_topk(
        q,
        cache,
        weights,
        i32(lengths),
        table,
        20,
        layout=ROWS_FP32_128,
        backend=run,
    )
    for row, last in enumerate(lengths):
        assert got[row].tolist() == by_rule(rows[row][:last], 20), row


@pytest.mark.parametrize("splits", [1, 2, 1000])
def test_every_split_of_scores_selects_alike(splits, monkeypatch):
    run = use_backend("triton", monkeypatch)
    module = pytest.importorskip("anymla.ops.indexer.triton_scores")

    def split_size(groups, keys, config):
        return max(1, keys // config.keys // splits) * config.keys

    monkeypatch.setattr(module, "split_size", split_size)
    a_call(3, [150, 90, 140], [0, 0, 1], 10).check(run)


@pytest.mark.parametrize("name", ["torch", "torch without looking at values"])
@pytest.mark.parametrize("merged", [90, 300, 5000])
def test_every_chunk_of_keys_selects_alike(name, merged, monkeypatch):
    run = use_backend(name, monkeypatch)
    monkeypatch.setattr(torch_select, "_merged", lambda batch: merged)
    for dtype in (torch.float32, torch.float64):
        call = a_call(9, [150, 0, 90, 149, 150, 33, 140, 88, 100], [0] * 5 + [1] * 4, 20)
        call.arguments["weights"] = call.arguments["weights"].to(dtype)
        call.check(run)
        call = a_call(6, [150, 0, 90, 149, 150, 33], [0, 0, 0, 1, 1, 1], 20, each=True)
        call.arguments["weights"] = call.arguments["weights"].to(dtype)
        call.check(run)


@pytest.mark.parametrize("name", BACKENDS[1:])
def test_memory_is_bounded(name, monkeypatch):
    # Conformance I7: 48 tokens of 40,000 entries have 7.7 MB of scores, 61 MB of them with 8 heads.
    run = use_backend(name, monkeypatch)
    tokens, entries = 48, 40_000
    cache = get_layout(INDEX_FP8).allocate(entries // 64, 64, fill=0x38)
    q, weights = torch.randn(tokens, 8, D), torch.randn(tokens, 8)
    table = torch.randperm(entries // 64)[None].int()
    lengths = torch.full((tokens,), entries, dtype=torch.int32)
    with LargestAllocation() as largest:
        select_topk(q, cache, weights, lengths, table, 512, scratch_bytes=LEAST, backend=run)
    assert largest.num_bytes <= LEAST // 2

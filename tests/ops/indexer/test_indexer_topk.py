"""Exact top-k: every backend against a sort in Python by the documented rule."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from index_scores import D, i32, key_cache
from paged import BACKENDS, runnable, skip_float64, use_backend

from anymla.formats.hadamard import hadamard_transform
from anymla.formats.page_layout import INDEX_FP8
from anymla.ops.indexer import (
    indexer_q_rope_quant,
    mqa_logits,
    paged_mqa_logits,
    topk_per_row,
    torch_select,
)
from anymla.ops.indexer.config import TopkConfig

# Scores have no FP8 in them, so one kind of Triton kernels is enough.
KINDS = (*BACKENDS, "triton")


@pytest.fixture(params=KINDS)
def run(request, monkeypatch):
    return use_backend(request.param, monkeypatch)


def by_rule(row, start, end, k):
    """Score descending, NaN above +inf, lower index first; relative to start, then -1."""

    def rank(n):
        return (0, 0.0, n) if math.isnan(row[n]) else (1, -row[n], n)

    seen = range(max(start, 0), min(end, len(row)))
    best = [n - start for n in sorted(seen, key=rank)[:k]]
    return best + [-1] * (k - len(best))


def check_rule(logits, starts, ends, k, backend):
    got = topk_per_row(logits, i32(starts), i32(ends), k, backend=backend)
    assert got.dtype == torch.int32
    rows = zip(logits.tolist(), starts, ends, strict=True)
    assert got.tolist() == [by_rule(row, start, end, k) for row, start, end in rows]
    return got


@pytest.mark.parametrize("k", [1, 7, 512, 1024, 2048])
def test_lengths_around_k(run, k):
    # Conformance I10: sequences of 1984..4300 tokens, 496..1075 entries, for k = 512 and 1024.
    lengths = sorted({0, 1, 2, k - 1, k, k + 1, 4 * k, 496, 512, 513, 537, 1024, 1025, 1075})
    logits = torch.randn(len(lengths), max(lengths))
    got = check_rule(logits, [0] * len(lengths), lengths, k, run)
    for row, length in zip(got.tolist(), lengths, strict=True):
        valid = [n for n in row if n >= 0]
        assert len(valid) == len(set(valid)) == min(length, k)
        assert set(row[len(valid) :]) <= {-1}


@pytest.mark.parametrize("k", [512, 1024])
def test_persistent_buffer_is_overwritten(run, k):
    # Conformance I10, second half: a buffer that keeps what earlier steps wrote.
    buffer = torch.full((8, k), 77, dtype=torch.int32)
    for tokens in (4300, 1984, 2047, 2051, 4099, 3):
        lengths = i32([(tokens - 3 + row) // 4 for row in range(4)])
        logits = torch.randn(4, 1075)
        got = topk_per_row(
            logits, torch.zeros_like(lengths), lengths, k, out=buffer[:4], backend=run
        )
        assert got.data_ptr() == buffer.data_ptr()
        for row, length, written in zip(logits.tolist(), lengths.tolist(), buffer, strict=False):
            assert written.tolist() == by_rule(row, 0, length, k)
    assert bool((buffer[4:] == 77).all())


def test_ties_take_the_lower_index(run):
    # Conformance I4: relu gives exact zeros, so fewer positives than k leave ties at 0.
    logits = torch.zeros(4, 900)
    logits[0, [5, 899, 300]] = torch.tensor([1.0, 2.0, 1.0])
    logits[1] = -0.0
    logits[1, ::7] = 0.0
    logits[2] = torch.randn(900).round()
    logits[3] = -math.inf
    got = check_rule(logits, [0, 0, 0, 0], [900, 900, 900, 700], 512, run)
    assert got[0, :6].tolist() == [899, 5, 300, 0, 1, 2]
    assert got[1].tolist() == got[3].tolist() == list(range(512))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nan_and_infinities_are_ordered(run, dtype):
    skip_float64(run, dtype)
    nan, inf = math.nan, math.inf
    special = [1.0, nan, -inf, inf, -0.0, 0.0, nan, 3.4e38, -3.4e38, inf, 1e-45, -1e-45, -inf]
    logits = torch.tensor([special, special[::-1]], dtype=dtype)
    negative = torch.tensor([nan], dtype=dtype).neg_()  # a NaN with its sign bit set
    logits[0, 1] = negative
    if dtype == torch.float32:  # and one with another payload
        logits[1].view(torch.int32)[6] = 0x7FABCDEF
    for k in (1, 2, 3, 5, 12, 13, 20):
        check_rule(logits, [0, 0], [13, 13], k, run)
        check_rule(logits, [2, 4], [12, 6], k, run)


def test_columns_out_of_sight_may_hold_anything(run):
    logits = torch.full((3, 50), math.inf)
    logits[1] = math.nan
    logits[0, 10:20], logits[1, 3:5], logits[2] = torch.randn(10), torch.randn(2), -math.inf
    got = check_rule(logits, [10, 3, 50], [20, 5, 50], 8, run)
    assert got[1, 2:].tolist() == [-1] * 6


def test_minus_infinity_in_sight_beats_padding_out_of_sight(run):
    logits = torch.full((1, 6), -math.inf, dtype=torch.float64)
    check_rule(logits.float(), [2], [4], 3, run)
    skip_float64(run, torch.float64)
    check_rule(logits, [2], [4], 3, run)


def test_several_requests_are_rebased_once(run):
    # Conformance I5: keys of three requests in one list; indices count from each one's start.
    starts = [0] * 3 + [700] * 3 + [701] * 2
    ends = [698, 699, 700, 700, 701, 701, 1500, 1501]
    logits = torch.randn(8, 1501)
    got = check_rule(logits, starts, ends, 512, run)
    assert int(got[6:].max()) < 800


def test_bounds_are_clamped_to_the_columns(run):
    logits = torch.randn(4, 9)
    check_rule(logits, [-3, 0, 5, 2**31 - 1], [4, 2**31 - 1, -9, 2**31 - 1], 6, run)


@given(
    width=st.integers(1, 60),
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    k=st.integers(1, 70),
    levels=st.sampled_from([1, 2, 5, 1000]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**31),
)
@pytest.mark.parametrize("name", runnable(KINDS))
def test_any_rows(name, width, lengths, k, levels, dtype, seed):
    torch.manual_seed(seed)
    if name == "triton":
        dtype = torch.float32
    rows = len(lengths)
    logits = torch.randint(-levels, levels + 1, (rows, width)).to(dtype)
    logits[torch.rand(rows, width) < 0.1] = -math.inf
    logits[torch.rand(rows, width) < 0.05] = math.nan
    starts = torch.randint(0, width, (rows,)).tolist()
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        check_rule(logits, starts, ends, k, use_backend(name, patch))


@pytest.mark.parametrize("run", BACKENDS)
def test_result_does_not_depend_on_the_block(run, monkeypatch):
    run = use_backend(run, monkeypatch)
    # Rows of unlike lengths, in blocks of one row up to all.
    logits = torch.randn(40, 3000)
    lengths = [(37 * row * row) % 3001 for row in range(40)]
    whole = topk_per_row(logits, i32([0] * 40), i32(lengths), 512, backend=run)
    for block in (1, 7000):
        monkeypatch.setattr(torch_select, "_CPU_BLOCK", block)
        monkeypatch.setattr(torch_select, "_DEVICE_BLOCK", block)
        small = topk_per_row(logits, i32([0] * 40), i32(lengths), 512, backend=run)
        assert torch.equal(small, whole)


@pytest.mark.parametrize(
    ("k", "splits", "resident", "merge_resident"),
    [(10, 12, True, True), (40, 12, True, False), (130, 3, False, False), (700, 1, False, False)],
)
@pytest.mark.parametrize("sorted_at_most", [2048, 8])
def test_every_config_selects_alike(
    monkeypatch, k, splits, resident, merge_resident, sorted_at_most
):
    # Splits and candidates of one block and of several; winners sorted and ranked.
    run = use_backend("triton", monkeypatch)
    triton_topk = pytest.importorskip("anymla.ops.indexer.triton_topk")
    config = TopkConfig(splits, 256, 256, resident, merge_resident, k <= sorted_at_most)
    monkeypatch.setattr(triton_topk, "choose_topk_config", lambda *_: config)
    logits = torch.stack((torch.randn(3000), torch.randint(-3, 3, (3000,)).float()))
    check_rule(logits, [0, 5], [3000, 2990], k, run)


def test_long_row(run):
    # The longest context: 2^18 entries; ties at the last place, and k at its largest.
    if run == "reference":
        pytest.skip("the rule in Python is the reference here")
    row = torch.randn(1, 1 << 18).mul_(64).round_()
    check_rule(row, [0], [(1 << 18) - 3], 2048, run)


@pytest.mark.parametrize(("rows", "width"), [(0, 5), (3, 0), (0, 0)])
def test_nothing_to_choose_from(run, rows, width):
    bounds = torch.zeros(rows, dtype=torch.int32), torch.full((rows,), width, dtype=torch.int32)
    got = topk_per_row(torch.zeros(rows, width), *bounds, 4, backend=run)
    assert got.tolist() == [[-1] * 4] * rows


def test_nothing_waits_for_a_device():
    meta = {"device": "meta"}
    for dtype in (torch.float32, torch.float64):
        logits = torch.empty(5, 99, dtype=dtype, **meta)
        bounds = torch.empty(5, dtype=torch.int32, **meta)
        assert topk_per_row(logits, bounds, bounds, 512, backend="torch").shape == (5, 512)


def test_selection_survives_the_hadamard_transform(run):
    # Conformance I1 and I8: on both sides it only moves scores by rounding, so the same entries are
    # chosen, except among scores closer than that.
    q, k = torch.randn(4, 8, D), torch.randn(600, D)
    weights, starts, ends = torch.randn(4, 8), i32([0] * 4), i32([600] * 4)
    plain = mqa_logits(q, k, None, weights, starts, ends, backend=run)
    turned = mqa_logits(
        hadamard_transform(q), hadamard_transform(k), None, weights, starts, ends, backend=run
    )
    error = 2 * float((plain - turned).abs().max())
    assert error < 1e-3 * float(plain.std())
    chosen = topk_per_row(plain, starts, ends, 100, backend=run)
    again = topk_per_row(turned, starts, ends, 100, backend=run)
    for row in range(4):
        threshold = float(plain[row, chosen[row, -1].long()])
        for n in set(chosen[row].tolist()) ^ set(again[row].tolist()):
            assert abs(float(plain[row, n]) - threshold) <= error


def test_scores_and_selection_of_growing_contexts(run):
    # From no entry to some above k, a token at a time as in decoding: p + 1 tokens, (p + 1) // 4
    # entries. The selection is every entry, best first, until there are more than k.
    k, table = 12, torch.randperm(6)[None].int()
    cache, (keys,) = key_cache(INDEX_FP8, 6, 4, table, [24])
    q, weights = torch.randn(1, 1, 3, D), torch.randn(1, 3)
    exact = (weights.double() @ (q[0, 0].double() @ keys.T).relu())[0]
    for p in [0, 1, 2, 3, 4, 7, 8, 46, 47, 50, 51, 52, 94, 95]:
        n = (p + 1) // 4
        logits = paged_mqa_logits(q, cache, weights, i32([n]), table, max_context=24, backend=run)
        got = topk_per_row(logits, i32([0]), i32([n]), k, backend=run)[0].tolist()
        order = sorted(range(n), key=lambda w: -float(exact[w]))[:k]
        assert got == order + [-1] * (k - len(order))


def test_errors_name_the_argument():
    logits, bounds = torch.zeros(2, 4), i32([0, 0])
    with pytest.raises(ValueError, match="topk_per_row: k must be >= 1, got 0"):
        topk_per_row(logits, bounds, bounds, 0)
    with pytest.raises(TypeError, match="logits must be float32 or float64"):
        topk_per_row(logits.half(), bounds, bounds, 1)
    with pytest.raises(TypeError, match="starts must be int32"):
        topk_per_row(logits, bounds.long(), bounds, 1)
    with pytest.raises(ValueError, match=r"ends must be int32 \[M=2\]"):
        topk_per_row(logits, bounds, bounds[:1], 1)
    with pytest.raises(ValueError, match=r"out must be int32 \[M=2, K=3\]"):
        topk_per_row(logits, bounds, bounds, 3, out=torch.zeros(2, 4, dtype=torch.int32))


@pytest.mark.compiles
def test_indexer_compiles_into_one_graph():
    def select(q, weights, positions, table, cache, lens, pages, out):
        q, _, weights = indexer_q_rope_quant(
            q, weights, positions, table, softmax_scale=0.1, head_scale=0.2
        )
        logits = paged_mqa_logits(q.unsqueeze(1), cache, weights, lens, pages, max_context=12)
        best = topk_per_row(logits, torch.zeros_like(lens), lens, 5, out=out)
        return logits, best, mqa_logits(q, q[:, 0].float(), None, weights, lens - lens, lens)

    pages, lens = torch.randperm(6).view(2, 3).int(), i32([9, 5])
    cache, _ = key_cache(INDEX_FP8, 6, 4, pages, [9, 5])
    q, weights, positions = torch.randn(2, 3, D), torch.randn(2, 3), torch.tensor([38, 21])
    arguments = (q, weights, positions, torch.rand(40, 64), cache, lens, pages)
    eager_out, traced_out = torch.zeros(2, 2, 5, dtype=torch.int32)
    eager = select(*arguments, eager_out)
    traced = torch.compile(select, backend="aot_eager", fullgraph=True)(*arguments, traced_out)
    for got, want in zip((*traced, traced_out), (*eager, eager_out), strict=True):
        assert torch.equal(got, want)

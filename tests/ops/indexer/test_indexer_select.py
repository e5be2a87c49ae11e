"""Selection straight from the index cache: layouts, requests, results and errors."""

import pytest
import torch
from index_scores import D, i32
from index_selection import Call, a_call, expected, integers, keys_in
from paged import ALL_BACKENDS, BACKENDS, INDEX_LAYOUTS, make_cache, use_backend

from anymla.formats.mxfp4 import quantize_mxfp4
from anymla.formats.page_layout import INDEX_FP8, INDEX_MXFP4, get_layout
from anymla.ops.indexer import (
    paged_mqa_logits,
    select_topk,
    topk_per_row,
)
from anymla.ops.step_indices import compute_global_topk_indices_and_lens


@pytest.fixture(params=(*BACKENDS, "triton"))
def run(request, monkeypatch):
    return use_backend(request.param, monkeypatch)


@pytest.fixture(params=ALL_BACKENDS)
def every(request, monkeypatch):
    """Codes by bits and by instructions, for what depends on it."""
    return use_backend(request.param, monkeypatch)


@pytest.mark.parametrize("layout", INDEX_LAYOUTS)
def test_every_layout(every, layout):
    a_call(3, [41, 9, 30], [0, 1, 0], 12, layout=layout).check(every)


@pytest.mark.parametrize("next_n", [1, 2, 3, 9])
def test_decoding_rows_of_every_request(run, next_n):
    # Conformance I6: lengths of zero among them.
    lengths = [37, 0, 5, 20, 36, 19, 33, 8, 21] * 2
    owners = [r for r in range(2) for _ in range(next_n)]
    a_call(2 * next_n, lengths[: 2 * next_n], owners, 8, each=True).check(run)


def test_ragged_requests(every):
    # Conformance I5: indices are local to every token's own request; -1 and others select nothing.
    owners = [0, 0, 0, 2, -1, 1, 1, 7, 2]
    lengths = [31, 40, 12, 33, 40, 5, 18, 40, 26]
    call = a_call(9, lengths, [min(o, 2) for o in owners], 10)
    call.arguments["token_to_req"] = i32(owners)
    call.want[[4, 7]] = -1
    call.check(every)


@pytest.mark.parametrize("stride", [8448, 8640])
def test_pages_of_any_stride(run, stride):
    gap = stride - get_layout(INDEX_FP8).page_stride_bytes(64)
    if gap < 0:
        # A page without its padding, as other engines allocate it.
        call = a_call(2, [150, 70], [0, 0], 40, entries=64)
        padded = call.arguments["index_cache"]
        packed = torch.full((len(padded) * stride,), 0xFF, dtype=torch.uint8)
        packed = packed.as_strided(padded.shape, (stride, *padded.stride()[1:]))
        packed.copy_(padded)
        call.arguments["index_cache"] = packed
    else:
        call = a_call(2, [150, 70], [0, 0], 40, entries=64, gap=gap)
    assert call.arguments["index_cache"].stride(0) == stride
    call.check(run)
    call.arguments["index_cache"] = call.arguments["index_cache"].unsqueeze(2)
    call.check(run)


@pytest.mark.parametrize("k", [1, 2, 7, 33, 100])
def test_any_number_kept(run, k):
    # Conformance I3 and I10: fewer, as many and more entries than are kept.
    a_call(5, [k - 1, k, k + 1, min(4 * k, 90), 90], [0] * 5, k, heads=1).check(run)


def test_slots_and_counts(run):
    lengths, owners = [40, 9, 31, 0, 22, 40], [0, 1, 1, 1, -1, 0]
    call = a_call(6, lengths, [max(o, 0) for o in owners], 12)
    call.arguments["token_to_req"], call.want[4] = i32(owners), -1
    tables = torch.randint(-1, 50, (2, 6), dtype=torch.int32)  # covers 24 entries of 40
    slots, counts = torch.full((6, 12), 77, dtype=torch.int32), torch.full((6,), 77).int()
    given = {"slot_table": tables, "slot_page_size": 4, "slots": slots, "counts": counts}
    call.check(run, **given)
    valid = torch.tensor(owners) >= 0
    want = compute_global_topk_indices_and_lens(
        call.want, i32(owners).clamp(min=0), tables, 4, valid, backend="reference"
    )
    assert torch.equal(slots, want[0])
    assert torch.equal(counts, want[1])


def test_results_into_the_callers_memory(run):
    call = a_call(4, [40, 9, 31, 33], [0, 0, 1, 1], 12)
    for out in (
        torch.full((4, 12), 77, dtype=torch.int32),
        torch.full((4, 24), 77, dtype=torch.int32)[:, :12],
        torch.full((12, 4), 77, dtype=torch.int32).T,
    ):
        got = select_topk(**call.arguments, out=out, backend=run)
        assert got.data_ptr() == out.data_ptr()
        assert torch.equal(out, call.want)


def test_other_tokens_do_not_matter(run):
    call = a_call(7, [90, 77, 12, 90, 85, 80, 33], [0, 0, 0, 1, 1, 1, 1], 9)
    for token in range(7):
        part = slice(token, token + 1)
        names = ("q", "weights", "lengths", "token_to_req")
        alone = {name: call.arguments[name][part] for name in names}
        Call({**call.arguments, **alone}, call.want[part]).check(run)


def test_packed_queries(run):
    table = torch.randperm(4)[None].int()
    cache, keys = keys_in(INDEX_MXFP4, table, 16, 60)
    q, weights = integers(2, 3, D), integers(2, 3)
    codes, scales = quantize_mxfp4(q)
    want = expected(q, keys, weights, [60, 44], [0, 0], 9)
    got = select_topk(
        codes,
        cache,
        weights,
        i32([60, 44]),
        table,
        9,
        layout=INDEX_MXFP4,
        q_scales=scales,
        backend=run,
    )
    assert torch.equal(got, want)


def test_selection_is_the_best_of_the_scores(run):
    # Conformance I2, I8: not only of integers. Scores differ in their last digits where tiles do,
    # so a score may only be passed over for one that is as good up to that.
    table = torch.randperm(10).view(2, 5).int()
    cache, _ = keys_in(INDEX_FP8, table, 16, 80, keys=torch.randn(2, 80, D))
    q, weights, lens = torch.randn(4, 3, D), torch.randn(4, 3), i32([80, 41, 77, 20])
    got = select_topk(q, cache, weights, lens, table, 24, backend=run)
    scores = paged_mqa_logits(
        q.double().view(2, 2, 3, D),
        cache,
        weights.double(),
        lens.view(2, 2),
        table,
        max_context=80,
        backend="reference",
    )
    best = topk_per_row(scores, torch.zeros_like(lens), lens, 24, backend="reference")
    for row in range(4):
        chosen, want = set(got[row].tolist()), set(best[row].tolist())
        worst = min(float(scores[row, n]) for n in want if n >= 0)
        for n in chosen ^ want:
            assert abs(float(scores[row, n]) - worst) < 1e-4
        assert got[row].tolist() == sorted(chosen - {-1}) + [-1] * (got[row] < 0).sum().item()


@pytest.mark.parametrize(("tokens", "requests", "pages"), [(0, 0, 0), (0, 3, 2), (4, 2, 0)])
def test_nothing_to_select_from(run, tokens, requests, pages):
    cache = make_cache(INDEX_FP8, 2, 16).tensor
    got = select_topk(
        torch.randn(tokens, 2, D),
        cache,
        torch.randn(tokens, 2),
        torch.full((tokens,), 9, dtype=torch.int32),
        torch.zeros(requests, pages, dtype=torch.int32),
        5,
        backend=run,
    )
    assert got.tolist() == [[-1] * 5] * tokens


def test_nothing_waits_for_a_device():
    meta = {"device": "meta"}
    cache = get_layout(INDEX_FP8).allocate(6, 16, device="meta")
    for owners in (None, torch.empty(6, dtype=torch.int32, **meta)):
        got = select_topk(
            torch.empty(6, 2, D, **meta),
            cache,
            torch.empty(6, 2, **meta),
            torch.empty(6, dtype=torch.int32, **meta),
            torch.empty(3, 2, dtype=torch.int32, **meta),
            5,
            token_to_req=owners,
            backend="torch",
        )
        assert got.shape == (6, 5)


def test_errors_name_the_argument():
    call = a_call(4, [40, 9, 31, 33], [0, 0, 1, 1], 12).arguments
    wrong = [
        ({"k": 0}, ValueError, "select_topk: k must be >= 1, got 0"),
        ({"scratch_bytes": 100}, ValueError, "scratch_bytes must be >= 16777216, got 100"),
        ({"slots": torch.zeros(4, 12).int()}, ValueError, "slot_table must be given for slots"),
        ({"lengths": torch.zeros(4)}, TypeError, "lengths must be int32"),
        ({"lengths": i32([1])}, ValueError, r"lengths must be int32 \[T=4\]"),
        ({"out": torch.zeros(4, 5).int()}, ValueError, r"out must be int32 \[T=4, K=12\]"),
        ({"layout": INDEX_MXFP4}, ValueError, "index_cache"),
        ({"max_context": -1}, ValueError, "max_context must be >= 0"),
    ]
    for change, kind, message in wrong:
        with pytest.raises(kind, match=message):
            select_topk(**{**call, **change})
    part = {name: call[name][:3] for name in ("q", "weights", "lengths")}
    with pytest.raises(ValueError, match="token_to_req must be given for 3 tokens of 2 requests"):
        select_topk(**{**call, **part, "token_to_req": None})


@pytest.mark.compiles
def test_selection_compiles_into_one_graph():
    call = a_call(4, [40, 9, 31, 33], [0, 0, 1, 1], 12)
    tables = torch.arange(12).view(2, 6).int()

    def select(out, slots, counts):
        return select_topk(**call.arguments, out=out, slot_table=tables, slots=slots, counts=counts)

    eager = (torch.zeros(4, 12).int(), torch.zeros(4, 12).int(), torch.zeros(4).int())
    traced = tuple(torch.zeros_like(x) for x in eager)
    select(*eager)
    got = torch.compile(select, backend="aot_eager", fullgraph=True)(*traced)
    assert torch.equal(got, call.want)
    for a, b in zip(traced, eager, strict=True):
        assert torch.equal(a, b)

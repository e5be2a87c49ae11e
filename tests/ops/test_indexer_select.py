"""Selection straight from the index cache: the rule, the forms of a call, and bounded memory."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from index_scores import D, i32
from paged import ALL_BACKENDS, BACKENDS, INDEX_LAYOUTS, make_cache, runnable, use_backend

from anymla.formats.mxfp4 import quantize_mxfp4
from anymla.formats.page_layout import INDEX_FP8, INDEX_MXFP4, ROWS_FP32_128, get_layout
from anymla.ops.indexer import (
    paged_mqa_logits,
    score_forms,
    select_topk,
    topk_per_row,
    torch_select,
)
from anymla.ops.indexer.selection_plan import (
    SelectionPlan,
    plan_selection,
    prefill_parts,
)
from anymla.ops.selection import compute_global_topk_indices_and_lens
from anymla.testing.allocation import LargestAllocation

LEAST = 1 << 24


@pytest.fixture(params=(*BACKENDS, "triton"))
def run(request, monkeypatch):
    return use_backend(request.param, monkeypatch)


@pytest.fixture(params=ALL_BACKENDS)
def every(request, monkeypatch):
    """Codes by bits and by instructions, for what depends on it."""
    return use_backend(request.param, monkeypatch)


def integers(*shape):
    """Values whose scores are exact in any order of summation, with many ties."""
    return torch.randint(-2, 3, shape).float()


def keys_in(layout, table, entries, count, *, gap=0, keys=None):
    """A cache of NaN bytes with ``count`` keys of each request; the cache and the keys."""
    kind = make_cache(layout, int(table.max()) + 2, entries, gap=gap)
    keys = integers(len(table), count, D) if keys is None else keys
    w = torch.arange(count)
    for request, row in enumerate(table):
        slots = row.long()[w // entries] * entries + w % entries
        kind.layout.write(kind.tensor, slots, keys[request])
    return kind.tensor, keys


def by_rule(scores, first, k):
    """Places of the best k of a list of scores, ascending: higher, NaN highest, then earlier."""
    order = sorted(
        range(len(scores)),
        key=lambda n: (not math.isnan(scores[n]), 0 if math.isnan(scores[n]) else -scores[n], n),
    )
    return sorted(order[:k])


def expected(q, keys, weights, lengths, owners, starts, k):
    """The selection by hand, from keys [R, N, D] that are stored exactly."""
    rows = []
    for token, request in enumerate(owners):
        chosen = []
        if 0 <= request < len(keys):
            first, last = max(starts[token], 0), min(lengths[token], keys.shape[1])
            dots = q[token].double() @ keys[request, first : max(first, last)].double().T
            scores = weights[token].double() @ dots.relu()
            chosen = by_rule(scores.tolist(), first, k)
        rows.append(chosen + [-1] * (k - len(chosen)))
    return i32(rows)


@dataclasses.dataclass
class Call:
    """Arguments of a call and what it must give."""

    arguments: dict
    want: torch.Tensor

    def check(self, run, **options):
        got = select_topk(**self.arguments, **options, backend=run)
        assert got.dtype == torch.int32
        assert torch.equal(got, self.want)


def a_call(tokens, lengths, owners, k, *, entries=16, heads=2, layout=INDEX_FP8, **options):
    """Tokens with their lengths and requests over an integer cache."""
    starts, each, gap = options.pop("starts", None), options.pop("each", False), 0
    gap = options.pop("gap", 0)
    requests = max(owners) + 1 if each else max(*owners, 1) + 1
    longest = max(1, *lengths)
    pages = -(-longest // entries)
    table = torch.randperm(requests * pages + 2)[: requests * pages].view(requests, pages).int()
    cache, keys = keys_in(layout, table, entries, longest, gap=gap)
    q, weights = integers(tokens, heads, D), integers(tokens, heads)
    want = expected(q, keys, weights, lengths, owners, starts or [0] * tokens, k)
    arguments = {
        "q": q,
        "index_cache": cache,
        "weights": weights,
        "lengths": i32(lengths),
        "block_table": table,
        "k": k,
        "layout": layout,
        "token_to_req": None if each else i32(owners),
        "starts": None if starts is None else i32(starts),
        **options,
    }
    if layout == INDEX_FP8:
        arguments["q"] = q.to(torch.float8_e4m3fn)
    return Call(arguments, want)


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


def test_first_entries_need_not_be_visible(run):
    lengths, starts = [40, 40, 33, 8, 40], [3, 16, 31, 9, -5]
    a_call(5, lengths, [0, 0, 1, 1, 1], 6, starts=starts).check(run)


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


def arbitrary_scores(rows):
    """Queries, keys and weights that give exactly the numbers in ``rows`` as scores.

    relu(x) - relu(-x) is x, NaN and infinities included.
    """
    values = torch.tensor(rows)
    keys = torch.zeros(*values.shape, D)
    keys[..., 0] = values
    q = torch.zeros(len(values), 2, D)
    q[:, 0, 0], q[:, 1, 0] = 1.0, -1.0
    return q, keys, torch.tensor([1.0, -1.0]).expand(len(values), 2).contiguous()


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
        first = data.draw(st.integers(-1, count), label="start")
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
            starts=i32([first]),
            layout=ROWS_FP32_128,
            backend=run,
        )
        want = by_rule(scores[max(first, 0) : min(last, count)], first, k)
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
        assert got[0].tolist() == by_rule(every, 0, kept)
    empty = cache[:0]
    got = select_topk(q, empty, weights, i32([64]), table, k, layout=ROWS_FP32_128, backend=run)
    assert got[0].tolist() == list(range(k))


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


def test_short_contexts_are_not_scored(run, monkeypatch):
    # Nothing is read: pages that do not exist, queries of NaN.
    if run == "triton":
        module = pytest.importorskip("anymla.ops.indexer.triton_select")
        monkeypatch.setattr(module, "select_scores", None)
    monkeypatch.setattr(torch_select, "_select", None)
    cache = make_cache(INDEX_FP8, 1, 16).tensor
    q, weights = torch.full((3, 2, D), torch.nan), torch.full((3, 2), torch.nan)
    lengths, table = i32([12, 0, 5]), torch.full((3, 4), 10**6, dtype=torch.int32)
    if run == "reference":
        table.zero_()
    got = select_topk(q, cache, weights, lengths, table, 12, max_context=12, backend=run)
    assert got.tolist() == [list(range(n)) + [-1] * (12 - n) for n in (12, 0, 5)]


def plans(monkeypatch, **sizes):
    """Make Triton's launcher take a plan of these sizes."""
    module = pytest.importorskip("anymla.ops.indexer.triton_select")

    def plan(rows, entries, k, **limits):
        usual = plan_selection(rows, entries, k, **limits)
        if usual.form == "all":
            return usual
        return dataclasses.replace(usual, **{"rows": rows, **sizes})

    monkeypatch.setattr(module, "plan_selection", plan)
    monkeypatch.setattr(module.triton_sample_select, "SAMPLES", 64)
    monkeypatch.setattr(module, "tile_and_warps", lambda *_: (64, 4))


FORMS = (
    {},
    {"rows": 1},
    {"form": "groups", "elements": 0, "groups": 64},
    {"form": "groups", "elements": 0, "groups": 64, "rows": 3},
    {"form": "samples", "elements": 0, "capacity": 128},
    {"form": "samples", "elements": 0, "capacity": 256, "rows": 2},
    {"form": "samples", "elements": 0, "capacity": 64, "parts": 2},
    {"form": "samples", "elements": 0, "capacity": 128, "parts": 4},
)


@pytest.mark.parametrize("sizes", FORMS, ids=str)
def test_every_plan_selects_alike(sizes, monkeypatch):
    # Conformance I7: rounds, parts and selectors are of no consequence. Row 3 misleads samples:
    # ascending scores, and the next one descending; row 5 is one tie.
    run = use_backend("triton", monkeypatch)
    if run != "triton":
        pytest.skip("plans are Triton's")
    plans(monkeypatch, **sizes)
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
    lengths, starts = [300, 299, 250, 300, 300, 200], [0, 17, 33, 5, 0, 48]
    got = select_topk(
        q,
        cache,
        weights,
        i32(lengths),
        table,
        20,
        starts=i32(starts),
        layout=ROWS_FP32_128,
        backend=run,
    )
    for row, (first, last) in enumerate(zip(starts, lengths, strict=True)):
        assert got[row].tolist() == by_rule(rows[row][first:last], 0, 20), row


@pytest.mark.parametrize("parts", [1, 7, 1000])
def test_every_split_of_scores_selects_alike(parts, monkeypatch):
    run = use_backend("triton", monkeypatch)
    tiles = pytest.importorskip("anymla.ops.indexer.triton_tiles")
    monkeypatch.setattr(tiles, "_PROGRAMS", parts)
    monkeypatch.setattr(tiles, "_MOST_TILES", 1)
    a_call(3, [150, 90, 140], [0, 0, 1], 10, starts=[0, 40, 33]).check(run)


@pytest.mark.parametrize("name", ["torch", "torch without looking at values"])
@pytest.mark.parametrize("merged", [90, 300, 5000])
def test_every_run_of_keys_selects_alike(name, merged, monkeypatch):
    run = use_backend(name, monkeypatch)
    monkeypatch.setattr(torch_select, "_merged", lambda batch: merged)
    for dtype in (torch.float32, torch.float64):
        call = a_call(9, [150, 0, 90, 149, 150, 33, 140, 88, 100], [0] * 5 + [1] * 4, 20)
        call.arguments["weights"] = call.arguments["weights"].to(dtype)
        call.check(run)
        call = a_call(6, [150, 0, 90, 149, 150, 33], [0, 0, 0, 1, 1, 1], 20, each=True)
        call.arguments["weights"] = call.arguments["weights"].to(dtype)
        call.check(run)


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
    want = expected(q, keys, weights, [60, 44], [0, 0], [0, 0], 9)
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


@given(
    rows=st.integers(1, 20_000),
    entries=st.integers(0, 1 << 20),
    k=st.integers(1, 2048),
    multiprocessors=st.integers(1, 200),
    scratch=st.integers(LEAST, 1 << 34),
    histograms=st.booleans(),
)
def test_plans_stay_within_their_scratch(rows, entries, k, multiprocessors, scratch, histograms):
    plan = plan_selection(
        rows,
        entries,
        k,
        multiprocessors=multiprocessors,
        scratch_bytes=scratch,
        histograms=histograms,
    )
    assert 1 <= plan.rows <= rows
    assert plan.rows * plan.row_bytes(entries) <= scratch
    assert plan.kept >= k
    if plan.form == "all":
        assert entries <= k
    elif plan.form == "whole":
        assert entries <= plan.elements <= 16_384
    elif plan.form == "groups":
        # What a program of the group selector keeps in registers.
        assert plan.groups * 16 >= entries
        assert plan.groups <= 16_384
        assert plan.kept <= 1024
    else:
        assert plan.capacity > k
    if plan.rows < rows and plan.rows >= 2 * multiprocessors:
        assert plan.rows % (2 * multiprocessors) == 0


@pytest.mark.parametrize(
    ("rows", "entries", "k", "form", "parts", "by_histograms"),
    [
        (128, 512, 512, "all", 1, "all"),
        (128, 8192, 512, "whole", 1, "whole"),
        (2048, 4096, 512, "whole", 1, "whole"),
        (128, 32_768, 512, "groups", 1, "groups"),
        (1, 32_768, 1024, "groups", 1, "groups"),
        (1, 262_144, 512, "samples", 32, "groups"),
        (8, 262_144, 512, "groups", 1, "groups"),
        (2048, 8192, 512, "samples", 1, "whole"),
        (2048, 65_536, 512, "groups", 1, "groups"),
        (128, 32_768, 2048, "samples", 1, "samples"),
        (64, 1_000_000, 512, "samples", 1, "samples"),
    ],
)
def test_shapes_take_the_form_that_was_measured(rows, entries, k, form, parts, by_histograms):
    limits = {"multiprocessors": 132, "scratch_bytes": 1 << 30}
    plan = plan_selection(rows, entries, k, **limits)
    assert (plan.form, plan.parts) == (form, parts)
    assert plan_selection(rows, entries, k, histograms=True, **limits).form == by_histograms


@pytest.mark.parametrize(
    ("items", "tiles", "shared", "form"),
    [
        (32, 32, False, score_forms.FEW_SINGLE),
        (128, 32, False, score_forms.SINGLE),
        (32, 128, True, score_forms.FEW_PAIRS),
        (128, 128, True, score_forms.AHEAD),
        (1024, 128, True, score_forms.AHEAD),
    ],
)
def test_scores_take_the_form_that_was_measured(items, tiles, shared, form):
    assert score_forms.form_of(items, tiles, shared, 132) == form


def test_a_million_tokens_go_in_whole_waves():
    plan = plan_selection(16_384, 262_144, 512, multiprocessors=132, scratch_bytes=512 << 20)
    assert isinstance(plan, SelectionPlan)
    assert plan.rows == 264
    with pytest.raises(ValueError, match="scratch_bytes must be >= "):
        plan_selection(1, 1 << 24, 512, multiprocessors=132, scratch_bytes=LEAST)


@pytest.mark.parametrize(
    ("pairs", "tiles", "waves"), [(132, 4096, 132), (120, 4096, 121), (1, 4096, 128), (1, 3, 3)]
)
def test_prefill_programs_fill_their_waves(pairs, tiles, waves):
    # Of 132 multiprocessors at least so many have work at a time.
    parts = prefill_parts(pairs, tiles, 132)
    programs = pairs * parts
    assert programs / -(-programs // 132) >= min(waves, 132)


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

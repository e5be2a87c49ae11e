"""Index scores against keys in a paged cache: addressing and lengths."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from index_scores import (
    D,
    assert_scores,
    fill,
    i32,
    key_cache,
    multiplies_fp8,
    paged_by_hand,
    score64,
    score_bound,
)
from paged import (
    ALL_BACKENDS,
    INDEX_LAYOUTS,
    INTEL,
    TRITON,
    make_cache,
    runnable,
    skip_float64,
    use_backend,
)

from anymla.formats.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from anymla.formats.page_layout import (
    INDEX_FP8,
    get_layout,
)
from anymla.ops.indexer import mqa_logits, paged_mqa_logits, select_topk
from anymla.testing.tolerance import assert_close


@pytest.fixture(params=(*ALL_BACKENDS, INTEL))
def run(request, monkeypatch):
    return use_backend(request.param, monkeypatch)


@pytest.mark.parametrize("layout", INDEX_LAYOUTS)
@pytest.mark.parametrize("query", ["plain", "fp8", "mxfp4"])
def test_paged_scores_of_every_layout_and_query(run, layout, query):
    requests, rows, heads, entries = 3, 2, 3, 16
    lens = [[33, 34], [0, 0], [1, 70]]
    table = torch.randperm(20)[:15].view(3, 5).int()
    cache, stored = key_cache(layout, 20, entries, table, [34, 0, 70])
    q, weights = torch.randn(requests, rows, heads, D), torch.randn(requests * rows, heads)
    scales = None
    if query == "plain":
        q = q.bfloat16()
        q64 = q.double()
    elif query == "fp8":
        q = q.to(torch.float8_e4m3fn)
        q64 = q.double()
    else:
        q, scales = quantize_mxfp4(q)
        q64 = dequantize_mxfp4(q, scales, torch.float64)
    got = paged_mqa_logits(
        q,
        cache,
        weights,
        i32(lens),
        table,
        max_context=77,
        layout=layout,
        q_scales=scales,
        backend=run,
    )
    fp8 = (query, layout) == ("fp8", INDEX_FP8) and multiplies_fp8(run)
    assert_scores(got, *paged_by_hand(q64, weights, stored, lens, 77), heads, fp8=fp8)


@pytest.mark.parametrize("layout", INDEX_LAYOUTS)
def test_paged_scores_in_float64(run, layout):
    skip_float64(run, torch.float64)
    table = torch.randperm(6)[None].int()
    cache, stored = key_cache(layout, 6, 8, table, [41])
    q, weights = torch.randn(1, 3, 4, D).double(), torch.randn(3, 4).double()
    got = paged_mqa_logits(
        q, cache, weights, i32([[39, 40, 41]]), table, max_context=41, layout=layout, backend=run
    )
    want = paged_by_hand(q, weights, stored, [[39, 40, 41]], 41)
    assert_scores(got, *want, 4, torch.float64)


@pytest.mark.parametrize(("stride", "start"), [(8448, 0), (8640, 0), (149_760, 37_440)])
def test_fp8_pages_by_their_bytes(run, stride, start):
    # Conformance L1 and L3: values plane, then scales plane, and the tensor's own page stride.
    entries, length = 64, 130
    gap = stride - get_layout(INDEX_FP8).page_stride_bytes(entries)
    cache = make_cache(INDEX_FP8, 5, entries, gap=gap, start=start)
    assert cache.tensor.stride(0) == stride
    table = i32([[3, 0, 4]])
    fill(cache, table, [length])
    raw = bytes(cache.storage.tolist())
    keys = torch.zeros(length, D, dtype=torch.float64)
    for w in range(length):
        page, place = start + int(table[0, w // entries]) * stride, w % entries
        begin = page + place * D
        codes = torch.tensor(list(raw[begin : begin + D]), dtype=torch.uint8)
        (scale,) = struct.unpack_from("<f", raw, page + entries * D + place * 4)
        assert scale > 0
        keys[w] = codes.view(torch.float8_e4m3fn).double() * scale
    q, weights = torch.randn(1, 1, 4, D).bfloat16(), torch.randn(1, 4)
    for tensor in (cache.tensor, cache.tensor.unsqueeze(2)):
        got = paged_mqa_logits(
            q, tensor, weights, i32([length]), table, max_context=length, backend=run
        )
        want, magnitude = score64(q[0, 0], weights[0], keys)
        assert_scores(got[0], want, magnitude, 4)


@pytest.mark.parametrize("entries", [1, 2, 53, 64, 128])
def test_page_size_does_not_matter(run, entries):
    length = 131
    keys = torch.randn(length, D)
    q, weights = torch.randn(1, 2, 4, D), torch.randn(2, 4)
    lens, results = i32([[130, 131]]), []
    for size in (entries, 64):
        pages = -(-length // size)
        table = torch.randperm(pages)[None].int()
        cache = make_cache(INDEX_FP8, pages, size)
        slots = table[0].long()[torch.arange(length) // size] * size + torch.arange(length) % size
        cache.layout.write(cache.tensor, slots, keys)
        results.append(
            paged_mqa_logits(q, cache.tensor, weights, lens, table, max_context=131, backend=run)
        )
    magnitude = torch.einsum("mh,mhd,nd->mn", weights.abs(), q[0].abs(), keys.abs())
    # Keys are stored alike, up to 2^-4 relative: a generous scale for rounding in another order.
    assert_close(results[0], results[1], atol=2 * score_bound(4), scale=2 * magnitude)


@pytest.mark.parametrize("rows", [1, 2, 5, 9])
def test_one_length_for_all_rows_of_a_request(run, rows):
    # Speculative rows: [R] means the same length for every row; [R, J] a length each.
    table = torch.randperm(8).view(2, 4).int()
    cache, stored = key_cache(INDEX_FP8, 8, 4, table, [13, 16])
    q, weights = torch.randn(2, rows, 2, D), torch.randn(2 * rows, 2)
    same = paged_mqa_logits(q, cache, weights, i32([13, 16]), table, max_context=16, backend=run)
    want = paged_by_hand(q, weights, stored, [[13] * rows, [16] * rows], 16)
    assert_scores(same, *want, 2)
    lens = [[(4 * 13 + j) // 4 - 2 for j in range(rows)], [max(0, 16 - 3 * j) for j in range(rows)]]
    each = paged_mqa_logits(q, cache, weights, i32(lens), table, max_context=16, backend=run)
    assert_scores(each, *paged_by_hand(q, weights, stored, lens, 16), 2)


def test_hostile_tables_and_lengths(run):
    good = i32([[2, 0, 3, 1]])
    cache, stored = key_cache(INDEX_FP8, 4, 4, good, [16])
    table = i32([[2, -1, 3, 4], [-(2**31), 0, 2**31 - 1, 1]])
    q, weights = torch.randn(2, 1, 2, D), torch.randn(2, 2)
    # Lengths beyond the table and beyond max_context see what exists.
    got = paged_mqa_logits(
        q, cache, weights, i32([17, 2**31 - 1]), table, max_context=18, backend=run
    )
    want, magnitude = paged_by_hand(q, weights, stored * 2, [[16], [16]], 18)
    for row, absent in ((0, [*range(4, 8), *range(12, 18)]), (1, [0, 1, 2, 3, *range(8, 12)])):
        want[row, absent] = -torch.inf
        want[row, 16:] = -torch.inf
    assert_scores(got, want, magnitude, 2)
    got = paged_mqa_logits(
        q, cache, weights, i32([-3, 3]), good.expand(2, 4), max_context=2, backend=run
    )
    assert bool((got[0] == -torch.inf).all())
    assert bool(got[1].isfinite().all())


@pytest.mark.parametrize(
    ("pages", "table_shape", "context", "shape"),
    [
        (0, (2, 3), 8, (2, 1)),
        (4, (2, 0), 8, (2, 1)),
        (4, (2, 3), 0, (2, 1)),
        (4, (0, 3), 8, (0, 1)),
        (4, (2, 3), 8, (2, 0)),
    ],
)
def test_paged_scores_of_nothing(run, pages, table_shape, context, shape):
    cache = get_layout(INDEX_FP8).allocate(pages, 4, fill=0xFF)
    rows = shape[0] * shape[1]
    got = paged_mqa_logits(
        torch.randn(*shape, 2, D),
        cache,
        torch.randn(rows, 2),
        torch.full((shape[0],), context, dtype=torch.int32),
        torch.full(table_shape, -1, dtype=torch.int32),
        max_context=context,
        backend=run,
    )
    assert got.shape == (rows, context)
    assert bool((got == -torch.inf).all())


def test_poisoned_slots_do_not_leak(run):
    # Everything that is not an entry of the request is 0xFF: unused slots, other pages, padding.
    for layout in INDEX_LAYOUTS:
        cache = make_cache(layout, 9, 8)
        table = i32([[7, 2, 5, -1]])
        fill(cache, table, [19])
        before = cache.storage.clone()
        q, weights = torch.randn(1, 1, 2, D).bfloat16(), torch.randn(1, 2)
        got = paged_mqa_logits(
            q, cache.tensor, weights, i32([19]), table, max_context=32, layout=layout, backend=run
        )
        assert bool(got[0, :19].isfinite().all())
        assert bool((got[0, 19:] == -torch.inf).all())
        assert torch.equal(cache.storage, before)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    rows=st.integers(1, 9),
    heads=st.sampled_from([1, 3, 64]),
    entries=st.sampled_from([1, 3, 16]),
    layout=st.sampled_from(INDEX_LAYOUTS),
    seed=st.integers(0, 2**31),
)
@pytest.mark.parametrize("name", runnable((*ALL_BACKENDS, INTEL)))
def test_paged_scores_of_random_batches(name, lengths, rows, heads, entries, layout, seed):
    torch.manual_seed(seed)
    requests, width = len(lengths), -(-40 // entries)
    table = torch.randperm(requests * width + 3)[: requests * width].view(requests, width).int()
    cache, stored = key_cache(layout, requests * width + 3, entries, table, lengths)
    lens = [[max(0, n - (rows - 1 - j) // 4) for j in range(rows)] for n in lengths]
    for row, length in enumerate(lengths):  # pages that hold nothing may be anything
        table[row, -(-length // entries) :] = torch.randint(-2, 10**6, ()).int()
    q, weights = torch.randn(requests, rows, heads, D), torch.randn(requests * rows, heads)
    with pytest.MonkeyPatch.context() as patch:
        got = paged_mqa_logits(
            q,
            cache,
            weights,
            i32(lens),
            table,
            max_context=40,
            layout=layout,
            backend=use_backend(name, patch),
        )
    want, magnitude = paged_by_hand(q, weights, stored, lens, 40)
    assert_scores(got, want, magnitude, heads)


def test_paged_equals_dense_on_gathered_keys(run):
    table = torch.randperm(10).view(2, 5).int()
    cache, keys = key_cache(INDEX_FP8, 10, 16, table, [77, 50])
    q, weights = torch.randn(2, 4, 6, D), torch.randn(8, 6)
    lens = i32([[74, 75, 76, 77], [50, 50, 50, 50]])
    paged = paged_mqa_logits(q, cache, weights, lens, table, max_context=77, backend=run)
    starts = i32([0] * 4 + [77] * 4)
    dense = mqa_logits(
        q.flatten(0, 1),
        torch.cat(keys).float(),
        None,
        weights,
        starts,
        starts + lens.flatten(),
        backend=run,
    )
    magnitude = torch.einsum(
        "mh,mhd,nd->mn", weights.abs(), q.flatten(0, 1).abs(), torch.cat(keys).abs().float()
    )
    for m in range(8):
        start, n = int(starts[m]), int(lens.flatten()[m])
        assert_close(
            paged[m, :n],
            dense[m, start : start + n],
            atol=2 * score_bound(6),
            scale=magnitude[m, start : start + n],
        )


@pytest.mark.parametrize("name", TRITON)
def test_fp8_is_multiplied_as_the_machine_can(name, monkeypatch):
    # What a kernel asks about the machine is what ``use_backend`` has it answer.
    backend = use_backend(name, monkeypatch)
    from anymla.ops.indexer import triton_scores

    chosen, math_of = [], triton_scores.math_of

    def noted(*args):
        chosen.append(math_of(*args))
        return chosen[-1]

    monkeypatch.setattr(triton_scores, "math_of", noted)
    table = i32([[1, 0]])
    cache, _ = key_cache(INDEX_FP8, 2, 16, table, [32])
    q, weights = torch.randn(1, 1, 3, D).to(torch.float8_e4m3fn), torch.randn(1, 3)
    keys = torch.randn(32, D).to(torch.float8_e4m3fn)
    mqa_logits(q[0], keys, torch.ones(32), weights, i32([0]), i32([32]), backend=backend)
    paged_mqa_logits(q, cache, weights, i32([32]), table, max_context=32, backend=backend)
    select_topk(q[0], cache, weights, i32([32]), table, 8, backend=backend)
    assert chosen == ["e4m3" if "native" in name else "fp16"] * 3

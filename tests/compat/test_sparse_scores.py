"""DeepGEMM's scores of listed blocks, against formulas written out and our own dense scores."""

import pytest
import torch
from test_deep_gemm import FP8, D, H, formula, fp8_keys, fp8_pages, i32, mxfp8, packed

from anymla.compat import _sparse_scores, deep_gemm
from anymla.ops.indexer import select_candidate_blocks
from anymla.testing.tolerance import accumulation, assert_close, ulps

FORMATS = ("mxfp4", "mxfp8", "fp8")


def operands(form, rows, count):
    """Queries, keys of a list, and the values of both."""
    if form == "fp8":
        q = torch.randn(rows, H, D).to(FP8)
        codes, scale, keys = fp8_keys(count)
        return q, (codes, scale), q.double(), keys
    make = packed if form == "mxfp4" else mxfp8
    q_codes, q_scales, q = make(rows, H)
    codes, scales, keys = make(count)
    return (q_codes, q_scales), (codes, scales), q, keys


def pages_of(kv, page, order, stride=None):
    """A cache whose page ``order[p]`` holds the p-th run of a list's keys; others hold NaN."""
    codes, scales = (each.contiguous().view(torch.uint8) for each in kv)
    codes, scales = codes.view(len(order), page, -1), scales.view(len(order), page, 4)
    width = codes.shape[2] + 4
    stride = -(-page * width // 512) * 512 if stride is None else stride
    count = max(order) + 2
    storage = torch.full((count * stride,), 0xFF, dtype=torch.uint8)
    for number, values, factors in zip(order, codes, scales, strict=True):
        content = torch.cat((values.flatten(), factors.flatten()))
        storage[number * stride : number * stride + page * width] = content
    return storage.as_strided((count, page, 1, width), (stride, width, width, 1))


def by_hand(q, keys, weights, lists, block, bounds, offset):
    """Scores, their sizes, and which there are: of the i-th listed block's j-th key."""
    rows, blocks = lists.shape
    want = torch.full((rows, blocks * block), -torch.inf, dtype=torch.float64)
    size = torch.ones(rows, blocks * block, dtype=torch.float64)
    for row, (start, end) in enumerate(bounds):
        scores, sizes = formula(q[row : row + 1], keys, weights[row : row + 1])
        counted = min(blocks, max(0, -(-(end - start) // block)))
        for place, number in enumerate(lists[row, :counted].tolist()):
            for j in range(block):
                key = number * block + (start % block if offset else 0) + j
                if number >= 0 and start <= key < min(end, len(keys)):
                    want[row, place * block + j] = scores[0, key]
                    size[row, place * block + j] = sizes[0, key]
    return want, size


def check_against(got, want, size):
    assert torch.equal(got == -torch.inf, want == -torch.inf)
    assert not got.isnan().any()
    bound = accumulation(D + H, torch.float32)
    rounding = ulps(torch.bfloat16, 0.5) if got.dtype == torch.bfloat16 else 0.0
    assert_close(got, want, atol=bound, rtol=rounding, scale=size.clamp(min=1e-30))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block", [8, 16])
@pytest.mark.parametrize("unaligned", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_scores_of_listed_blocks_of_a_list(form, unaligned, block, dtype):
    count, rows, most = 150, 6, 4
    q, kv, values, keys = operands(form, rows, count)
    weights = torch.randn(rows, H).to(dtype)
    starts = [0, 3, 40, 64, 100, 5] if unaligned else [0, 0, 32, 64, 96, 48]
    ends = [150, 20, 150, 64, 149, 200]
    # The first of each, as many as its length has or the list takes, then padding of two kinds.
    lists = torch.full((rows, most), torch.iinfo(torch.int32).max, dtype=torch.int32)
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        first, there = start // block, -(-max(0, min(end, count) - start) // block)
        chosen = (torch.randperm(max(there, 1))[: min(there, most)].sort().values + first).int()
        lists[row, : len(chosen)] = chosen
        if len(chosen) and row % 2:
            lists[row, len(chosen) :] = chosen[-1]
    metadata = deep_gemm.get_sparse_mqa_logits_metadata(
        i32(starts), i32(ends), count, lists, FP8, block, unaligned
    )
    assert (metadata.dtype, metadata.ndim) == (torch.uint8, 1)
    lists_then = lists.clone()
    lists.zero_()  # the metadata is a copy
    arguments = (q, kv, weights, metadata, most, block)
    got = deep_gemm.fp8_fp4_sparse_mqa_logits(*arguments, use_unaligned_ks=unaligned)
    assert got.dtype == dtype
    bounds = list(zip(starts, [min(end, count) for end in ends], strict=True))
    check_against(got, *by_hand(values, keys, weights, lists_then, block, bounds, unaligned))


@pytest.mark.parametrize("at_once", [1, 1 << 28])
@pytest.mark.parametrize(("page", "block"), [(64, 8), (64, 16), (16, 16), (32, 8)])
@pytest.mark.parametrize("form", FORMATS)
def test_scores_of_listed_blocks_of_pages(form, page, block, at_once, monkeypatch):
    monkeypatch.setattr(_sparse_scores, "_GATHERED_BYTES", at_once)
    runs, most = 256 // page, 5
    rows = 5
    q, kv, values, keys = operands(form, rows, 256)
    weights = torch.randn(rows, H).bfloat16()
    order = (2 * torch.randperm(runs)).tolist()
    cache = pages_of(kv, page, order)
    table = i32([order] * rows)
    lengths = [256, 77, 0, 16, 200]
    lists = i32([[1, 3, 4, 7, 15], [0, 2, 4, 4, 4], [0] * 5, [0, 1, 9, 9, 9], [11, 2, 7, -1, 0]])
    metadata = deep_gemm.get_paged_sparse_mqa_logits_metadata(
        i32(lengths), table, i32([0, 0, 1, 1, 1]), page, lists, torch.int8, block
    )
    q = tuple(each.unsqueeze(1) for each in q) if isinstance(q, tuple) else q.unsqueeze(1)
    got = deep_gemm.fp8_fp4_paged_sparse_mqa_logits(q, cache, weights, metadata, most, block)
    assert got.shape == (rows, most * block)
    bounds = [(0, length) for length in lengths]
    check_against(got, *by_hand(values, keys, weights, lists, block, bounds, False))
    again = deep_gemm.get_paged_sparse_mqa_logits_metadata(
        i32(lengths).unsqueeze(1), table, None, page, lists, torch.int8, block
    )
    assert torch.equal(again, metadata)


def test_blocks_of_a_selection_are_scored_as_all_entries_are():
    """What ``select_candidate_blocks`` keeps: scores equal those of the whole context."""
    block, most, length = 8, 6, 250
    q, kv, _, _ = operands("mxfp4", 3, 256)
    weights, table = torch.randn(3, H), i32([[3, 1, 0, 2]] * 3)
    cache = pages_of(kv, 64, [3, 1, 0, 2])
    q = tuple(each.unsqueeze(1) for each in q)
    lens = i32([[length], [20], [64]])
    dense = deep_gemm.fp8_fp4_paged_mqa_logits(q, cache, weights, lens, table, None, 256)
    lists = select_candidate_blocks(dense, lens.flatten(), most, block_size=block)
    metadata = deep_gemm.get_paged_sparse_mqa_logits_metadata(
        lens, table, i32([0, 1, 2]), 64, lists, torch.int8, block
    )
    got = deep_gemm.fp8_fp4_paged_sparse_mqa_logits(q, cache, weights, metadata, most, block)
    columns = lists.repeat_interleave(block, 1) * block + torch.arange(block).repeat(most)
    want = dense.gather(1, columns.clamp(min=0).long())
    want[(lists < 0).repeat_interleave(block, 1)] = -torch.inf
    slack = accumulation(D + H, torch.float32, 4)
    assert_close(got, want, atol=slack, scale=64.0 * dense[dense.isfinite()].abs().max().item())


def test_hostile_lists_and_tables_read_nothing():
    big = torch.iinfo(torch.int32).max
    cache, _ = fp8_pages(3, 32, 4608)
    table = i32([[0, -1, 7, big, 1 << 29, 1 << 28]])
    lists = i32([[0, 4, 8, 12, 16, 20, big, -big - 1]])
    metadata = deep_gemm.get_paged_sparse_mqa_logits_metadata(
        i32([big]), table, None, 32, lists, FP8, 8
    )
    q, weights = torch.randn(1, 1, H, D).to(FP8), torch.randn(1, H)
    got = deep_gemm.fp8_fp4_paged_sparse_mqa_logits(q, cache, weights, metadata, 8, 8)
    assert got[:, :8].isfinite().all()
    assert (got[:, 8:] == -torch.inf).all()
    codes, scale, _ = fp8_keys(20)
    for bounds in ((0, 20), (-5, 9), (19, 3), (big, big), (-big, big)):
        metadata = deep_gemm.get_sparse_mqa_logits_metadata(
            i32([bounds[0]]), i32([bounds[1]]), 20, lists, FP8, 8, True
        )
        got = deep_gemm.fp8_fp4_sparse_mqa_logits(q[:, 0], (codes, scale), weights, metadata, 8, 8)
        assert not got.isnan().any()
    noise = torch.randint(0, 256, (8 * 8,), dtype=torch.uint8)
    got = deep_gemm.fp8_fp4_sparse_mqa_logits(q[:, 0], (codes, scale), weights, noise, 8, 8)
    assert not got.isnan().any()


def test_nothing_to_score():
    codes, scale, _ = fp8_keys(9)
    q, weights = torch.randn(2, H, D).to(FP8), torch.randn(2, H)
    none = torch.zeros(2, 0, dtype=torch.int32)
    metadata = deep_gemm.get_sparse_mqa_logits_metadata(i32([0, 0]), i32([9, 9]), 9, none, FP8, 8)
    got = deep_gemm.fp8_fp4_sparse_mqa_logits(q, (codes, scale), weights, metadata, 0, 8)
    assert got.shape == (2, 0)
    metadata = deep_gemm.get_sparse_mqa_logits_metadata(
        i32([0, 0]), i32([9, 9]), 0, torch.zeros(2, 4).int(), FP8, 8
    )
    got = deep_gemm.fp8_fp4_sparse_mqa_logits(q, (codes[:0], scale[:0]), weights, metadata, 4, 8)
    assert (got == -torch.inf).all()


def test_arguments_that_do_not_fit_are_named():
    q, kv, _, _ = operands("mxfp4", 2, 16)
    weights, lists = torch.randn(2, H), torch.zeros(2, 4, dtype=torch.int32)
    make = deep_gemm.get_sparse_mqa_logits_metadata
    metadata = make(i32([0, 0]), i32([16, 16]), 16, lists, torch.int8, 8)
    score = deep_gemm.fp8_fp4_sparse_mqa_logits
    with pytest.raises(ValueError, match="metadata must be the metadata of 2 rows of 5 blocks"):
        score(q, kv, weights, metadata, 5, 8)
    with pytest.raises(ValueError, match="sparse_block_kv must be within"):
        score(q, kv, weights, metadata, 4, 0)
    with pytest.raises(ValueError, match="weights must be"):
        score(q, kv, weights[:1], metadata, 4, 8)
    with pytest.raises(ValueError, match="kv must be a tuple of values and scales"):
        score(q, kv[0], weights, metadata, 4, 8)
    with pytest.raises(TypeError, match=r"kv scales must be torch\.int32 for mxfp4"):
        score(q, (kv[0], torch.ones(16)), weights, metadata, 4, 8)
    with pytest.raises(ValueError, match=r"kv must be \[N, 64\]"):
        score(q, (torch.zeros(16, 128, dtype=torch.uint8), kv[1]), weights, metadata, 4, 8)
    with pytest.raises(ValueError, match="q must be with scales where it is packed"):
        score(q[0], kv, weights, metadata, 4, 8)
    with pytest.raises(TypeError, match="sparse_kv_block_indices must be int32"):
        make(i32([0, 0]), i32([16, 16]), 16, lists.long(), torch.int8, 8)
    paged = deep_gemm.get_paged_sparse_mqa_logits_metadata
    with pytest.raises(ValueError, match="page_kv must be a multiple of 16"):
        paged(i32([1, 1]), i32([[0], [0]]), None, 24, lists, torch.int8, 16)
    with pytest.raises(ValueError, match="block_table must be"):
        paged(i32([1, 1]), i32([[0]]), None, 64, lists, torch.int8, 16)

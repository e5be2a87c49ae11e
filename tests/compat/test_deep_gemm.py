"""DeepGEMM's index scores by their signatures and conventions, against formulas written out."""

import pytest
import torch

from anymla.compat import deep_gemm
from anymla.testing.tolerance import accumulation, assert_close

H, D = 8, 128
FP8 = torch.float8_e4m3fn
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def fp8_keys(count):
    """Keys as DeepGEMM's callers make them: a float32 scale each, no power of two."""
    keys = torch.randn(count, D)
    scale = keys.abs().amax(1).clamp(min=1e-4) / 448
    codes = (keys / scale[:, None]).to(FP8)
    return codes, scale, codes.double() * scale.double()[:, None]


def packed(*shape):
    """Random packed e2m1 with int32 scales: codes, scales, values."""
    codes = torch.randint(0, 16, (*shape, D))
    exponent = torch.randint(120, 132, (*shape, D // 32))
    low, high = codes[..., ::2], codes[..., 1::2]
    data = (low | high << 4).to(torch.uint8).view(torch.int8)
    shifts = 256 ** torch.arange(4)
    scales = (exponent * shifts).sum(-1)
    scales = torch.where(scales >= 2**31, scales - 2**32, scales).int()
    sign = 1 - 2 * (codes >> 3)
    values = sign * E2M1[codes & 7].double()
    blocks = values.unflatten(-1, (-1, 32)) * 2.0 ** (exponent - 127).double().unsqueeze(-1)
    return data, scales, blocks.flatten(-2)


def formula(q, keys, weights):
    """Scores [M, N] and their sizes: q [M, H, D], keys [N, D], weights [M, H]."""
    dots = torch.einsum("mhd,nd->mhn", q.double(), keys)
    sizes = torch.einsum("mhd,nd->mhn", q.double().abs(), keys.abs())
    weights = weights.double()
    return (weights.unsqueeze(2) * dots.relu()).sum(1), (weights.abs().unsqueeze(2) * sizes).sum(1)


def check_scores(got, want, size, hidden):
    want = want.masked_fill(hidden, -torch.inf)
    assert torch.equal(got == -torch.inf, hidden)
    scale = size.masked_fill(hidden, 1.0).clamp(min=1e-30)
    assert_close(got, want, atol=accumulation(D + H, torch.float32), scale=scale)


@pytest.mark.parametrize("fp4", [False, True])
def test_dense_scores(fp4):
    count, rows = 40, 6
    starts, ends = i32([0, 3, 10, 40, 0, 39]), i32([40, 20, 11, 40, 0, 40])
    weights = torch.randn(rows, H)
    if fp4:
        q_codes, q_scales, q = packed(rows, H)
        k_codes, k_scales, keys = packed(count)
        given = ((q_codes, q_scales), (k_codes, k_scales), weights, starts, ends)
        got = deep_gemm.fp8_fp4_mqa_logits(*given)
    else:
        q = torch.randn(rows, H, D).to(FP8)
        codes, scale, keys = fp8_keys(count)
        got = deep_gemm.fp8_mqa_logits(q, (codes, scale), weights, starts, ends)
        both = deep_gemm.fp8_fp4_mqa_logits((q, None), (codes, scale), weights, starts, ends)
        assert torch.equal(got, both)
    column = torch.arange(count)
    hidden = (column < starts[:, None]) | (column >= ends[:, None])
    check_scores(got, *formula(q, keys, weights), hidden)


@pytest.mark.parametrize("most", [5, 17, 60])
def test_rows_moved_to_their_start(most, monkeypatch):
    monkeypatch.setattr(deep_gemm, "_MOVED_ELEMENTS", 100)
    count, rows = 40, 5
    starts, ends = i32([0, 3, 30, 40, 38]), i32([5, 20, 40, 40, 40])
    # Small integers, whose sums are exact in any order.
    q, weights = torch.randint(-2, 3, (rows, H, D)).to(FP8), torch.randint(-2, 3, (rows, H)).float()
    codes, scale = torch.randint(-2, 3, (count, D)).to(FP8), torch.ones(count)
    given = (q, (codes, scale), weights, starts, ends)
    whole = deep_gemm.fp8_mqa_logits(*given)
    moved = deep_gemm.fp8_mqa_logits(*given, clean_logits=False, max_seqlen_k=most)
    assert moved.shape == (rows, most)
    for row in range(rows):
        first, n = int(starts[row]), min(int(ends[row] - starts[row]), most)
        assert torch.equal(moved[row, :n], whole[row, first : first + n])
        assert (moved[row, n:] == -torch.inf).all()
    with pytest.raises(ValueError, match="clean_logits must be False"):
        deep_gemm.fp8_mqa_logits(*given, max_seqlen_k=most)


def fp8_pages(pages, block, stride):
    """A cache of random bytes' worth of keys, and the keys [P, block, D]."""
    storage = torch.full((pages * stride,), 0xFF, dtype=torch.uint8)
    cache = storage.as_strided((pages, block, 1, D + 4), (stride, D + 4, D + 4, 1))
    codes, scale, keys = fp8_keys(pages * block)
    for page in range(pages):
        part = slice(page * block, page * block + block)
        begin = page * stride
        storage[begin : begin + block * D] = codes[part].view(torch.uint8).flatten()
        end = begin + block * D
        storage[end : end + block * 4] = scale[part].view(torch.uint8)
    return cache, keys.view(pages, block, D)


@pytest.mark.parametrize(("block", "stride"), [(64, 8448), (64, 8640), (32, 4224)])
@pytest.mark.parametrize("next_n", [1, 2, 4])
def test_paged_scores(block, stride, next_n):
    cache, keys = fp8_pages(7, block, stride)
    table, batch, most = i32([[3, 0, 6], [5, 2, 1]]), 2, 3 * block + 9
    q, weights = torch.randn(batch, next_n, H, D).to(FP8), torch.randn(batch * next_n, H)
    lens = torch.randint(0, 3 * block + 1, (batch, next_n), dtype=torch.int32)
    meta = deep_gemm.get_paged_mqa_logits_metadata(lens, block, deep_gemm.get_num_sms())
    assert meta.shape == (deep_gemm.get_num_sms() + 1, 2)
    got = deep_gemm.fp8_paged_mqa_logits(q, cache, weights, lens, table, meta, most)
    assert got.shape == (batch * next_n, most)
    column = torch.arange(most)
    for b in range(batch):
        mine = keys[table[b].long()].flatten(0, 1)
        rows = slice(b * next_n, (b + 1) * next_n)
        want, size = formula(q[b], mine, weights[rows])
        pad = (0, most - mine.shape[0])
        want, size = (torch.nn.functional.pad(x, pad) for x in (want, size))
        check_scores(got[rows], want, size, column >= lens[b][:, None])


def test_one_length_means_the_last_row():
    # Token units, as DeepGEMM's tests have it: row j of next_n sees length - next_n + j + 1.
    cache, _ = fp8_pages(4, 64, 8640)
    table, lens = i32([[1, 3], [0, 2]]), i32([100, 2])
    q, weights = torch.randn(2, 3, H, D).to(FP8), torch.randn(6, H)
    each = i32([[98, 99, 100], [0, 1, 2]])
    short = deep_gemm.fp8_paged_mqa_logits(q, cache, weights, lens, table, None, 128, True)
    full = deep_gemm.fp8_paged_mqa_logits(q, cache, weights, each, table, None, 128)
    assert torch.equal(short, full)


def test_paged_scores_of_mxfp4():
    block, pages = 64, 3
    codes, scales, keys = packed(pages, block)
    cache = torch.cat(
        (codes.view(torch.uint8).flatten(1), scales.view(torch.uint8).view(pages, -1)), 1
    ).view(pages, block, 1, D // 2 + 4)
    q_codes, q_scales, q = packed(1, 2, H)
    weights, table, lens = torch.randn(2, H), i32([[2, 0]]), i32([[70, 128]])
    given = ((q_codes, q_scales), cache, weights, lens, table, None, 128)
    got = deep_gemm.fp8_fp4_paged_mqa_logits(*given)
    want, size = formula(q[0], keys[[2, 0]].flatten(0, 1), weights)
    check_scores(got, want, size, torch.arange(128) >= lens[0][:, None])
    half = deep_gemm.fp8_fp4_paged_mqa_logits(*given, logits_dtype=torch.bfloat16)
    assert torch.equal(half, got.bfloat16())


def test_neighbours_of_a_request_may_be_named():
    cache, _ = fp8_pages(4, 64, 8448)
    table = i32([[1, 3], [1, 3], [0, 2]])
    q, weights, lens = torch.randn(3, 1, H, D).to(FP8), torch.randn(3, H), i32([[99], [100], [64]])
    given = (q, cache, weights, lens, table, None, 128)
    assert torch.equal(
        deep_gemm.fp8_paged_mqa_logits(*given, indices=i32([0, 0, 1])),
        deep_gemm.fp8_paged_mqa_logits(*given),
    )


def mxfp8(*shape):
    """Random e4m3 codes with int32 scales: codes, scales, values."""
    codes = torch.randn(*shape, D).to(FP8)
    exponent = torch.randint(120, 132, (*shape, D // 32))
    scales = exponent.to(torch.uint8).contiguous().view(torch.int32).squeeze(-1)
    blocks = codes.double().unflatten(-1, (-1, 32)) * 2.0 ** (exponent - 127).double().unsqueeze(-1)
    return codes, scales, blocks.flatten(-2)


def dense_call(rows=4, count=256):
    q, (codes, scale, _) = torch.randn(rows, H, D).to(FP8), fp8_keys(count)
    starts, ends = i32([0, 3, 100, 256]), i32([200, 150, 256, 256])
    return q, (codes, scale), torch.randn(rows, H), starts, ends


def test_the_sixth_argument_is_todays_or_an_older_one():
    q, *rest = given = dense_call()
    _, _, starts, ends = rest
    whole = deep_gemm.fp8_fp4_mqa_logits(*given)
    assert whole.shape == (4, 256)
    moved = torch.full((4, 200), -torch.inf)
    for row, (first, last) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        moved[row, : last - first] = whole[row, first:last]
    for got in (
        deep_gemm.fp8_fp4_mqa_logits(*given, 200),
        deep_gemm.fp8_fp4_mqa_logits(*given, 200, None),
        deep_gemm.fp8_fp4_mqa_logits(*given, 200, torch.zeros(3, 2).int()),
        deep_gemm.fp8_fp4_mqa_logits(*given, max_seqlen_k=200, schedule_meta=None),
        deep_gemm.fp8_fp4_mqa_logits((q, None), *rest, False, 200),
        deep_gemm.fp8_fp4_mqa_logits(*given, False, 200, torch.float32, None),
        deep_gemm.fp8_fp4_mqa_logits(*given, False, max_seqlen_k=200),
        deep_gemm.fp8_fp4_mqa_logits(*given, clean_logits=False, max_seqlen_k=200),
        deep_gemm.fp8_mqa_logits(*given, False, 200),
        deep_gemm.fp8_mqa_logits(*given, 200),
    ):
        assert torch.equal(got, moved)
    for clean in (True, False):
        for got in (
            deep_gemm.fp8_fp4_mqa_logits(*given, clean),
            deep_gemm.fp8_fp4_mqa_logits(*given, clean_logits=clean),
            deep_gemm.fp8_mqa_logits(*given, clean),
        ):
            assert torch.equal(got, whole)
    with pytest.raises(ValueError, match="clean_logits must be False"):
        deep_gemm.fp8_fp4_mqa_logits(*given, True, 200)
    with pytest.raises(TypeError, match="clean_logits"):
        deep_gemm.fp8_fp4_mqa_logits(*given, True, clean_logits=True)
    with pytest.raises(TypeError, match="takes 9 arguments with clean_logits, got 10"):
        deep_gemm.fp8_fp4_mqa_logits(*given, False, 0, torch.float32, None, None)
    with pytest.raises(ValueError, match="max_seqlen_k must be >= 0"):
        deep_gemm.fp8_fp4_mqa_logits(*given, -1)


def test_the_eighth_argument_is_todays_or_an_older_one():
    cache, _ = fp8_pages(4, 64, 8448)
    table, rows = i32([[1, 3], [1, 3], [0, 2]]), i32([0, 0, 1])
    q, weights, lens = torch.randn(3, 1, H, D).to(FP8), torch.randn(3, H), i32([[99], [100], [64]])
    meta = deep_gemm.get_paged_mqa_logits_metadata(lens, 64, deep_gemm.get_num_sms(), rows)
    given = (q, cache, weights, lens, table, meta, 128)
    want = deep_gemm.fp8_fp4_paged_mqa_logits(*given)
    for got in (
        deep_gemm.fp8_fp4_paged_mqa_logits(*given, rows),
        deep_gemm.fp8_fp4_paged_mqa_logits(*given, None),
        deep_gemm.fp8_fp4_paged_mqa_logits((q, None), *given[1:], indices=rows),
        deep_gemm.fp8_fp4_paged_mqa_logits([q, None], *given[1:], False),
        deep_gemm.fp8_fp4_paged_mqa_logits(*given, True, torch.float32, rows),
        deep_gemm.fp8_fp4_paged_mqa_logits(*given, False, indices=rows),
        deep_gemm.fp8_fp4_paged_mqa_logits(*given, clean_logits=False, logits_dtype=torch.float32),
        deep_gemm.fp8_paged_mqa_logits(*given, False, rows),
        deep_gemm.fp8_paged_mqa_logits(*given, rows),
        deep_gemm.fp8_paged_mqa_logits(*given),
    ):
        assert torch.equal(got, want)


def test_logits_have_the_dtype_of_the_weights():
    q, kv, weights, starts, ends = dense_call()
    half = weights.bfloat16()
    got = deep_gemm.fp8_fp4_mqa_logits(q, kv, half, starts, ends, 256)
    assert got.dtype == torch.bfloat16
    want = deep_gemm.fp8_fp4_mqa_logits(q, kv, half.float(), starts, ends, 256)
    assert torch.equal(got, want.bfloat16())
    kept = deep_gemm.fp8_fp4_mqa_logits(q, kv, half, starts, ends, logits_dtype=torch.float32)
    assert kept.dtype == torch.float32


def test_keys_alone_have_a_scale_of_one():
    q, (codes, _), weights, starts, ends = dense_call()
    got = deep_gemm.fp8_fp4_mqa_logits(q, codes, weights, starts, ends)
    want = deep_gemm.fp8_fp4_mqa_logits(q, (codes, torch.ones(256)), weights, starts, ends)
    assert torch.equal(got, want)


def test_scores_of_mxfp8():
    q_codes, q_scales, q = mxfp8(5, H)
    k_codes, k_scales, keys = mxfp8(40)
    starts, ends, weights = i32([0, 3, 10, 40, 0]), i32([40, 20, 11, 40, 0]), torch.randn(5, H)
    given = ((q_codes, q_scales), (k_codes, k_scales), weights, starts, ends)
    column = torch.arange(40)
    hidden = (column < starts[:, None]) | (column >= ends[:, None])
    check_scores(deep_gemm.fp8_fp4_mqa_logits(*given), *formula(q, keys, weights), hidden)


@pytest.mark.parametrize("at_once", [1, 1 << 28])
def test_paged_scores_of_mxfp8(at_once, monkeypatch):
    monkeypatch.setattr(deep_gemm, "_DECODED_BYTES", at_once)
    block, pages = 32, 5
    codes, scales, keys = mxfp8(pages, block)
    cache = torch.cat(
        (codes.view(torch.uint8).flatten(1), scales.view(torch.uint8).view(pages, -1)), 1
    ).view(pages, block, 1, D + 4)
    q_codes, q_scales, q = mxfp8(3, 2, H)
    weights, lens = torch.randn(6, H), i32([[70, 96], [0, 64], [33, 34]])
    table = i32([[2, 0, 4, 1], [3, -1, 9, 0], [1, 4, 0, 0]])
    given = ((q_codes, q_scales), cache, weights, lens, table, None, 100)
    got = deep_gemm.fp8_fp4_paged_mqa_logits(*given)
    column = torch.arange(100)
    absent = torch.zeros(3, 100, dtype=torch.bool)
    absent[1, block:] = True  # pages that are none
    for b in range(3):
        mine = keys[table[b].clamp(0, pages - 1).long()].flatten(0, 1)[:100]
        rows = slice(2 * b, 2 * b + 2)
        want, size = formula(q[b], mine, weights[rows])
        check_scores(got[rows], want, size, (column >= lens[b][:, None]) | absent[b])
    nothing = deep_gemm.fp8_fp4_paged_mqa_logits(
        (q_codes[:0], q_scales[:0]), cache, weights[:0], lens[:0], table[:0], None, 100
    )
    assert nothing.shape == (0, 100)


def test_multiprocessors_are_as_set(monkeypatch):
    monkeypatch.setattr(deep_gemm, "_num_sms", None)
    before = deep_gemm.get_num_sms()
    assert before >= 1
    deep_gemm.set_num_sms(7)
    assert deep_gemm.get_num_sms() == 7
    with pytest.raises(ValueError, match="num_sms must be >= 1"):
        deep_gemm.set_num_sms(0)


def test_errors_name_the_argument():
    codes, scale, _ = fp8_keys(4)
    q, weights, bound = torch.randn(2, H, D).to(FP8), torch.randn(2, H), i32([0, 0])
    with pytest.raises(TypeError, match="logits_dtype must be float32 or bfloat16"):
        deep_gemm.fp8_fp4_mqa_logits(
            (q, None), (codes, scale), weights, bound, bound, logits_dtype=torch.float16
        )
    with pytest.raises(ValueError, match="q must be with scales where it is packed"):
        deep_gemm.fp8_fp4_mqa_logits(
            (torch.zeros(2, H, D // 2, dtype=torch.int8), None),
            (codes, scale),
            weights,
            bound,
            bound,
        )
    with pytest.raises(TypeError, match="scales of packed values must be int32"):
        deep_gemm.fp8_fp4_mqa_logits(
            (torch.zeros(2, H, D // 2, dtype=torch.int8), torch.zeros(2, H)),
            (codes, scale),
            weights,
            bound,
            bound,
        )

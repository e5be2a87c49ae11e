"""Index scores against one dense list of keys, and the bulk decoding of keys."""

import math

import pytest
import torch
from index_scores import D, assert_scores, i32, multiplies_fp8, score64, score_bound
from paged import ALL_BACKENDS, ARC_A, INTEL, skip_float64, use_backend

from anymla.formats.e4m3 import decode_e4m3
from anymla.formats.hadamard import hadamard_transform
from anymla.formats.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from anymla.ops import _host
from anymla.ops.indexer import mqa_logits, torch_scores
from anymla.testing.tolerance import accumulation, assert_close, assert_identical


@pytest.fixture(params=(*ALL_BACKENDS, INTEL, ARC_A))
def run(request, monkeypatch):
    return use_backend(request.param, monkeypatch)


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bulk_e4m3_is_exact_for_every_code(monkeypatch, seen, dtype):
    monkeypatch.setattr(_host, "on_host", lambda x: seen)
    codes = torch.arange(256, dtype=torch.uint8)
    want = decode_e4m3(codes, dtype)
    assert torch.equal(
        torch_scores.decode_e4m3_bulk(codes, dtype).nan_to_num(7e7), want.nan_to_num(7e7)
    )
    fp8 = codes.view(torch.float8_e4m3fn)
    assert torch.equal(
        torch_scores.decode_e4m3_bulk(fp8, dtype).nan_to_num(7e7), want.nan_to_num(7e7)
    )
    finite = codes[~want.isnan()]
    assert_identical(torch_scores.decode_e4m3_bulk(finite, dtype), decode_e4m3(finite, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bulk_mxfp4_is_exact_for_every_byte_and_scale(dtype):
    packed = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(256, 16, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1, 1).expand(256, 16, 1)
    got = torch_scores.decode_mxfp4_bulk(packed, scales, dtype)
    want = dequantize_mxfp4(packed, scales, dtype)
    assert torch.equal(got.isnan(), want.isnan())
    assert_identical(got.nan_to_num(7.0), want.nan_to_num(7.0))


def test_score_is_a_weighted_sum_of_relus(run):
    # By hand: no mean, no sigmoid, relu before the weights, weights of either sign.
    q = torch.tensor([[[1.0, 2.0], [3.0, -1.0], [-2.0, 0.0]]])
    k = torch.tensor([[1.0, 1.0], [-1.0, 0.0], [0.0, 2.0]])
    weights = torch.tensor([[0.5, -2.0, 4.0]])
    got = mqa_logits(q, k, None, weights, i32([0]), i32([3]), backend=run)
    want = [0.5 * 3 - 2 * 2 + 0, 0 + 0 + 4 * 2, 0.5 * 4 + 0 + 0]
    assert got.tolist() == [want]


def dense_case(*, rows, keys, heads, seed=0):
    torch.manual_seed(seed)
    q, k = torch.randn(rows, heads, D), torch.randn(keys, D)
    return q, k, torch.randn(rows, heads)


def coded(q, k, weights, kind):
    """Arguments of mqa_logits for a kind of operands, and their exact values in float64."""
    if kind == "float64":
        return (q.double(), k.double(), None, weights.double()), {}, q.double(), k.double()
    if kind == "fp8":
        scale = torch.rand(len(k)) + 0.5  # any positive float32, not only powers of two
        codes_q, codes_k = q.to(torch.float8_e4m3fn), (k * 50).to(torch.float8_e4m3fn)
        values = codes_k.double() * scale.double()[:, None]
        return (codes_q, codes_k, scale, weights), {}, codes_q.double(), values
    if kind == "mxfp4":
        packed, scales = quantize_mxfp4(q)
        values = dequantize_mxfp4(packed, scales, torch.float64)
        return (packed, k, None, weights), {"q_scales": scales}, values, k.double()
    plain = k.to(kind)
    return (q.to(kind), plain, None, weights), {}, q.to(kind).double(), plain.double()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, "float64", "fp8", "mxfp4"])
def test_dense_scores_of_several_requests(run, kind):
    skip_float64(run, torch.float64 if kind == "float64" else torch.float32)
    # Two requests' keys one after the other; rows of both, growing like a causal prefill.
    q, k, weights = dense_case(rows=12, keys=45, heads=3)
    starts = i32([0] * 6 + [20] * 6)
    ends = i32([0, 1, 5, 19, 20, 20, 20, 21, 30, 44, 45, 45])
    arguments, scales, q64, k64 = coded(q, k, weights, kind)
    got = mqa_logits(*arguments, starts, ends, backend=run, **scales)
    want = torch.full((12, 45), -math.inf, dtype=torch.float64)
    magnitude = torch.zeros_like(want)
    for m, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        want[m, start:end], magnitude[m, start:end] = score64(q64[m], weights[m], k64[start:end])
    dtype = torch.float64 if kind == "float64" else torch.float32
    fp8 = kind == "fp8" and multiplies_fp8(run)
    assert_scores(got, want, magnitude, 3, dtype, fp8=fp8)


def test_keys_out_of_sight_never_leak(run):
    q, k, weights = dense_case(rows=3, keys=10, heads=2)
    k[[0, 1, 7, 8, 9]] = math.nan
    got = mqa_logits(q, k, None, weights, i32([2, 4, 5]), i32([7, 7, 5]), backend=run)
    assert got[0, 2:7].isfinite().all()
    assert got[1, 4:7].isfinite().all()
    outside = torch.ones(3, 10, dtype=torch.bool)
    outside[0, 2:7] = outside[1, 4:7] = False
    assert torch.equal(got == -math.inf, outside)


def test_nan_key_in_sight_gives_nan_for_that_key_only(run):
    q, k, weights = dense_case(rows=2, keys=9, heads=2)
    codes = k.to(torch.float8_e4m3fn)
    codes.view(torch.uint8)[4, 77] = 0xFF
    got = mqa_logits(q, codes, torch.ones(9), weights, i32([0, 0]), i32([9, 9]), backend=run)
    assert got.isnan().nonzero()[:, 1].tolist() == [4, 4]


def test_bounds_are_clamped_to_the_keys(run):
    q, k, weights = dense_case(rows=3, keys=4, heads=2)
    full = mqa_logits(q, k, None, weights, i32([0] * 3), i32([4] * 3), backend=run)
    starts, ends = i32([-5, 3, 2**31 - 1]), i32([2**31 - 1, -7, 4])
    got = mqa_logits(q, k, None, weights, starts, ends, backend=run)
    assert_close(got[0], full[0], rtol=1e-5)
    assert bool((got[1:] == -math.inf).all())


def test_out_is_written_whole_and_returned(run):
    q, k, weights = dense_case(rows=3, keys=5, heads=2)
    out = torch.full((3, 5), math.nan)
    arguments = (q, k, None, weights, i32([0, 0, 3]), i32([5, 0, 4]))
    got = mqa_logits(*arguments, out=out, backend=run)
    assert got is out
    assert_identical(out, mqa_logits(*arguments, backend=run))


@pytest.mark.parametrize(("rows", "keys"), [(0, 5), (3, 0), (0, 0)])
def test_dense_scores_of_nothing(run, rows, keys):
    q, k, weights = dense_case(rows=rows, keys=keys, heads=2)
    bounds = torch.zeros(rows, dtype=torch.int32), torch.full((rows,), keys, dtype=torch.int32)
    assert mqa_logits(q, k, None, weights, *bounds, backend=run).shape == (rows, keys)


def test_hadamard_on_both_sides_leaves_scores_alone(run):
    q, k, weights = dense_case(rows=5, keys=40, heads=4)
    bounds = i32([0] * 5), i32([40] * 5)
    plain = mqa_logits(q, k, None, weights, *bounds, backend=run)
    turned_q, turned_k = hadamard_transform(q), hadamard_transform(k)
    both = mqa_logits(turned_q, turned_k, None, weights, *bounds, backend=run)
    magnitude = torch.einsum("mh,mhd,nd->mn", weights.abs(), q.abs(), k.abs())
    # Rotating costs log2(D) rounded additions of each operand, at most sqrt(D) larger products.
    rotation = math.sqrt(D) * 2 * accumulation(7, torch.float32)
    assert_close(both, plain, atol=2 * score_bound(4) + rotation, scale=magnitude)
    one_side = mqa_logits(turned_q, k, None, weights, *bounds, backend=run)
    assert (one_side - plain).abs().max() > 0.1 * plain.abs().max()


def test_score_errors_name_the_argument():
    q, k, weights = dense_case(rows=2, keys=4, heads=3)
    bounds = i32([0, 0]), i32([4, 4])
    with pytest.raises(TypeError, match="mqa_logits: starts must be int32"):
        mqa_logits(q, k, None, weights, bounds[0].long(), bounds[1])
    with pytest.raises(ValueError, match="q must be of 64 channels"):
        mqa_logits(q, k[:, :64], None, weights, *bounds)
    with pytest.raises(ValueError, match="q_scales must be given"):
        mqa_logits(torch.zeros(2, 3, 64, dtype=torch.uint8), k, None, weights, *bounds)
    packed, scales = quantize_mxfp4(q)
    with pytest.raises(ValueError, match="q_scales must be uint8"):
        mqa_logits(packed, k, None, weights, *bounds, q_scales=scales[:1])
    with pytest.raises(TypeError, match="k_scale must be float32"):
        mqa_logits(q, k, torch.ones(4).double(), weights, *bounds)
    with pytest.raises(TypeError, match="out must be float32"):
        mqa_logits(q, k, None, weights, *bounds, out=torch.empty(2, 4, dtype=torch.float64))


@pytest.mark.parametrize("first", [0, 1, 4])
def test_fp8_keys_at_any_address(run, first):
    q, k, weights = dense_case(rows=3, keys=20, heads=4)
    (codes_q, codes_k, scale, weights), _, q64, k64 = coded(q, k, weights, "fp8")
    around = torch.full((20, D + 9), 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    around.view(torch.uint8)[:, first : first + D] = codes_k.view(torch.uint8)
    keys = around[:, first : first + D]
    got = mqa_logits(codes_q, keys, scale, weights, i32([0, 0, 2]), i32([20, 7, 20]), backend=run)
    for row, (start, end) in enumerate(((0, 20), (0, 7), (2, 20))):
        want, magnitude = score64(q64[row], weights[row], k64[start:end])
        assert_scores(got[row, start:end], want, magnitude, 4, fp8=multiplies_fp8(run))

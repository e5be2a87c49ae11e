"""Number formats: every code of the small ones, and rounding against exact arithmetic."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anymla.formats.e2m1 import decode_e2m1, encode_e2m1, pack_nibbles, unpack_nibbles
from anymla.formats.e4m3 import (
    decode_e4m3,
    decode_e4m3fnuz,
    encode_e4m3,
    encode_e4m3fnuz,
)
from anymla.formats.fp8_block import (
    dequantize_fp8_rows,
    dequantize_fp8_weight,
    quantize_fp8_rows,
    quantize_fp8_weight,
)
from anymla.formats.hadamard import hadamard_transform
from anymla.formats.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from anymla.formats.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from anymla.formats.ue8m0 import decode_ue8m0, encode_ue8m0, scale_exponent

CODES = torch.arange(256, dtype=torch.uint8)


def nearest_even(x: float, values: torch.Tensor, codes: torch.Tensor) -> int:
    """The code whose value is nearest to x, the even code on a tie, by exact comparison."""
    distance = (values - x).abs()
    best = codes[distance == distance.min()]
    even = best[best % 2 == 0]
    return int((even if len(even) else best)[0])


@pytest.mark.parametrize(
    ("decode", "native"),
    [(decode_e4m3, torch.float8_e4m3fn), (decode_e4m3fnuz, torch.float8_e4m3fnuz)],
)
def test_every_e4m3_code_decodes_like_torch(decode, native):
    want = CODES.view(native).float()
    got = decode(CODES)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(0.5), want.nan_to_num(0.5))
    finite = ~want.isnan()
    assert torch.equal(torch.signbit(got)[finite], torch.signbit(want)[finite])
    assert torch.equal(decode(CODES, torch.bfloat16).float().nan_to_num(0.5), want.nan_to_num(0.5))


@pytest.mark.parametrize(
    ("decode", "encode"), [(decode_e4m3, encode_e4m3), (decode_e4m3fnuz, encode_e4m3fnuz)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_e4m3_codes_survive_a_round_trip(decode, encode, dtype):
    values = decode(CODES, dtype)
    finite = ~values.isnan()
    assert torch.equal(encode(values[finite]), CODES[finite])


@pytest.mark.parametrize(
    ("decode", "encode", "top"),
    [(decode_e4m3, encode_e4m3, 448.0), (decode_e4m3fnuz, encode_e4m3fnuz, 240.0)],
)
def test_e4m3_rounds_every_tie_to_the_even_code_and_saturates(decode, encode, top):
    values = decode(CODES[:128], torch.float64)
    codes = CODES[:128][~values.isnan()]
    values = values[~values.isnan()]
    order = values.argsort()
    values, codes = values[order], codes[order]
    ties = (values[1:] + values[:-1]) / 2
    for nudge in (0.0, 1e-9, -1e-9):
        x = ties * (1 + nudge)
        want = torch.tensor([nearest_even(v, values, codes) for v in x.tolist()])
        assert torch.equal(encode(x).long(), want)
    x = torch.tensor([top, top + 8, 1e30, math.inf], dtype=torch.float64)
    assert decode(encode(x)).tolist() == [top] * 4
    assert decode(encode(-x)).tolist() == [-top] * 4


def test_e4m3_of_nan():
    nan = torch.tensor([math.nan])
    assert encode_e4m3(nan).item() == 0x7F
    assert encode_e4m3fnuz(nan).item() == 0x80


def test_fnuz_has_no_negative_zero_and_ocp_has():
    tiny = torch.tensor([-1e-9])
    assert encode_e4m3fnuz(tiny).item() == 0
    assert encode_e4m3(tiny).item() == 0x80


def test_decoders_refuse_other_dtypes():
    with pytest.raises(TypeError, match="codes must be uint8"):
        decode_e4m3(torch.zeros(1))
    with pytest.raises(TypeError, match="codes must be uint8"):
        decode_ue8m0(torch.zeros(1))


def test_every_ue8m0_code():
    values = decode_ue8m0(CODES, torch.float64)
    assert values[:255].tolist() == [math.ldexp(1.0, code - 127) for code in range(255)]
    assert values[255].isnan()
    assert torch.equal(encode_ue8m0(torch.arange(-127, 128)), CODES[:255])


@given(st.floats(1e-30, 1e30), st.sampled_from([(448.0, 1e-4), (6.0, 6 * 2.0**-126)]))
def test_scale_exponent_is_the_rounded_up_logarithm(amax, code):
    top, floor = code
    got = int(scale_exponent(torch.tensor([amax]), top, floor))
    ratio = float(torch.tensor(max(amax, floor)).float() * torch.tensor(1.0 / top).float())
    assert 2.0**got >= ratio
    assert 2.0 ** (got - 1) < ratio


def test_scale_exponent_at_exact_powers_of_two():
    powers = torch.arange(-20, 20)
    amax = torch.ldexp(torch.full((40,), 448.0), powers)
    assert torch.equal(scale_exponent(amax, 448.0, 1e-30), powers.int())


def test_e2m1_codes_and_ties():
    codes = torch.arange(16, dtype=torch.uint8)
    values = decode_e2m1(codes)
    assert values.tolist()[:8] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert torch.equal(encode_e2m1(values), codes)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert decode_e2m1(encode_e2m1(ties)).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert decode_e2m1(encode_e2m1(-ties)).tolist() == [0, -1, -1, -2, -2, -4, -4]
    assert decode_e2m1(encode_e2m1(torch.tensor([100.0, -math.inf]))).tolist() == [6, -6]


def test_nibbles_low_first():
    codes = torch.arange(16, dtype=torch.uint8)
    packed = pack_nibbles(codes)
    assert packed[0].item() == 0x10
    assert torch.equal(unpack_nibbles(packed), codes)


def test_mxfp4_error_is_half_a_step():
    x = torch.randn(7, 96)
    packed, scales = quantize_mxfp4(x)
    assert packed.shape == (7, 48)
    assert scales.shape == (7, 3)
    got = dequantize_mxfp4(packed, scales)
    # The widest gap between codes is 2 (4 to 6), so an error is at most one scale.
    step = decode_ue8m0(scales).repeat_interleave(32, -1)
    assert ((got - x).abs() <= step).all()
    again = quantize_mxfp4(got)
    assert torch.equal(dequantize_mxfp4(*again), got)


def test_nvfp4_round_trip():
    x = torch.randn(5, 64) * torch.exp2(torch.randint(-6, 6, (5, 64)).float())
    packed, block_scales, global_scale = quantize_nvfp4(x)
    assert block_scales.shape == (5, 4)
    got = dequantize_nvfp4(packed, block_scales, global_scale)
    step = (decode_e4m3(block_scales) * global_scale).repeat_interleave(16, -1)
    # Half the widest gap, plus what rounding the block scale to e4m3 (3 bits) can clip: 6 / 16.
    assert ((got - x).abs() <= step * (1 + 6 / 16)).all()
    zeros = quantize_nvfp4(torch.zeros(2, 32))
    assert dequantize_nvfp4(*zeros).abs().max() == 0


@pytest.mark.parametrize("shape", [(128, 128), (130, 257), (1, 1), (300, 64)])
@pytest.mark.parametrize("scale_format", ["ue8m0", "fp32"])
def test_fp8_weight_blocks(shape, scale_format):
    w = torch.randn(shape)
    codes, scales = quantize_fp8_weight(w, scale_format)
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    got = dequantize_fp8_weight(codes, scales)
    # Relative half step of 3 mantissa bits, or half the subnormal step of the block.
    amax = w.abs().max()
    assert ((got - w).abs() <= w.abs() / 16 + amax * 2 / 448 * 2.0**-10).all()


def test_fp8_rows_with_a_short_last_run():
    x = torch.randn(3, 200)
    codes, scales = quantize_fp8_rows(x)
    assert scales.shape == (3, 2)
    assert torch.equal(torch.frexp(scales).mantissa, torch.full((3, 2), 0.5))
    assert ((dequantize_fp8_rows(codes, scales) - x).abs() <= x.abs() / 16 + 1e-5).all()


def test_quantising_is_unbiased():
    """Rounded-down shares lie within 10 standard deviations of a half (binomial, n samples)."""
    x = torch.rand(1 << 16) + 1.0
    got = decode_e4m3(encode_e4m3(x))
    share = (got < x).float().mean().item()
    assert abs(share - 0.5) < 10 * 0.5 / math.sqrt(len(x))


@given(st.integers(0, 8), st.integers(0, 2**31 - 1))
def test_hadamard_is_its_own_inverse_and_keeps_dot_products(log_n, seed):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 3, 1 << log_n, generator=generator, dtype=torch.float64)
    hx, hy = hadamard_transform(x), hadamard_transform(y)
    torch.testing.assert_close(hadamard_transform(hx), x)
    torch.testing.assert_close((hx * hy).sum(-1), (x * y).sum(-1))


def test_hadamard_of_two():
    got = hadamard_transform(torch.tensor([1.0, 2.0], dtype=torch.float64))
    torch.testing.assert_close(got, torch.tensor([3.0, -1.0], dtype=torch.float64) / math.sqrt(2))
    with pytest.raises(ValueError, match="power of two, got 12"):
        hadamard_transform(torch.zeros(12))

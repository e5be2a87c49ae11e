from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from anymla.formats.fp8_block import quantize_fp8_weight
from anymla.ops.linear import (
    grouped_output_projection,
    grouped_output_projection_fp8,
    inverse_rope_fp8_quant,
)
from anymla.ops.norm_rope import rope
from anymla.testing.oracle.rounding import (
    decode_e4m3,
    decode_ue8m0,
    e4m3_values,
    round_to,
    scale_exponent,
)
from anymla.testing.tolerance import accumulation, assert_close, assert_identical, ulps

BACKENDS = ("reference", "torch")
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ROPE = 64


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def table(length: int) -> Tensor:
    """Float32 cosines, then sines, of angles that differ from row to row and pair to pair."""
    angle = torch.arange(length).double().unsqueeze(1) * torch.linspace(0.001, 1, ROPE // 2)
    return torch.cat((angle.cos(), angle.sin()), 1).float()


def turned_back(o: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """Heads with their last channels multiplied by exp(-i angle), pair by pair, in float64."""
    cos, sin = cos_sin[positions].double().unsqueeze(1).chunk(2, -1)
    out = o.double().clone()
    pairs = torch.view_as_complex(out[..., -ROPE:].contiguous().unflatten(-1, (-1, 2)))
    out[..., -ROPE:] = torch.view_as_real(pairs * torch.complex(cos, -sin)).flatten(-2)
    return out


def lengths(heads: Tensor) -> Tensor:
    """Magnitude that a rotated channel's error scales with: the length of its pair."""
    out = heads.abs()
    pairs = out[..., -ROPE:].unflatten(-1, (-1, 2))
    out[..., -ROPE:] = pairs.norm(dim=-1, keepdim=True).expand_as(pairs).flatten(-2)
    return out


def rotation_error(dtype: torch.dtype) -> float:
    """Relative to the pair: two products and a sum in float32 or wider, then rounded to o."""
    return accumulation(2, torch.promote_types(dtype, torch.float32)) + ulps(dtype, 0.5)


@given(
    seed=st.integers(0, 2**20),
    tokens=st.sampled_from([0, 1, 2, 7]),
    groups=st.sampled_from([1, 2, 3]),
    heads=st.sampled_from([1, 2, 5]),
    dim=st.sampled_from([64, 128, 512]),
    rank=st.sampled_from([1, 16, 96]),
    dtype=st.sampled_from(FLOATS),
    backend=st.sampled_from(BACKENDS),
)
def test_projection_by_groups(seed, tokens, groups, heads, dim, rank, dtype, backend):
    torch.manual_seed(seed)
    o = torch.randn(tokens, groups * heads, dim).to(dtype)
    positions = torch.randint(0, 50, (tokens,))
    wo_a = torch.randn(groups, rank, heads * dim).to(dtype)
    before = o.clone()
    out = grouped_output_projection(o, positions, table(50), wo_a, backend=backend)
    assert out.shape == (tokens, groups * rank)
    assert out.dtype == dtype
    assert torch.equal(o, before)
    grouped = turned_back(o, positions, table(50)).view(tokens, groups, heads * dim)
    want = torch.einsum("tgj,grj->tgr", grouped, wo_a.double()).flatten(1)
    magnitude = lengths(turned_back(o, positions, table(50))).view(grouped.shape)
    magnitude = torch.einsum("tgj,grj->tgr", magnitude, wo_a.double().abs()).flatten(1)
    wide = torch.promote_types(dtype, torch.float32)
    error = rotation_error(dtype) + accumulation(heads * dim, wide)
    assert_close(out, want, atol=error, rtol=ulps(dtype, 0.5), scale=magnitude)


@pytest.mark.parametrize("dtype", FLOATS)
def test_heads_are_rounded_once_between_rotation_and_product(backend, dtype):
    # A weight that picks channels shows the rotated heads as they enter the product.
    o = torch.randn(5, 4, 128).to(dtype)
    positions = torch.tensor([0, 1, 17, 40, 49])
    wo_a = torch.eye(256).to(dtype).expand(2, 256, 256).contiguous()
    out = grouped_output_projection(o, positions, table(50), wo_a, backend=backend)
    turned = rope(o, positions, table(50), inverse=True, backend="reference")
    error = ulps(dtype, 1) if dtype.itemsize == 2 else accumulation(2, dtype)
    assert_close(out, turned.flatten(1), atol=error, rtol=error, scale=4.0)
    untouched = out.view(5, 4, 128)[..., :-ROPE]
    assert torch.equal(untouched, o[..., :-ROPE])


def test_forward_rotation_and_its_inverse_cancel(backend):
    o = torch.randn(6, 2, 128, dtype=torch.float64)
    positions = torch.arange(6) * 7
    there = rope(o, positions, table(50), backend="reference")
    eye = torch.eye(256, dtype=torch.float64).unsqueeze(0)
    back = grouped_output_projection(there, positions, table(50), eye, backend=backend)
    # The table's float32 cosines and sines are off the unit circle by half a unit each.
    assert_close(back, o.flatten(1), atol=ulps(torch.float32, 2), scale=8.0)


@given(
    seed=st.integers(0, 2**20),
    tokens=st.sampled_from([0, 1, 6]),
    groups=st.sampled_from([1, 2]),
    dim=st.sampled_from([128, 512]),
    exponent=st.integers(-45, 40),
    rule=st.sampled_from([(128, 1e-10), (32, 1e-4), (64, 1e-4)]),
    dtype=st.sampled_from(FLOATS),
    backend=st.sampled_from(BACKENDS),
)
def test_quantised_heads(seed, tokens, groups, dim, exponent, rule, dtype, backend):
    torch.manual_seed(seed)
    if dtype == torch.float16:
        exponent = exponent % 16 - 10
    o = (torch.randn(tokens, 2 * groups, dim) * 2.0**exponent).to(dtype)
    positions = torch.randint(0, 50, (tokens,))
    block, floor = rule
    given_ = {} if block == 128 else {"quant_block": block, "amax_floor": floor}
    values, scales = inverse_rope_fp8_quant(
        o, positions, table(50), n_groups=groups, **given_, backend=backend
    )
    assert values.dtype == torch.float8_e4m3fn
    assert values.shape == (tokens, groups, 2 * dim)
    assert scales.shape == (tokens, groups, 2 * dim // block)
    exact = turned_back(o, positions, table(50)).view(tokens, groups, 2 * dim // block, block)
    amax = exact.abs().amax(-1).clamp(min=floor)
    want = torch.exp2(scale_exponent(amax, 448.0).double())
    # Rotated in float32, an amax that lies at a power of two may fall on its other side.
    ratio = amax / 448.0
    near = (torch.log2(ratio) - torch.log2(ratio).round()).abs() < 2.0**-20
    assert torch.equal(scales.double()[~near], want[~near])
    assert ((scales / want).log2().abs() <= 1).all()
    scale = scales.double().unsqueeze(-1)
    decoded = decode_e4m3(values.view(torch.uint8)).view(exact.shape) * scale
    # No other rounding precedes the codes: each is the nearest, up to the rotation's own error.
    slack = accumulation(2, torch.promote_types(dtype, torch.float32)) * 2
    slack = slack * exact.abs().amax(-1, keepdim=True)
    low = round_to((exact - slack) / scale, e4m3_values()) * scale
    high = round_to((exact + slack) / scale, e4m3_values()) * scale
    assert ((low <= decoded) & (decoded <= high)).all()


@pytest.mark.parametrize("scale_format", ["ue8m0", "fp32"])
@pytest.mark.parametrize("out_dtype", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_projection_of_quantised_heads(backend, scale_format, out_dtype, tokens):
    groups, rank, width = 2, 128, 256
    o = torch.randn(tokens, 2 * groups, 128).bfloat16()
    values, scales = inverse_rope_fp8_quant(
        o, torch.arange(tokens), table(50), n_groups=groups, backend=backend
    )
    parts = [
        quantize_fp8_weight(torch.randn(rank, width) * 2.0 ** (3 * g), scale_format)
        for g in range(groups)
    ]
    codes, weight_scales = (torch.stack(each) for each in zip(*parts, strict=True))
    out = grouped_output_projection_fp8(
        values, scales, codes, weight_scales, out_dtype=out_dtype, backend=backend
    )
    factor = decode_ue8m0(weight_scales) if scale_format == "ue8m0" else weight_scales.double()
    factor = factor.repeat_interleave(128, 1).repeat_interleave(128, 2)
    weight = decode_e4m3(codes) * factor
    heads = decode_e4m3(values.view(torch.uint8)) * scales.double().repeat_interleave(128, -1)
    want = torch.einsum("tgj,grj->tgr", heads, weight).flatten(1)
    magnitude = torch.einsum("tgj,grj->tgr", heads.abs(), weight.abs()).flatten(1)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[out_dtype]
    assert out.dtype == dtype
    wide = torch.promote_types(dtype, torch.float32)
    assert_close(out, want, atol=accumulation(width, wide), rtol=ulps(dtype, 0.5), scale=magnitude)


def test_groups_do_not_mix(backend):
    o = torch.randn(3, 4, 128)
    positions = torch.arange(3)
    wo_a = torch.randn(2, 16, 256)
    out = grouped_output_projection(o, positions, table(50), wo_a, backend=backend)
    changed = o.clone()
    changed[:, 2:] = torch.randn(3, 2, 128)
    other = grouped_output_projection(changed, positions, table(50), wo_a, backend=backend)
    assert_identical(other[:, :16], out[:, :16])
    assert not torch.equal(other[:, 16:], out[:, 16:])


HEADS, POSITIONS, TABLE = torch.zeros(2, 4, 128), torch.zeros(2, dtype=torch.int64), table(3)
FP8 = HEADS.view(2, 2, 256).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: grouped_output_projection(HEADS, POSITIONS, TABLE, torch.zeros(3, 5, 128)),
            ValueError,
            "grouped_output_projection: o must be .* multiple of 3 groups, got H=4",
        ),
        (
            lambda: grouped_output_projection(HEADS, POSITIONS, TABLE, torch.zeros(2, 5, 128)),
            ValueError,
            r"grouped_output_projection: wo_a must be \[G, rank, 256\]",
        ),
        (
            lambda: grouped_output_projection(
                HEADS, POSITIONS.int(), TABLE, torch.zeros(2, 5, 256)
            ),
            TypeError,
            r"grouped_output_projection: positions must be int64 \[T=2\]",
        ),
        (
            lambda: grouped_output_projection(
                HEADS, POSITIONS, TABLE, torch.zeros(2, 5, 256).half()
            ),
            TypeError,
            "grouped_output_projection: wo_a must be float32",
        ),
        (
            lambda: inverse_rope_fp8_quant(HEADS, POSITIONS, TABLE, n_groups=3),
            ValueError,
            "inverse_rope_fp8_quant: o must be .* multiple of 3 groups",
        ),
        (
            lambda: inverse_rope_fp8_quant(HEADS[..., :96], POSITIONS, TABLE, n_groups=2),
            ValueError,
            "inverse_rope_fp8_quant: o must be .* multiple of 128",
        ),
        (
            lambda: inverse_rope_fp8_quant(HEADS, POSITIONS, TABLE, n_groups=2, quant_block=0),
            ValueError,
            "inverse_rope_fp8_quant: quant_block must be >= 1, got 0",
        ),
        (
            lambda: inverse_rope_fp8_quant(HEADS, POSITIONS, TABLE, n_groups=2, amax_floor=0.0),
            ValueError,
            "inverse_rope_fp8_quant: amax_floor must be above 0, got 0.0",
        ),
        (
            lambda: grouped_output_projection_fp8(
                FP8,
                torch.ones(2, 2, 2),
                torch.zeros(2, 64, 256, dtype=torch.uint8),
                torch.ones(2, 1, 2),
            ),
            ValueError,
            "grouped_output_projection_fp8: wo_a must be .* whole 128 x 128 blocks",
        ),
        (
            lambda: grouped_output_projection_fp8(
                FP8,
                torch.ones(2, 2, 2),
                torch.zeros(2, 128, 256, dtype=torch.uint8),
                torch.ones(2, 1, 2),
                out_dtype="int8",
            ),
            ValueError,
            "grouped_output_projection_fp8: out_dtype must be bf16, fp32 or fp64, got 'int8'",
        ),
    ],
)
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()

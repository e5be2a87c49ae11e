"""Index queries: rotation, quantisation and the scale folded into the weights."""

import math

import pytest
import torch
from paged import ALL_BACKENDS, runnable, skip_float64, use_backend

from anymla.formats.e4m3 import decode_e4m3
from anymla.formats.hadamard import hadamard_transform
from anymla.formats.mxfp4 import quantize_mxfp4
from anymla.ops.indexer import indexer_q_rope_quant
from anymla.ops.registry import BackendUnavailable
from anymla.testing.tolerance import assert_close, assert_identical, ulps

D = 128


@pytest.fixture(params=ALL_BACKENDS)
def run(request, monkeypatch):
    return use_backend(request.param, monkeypatch)


def rope_table(length=300, width=64):
    angle = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
    return torch.cat((angle.cos(), angle.sin()), 1)


def rotated(q, positions, table):
    """q in float64, the last channels turned as complex numbers."""
    width = table.shape[1]
    tail = torch.view_as_complex(q[..., -width:].double().unflatten(-1, (-1, 2)).contiguous())
    cos, sin = table[positions].double().chunk(2, -1)
    turned = torch.view_as_real(tail * torch.complex(cos, sin)[:, None]).flatten(-2)
    return torch.cat((q[..., :-width].double(), turned), -1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_unquantised_query_is_rotated(run, dtype):
    skip_float64(run, dtype)
    q, weights = torch.randn(9, 3, D, dtype=dtype), torch.randn(9, 3, dtype=dtype)
    positions, table = torch.randint(0, 300, (9,)), rope_table()
    out, scales, scaled = indexer_q_rope_quant(
        q, weights, positions, table, softmax_scale=0.25, head_scale=0.5, quant="none", backend=run
    )
    assert out.dtype == dtype
    assert scales.shape == (0,)
    assert scaled.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(scaled, weights.to(scaled.dtype) * 0.125)
    # One rounding, after two products and a sum in at least float32 (bounded by twice the largest
    # channel of a pair).
    tolerance = ulps(dtype, 0.5) + ulps(scaled.dtype, 2)
    assert_close(out, rotated(q, positions, table), atol=tolerance, scale=2 * q.abs().max())


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_query_folds_its_scale_into_the_weights(run, hadamard, dtype):
    tokens, heads = 33, 5
    q = torch.randn(tokens, heads, D) * torch.logspace(-6, 3, tokens)[:, None, None]
    q[3] = 0
    q, weights = q.to(dtype), torch.randn(tokens, heads).bfloat16()
    positions, table = torch.randint(0, 300, (tokens,)), rope_table()
    codes, scales, scaled = indexer_q_rope_quant(
        q,
        weights,
        positions,
        table,
        softmax_scale=D**-0.5,
        head_scale=heads**-0.5,
        quant="fp8",
        hadamard=hadamard,
        backend=run,
    )
    plain, _, unit = indexer_q_rope_quant(
        q,
        weights,
        positions,
        table,
        softmax_scale=D**-0.5,
        head_scale=heads**-0.5,
        quant="none",
        backend=run,
    )
    rounded = plain.bfloat16()
    rounded = (hadamard_transform(rounded) if hadamard else rounded).double()
    # The scale is the smallest power of two that brings amax to 448 or below, amax floored at 1e-4.
    amax = rounded.abs().amax(-1).clamp(min=1e-4)
    scale = 2.0 ** torch.tensor([[math.ceil(math.log2(a / 448)) for a in row] for row in amax])
    assert codes.dtype == torch.float8_e4m3fn
    assert scales.shape == (0,)
    assert torch.equal(scaled, unit * scale.float())
    values = decode_e4m3(codes.view(torch.uint8), torch.float64) * scale.unsqueeze(-1)
    # Round to nearest: half a unit of a 3-bit mantissa, or half the smallest subnormal, 2^-9.
    half_step = torch.maximum(rounded.abs() / 16, scale.unsqueeze(-1) * 2.0**-10)
    assert bool(((values - rounded).abs() <= half_step).all())


def test_mxfp4_query(run):
    q, weights = torch.randn(7, 3, D).bfloat16(), torch.randn(7, 3)
    positions, table = torch.randint(0, 300, (7,)), rope_table()
    arguments = (q, weights, positions, table)
    packed, scales, scaled = indexer_q_rope_quant(
        *arguments, softmax_scale=2.0, head_scale=0.5, quant="mxfp4", hadamard=True, backend=run
    )
    plain, _, _ = indexer_q_rope_quant(
        *arguments, softmax_scale=2.0, head_scale=0.5, quant="none", backend=run
    )
    want = quantize_mxfp4(hadamard_transform(plain))
    assert_identical(packed, want[0])
    assert_identical(scales, want[1])
    assert torch.equal(scaled, weights)


@pytest.mark.parametrize("quant", ["fp8", "mxfp4", "none"])
@pytest.mark.parametrize("hadamard", [False, True])
def test_query_backends_agree_bit_for_bit(quant, hadamard, monkeypatch):
    q, weights = torch.randn(40, 4, D).bfloat16(), torch.randn(40, 4).bfloat16()
    arguments = (q, weights, torch.randint(0, 300, (40,)), rope_table())
    results = [
        indexer_q_rope_quant(
            *arguments,
            softmax_scale=0.1,
            head_scale=0.3,
            quant=quant,
            hadamard=hadamard,
            backend=use_backend(backend, monkeypatch),
        )
        for backend in runnable(ALL_BACKENDS)
    ]
    for result in results[1:]:
        for one, other in zip(results[0], result, strict=True):
            if one.dtype == torch.float8_e4m3fn:
                one, other = one.view(torch.uint8), other.view(torch.uint8)
            assert_identical(one, other)


def test_triton_refuses_what_it_would_compute_wrongly():
    odd, weights = torch.randn(2, 3, 9), torch.randn(2, 3)
    scales = {"softmax_scale": 1.0, "head_scale": 1.0, "quant": "none"}
    positions, table = torch.zeros(2, dtype=torch.int64), rope_table(4, 8)
    support = indexer_q_rope_quant.supports(
        odd, weights, positions, table, backend="triton", **scales
    )
    assert not support
    assert "even number of channels" in support.reason
    with pytest.raises(BackendUnavailable, match="float64"):
        indexer_q_rope_quant(
            odd[..., 1:].double(), weights, positions, table, backend="triton", **scales
        )


@pytest.mark.parametrize("quant", ["fp8", "mxfp4", "none"])
def test_no_query_tokens(run, quant):
    out, _, scaled = indexer_q_rope_quant(
        torch.zeros(0, 4, D),
        torch.zeros(0, 4),
        torch.zeros(0, dtype=torch.int64),
        rope_table(),
        softmax_scale=1.0,
        head_scale=1.0,
        quant=quant,
        backend=run,
    )
    assert len(out) == len(scaled) == 0


def test_query_errors_name_the_argument():
    q, weights = torch.randn(2, 3, D), torch.randn(2, 3)
    positions, table = torch.zeros(2, dtype=torch.int64), rope_table()
    scales = {"softmax_scale": 1.0, "head_scale": 1.0}
    call = indexer_q_rope_quant
    with pytest.raises(TypeError, match="indexer_q_rope_quant: positions must be int64"):
        call(q, weights, positions.int(), table, **scales)
    with pytest.raises(ValueError, match=r"weights must be .*H=3"):
        call(q, weights[:, :2], positions, table, **scales)
    with pytest.raises(ValueError, match="quant must be one of fp8, mxfp4, none, got int8"):
        call(q, weights, positions, table, **scales, quant="int8")
    with pytest.raises(ValueError, match="cos_sin_cache must be"):
        call(q, weights, positions, table[:, :63], **scales)
    with pytest.raises(ValueError, match="multiple of 32 channels"):
        call(q[..., :72], weights, positions, table, **scales, quant="mxfp4")
    with pytest.raises(ValueError, match="Hadamard"):
        call(q[..., :96], weights, positions, table, **scales, hadamard=True)

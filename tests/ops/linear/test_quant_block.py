"""Products of weights and activations in blocks of 32, as DeepSeek-V4.1 stores them."""

import pytest
import torch

from anymla.formats.fp8_block import (
    dequantize_fp8_rows,
    dequantize_fp8_weight,
    quantize_fp8_rows,
    quantize_fp8_weight,
)
from anymla.formats.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from anymla.ops.linear import fp8_block_linear, mxfp4_linear
from anymla.ops.moe import experts
from anymla.ops.registry import BackendUnavailable

BLOCK = 32


def _randn(*shape, seed=0):
    # Channels of unlike size, so that it matters which of them share a scale.
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values * torch.exp2(torch.arange(shape[-1]) // BLOCK % 5 * 3.0)


def _rounded(x):
    return dequantize_fp8_rows(*quantize_fp8_rows(x, BLOCK), block=BLOCK)


@pytest.mark.parametrize("shape", [(96, 160), (70, 100), (128, 128)])
def test_weights_come_back_block_by_block(shape):
    weight = _randn(*shape)
    codes, scales = quantize_fp8_weight(weight, block=BLOCK)
    assert scales.shape == (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        decoded = dequantize_fp8_weight(codes, scales, dtype, BLOCK).float()
        for row in range(0, shape[0], BLOCK):
            for column in range(0, shape[1], BLOCK):
                part = slice(row, row + BLOCK), slice(column, column + BLOCK)
                error = (decoded[part] - weight[part]).abs().max()
                assert error <= weight[part].abs().max() / 8


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("quantises", [False, True])
@pytest.mark.parametrize("tokens", [1, 7])
def test_fp8_product(backend, quantises, tokens):
    x = _randn(tokens, 160, seed=1)
    codes, scales = quantize_fp8_weight(_randn(70, 160), block=BLOCK)
    out = fp8_block_linear(
        x, codes, scales, quantize_activations=quantises, quant_block=BLOCK, backend=backend
    )
    exact = (_rounded(x) if quantises else x).double()
    want = exact @ dequantize_fp8_weight(codes, scales, torch.float64, BLOCK).T
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_mxfp4_product(backend):
    x = _randn(5, 160, seed=1)
    packed, scales = quantize_mxfp4(_randn(64, 160))
    out = mxfp4_linear(
        x, packed, scales, quantize_activations=True, quant_block=BLOCK, backend=backend
    )
    want = _rounded(x).double() @ dequantize_mxfp4(packed, scales, torch.float64).T
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("weight_format", ["fp8", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_experts(weight_format, tokens):
    quantise = quantize_mxfp4
    if weight_format == "fp8":

        def quantise(weight):
            return quantize_fp8_weight(weight, block=BLOCK)

    shapes = {"1": (64, 96), "3": (64, 96), "2": (96, 64)}
    given = {}
    for name, shape in shapes.items():
        pairs = [quantise(_randn(*shape, seed=10 + e) / 100) for e in range(4)]
        given[f"w{name}"], given[f"s{name}"] = ([pair[i] for pair in pairs] for i in (0, 1))
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, 4, generator=generator).argsort(1)[:, :2].int()
    call = given | {
        "x": _randn(tokens, 96, seed=2) / 100, "ids": ids, "weights": torch.rand(tokens, 2),
        "weight_format": weight_format, "swiglu_limit": 10.0, "quantize_activations": True,
    }  # fmt: skip
    one, other = (experts(**call, quant_block=BLOCK, backend=b) for b in ("reference", "torch"))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-2 * float(one.abs().max()))


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_large_channel_hides_those_of_its_block_alone(backend):
    x = torch.ones(2, 128)
    x[:, 3] = 2.0**24
    weight = torch.ones(32, 128)
    weight[:, 3] = 0
    packed, scales = quantize_mxfp4(weight)
    for block, left in ((128, 0.0), (BLOCK, 96.0)):
        out = mxfp4_linear(
            x, packed, scales, quantize_activations=True, quant_block=block, backend=backend
        )
        assert out.tolist() == [[left] * 32] * 2


def test_kernels_that_know_blocks_of_128_alone_say_so():
    x = torch.randn(2, 128)
    codes, scales = quantize_fp8_weight(torch.randn(128, 128), block=BLOCK)
    reason = "scales of blocks of 128, got 32"
    for backend in ("triton", "gluon_sm90", "vendor"):
        found = fp8_block_linear.supports(x, codes, scales, quant_block=BLOCK, backend=backend)
        assert not found
        assert reason in found.reason
    with pytest.raises(BackendUnavailable, match=reason):
        fp8_block_linear(x, codes, scales, quant_block=BLOCK, backend="triton")
    with pytest.raises(ValueError, match=r"fp8_block_linear: scale must be \[1, 1\]"):
        fp8_block_linear(x, codes, scales)

"""Products that quantise their activations themselves, against those that read codes."""

import pytest
import torch

from anymla.formats.fp8_block import quantize_fp8_weight
from anymla.formats.mxfp4 import quantize_mxfp4
from anymla.ops.linear import fp8_block_linear, mxfp4_linear
from anymla.ops.moe import experts

pytest.importorskip("triton")
from anymla.ops.linear import triton_product

QUANTIZERS = {"fp8": quantize_fp8_weight, "mxfp4": quantize_mxfp4}
LINEAR = {"fp8": fp8_block_linear, "mxfp4": mxfp4_linear}


def _both(monkeypatch, call):
    results = []
    for inside in (False, True):
        monkeypatch.setattr(triton_product, "QUANTIZE_INSIDE", inside)
        results.append(call())
    return results


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("weight_format", ["fp8", "mxfp4"])
@pytest.mark.parametrize("width", [192, 1152])
def test_linear_layers_have_the_same_bits(monkeypatch, tokens, weight_format, width):
    """Also where the last run is short, and where K is split."""
    x = (torch.randn(tokens, width) * torch.randn(tokens, 1).exp2()).bfloat16()
    x[0, :128] = 0
    stored = QUANTIZERS[weight_format](torch.randn(40, width))
    apart, inside = _both(
        monkeypatch,
        lambda: LINEAR[weight_format](x, *stored, quantize_activations=True, backend="triton"),
    )
    assert torch.equal(apart, inside)
    assert apart.abs().sum() > 0


@pytest.mark.parametrize("weight_format", ["fp8", "mxfp4"])
def test_experts_have_the_same_bits(monkeypatch, weight_format):
    hidden, inner, count = 256, 160, 3
    shapes = [(inner, hidden), (inner, hidden), (hidden, inner)]
    stored = [
        [QUANTIZERS[weight_format](torch.randn(shape)) for _ in range(count)] for shape in shapes
    ]
    lists = [[each[part] for each in group] for part in (0, 1) for group in stored]
    x = torch.randn(4, hidden).bfloat16()
    ids = torch.tensor([[0, 2], [1, 0], [0, 1], [2, 1]], dtype=torch.int32)
    weights = torch.rand(4, 2)
    apart, inside = _both(
        monkeypatch,
        lambda: experts(
            x,
            ids,
            weights,
            *lists,
            weight_format=weight_format,
            swiglu_limit=10.0,
            quantize_activations=True,
            backend="triton",
        ),
    )
    assert torch.equal(apart, inside)
    assert apart.abs().sum() > 0

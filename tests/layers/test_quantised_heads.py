"""The output projection with quantised heads against the one without."""

import pytest
import torch

from anymla.formats.fp8_block import quantize_fp8_weight
from anymla.layers.linear import Linear, PackedWeight
from anymla.layers.output_projection import OutputProjection
from anymla.ops.linear import inverse_rope_fp8_quant
from anymla.testing.tolerance import relative_l2, ulps

TOKENS, HEADS, DIM, GROUPS, RANK, HIDDEN = 5, 4, 512, 2, 128, 64


def _projections(dtype):
    wo_a = torch.randn(GROUPS * RANK, HEADS // GROUPS * DIM) / 32
    wo_b = (torch.randn(HIDDEN, GROUPS * RANK) / 16).to(dtype)
    packed = PackedWeight("fp8", *quantize_fp8_weight(wo_a))
    last = Linear(PackedWeight("plain", wo_b))
    return [
        OutputProjection(wo_a=packed, wo_b=last, groups=GROUPS, quantize_heads=quantize)
        for quantize in (False, True)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantised_heads_move_the_output_by_their_rounding(dtype):
    """Half an ulp of e4m3 in each of 1024 x 128 random terms, which add up like a random walk."""
    plain, quantised = _projections(dtype)
    o = torch.randn(TOKENS, HEADS, DIM).to(dtype)
    positions = torch.arange(TOKENS) * 97
    table = torch.randn(500, 64)
    want = plain(o, positions, table).double()
    codes = inverse_rope_fp8_quant(o, positions, table, n_groups=GROUPS)
    got = quantised.of_quantized(*codes, dtype).double()
    assert got.shape == want.shape == (TOKENS, HIDDEN)
    most = ulps(torch.float8_e4m3fn, 0.5)
    # At least a tenth of it, or nothing was quantised.
    assert most / 10 < relative_l2(got, want) < most

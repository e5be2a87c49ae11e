from __future__ import annotations

import math

import pytest
import torch
from norm_rope_float64 import DEEPSEEK_YARN

from anymla.ops.norm_rope import YarnScaling, cos_sin_table, inv_freq
from anymla.testing.tolerance import assert_close, ulps


def test_compressed_frequencies_of_deepseek():
    freqs = inv_freq(64, 160000.0, DEEPSEEK_YARN).double()
    golden = {
        0: 1.0,
        15: 3.635538584e-03,
        16: 2.265625e-03,
        20: 2.969777783e-04,
        25: 5.372312671e-06,
        31: 5.680529037e-07,
    }
    for pair, value in golden.items():
        # Four roundings: the power, its reciprocal, the blend's product and sum.
        assert math.isclose(float(freqs[pair]), value, rel_tol=ulps(torch.float32, 2))


def test_frequencies_by_the_formula():
    plain = 160000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    bound = ulps(torch.float32, 2)
    assert_close(inv_freq(64, 160000.0), plain, rtol=bound)
    # Pairs 0..15 rotate often and stay, 25..31 rotate less than once and slow down 16 times, a ramp
    # of ten steps lies between.
    kept = (1 - (torch.arange(32, dtype=torch.float64) - 15) / 10).clamp(0, 1)
    yarn = plain * (kept + (1 - kept) / 16)
    assert_close(inv_freq(64, 160000.0, DEEPSEEK_YARN), yarn, rtol=2 * bound)
    assert torch.equal(inv_freq(64, 160000.0, DEEPSEEK_YARN)[:16], inv_freq(64, 160000.0)[:16])
    assert torch.equal(inv_freq(64, 160000.0, DEEPSEEK_YARN)[25:], inv_freq(64, 160000.0)[25:] / 16)


def test_a_ramp_without_width():
    """No pair rotates once in 3 positions, so both ends clamp to pair 0: no division by zero."""
    freqs = inv_freq(8, 10000.0, YarnScaling(factor=8.0, original_max_position_embeddings=3))
    assert torch.equal(freqs, inv_freq(8, 10000.0) / torch.tensor([1, 8, 8, 8]))


@pytest.mark.parametrize("position", [0, 1, 127, 2048, 65536, 200_000, 1_048_575])
@pytest.mark.parametrize(("theta", "yarn"), [(10000.0, None), (160000.0, DEEPSEEK_YARN)])
def test_table_at_a_position(position, theta, yarn):
    freqs = inv_freq(64, theta, yarn)
    row = cos_sin_table(freqs, position, position + 1)
    # The angle is a float32 product by definition; only its cosine and sine are approximate.
    angle = (torch.tensor(float(position)) * freqs).double()
    want = torch.cat((angle.cos(), angle.sin())).unsqueeze(0)
    assert row.dtype == torch.float32
    assert_close(row, want, atol=ulps(torch.float32, 1))


def test_the_two_tables_differ():
    """Layers that compress rotate by another base than layers that do not."""
    plain = cos_sin_table(inv_freq(64, 10000.0), 127, 128)
    compressed = cos_sin_table(inv_freq(64, 160000.0, DEEPSEEK_YARN), 127, 128)
    assert (plain - compressed).abs().max() > 0.5


def test_a_table_is_the_same_in_pieces():
    freqs = inv_freq(64, 10000.0)
    whole = cos_sin_table(freqs, 0, 300)
    pieces = [cos_sin_table(freqs, *span) for span in ((0, 1), (1, 130), (130, 130), (130, 300))]
    assert torch.equal(torch.cat(pieces), whole)
    assert cos_sin_table(freqs, 7, 7).shape == (0, 64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: inv_freq(7, 10000.0), "rope_dim must be even and positive, got 7"),
        (lambda: inv_freq(0, 10000.0), "rope_dim must be even and positive, got 0"),
        (lambda: inv_freq(64, 1.0), "theta must be above 1, got 1.0"),
        (lambda: cos_sin_table(torch.ones(2), 5, 4), "0 <= start <= stop, got 5 and 4"),
        (lambda: cos_sin_table(torch.ones(2), -1, 4), "0 <= start <= stop, got -1 and 4"),
    ],
)
def test_tables_name_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()

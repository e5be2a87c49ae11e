"""Rotary tables, however they have grown."""

import itertools
import math

import pytest
import torch

from anymla.layers.rope_table import RopeTable
from anymla.ops.norm_rope.rope_tables import YarnScaling

CPU = torch.device("cpu")
LENGTHS = {
    "one by one over the first growth": [1, 1023, 1024, 1025, 1026, 2048, 2049],
    "a long prompt at once": [70_000],
    "a prompt, and a long one behind it": [300, 2048, 70_000, 70_001, 140_001],
    "shorter again": [5000, 10, 2048],
}


@pytest.mark.parametrize("yarn", [None, YarnScaling(16.0, 65536)], ids=["plain", "YaRN"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_a_table_that_has_grown_is_that_of_its_positions(lengths, yarn):
    """Against angles in float64, of float32 products of position and frequency."""
    table = RopeTable(64, 160_000.0, yarn, CPU)
    for length in lengths:
        found = table.table_for(length)
        assert len(found) >= length
        assert found.dtype == torch.float32
        places = {0, 1, length // 2, length - 1, len(found) - 1}
        places |= {place for place in (1023, 1024, 1025, 2047, 2048, 65_536) if place < length}
        for position, pair in itertools.product(sorted(places), (0, 1, 13, 20, 31)):
            angle = float(torch.tensor(float(position)) * table.inv_freq[pair])
            assert found[position, pair].item() == pytest.approx(math.cos(angle), abs=1e-6)
            assert found[position, 32 + pair].item() == pytest.approx(math.sin(angle), abs=1e-6)


def test_rows_that_are_there_are_not_computed_again(monkeypatch):
    table = RopeTable(64, 10_000.0, None, CPU)
    first = table.table_for(600)
    assert len(first) == 1024
    assert table.table_for(1024) is first
    grown = table.table_for(1025)
    assert len(grown) == 2048
    assert torch.equal(grown[:1024], first)

"""The sweep over tiles and splits of the portable decode kernel."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

from anymla.bench.cpu_clock import CpuClock
from anymla.ops.attention.decode_config import Tile, choose_tile
from anymla.ops.device import TARGETS, has_triton
from lab import decode_tiles
from lab.page.rows import load_rows

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("name", ["sm_80", "sm_86", "sm_89", "sm_120"])
def test_what_is_chosen_is_among_what_is_timed(name):
    target = TARGETS[name]
    known = {dataclasses.replace(tile, per_sm=1) for tile in decode_tiles.tiles(target)}
    for heads, copied in itertools.product((8, 16, 32, 64, 128), (False, True)):
        tile = choose_tile(heads, 640, 8, "float16", target, copied=copied)
        assert tile.copied == copied
        assert dataclasses.replace(tile, per_sm=1) in known


def test_shapes_are_those_of_the_seed():
    assert list(decode_tiles.shapes(3)) == list(decode_tiles.shapes(3))
    assert list(decode_tiles.shapes(3)) != list(decode_tiles.shapes(4))
    assert list(decode_tiles.shapes(3, 0)) == decode_tiles.SHAPES


def test_recorded_shapes_are_drawn_again():
    drawn = {*decode_tiles.shapes(7), *decode_tiles.COPIED_SHAPES}
    for row in load_rows(RESULTS):
        if row.get("part") == "decode tile":
            assert (row["heads"], row["tokens"], row["slots"]) in drawn


@pytest.mark.skipif(not has_triton(), reason="triton is an extra")
def test_a_call_is_timed_in_its_tile():
    tile = Tile(16, 32, 4, ahead=True, words=True)
    made = decode_tiles.calls((2, 1, 40), torch.device("cpu"), pages=8)[:1]
    assert decode_tiles.timed(made, tile, 2, CpuClock()) > 0

"""The sweep over tiles and splits of the portable decode kernel."""

import pytest

from anymla.bench.cpu_clock import CpuClock
from anymla.ops.attention.decode_config import Tile, choose_tile
from anymla.ops.device import TARGETS, has_triton
from lab import decode_tiles


@pytest.mark.parametrize("name", ["sm_80", "sm_86", "sm_89", "sm_120"])
def test_what_is_chosen_is_among_what_is_timed(name):
    target = TARGETS[name]
    known = {
        (tile.heads, tile.keys, tile.warps, tile.ahead, tile.words)
        for tile in decode_tiles.tiles(target)
    }
    for heads in (8, 16, 32, 64, 128):
        tile = choose_tile(heads, 640, 8, "float16", target)
        assert (tile.heads, tile.keys, tile.warps, tile.ahead, tile.words) in known


def test_shapes_are_those_of_the_seed():
    assert list(decode_tiles.shapes(3)) == list(decode_tiles.shapes(3))
    assert list(decode_tiles.shapes(3)) != list(decode_tiles.shapes(4))
    assert list(decode_tiles.shapes(3, 0)) == decode_tiles.SHAPES


@pytest.mark.skipif(not has_triton(), reason="triton is an extra")
def test_a_call_is_timed_in_its_tile():
    tile = Tile(16, 32, False, 4, ahead=True, words=True)
    assert decode_tiles.timed((2, 1, 40), tile, 2, CpuClock(), pages=8) > 0

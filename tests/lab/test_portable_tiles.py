"""The sweep over tiles of prefill attention and hyper-connections of older targets."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

from anymla.bench.cpu_clock import CpuClock
from anymla.ops.attention.decode_config import choose_tile
from anymla.ops.device import TARGETS, has_triton
from anymla.ops.hyper_connection.config import choose_mix_config
from anymla.ops.indexer.config import choose_score_config

if not has_triton():
    pytest.skip("triton is not installed", allow_module_level=True)

from lab import portable_tiles


@pytest.mark.parametrize("name", ["sm_80", "sm_86", "sm_89"])
def test_what_is_chosen_is_among_what_is_timed(name: str) -> None:
    target = TARGETS[name]
    for heads in (8, 16, 64):
        tile = choose_tile(heads, 640, 1024, "bfloat16", target)
        assert str((tile.heads, tile.keys, tile.warps)) in portable_tiles.prefill_tiles(heads)
    for tokens, d in portable_tiles.STREAMS:
        chosen = choose_mix_config(tokens, d, torch.bfloat16, target)
        known = portable_tiles.stream_tiles(tokens, d, target)
        assert str(dataclasses.astuple(chosen)) in known
    math = "e4m3" if target.dot_e4m3 else "fp16"
    for shape in portable_tiles.SELECTIONS:
        keys = shape.rows * shape.keys
        tile = choose_score_config(1, 64, 128, math, target, paged_keys=keys)
        sizes = tile.keys, tile.warps, tile.stages
        assert str(sizes) in portable_tiles.score_tiles(target)


def test_tiles_give_the_same_streams_and_the_fastest_is_named() -> None:
    torch.manual_seed(0)
    made = portable_tiles.stream_calls(3, 64, torch.device("cpu"))[:1]
    tiles = portable_tiles.stream_tiles(3, 64, TARGETS["sm_80"])
    some = {name: tiles[name] for name in ("(16, 16, 2, 4, False)", "(16, 32, 1, 4, False)")}
    with mock.patch.object(portable_tiles, "_REPETITIONS", 1):
        row = portable_tiles.searched(made, some, CpuClock())
    assert set(row["us_by_tile"]) == set(some)
    assert row["us_best"] == min(row["us_by_tile"].values()) == row["us_by_tile"][row["tile"]]
    assert row["difference"] < 1e-3

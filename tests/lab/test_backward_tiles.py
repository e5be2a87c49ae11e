"""The tiles of gradients can be drawn, checked and timed where there is no GPU."""

import pytest
import torch

from anymla.bench.cpu_clock import CpuClock
from anymla.ops.attention.prefill_backward_config import choose_config
from anymla.ops.device import TARGETS, has_triton
from lab import backward_tiles


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_the_chosen_tile_is_the_first(target):
    chosen = choose_config(64, torch.bfloat16, target)
    drawn = list(backward_tiles.tiles(chosen))
    assert drawn[0] == chosen
    assert len({*drawn}) == len(drawn)


def test_small_gradients_are_checked_and_timed(monkeypatch):
    if not has_triton():
        pytest.skip("needs Triton")
    monkeypatch.setattr(backward_tiles, "ENTRIES", 40)
    monkeypatch.setattr(backward_tiles, "WINDOW", 8)
    shape, cpu = backward_tiles.Shape(2, 9, tokens=4), torch.device("cpu")
    lines = backward_tiles.checked(cpu, shape, channels=32)
    assert [line.rpartition(" ")[2] for line in lines] == ["alike", "alike"]
    rows = list(backward_tiles.measured(cpu, CpuClock(), (shape,), channels=32, seconds=0.5))
    assert rows[0]["chosen"]
    assert rows[0]["us"] > 0

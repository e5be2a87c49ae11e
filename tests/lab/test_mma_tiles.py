"""Tiles of warps that share K are the same products, and those that are chosen are timed too."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from anymla.bench.cpu_clock import CpuClock
from anymla.bench.random_weights import random_experts
from anymla.ops.device import TARGETS, has_triton
from anymla.ops.moe.config import choose_config
from anymla.ops.moe.shapes import ExpertsShape

if not has_triton():
    pytest.skip("triton is not installed", allow_module_level=True)

from anymla.ops.moe import triton_launch
from anymla.testing.tolerance import relative_l2
from lab import mma_tiles

TINY = ExpertsShape(3, 2, 4, 256, 512)


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89"])
@pytest.mark.parametrize("label", mma_tiles.EXPERTS)
def test_chosen_tiles_are_among_those_that_are_timed(label: str, target: str) -> None:
    for tokens in mma_tiles.TOKENS:
        shape = dataclasses.replace(mma_tiles.EXPERTS[label], tokens=tokens)
        if shape.pairs_per_expert <= 12:
            chosen = choose_config(shape, mma_tiles._FORMATS, TARGETS[target])
            assert dataclasses.replace(chosen, down=None) in {
                dataclasses.replace(each, down=None)
                for each in mma_tiles.up_configs(shape).values()
            }


def test_tiles_multiply_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weights = random_experts(TINY.experts, TINY.d, TINY.inner)
    (call, *_), visited = mma_tiles.expert_calls(TINY, weights, CpuClock())
    assert 2 <= visited <= 4
    want = mma_tiles.by_torch(call)
    for tile in ((16, 4, 3), (64, 2, 3)):
        config = mma_tiles.expert_config(TINY, tile, tile, 8)
        monkeypatch.setattr(triton_launch, "choose_config", lambda *_, config=config: config)
        assert relative_l2(call(), want) < 1e-3


def test_splits_of_many_tokens_are_whole_blocks() -> None:
    for n, k in mma_tiles.PRODUCTS:
        for tile in mma_tiles._MANY_TILES:
            split = mma_tiles.many_split(mma_tiles.GemmShape(128, n, k), tile, 512)
            assert split % 128 == 0
            assert 0 < split <= k

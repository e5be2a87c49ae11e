"""V4's shapes are the published ones, and ``step_tokens`` take every config that any step does."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import pytest
import torch

from anymla.ops.device import TARGETS, Target
from anymla.ops.moe.config import (
    choose_align_config,
    choose_config,
    choose_router_config,
    choose_sm90_config,
    choose_w4a8_config,
)
from anymla.ops.moe.shapes import (
    FLASH_ROUTER,
    MODELS,
    PRO_ROUTER,
    RANKS,
    ROUTER_TOKENS,
    ExpertFormats,
    ExpertsShape,
    step_tokens,
)
from anymla.runtime.bucket import request_counts
from anymla.testing.published import FLASH, PRO

STEPS = range(1, 4200)


def test_sizes_are_the_published_ones() -> None:
    routers = (FLASH_ROUTER, PRO_ROUTER)
    for sized, router, published in zip(MODELS.values(), routers, (FLASH, PRO), strict=True):
        shape = sized(1)
        assert router == (shape.experts, shape.d)
        assert shape.experts == published["n_routed_experts"]
        assert shape.experts_per_token == published["num_experts_per_tok"]
        assert (shape.inner, shape.d) == (
            published["moe_intermediate_size"],
            published["hidden_size"],
        )


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("model", MODELS)
def test_steps_take_every_config_on_hopper(model: str, ranks: int) -> None:
    def configs(steps: Iterable[int]) -> set[object]:
        found: set[object] = set()
        for shape in (MODELS[model](tokens, count) for tokens in steps):
            tiles = choose_sm90_config(shape)
            if tiles is not None:
                found.add((tiles, choose_align_config(shape.pairs, count, tiles[0].block_m)))
        return found

    count = MODELS[model](1).experts // ranks
    assert configs(STEPS) == configs(step_tokens(MODELS[model], count))


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90", "gfx942", "gfx1151"])
@pytest.mark.parametrize("model", MODELS)
def test_built_steps_take_every_config_of_triton(model: str, target: str) -> None:
    sized, whole = MODELS[model], MODELS[model](1)

    def configs(
        count: int, steps: Iterable[int], formats: ExpertFormats, parts: int = 1
    ) -> set[object]:
        shapes = (sized(tokens, count) for tokens in steps)
        shares = (dataclasses.replace(each, inner=each.inner // parts) for each in shapes)
        return {choose_config(each, formats, TARGETS[target]) for each in shares}

    fewest = whole.experts // RANKS[-1]
    # Ranks that have some channels of every expert, as builds have them.
    parts = [ranks for ranks in RANKS[1:] if whole.inner % (ranks * 256) == 0]
    for x, quantized in ((torch.bfloat16, True), (torch.float32, False)):
        formats = ExpertFormats(x, "mxfp4", torch.uint8, quantized)
        taken = configs(fewest, step_tokens(sized, fewest), formats)
        for part in parts:
            taken |= configs(whole.experts, step_tokens(sized, whole.experts), formats, part)
            assert configs(whole.experts, STEPS, formats, part) <= taken
        for ranks in RANKS:
            assert configs(whole.experts // ranks, STEPS, formats) <= taken


MXFP4 = ExpertFormats(torch.bfloat16, "mxfp4", torch.uint8, True)
ALL_FORMATS = [
    MXFP4,
    dataclasses.replace(MXFP4, quantized=False),
    dataclasses.replace(MXFP4, weight="fp8"),
    dataclasses.replace(MXFP4, weight="nvfp4"),
    ExpertFormats(torch.bfloat16, "plain", torch.bfloat16, False),
]


def compiled_for(shape: ExpertsShape, formats: ExpertFormats, target: Target) -> set[object]:
    """What the kernels of a call are compiled for, one entry a kernel."""
    aligned = None
    if target.name == "sm_90" and formats == MXFP4:
        if shape.pairs > 5 * shape.experts:
            config = choose_w4a8_config(shape)
            assert config is not None
            gemms: object = config
            aligned = config.block_m
        else:
            tiles = choose_sm90_config(shape)
            assert tiles is not None
            gemms, aligned = tiles, tiles[0].block_m
    else:
        triton = choose_config(shape, formats, target)
        gemms = triton
        if triton.adjacent and triton.grouped:
            aligned = triton.block_m
    if aligned is None:
        return {gemms}
    return {gemms, (aligned, choose_align_config(shape.pairs, shape.experts, aligned))}


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("model", MODELS)
def test_numbers_that_a_warm_up_runs_compile_all_kernels(model: str, ranks: int) -> None:
    """Whatever the number of tokens, so that no step of a server waits for a compiler."""
    count = MODELS[model](1).experts
    for target, formats in itertools.product(map(TARGETS.get, TARGETS), ALL_FORMATS):
        assert target is not None
        # Ranks with experts of their own, and with some channels of each; experts of a token.
        for experts, parts, chosen in ((count // ranks, 1, 6), (count, ranks, 6), (count, 1, 8)):
            shape = dataclasses.replace(MODELS[model](1, experts), experts_per_token=chosen)
            shape = dataclasses.replace(shape, inner=shape.inner // parts)
            if target.name == "sm_90" and formats == MXFP4 and shape.inner % 512:
                continue  # W4A8 and Triton share these

            steps = (*range(1, 400), *range(400, 4200, 9))
            known = _compiled_by(request_counts(4200), shape, formats, target)
            assert _compiled_by(steps, shape, formats, target) <= known


def _compiled_by(
    steps: Iterable[int], shape: ExpertsShape, formats: ExpertFormats, target: Target
) -> set[object]:
    sized = (dataclasses.replace(shape, tokens=tokens) for tokens in steps)
    return set().union(*(compiled_for(each, formats, target) for each in sized))


def test_steps_take_every_config_of_routers() -> None:
    def configs(steps: Iterable[int], router: tuple[int, int], same: bool) -> set[object]:
        found: set[object] = set()
        for tokens in steps:
            config = choose_router_config(tokens, *router, same, TARGETS["sm_90"])
            tile = config.block_m, config.block_n, config.block_k
            found.add((tile, config.route_tokens, config.unroll, config.route_warps))
        return found

    for router, same in itertools.product((FLASH_ROUTER, PRO_ROUTER), (True, False)):
        assert configs(STEPS, router, same) == configs(ROUTER_TOKENS, router, same)

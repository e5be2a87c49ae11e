"""Time MXFP4 experts and FP8 products of few tokens in every tile that configs for mma.sync choose.

``python -m crossrun.ptx sm_80 python -m lab.mma_tiles [--search] rows.jsonl [CASE ...]`` does so
for an older target; a case is "products", "products of many" or a key of EXPERTS. ``us`` is the
time in the chosen tile, ``us_rows_shared`` that of warps that share a tile's rows instead of K, and
``share_of_copy`` the bytes of visited weights over ``us``, as a share of the measured copy rate.
With ``--search`` all tiles are timed: rows of the weight, warps that share K, and stages.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from anymla.bench.environment import environment
from anymla.bench.gpu import device_facts
from anymla.bench.gpu_timing import copies_for, gpu_clock
from anymla.bench.random_weights import random_e4m3, random_experts
from anymla.bench.report import append_lines
from anymla.ops._gemm_config import TileConfig
from anymla.ops.compile_ahead import compiled_together
from anymla.ops.device import Target, target_of
from anymla.ops.linear import config as linear_config
from anymla.ops.linear import fp8_block_linear
from anymla.ops.linear import triton_launch as linear_launch
from anymla.ops.linear.config import GemmShape, TritonConfig
from anymla.ops.moe import config as moe_config
from anymla.ops.moe import experts
from anymla.ops.moe import triton_launch as moe_launch
from anymla.ops.moe.config import GemmConfig
from anymla.ops.moe.shapes import ExpertFormats, ExpertsShape, flash, pro
from anymla.testing.tolerance import relative_l2

Tile = tuple[int, int, int]  # rows of the weight, warps that share K, stages
Calls = list[Callable[[], Any]]

# Experts of one GPU that has an eighth of each, that has an eighth of them, and that has all.
EXPERTS: dict[str, ExpertsShape] = {
    "flash, 1/8 of each": dataclasses.replace(flash(1), inner=256),
    "flash, 1/8 of them": flash(1, 32),
    "flash": flash(1),
    "pro, 1/8 of each": dataclasses.replace(pro(1), inner=384),
    "pro, 1/8 of them": pro(1, 48),
}
TOKENS = (1, 2, 4, 8, 16, 64, 128)
_TILES: tuple[Tile, ...] = (
    (16, 4, 3), (16, 4, 4), (16, 4, 6), (16, 8, 3), (32, 2, 4), (32, 4, 3), (32, 4, 4), (32, 8, 3),
    (64, 2, 3), (64, 4, 3), (64, 4, 4),
)  # fmt: skip
# Products [N, K] of a layer of V4-Flash, and those of which eight GPUs have an eighth.
PRODUCTS = (
    (1536, 4096), (4096, 1024), (1024, 4096), (512, 4096), (4096, 256), (4096, 8192), (4096, 2048),
    (4096, 4096), (32768, 1024),
)  # fmt: skip
PRODUCT_TOKENS = (1, 8, 16, 32)
# Tokens, tiles and numbers of CTAs of products that decode both operands by words.
MANY_TOKENS = (64, 128)
_MANY_TILES = (
    TileConfig(64, 64, 64, 4, 2), TileConfig(64, 64, 64, 4, 3), TileConfig(64, 64, 128, 4, 2),
    TileConfig(64, 64, 128, 4, 3), TileConfig(64, 32, 128, 4, 3), TileConfig(64, 128, 64, 4, 3),
    TileConfig(64, 128, 64, 8, 3), TileConfig(128, 64, 64, 4, 3), TileConfig(128, 64, 64, 8, 3),
    TileConfig(128, 128, 64, 8, 3), TileConfig(128, 32, 64, 4, 3),
)  # fmt: skip
_MANY_CTAS = (128, 256, 512)
# Tile of w2 while those of w1 and w3 are timed, and most pairs an expert.
_DOWN: Tile = (32, 4, 3)
_MOST_PAIRS = 12
_REPETITIONS = 8
_SEARCH = "--search"
_PRODUCTS, _MANY = "products", "products of many"
_FORMATS = ExpertFormats(torch.bfloat16, "mxfp4", torch.uint8, True)


def expert_calls(shape: ExpertsShape, weights: dict[str, Any], clock: Any) -> tuple[Calls, float]:
    """Make calls with tokens of their own, and return how many experts one of them visits."""
    matrices = 3 * shape.inner * shape.d
    visited = min(shape.experts, shape.pairs)
    made: Calls = []
    read = 0
    for _ in range(min(32, copies_for(visited * matrices * 17 // 32))):
        draw = torch.rand(shape.tokens, shape.experts, device=clock.device)
        ids = draw.argsort(1)[:, : shape.experts_per_token].int()
        read += len(ids.unique())
        made.append(
            functools.partial(
                experts,
                torch.randn(shape.tokens, shape.d, device=clock.device).bfloat16(),
                ids,
                torch.rand(ids.shape, device=clock.device),
                **weights,
                weight_format="mxfp4",
                swiglu_limit=10.0,
                quantize_activations=True,
                backend="triton",
            )
        )
    return made, read / len(made)


def expert_config(shape: ExpertsShape, up: Tile, down: Tile, block_m: int) -> GemmConfig:
    """Return the config of a tile for w1 and w3, and one for w2, whose warps K must suffice for."""
    grouped = shape.tokens > 1
    limit = moe_config._MAX_COMPARISONS
    adjacent = shape.pairs * shape.experts <= limit

    def of(tile: Tile, width: int, other: GemmConfig | None = None) -> GemmConfig:
        rows, warps, stages = tile
        warps = math.gcd(warps, width // 128)
        return GemmConfig(
            True, grouped, block_m, rows, 128 * warps, torch.float16, warps, stages,
            k_warps=warps, adjacent=adjacent, down=other,
        )  # fmt: skip

    return of(up, shape.d, of(down, shape.inner))


def rows_config(shape: ExpertsShape, target: Target) -> GemmConfig:
    """Return the config of warps that share a tile's rows."""
    operand = torch.float8_e4m3fn if target.dot_e4m3 else torch.float16
    return GemmConfig(True, shape.tokens > 1, 16, 64, 128, operand, 4, 4)


def timed(made: Calls, launcher: Any, name: str, config: Any, clock: Any) -> float | None:
    """Return the median microseconds of one of the calls; None if the tile does not fit."""
    from triton.runtime.errors import OutOfResources

    with mock.patch.object(launcher, name, return_value=config):
        try:
            return float(clock.time_us(made, _REPETITIONS))
        except OutOfResources:
            return None


def up_configs(shape: ExpertsShape) -> dict[tuple[Tile, int], GemmConfig]:
    """Return configs by the tile of w1 and w3 and the number of pairs in a block."""
    share = shape.pairs_per_expert
    blocks = {8 if share <= 3 else 16, 8 if share < 6 else 16}
    return {
        (tile, block_m): expert_config(shape, tile, _DOWN, block_m)
        for tile in _TILES
        for block_m in sorted(blocks)
    }


def down_configs(shape: ExpertsShape, up: Tile, block_m: int) -> dict[Tile, GemmConfig]:
    """Return configs by the tile of w2, beside one of w1 and w3."""
    return {tile: expert_config(shape, up, tile, block_m) for tile in _TILES}


def fastest(times: dict[Any, float | None]) -> Any:
    """Return the key of the least time."""
    return min((us, key) for key, us in times.items() if us is not None)[1]


def compile_ahead(call: Callable[[], Any], launcher: Any, name: str, configs: list[Any]) -> None:
    """Compile the kernels that a call launches with each config, on all cores."""
    with compiled_together() as only_compiled:
        for config in configs if only_compiled else ():
            with mock.patch.object(launcher, name, return_value=config):
                call()


def by_torch(call: Any) -> torch.Tensor:
    """Return a call's result by the backend that is plain torch."""
    return call.func(*call.args, **call.keywords | {"backend": "torch"})


def measured_experts(
    labels: list[str], target: Target, clock: Any, search: bool
) -> Iterator[dict[str, Any]]:
    """Yield a row for each shape of experts and number of tokens."""
    for label, sizes in ((label, EXPERTS[label]) for label in labels):
        weights = random_experts(sizes.experts, sizes.d, sizes.inner, clock.device)
        for tokens in TOKENS:
            shape = dataclasses.replace(sizes, tokens=tokens)
            if shape.pairs_per_expert > _MOST_PAIRS:
                continue
            made, visited = expert_calls(shape, weights, clock)
            chosen = moe_config.choose_config(shape, _FORMATS, target)
            rows = rows_config(shape, target)
            compile_ahead(made[0], moe_launch, "choose_config", [rows, chosen])
            time = functools.partial(timed, made, moe_launch, "choose_config", clock=clock)
            us, before = time(config=chosen), time(config=rows)
            assert us is not None
            moved = visited * 3 * shape.inner * shape.d * 17 // 32
            row: dict[str, Any] = {
                "part": "experts tile", "case": label, "tokens": tokens, "visited_experts": visited,
                "us_rows_shared": before, "us": us,
                "bytes_us": moved / clock.copy_bandwidth() * 1e6,
                "share_of_copy": moved / us * 1e6 / clock.copy_bandwidth(),
                "kernels_us": [(name[:40], taken) for name, taken in clock.kernel_times(made[0])],
            }  # fmt: skip
            if tokens <= 8 or shape.experts <= 48:
                row["error"] = relative_l2(made[0](), by_torch(made[0]))
            yield row | (searched(shape, made[0], time) if search else {})


def searched(shape: ExpertsShape, call: Any, time: Callable[..., float | None]) -> dict[str, Any]:
    """Return the times of all tiles of w1 and w3, then of w2 beside the best of them."""
    ups = up_configs(shape)
    ahead = [*ups.values(), *down_configs(shape, _DOWN, 8).values()]
    compile_ahead(call, moe_launch, "choose_config", ahead)
    by_up = {key: time(config=config) for key, config in ups.items()}
    up, block_m = fastest(by_up)
    downs = down_configs(shape, up, block_m)
    by_down = {key: time(config=config) for key, config in downs.items()}
    down = fastest(by_down)
    other = dataclasses.replace(downs[down], adjacent=not downs[down].adjacent)
    return {
        "us_best": by_down[down], "up": up, "down": down, "block_m": block_m,
        "adjacent": downs[down].adjacent,
        "us_other_blocks": time(config=other) if shape.tokens > 1 else None,
        "us_by_up": {str(key): value for key, value in by_up.items()},
        "us_by_down": {str(key): value for key, value in by_down.items()},
    }  # fmt: skip


def product_calls(n: int, k: int, tokens: int, clock: Any) -> Calls:
    """Make calls of a product, each with a weight of its own."""
    made: Calls = []
    for _ in range(copies_for(n * k)):
        weight = random_e4m3(n, k, device=clock.device)
        scale = torch.randint(
            116, 121, (n // 128, k // 128), dtype=torch.uint8, device=clock.device
        )
        x = torch.randn(tokens, k, device=clock.device).bfloat16()
        made.append(
            functools.partial(
                fp8_block_linear, x, weight, scale, quantize_activations=True, backend="triton"
            )
        )
    return made


def product_config(shape: GemmShape, tile: Tile) -> TritonConfig:
    """Return the config of a tile."""
    rows, warps, stages = tile
    warps = math.gcd(warps, shape.k // 128)
    block_m = 8 if shape.tokens <= 8 else 16 if shape.tokens <= 16 else 32
    size = TileConfig(block_m, rows, 128 * warps, warps, stages)
    return TritonConfig(True, torch.float16, size, shape.k, k_warps=warps)


def measured_products(target: Target, clock: Any, search: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each product and number of tokens."""
    for n, k in PRODUCTS:
        for tokens in PRODUCT_TOKENS:
            shape = GemmShape(tokens, n, k)
            made = product_calls(n, k, tokens, clock)
            choose = functools.partial(
                linear_config.choose_triton_config, shape, "fp8", target,
                x_dtype=torch.bfloat16, quantized=True,
            )  # fmt: skip
            with mock.patch.object(linear_config, "_takes_k_warps", return_value=False):
                rows = dataclasses.replace(choose(), by_words=False)
            chosen, name = choose(), "choose_triton_config"
            tiles = _TILES if search else ()
            configs = {tile: product_config(shape, tile) for tile in tiles}
            compile_ahead(made[0], linear_launch, name, [*configs.values(), rows, chosen])
            time = functools.partial(timed, made, linear_launch, name, clock=clock)
            us = time(config=chosen)
            assert us is not None
            row: dict[str, Any] = {
                "part": "product tile", "n": n, "k": k, "tokens": tokens,
                "us_rows_shared": time(config=rows), "us": us,
                "bytes_us": n * k / clock.copy_bandwidth() * 1e6,
                "share_of_copy": n * k / us * 1e6 / clock.copy_bandwidth(),
                "error": relative_l2(made[0](), by_torch(made[0])),
            }  # fmt: skip
            if search:
                taken = {tile: time(config=config) for tile, config in configs.items()}
                best = fastest(taken)
                by_tile = {str(key): value for key, value in taken.items()}
                row |= {"us_best": taken[best], "tile": best, "us_by_tile": by_tile}
            yield row


def measured_many(clock: Any) -> Iterator[dict[str, Any]]:
    """Yield a row for each product of many tokens, with the times by tile and number of CTAs."""
    for (n, k), tokens in itertools.product(PRODUCTS, MANY_TOKENS):
        made, times = product_calls(n, k, tokens, clock), {}
        configs = {
            (dataclasses.astuple(tile), ctas): TritonConfig(
                False, torch.float16, tile, split, by_words=True
            )
            for tile, ctas in itertools.product(_MANY_TILES, _MANY_CTAS)
            for split in [many_split(GemmShape(tokens, n, k), tile, ctas)]
            if tile.block_m < 2 * tokens
        }
        name = "choose_triton_config"
        bits = dataclasses.replace(
            configs[dataclasses.astuple(_MANY_TILES[0]), 512], by_words=False
        )
        compile_ahead(made[0], linear_launch, name, [*configs.values(), bits])
        known: dict[TritonConfig, float | None] = {}
        for key, config in configs.items():
            if config not in known:
                known[config] = timed(made, linear_launch, name, config, clock)
            times[key] = known[config]
        best = fastest(times)
        us = times[best]
        assert us is not None
        with mock.patch.object(linear_launch, name, return_value=configs[best]):
            error = relative_l2(made[0](), by_torch(made[0]))
        yield {
            "part": "product tile of many", "n": n, "k": k, "tokens": tokens, "us": us,
            "us_by_bits": timed(made, linear_launch, name, bits, clock),
            "us_by_words": times[dataclasses.astuple(_MANY_TILES[0]), 512],
            "tile": best, "bytes_us": n * k / clock.copy_bandwidth() * 1e6,
            "us_by_tile": {str(key): value for key, value in times.items()},
            "error": error,
        }  # fmt: skip


def many_split(shape: GemmShape, tile: TileConfig, ctas: int) -> int:
    """Return the channels of a split with which a product has about so many CTAs."""
    tiles = -(-shape.n // tile.block_n) * -(-shape.tokens // tile.block_m)
    splits = max(1, min(ctas // tiles, shape.k // 512))
    return -(-shape.k // splits // 128) * 128


def main(path: Path, cases: list[str], search: bool) -> None:
    """Append the rows of this device to a file, and print a line for each."""
    clock = gpu_clock()
    target = target_of(clock.device)
    facts = environment("python -m lab.mma_tiles") | device_facts()
    shown = ("case", "n", "k", "tokens", "us_rows_shared", "us_by_bits", "us_by_words", "us",
             "us_best", "tile", "up", "down", "bytes_us", "share_of_copy", "error")  # fmt: skip
    append_lines(path, [{"part": "copy", "tb_per_s": clock.copy_bandwidth() / 1e12} | facts])
    rows = measured_experts([case for case in cases if case in EXPERTS], target, clock, search)
    if _MANY in cases:
        rows = itertools.chain(measured_many(clock), rows)
    if _PRODUCTS in cases:
        rows = itertools.chain(measured_products(target, clock, search), rows)
    for row in rows:
        short = {name: _short(value) for name, value in row.items()}
        append_lines(path, [short | facts])
        print(*(f"{name} {short[name]}" for name in shown if name in short), sep=", ", flush=True)


def _short(value: Any) -> Any:
    """Round floats, also in dictionaries and lists."""
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_short(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    given = [word for word in sys.argv[1:] if word != _SEARCH]
    main(Path(given[0]), given[1:] or [_PRODUCTS, *EXPERTS], _SEARCH in sys.argv)

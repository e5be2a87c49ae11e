"""Time portable kernels of older NVIDIA GPUs in the tiles that they might choose.

``python -m crossrun.ptx sm_80 python -m lab.portable_tiles rows.jsonl [FAMILY ...]`` appends a row
for each shape of the families "prefill" (attention), "streams" (hyper-connections), "selection"
(index scores and top-k), "products" (FP8, more than 32 tokens) and "experts" (MXFP4), with the
chosen tile's microseconds and those of all tiles. ``streams:2048,8192`` are a family's shapes of so
many tokens only, likewise of products and experts.

``share`` is the time that the nearer of two ceilings allows over that of the best tile: the
measured rate of a copy, and that of the best ``mma.sync`` product.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from anymla.bench.environment import environment
from anymla.bench.gpu import device_facts
from anymla.bench.gpu_timing import copies_for, gpu_clock
from anymla.bench.random_weights import random_experts
from anymla.bench.report import append_lines
from anymla.ops.attention import triton_decode_launch
from anymla.ops.attention.decode_config import Tile
from anymla.ops.compile_ahead import compiled_together
from anymla.ops.device import Target, target_of
from anymla.ops.hyper_connection import hc_post_pre_norm, triton_mix, triton_mix_many_tokens
from anymla.ops.hyper_connection import triton_launch as streams_launch
from anymla.ops.hyper_connection.config import (
    ManyTokensConfig,
    MixConfig,
    choose_many_tokens_config,
)
from anymla.ops.indexer import triton_scores
from anymla.ops.indexer.config import choose_score_config
from anymla.ops.indexer.shapes import SelectShape
from anymla.ops.linear import triton_launch as linear_launch
from anymla.ops.linear.shapes import ProductShape
from anymla.ops.moe import triton_launch as moe_launch
from anymla.ops.moe.shapes import ExpertsShape
from anymla.testing.tolerance import relative_l2
from lab import mma_tiles
from lab.cases import many_tokens
from lab.cases.indexer import HEADS, TOPK, WIDTH, Pool, pages_needed
from lab.cases.prefill_attention import Call, PrefillCase

Calls = list[Callable[[], Any]]
# Numbers of tokens to time of each family; none for all.
Families = dict[str, set[int]]
Chosen = Callable[[], contextlib.AbstractContextManager[Any]]

PREFILLS = tuple(
    PrefillCase(kind, 1024, heads, 32768, topk)
    for heads in (8, 16, 64)
    for kind, topk in (("window", 0), ("selected", 512), ("all", 0))
)
# Heads, rows and warps of a CTA.
_PREFILL_TILES = (
    (16, 32, 4), (16, 64, 4), (16, 64, 8), (32, 32, 4), (32, 32, 8), (32, 64, 8), (64, 32, 8),
)  # fmt: skip
# Tokens and channels of the streams.
STREAMS = (
    *((tokens, 4096) for tokens in (1, 8, 16, 32, 64, 128, 512, 2048, 8192)),
    *((tokens, 7168) for tokens in (8, 128, 2048)),
)
_MANY_TILES = (
    (64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 8, 3), (64, 128, 4, 2), (128, 64, 4, 2),
    (128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 4),
)  # fmt: skip
SELECTIONS = (
    SelectShape(1, 1, 8192), SelectShape(8, 1, 2048), SelectShape(8, 2, 16384),
    SelectShape(32, 1, 2048), SelectShape(32, 2, 8192), SelectShape(128, 1, 2048),
    SelectShape(1, 1024, 8192, prefill=True),
)  # fmt: skip
_REPETITIONS = 8
# FLOP/s of the best mma.sync product of 16-bit operands on an H200 (docs/ampere-ada.md).
_PRODUCT_RATE = 411e12
FAMILIES = ("prefill", "streams", "selection", "products", "experts")


def prefill_tiles(heads: int) -> dict[str, Chosen]:
    """Return a context for each tile, by its name, in which calls take that tile."""
    return {
        str(tile): functools.partial(
            mock.patch.object, triton_decode_launch, "choose_tile", return_value=Tile(*tile)
        )
        for tile in _PREFILL_TILES
        if tile[0] < 2 * max(heads, 16)
    }


def stream_calls(tokens: int, d: int, device: torch.device, copies: int = 0) -> Calls:
    """Make calls of a site that leaves one block and enters the next, each on its own streams.

    0 copies are as many as no cache holds.
    """
    made: Calls = []
    drawn = functools.partial(torch.randn, device=device)
    fn, base, scale = drawn(24, 4 * d) / (4 * d) ** 0.5, drawn(24), drawn(3)
    for _ in range(copies or copies_for(tokens * 10 * d * 2)):
        u, h = drawn(tokens, d).bfloat16(), drawn(tokens, 4, d).bfloat16()
        post, comb = torch.rand(tokens, 4, device=device), torch.rand(tokens, 4, 4, device=device)
        made.append(
            functools.partial(
                hc_post_pre_norm, u, h, post, comb, fn, base, scale,
                torch.ones(d, device=device).bfloat16(),
                norm_eps=1e-6, hc_eps=1e-6, iters=20, backend="triton",
            )
        )  # fmt: skip
    return made


def stream_tiles(tokens: int, d: int, target: Target) -> dict[str, Chosen]:
    """Return a context for each tile of few and of many tokens, by its name, as for prefill."""
    few = [
        MixConfig(rows, columns, max(1, width // columns), warps, direct=direct)
        for rows, columns, warps, width in itertools.product(
            (16, 32, 64), (16, 32, 64), (2, 4, 8), (32, 128, 512)
        )
        for direct in ((False, True) if columns == 32 and rows == 16 * warps else (False,))
        if rows < 2 * max(tokens, 16) and columns <= width and rows * columns <= 2048
        and tokens * d // (rows * width) < 32768
    ]  # fmt: skip
    found: dict[str, Chosen] = {
        str(dataclasses.astuple(each)): functools.partial(_mixed_by, each) for each in few
    }
    if tokens >= 512:
        slice_ = choose_many_tokens_config(tokens, d, target).slice
        for size in _MANY_TILES:
            tile = ManyTokensConfig(*size, slice_)
            found[f"many {size}"] = functools.partial(_mixed_by, tile)
    return found


@contextlib.contextmanager
def _mixed_by(config: MixConfig | ManyTokensConfig) -> Iterator[None]:
    """Let the kernel that a config belongs to take it, and launches be prepared again."""
    many = isinstance(config, ManyTokensConfig)
    module: Any = triton_mix_many_tokens if many else triton_mix
    name = "choose_many_tokens_config" if many else "choose_mix_config"
    prepared = module._launches if many else module._mixing
    with (
        mock.patch.object(module, name, return_value=config),
        mock.patch.object(streams_launch, "takes_many_tokens", return_value=many),
    ):
        prepared.cache_clear()
        yield
    prepared.cache_clear()


def score_tiles(target: Target) -> dict[str, Chosen]:
    """Return a context for each tile of index scores, by its keys, warps and stages."""
    tile = choose_score_config(1, HEADS, WIDTH, "fp16", target, paged_keys=1)
    return {
        str(sizes): functools.partial(
            mock.patch.object, triton_scores, "choose_score_config",
            return_value=dataclasses.replace(tile, keys=sizes[0], warps=sizes[1], stages=sizes[2]),
        )
        for sizes in itertools.product((32, 64, 128), (2, 4, 8), (2, 4))
        if sizes[0] >= 16 * sizes[1]
    }  # fmt: skip


def product_tiles(product: ProductShape, tokens: int, target: Target) -> dict[str, Chosen]:
    """Return a context for each config of an FP8 product, by its name."""
    configs = many_tokens.product_configs(many_tokens.gemm_shape(product, tokens), target)
    return {
        name: functools.partial(
            mock.patch.object, linear_launch, "choose_triton_config", return_value=config
        )
        for name, config in configs.items()
    }


def expert_tiles(shape: ExpertsShape) -> dict[str, Chosen]:
    """Return a context for each config of experts, by its name."""
    return {
        name: functools.partial(mock.patch.object, moe_launch, "choose_config", return_value=config)
        for name, config in many_tokens.expert_configs(shape).items()
    }


def compile_ahead(cases: Iterable[tuple[Callable[[], Any], Mapping[str, Chosen]]]) -> None:
    """Compile the kernels of calls in their chosen tiles and in all others, on all cores."""
    with compiled_together() as only_compiled:
        for call, tiles in cases if only_compiled else ():
            for chosen in (contextlib.nullcontext, *tiles.values()):
                with chosen():
                    call()


def searched(made: Calls, tiles: Mapping[str, Chosen], clock: Any) -> dict[str, Any]:
    """Time calls in the chosen tile and in every other, and compare the fastest one's results."""
    from triton.runtime.errors import OutOfResources

    everywhere = {"chosen": contextlib.nullcontext, **tiles}
    compile_ahead([(made[0], tiles)])
    taken: dict[str, float] = {}
    for name, chosen in everywhere.items():
        with chosen(), contextlib.suppress(OutOfResources):
            taken[name] = float(f"{clock.time_us(made, _REPETITIONS):.4g}")
    us = taken.pop("chosen")
    best = min(taken, key=taken.__getitem__)
    want = _first(made[0]())
    with tiles[best]():
        difference = relative_l2(_first(made[0]()), want)
    return {
        "us": us, "us_best": taken[best], "tile": best, "difference": difference,
        "us_by_tile": taken,
    }  # fmt: skip


def _first(result: Any) -> torch.Tensor:
    """Return the largest tensor of a result, copied."""
    some = [result] if isinstance(result, torch.Tensor) else result
    return max(some, key=torch.Tensor.numel).clone()


def measured(families: Families, target: Target, clock: Any) -> Iterator[dict[str, Any]]:
    """Yield a row for each shape of the families."""
    device = clock.device
    if "prefill" in families:
        for case in PREFILLS:
            call = Call(case, clock.device)
            made: Calls = [functools.partial(call.ours, "triton")]
            row = searched(made, prefill_tiles(case.heads), clock)
            yield {
                "part": "prefill tile", "case": case.label,
                "tflop_per_s": call.flops / row["us_best"] / 1e6,
            } | row  # fmt: skip
    if "selection" in families:
        pool = Pool(pages_needed(SELECTIONS), clock.device)
        for shape in SELECTIONS:
            copies = copies_for(shape.requests * shape.keys * (WIDTH + 4))
            inputs = pool.inputs(shape, copies)
            made = [functools.partial(each.select, "triton", shape) for each in inputs]
            row = searched(made, score_tiles(target), clock)
            seen = int(inputs[0].lengths.sum())
            yield {
                "part": "selection tile", "case": shape.label, "topk": TOPK,
                "kernels_us": clock.kernel_times(made[0]),
                "tflop_per_s": seen * HEADS * WIDTH * 2 / row["us_best"] / 1e6,
            } | row  # fmt: skip
    if "streams" in families:
        shapes = [each for each in STREAMS if each[0] in (families["streams"] or {each[0]})]
        compile_ahead(
            (stream_calls(*each, device, 1)[0], stream_tiles(*each, target)) for each in shapes
        )
        for tokens, d in shapes:
            row = searched(stream_calls(tokens, d, device), stream_tiles(tokens, d, target), clock)
            moved = tokens * d * 10 * 2 + 24 * 4 * d * 4
            yield {
                "part": "streams tile", "tokens": tokens, "d": d,
                "share_of_copy": moved / row["us_best"] * 1e6 / clock.copy_bandwidth(),
            } | row  # fmt: skip
    if "products" in families:
        yield from measured_products(families["products"] or many_tokens.TOKENS, target, clock)
    if "experts" in families:
        yield from measured_experts(families["experts"] or many_tokens.EXPERT_TOKENS, clock)


def measured_products(
    numbers: Iterable[int], target: Target, clock: Any
) -> Iterator[dict[str, Any]]:
    """Yield a row for each FP8 product and number of tokens."""
    products, device = many_tokens.products(), clock.device
    shapes = list(itertools.product(products, sorted(numbers)))
    compile_ahead(
        (many_tokens.product_calls(*each, device, 1)[0], product_tiles(*each, target))
        for each in shapes
    )
    for product, tokens in shapes:
        made = many_tokens.product_calls(product, tokens, device)
        row = searched(made, product_tiles(product, tokens, target), clock)
        flops = 2 * tokens * product.elements
        moved = product.elements + tokens * (max(1, product.groups) * product.k + 2 * product.rows)
        yield {
            "part": "product tile", "case": str(product), "n": product.n, "k": product.k,
            "groups": product.groups, "tokens": tokens, **_shares(flops, moved, row, clock),
        } | row  # fmt: skip


def measured_experts(numbers: Iterable[int], clock: Any) -> Iterator[dict[str, Any]]:
    """Yield a row for each part of V4-Flash's experts and number of tokens."""
    for label, sizes in many_tokens.EXPERTS.items():
        weights = random_experts(sizes.experts, sizes.d, sizes.inner, clock.device)
        shapes = [dataclasses.replace(sizes, tokens=tokens) for tokens in sorted(numbers)]
        compile_ahead(
            (mma_tiles.expert_calls(each, weights, clock)[0][0], expert_tiles(each))
            for each in shapes
        )
        for shape in shapes:
            made, visited = mma_tiles.expert_calls(shape, weights, clock)
            row = searched(made, expert_tiles(shape), clock)
            matrices = 3 * shape.inner * shape.d
            flops, moved = 2 * shape.pairs * matrices, int(visited * matrices * 17 / 32)
            yield {
                "part": "experts tile", "case": label, "tokens": shape.tokens,
                "visited_experts": visited, **_shares(flops, moved, row, clock),
            } | row  # fmt: skip


def _shares(flops: int, moved: int, row: Mapping[str, Any], clock: Any) -> dict[str, Any]:
    """Return a case's rates in the best tile, and its share of the nearer ceiling."""
    by_products, by_copy = flops / _PRODUCT_RATE * 1e6, moved / clock.copy_bandwidth() * 1e6
    return {
        "tflop_per_s": flops / row["us_best"] / 1e6, "tb_per_s": moved / row["us_best"] / 1e6,
        "ceiling": "product" if by_products > by_copy else "bytes",
        "share": max(by_products, by_copy) / row["us_best"],
    }  # fmt: skip


def parsed(words: Iterable[str]) -> Families:
    """Return families and their numbers of tokens from words as ``streams:2048,8192``."""
    found: Families = {}
    for word in words:
        family, _, numbers = word.partition(":")
        if family not in FAMILIES:
            raise SystemExit(f"no family {family}; there are {', '.join(FAMILIES)}")
        found[family] = {int(each) for each in numbers.split(",") if each}
    return found


def main(path: Path, families: Families) -> None:
    """Append the rows of this device to a file, and print a line for each."""
    clock = gpu_clock()
    facts = environment("python -m lab.portable_tiles") | device_facts()
    for row in measured(families, target_of(clock.device), clock):
        append_lines(path, [row | facts])
        print(*(f"{k} {v}" for k, v in row.items() if k != "us_by_tile"), sep=", ", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), parsed(sys.argv[2:] or FAMILIES))

"""Time portable kernels of older NVIDIA GPUs in the tiles that they might choose.

``python -m crossrun.ptx sm_80 python -m lab.portable_tiles rows.jsonl [FAMILY ...]`` appends a row
for each shape of the families "prefill" (attention), "streams" (hyper-connections) and "selection"
(index scores and top-k), with the chosen tile's microseconds and those of all tiles.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from anymla.bench.environment import environment
from anymla.bench.gpu import device_facts
from anymla.bench.gpu_timing import copies_for, gpu_clock
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
from anymla.testing.tolerance import relative_l2
from lab.cases.indexer import HEADS, TOPK, WIDTH, Pool, pages_needed
from lab.cases.prefill_attention import Call, PrefillCase

Calls = list[Callable[[], Any]]
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


def prefill_tiles(heads: int) -> dict[str, Chosen]:
    """Return a context for each tile, by its name, in which calls take that tile."""
    return {
        str(tile): functools.partial(
            mock.patch.object, triton_decode_launch, "choose_tile", return_value=Tile(*tile)
        )
        for tile in _PREFILL_TILES
        if tile[0] < 2 * max(heads, 16)
    }


def stream_calls(tokens: int, d: int, device: torch.device) -> Calls:
    """Make calls of a site that leaves one block and enters the next, each on its own streams."""
    made: Calls = []
    drawn = functools.partial(torch.randn, device=device)
    fn, base, scale = drawn(24, 4 * d) / (4 * d) ** 0.5, drawn(24), drawn(3)
    for _ in range(copies_for(tokens * 10 * d * 2)):
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


def searched(made: Calls, tiles: Mapping[str, Chosen], clock: Any) -> dict[str, Any]:
    """Time calls in the chosen tile and in every other, and compare the fastest one's results."""
    from triton.runtime.errors import OutOfResources

    everywhere = {"chosen": contextlib.nullcontext, **tiles}
    with compiled_together() as only_compiled:
        for chosen in everywhere.values() if only_compiled else ():
            with chosen():
                made[0]()
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


def measured(families: list[str], target: Target, clock: Any) -> Iterator[dict[str, Any]]:
    """Yield a row for each shape of the families."""
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
        for tokens, d in STREAMS:
            made = stream_calls(tokens, d, clock.device)
            row = searched(made, stream_tiles(tokens, d, target), clock)
            moved = tokens * d * 10 * 2 + 24 * 4 * d * 4
            yield {
                "part": "streams tile", "tokens": tokens, "d": d,
                "share_of_copy": moved / row["us_best"] * 1e6 / clock.copy_bandwidth(),
            } | row  # fmt: skip


def main(path: Path, families: list[str]) -> None:
    """Append the rows of this device to a file, and print a line for each."""
    clock = gpu_clock()
    facts = environment("python -m lab.portable_tiles") | device_facts()
    for row in measured(families, target_of(clock.device), clock):
        append_lines(path, [row | facts])
        print(*(f"{k} {v}" for k, v in row.items() if k != "us_by_tile"), sep=", ", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or ["prefill", "streams", "selection"])

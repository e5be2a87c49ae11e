"""Time decode kernels of all GPUs in every tile and split that ``decode_config`` may choose.

``python -m crossrun.ptx sm_80 python -m lab.decode_tiles rows.jsonl`` does so for an older target;
with ``copied`` behind it for the tiles of copied rows alone, at their shapes, and a number of heads
behind that for the tiles of so many.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from anymla.bench.environment import environment
from anymla.bench.gpu import device_facts
from anymla.bench.gpu_timing import copies_for, gpu_clock
from anymla.bench.report import append_lines
from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.ops.attention import CacheRows, sparse_attention
from anymla.ops.attention import triton_decode_launch as launch
from anymla.ops.attention.decode_config import Tile, copied_tiles
from anymla.ops.device import Target, target_of

Shape = tuple[int, int, int]  # heads, tokens, slots beside a window of 128
WINDOW, PAGE = 128, 64
SHAPES: list[Shape] = [
    (64, 77, 1024), (64, 8, 1024), (64, 32, 512), (128, 24, 1024), (8, 64, 1024), (16, 128, 512),
    (32, 96, 700), (8, 8, 1024), (16, 16, 1024),
]  # fmt: skip
# Beside those, for tiles of copied rows: where their choice changes.
COPIED_SHAPES: list[Shape] = [
    (64, 64, 512), (64, 256, 512), (64, 256, 1024), (64, 1, 512), (64, 2, 1024), (64, 16, 128),
    (64, 128, 128), (128, 64, 512), (128, 256, 512), (128, 1, 512), (128, 8, 1024), (96, 40, 512),
    (48, 64, 1024), (32, 64, 512), (32, 256, 1024), (32, 8, 512), (32, 2, 1024), (24, 128, 512),
    (16, 64, 512),
]  # fmt: skip
SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24)


def shapes(seed: int, count: int = 26) -> Iterator[Shape]:
    """Yield the fixed shapes, then ``count`` that a seed draws."""
    yield from SHAPES
    draw = random.Random(seed)
    for _ in range(count):
        heads = draw.choice([8, 16, 64, 64, 128, 32])
        tokens = draw.choice([1, 2, 4, 6, 12, 20, 40, 60, 90, 150, 300])
        yield heads, tokens, draw.choice([128, 512, 1024, 2048])


def all_copied_tiles() -> list[Tile]:
    """List the tiles of copied rows; those that do not fit a target raise there."""
    found = [tile for large in (False, True) for tile in copied_tiles(64, large=large)]
    return list(dict.fromkeys(dataclasses.replace(tile, per_sm=1) for tile in found))


def tiles(target: Target) -> Iterator[Tile]:
    """Yield tiles with rows loaded ahead and not; those that do not fit a target raise there."""
    yield from all_copied_tiles()
    words = (False,) if target.native_e4m3 else (False, True)
    for heads, keys, warps in ((16, 32, 4), (16, 32, 8), (16, 64, 8), (32, 32, 8), (32, 64, 8)):
        yield Tile(heads, keys, warps)
        for by_words in words:
            yield Tile(heads, keys, warps, ahead=True, words=by_words)


def calls(shape: Shape, device: torch.device, *, pages: int = 4096) -> list[Callable[[], Any]]:
    """Make calls of a shape, each with slots of its own, so many that no cache holds their rows.

    Args:
        shape: heads, tokens and slots.
        device: device of the inputs.
        pages: pages of the cache; slots are drawn from all of them.
    """
    heads, tokens, slots = shape
    layout = get_layout(MAIN_FP8)
    few = layout.allocate(8, PAGE, "cpu")
    layout.write(few, torch.arange(8 * PAGE), torch.randn(8 * PAGE, layout.channels))
    cache = few.to(device).repeat(pages // 8, 1, 1)
    made: list[Callable[[], Any]] = []
    for _ in range(copies_for(tokens * (WINDOW + slots) * layout.entry_bytes)):
        q = torch.randn(tokens, heads, layout.channels, device=device).bfloat16()
        lists = [
            torch.randint(0, pages * PAGE, (tokens, width), device=device).int()
            for width in (WINDOW, slots)
        ]
        rows = [CacheRows(cache, MAIN_FP8, listed) for listed in lists]
        made.append(functools.partial(sparse_attention, q, rows, backend="triton"))
    return made


def timed(made: list[Callable[[], Any]], tile: Tile, splits: int, clock: Any) -> float:
    """Return the median microseconds of one of ``calls`` in a tile, its lists cut into ``splits``.

    Raises:
        OutOfResources: the tile does not fit the device.
    """
    with (
        mock.patch.object(launch, "choose_tile", return_value=tile),
        mock.patch.object(launch, "choose_splits", return_value=splits),
    ):
        return float(clock.time_us(made))


def measured(
    clock: Any, chosen: Iterable[Shape], candidates: Sequence[Tile]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each shape and tile, with the microseconds by number of splits."""
    from triton.runtime.errors import OutOfResources

    for shape in chosen:
        heads, tokens, slots = shape
        made = calls(shape, clock.device)
        for tile in candidates:
            steps = -(-(WINDOW + slots) // tile.keys)
            if tile.heads >= 2 * max(heads, 16):
                continue
            taken: dict[str, float] = {}
            try:
                for splits in SPLITS:
                    if splits <= steps:
                        taken[str(splits)] = round(timed(made, tile, splits, clock), 1)
            except OutOfResources:
                continue
            yield {
                "part": "decode tile", "heads": heads, "tokens": tokens, "slots": slots,
                "tile": [tile.heads, tile.keys, tile.warps], "ahead": tile.ahead,
                "words": tile.words, "copied": tile.copied, "us_by_splits": taken,
            }  # fmt: skip


def main(path: Path, only: str = "", heads: int = 0, seed: int = 7) -> None:
    """Append the rows of this device to a file.

    Args:
        path: file of rows.
        only: "copied" for the tiles of copied rows alone.
        heads: heads of those tiles; 0 for any.
        seed: seed of the shapes that are drawn.
    """
    clock = gpu_clock()
    command = f"python -m lab.decode_tiles ROWS {only} {heads or ''}".strip()
    facts = environment(command) | device_facts()
    if only:
        chosen = [tile for tile in all_copied_tiles() if heads in (0, tile.heads)]
        rows = measured(clock, [*SHAPES, *COPIED_SHAPES], chosen)
    else:
        rows = measured(clock, shapes(seed), list(tiles(target_of(clock.device))))
    for row in rows:
        append_lines(path, [row | facts])


if __name__ == "__main__":
    main(Path(sys.argv[1]), "".join(sys.argv[2:3]), int("".join(sys.argv[3:4]) or 0))

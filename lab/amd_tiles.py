"""Count the instructions of decode attention by tile on an AMD target, without a GPU.

``TRITON_INTERPRET=0 python -m lab.amd_tiles gfx1151 [ROWS.jsonl]``: one token of 16 heads over 128
FP8 rows, executed by ``crossrun.amd``. Counts are of all waves.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
from pathlib import Path
from unittest import mock

import torch

from anymla.bench.environment import environment
from anymla.bench.report import append_lines
from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.ops.attention import CacheRows, sparse_attention
from anymla.ops.attention import triton_decode_launch as launch
from anymla.ops.attention.decode_config import Tile
from anymla.testing import amd_on_cpu

TILES = {
    "heads x channels": (Tile(16, 16, 8), "float16"),
    "rows divided by 8": (Tile(16, 16, 8, row_parts=8), "bfloat16"),
    "rows divided by 8, 32 rows a step": (Tile(16, 32, 8, row_parts=8), "bfloat16"),
}


def main(target: str, path: Path | None) -> None:
    """Print a row for each tile, and keep it in a file."""
    device = amd_on_cpu.install(target)
    torch.manual_seed(0)
    layout = get_layout(MAIN_FP8)
    cache = layout.allocate(2, 64, torch.device("cpu"))
    layout.write(cache, torch.arange(128), torch.randn(128, 512))
    rows = CacheRows(cache, MAIN_FP8, torch.arange(128, dtype=torch.int32)[None])
    q = torch.randn(1, 16, 512).bfloat16()
    command = f"TRITON_INTERPRET=0 python -m lab.amd_tiles {target}"
    for name, (tile, mode) in TILES.items():
        before = collections.Counter(device.executed.get("decode_kernel", {}))
        with (
            mock.patch.object(launch, "choose_tile", return_value=tile),
            mock.patch.object(launch, "choose_mode", return_value=mode),
        ):
            sparse_attention(q, [rows], backend="triton")
        counts = collections.Counter(device.executed["decode_kernel"]) - before
        spilled = sum(times for word, times in counts.items() if word.startswith("scratch_"))
        row = {
            "part": "instructions of decode attention", "case": name, "target": target,
            "tile": dataclasses.astuple(tile), "instructions": sum(counts.values()),
            "of_spills": spilled,
        }  # fmt: skip
        print(row, flush=True)
        if path is not None:
            append_lines(path, [row | environment(command)])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else None)

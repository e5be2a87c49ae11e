"""Selection within V4.1's candidate blocks on a GPU: ``selection_in_blocks.py ROWS``.

Their keys scored alone, beside all keys of the context with those outside of blocks hidden. A
context's keys and lists are random; both ways must choose the same entries and slots.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from anymla.bench.environment import environment
from anymla.bench.gpu import device_facts
from anymla.bench.gpu_timing import GraphClock, copies_for
from anymla.formats.page_layout import INDEX_MXFP4, get_layout
from anymla.layers import selection
from anymla.layers.selection import SlotTarget, TwoLevels, select_entries

HEADS, PAGE, SIZE, KEPT, WIDTH = 32, 256, 8, 2048, 512
ENTRIES, ROWS = (16_384, 32_768, 65_536, 262_144), (1, 8, 32)
PAGES = 1 << 16
_ENTRY_BYTES = 68


@functools.cache
def keys() -> Tensor:
    """Pages of random MXFP4 keys."""
    cache = get_layout(INDEX_MXFP4).allocate(PAGES, PAGE, torch.device("cuda"))
    data, scales = (plane for plane in get_layout(INDEX_MXFP4).planes(cache) if plane is not None)
    for first in range(0, PAGES, 1 << 13):
        part = slice(first, first + (1 << 13))
        data[part] = random_bytes(0, 256, tuple(data[part].shape))
        scales[part] = random_bytes(124, 129, tuple(scales[part].shape))
    return cache


def random_bytes(low: int, high: int, shape: tuple[int, ...]) -> Tensor:
    """Bytes from ``low`` on, below ``high``."""
    return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda")


def drawn(entries: int, rows: int) -> dict[str, Any]:
    """Arguments of ``select_entries`` for one token of each of some requests."""
    blocks = torch.stack(
        [torch.randperm(entries // SIZE)[:KEPT].sort().values for _ in range(rows)]
    )
    blocks[:, -1] = entries // SIZE - 1  # the newest is always kept
    each = entries // PAGE
    return {
        "q": random_bytes(0, 256, (rows, HEADS, 64)),
        "q_scales": random_bytes(124, 129, (rows, HEADS, 4)),
        "weights": torch.randn(rows, HEADS, device="cuda"),
        "visible": torch.full((rows,), entries, dtype=torch.int32, device="cuda"),
        "cache": keys(),
        "block_table": torch.randperm(PAGES)[: rows * each].view(rows, each).int().cuda(),
        "query_lens": (1,) * rows,
        "num_decodes": rows,
        "max_context": entries,
        "layout": INDEX_MXFP4,
        "levels": TwoLevels(blocks.int().cuda(), SIZE, keeps=False),
    }


def call(given: dict[str, Any], alone: bool) -> tuple[Callable[[], None], list[Tensor]]:
    """A selection with its slots, and what it writes."""
    rows = len(given["q"])
    out, slots = (torch.empty(rows, WIDTH, dtype=torch.int32, device="cuda") for _ in range(2))
    counts = torch.empty(rows, dtype=torch.int32, device="cuda")
    target = SlotTarget(given["block_table"], PAGE, slots, counts)

    def run() -> None:
        with mock.patch.object(selection, "_within_blocks", return_value=alone):
            select_entries(**given, out=out, target=target)

    return run, [out, slots, counts]


def main(path: Path) -> None:
    """Append the rows."""
    torch.manual_seed(0)
    common = environment("python benchmarks/selection_in_blocks.py ROWS") | device_facts()
    for rows in ROWS:
        for entries in ENTRIES:
            sets = [
                drawn(entries, rows) for _ in range(copies_for(rows * KEPT * SIZE * _ENTRY_BYTES))
            ]
            row: dict[str, Any] = {
                "part": "selection within blocks",
                "case": f"{rows} rows x {entries}, {KEPT} blocks of {SIZE}",
            }
            made = []
            for name, alone in (("masked_us", False), ("blocks_us", True)):
                calls = [call(given, alone) for given in sets]
                row[name] = round(
                    GraphClock().time_us([run for run, _ in calls], repetitions=10), 2
                )
                made.append([each for _, results in calls for each in results])
            row["same"] = all(torch.equal(a, b) for a, b in zip(*made, strict=True))
            print(json.dumps(row), flush=True)
            with path.open("a") as file:
                file.write(json.dumps(row | common) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

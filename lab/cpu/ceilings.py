"""Upper limits of this machine: matrix products and copies."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from anymla.bench.report import Result
from lab.timing import interleaved, median

PART = "machine"
_SIZE = 1024
MATMUL_FLOPS = 2 * _SIZE**3
COPY_BYTES = 1 << 26


def square(dtype: torch.dtype) -> Tensor:
    """Draw a matrix for the product that serves as the ceiling."""
    return torch.randn(_SIZE, _SIZE).to(dtype)


def product(dtype: torch.dtype) -> Callable[[], Tensor]:
    """Make the product of ``MATMUL_FLOPS`` that serves as the ceiling of operations."""
    matrix = square(dtype)
    return lambda: matrix @ matrix


def copy() -> Callable[[], Tensor]:
    """Make the copy of ``COPY_BYTES`` that serves as the ceiling of bytes."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def ceilings(rounds: int) -> list[Result]:
    """Measure the rates of matrix products of 1024 x 1024 and of copying 64 MiB."""
    ways = {"bf16": product(torch.bfloat16), "fp32": product(torch.float32), "copy": copy()}
    times = interleaved(ways, rounds=rounds, block=3)
    seconds = {name: median(each) for name, each in times.items()}
    results = [
        Result(
            PART,
            f"{name} matrix product 1024^3",
            {"ms": seconds[name] * 1e3, "gflops": MATMUL_FLOPS / seconds[name] / 1e9},
        )
        for name in ("bf16", "fp32")
    ]
    copied = 2 * COPY_BYTES / seconds["copy"] / 1e9
    copies = {"ms": seconds["copy"] * 1e3, "gb_per_s": copied}
    return [*results, Result(PART, "copy 64 MiB", copies)]

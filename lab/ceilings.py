"""Upper limits of this machine: matrix products and copies."""

from __future__ import annotations

import torch

from anymla.bench.report import Result
from lab.timing import interleaved, median

PART = "machine"
_SIZE = 1024
MATMUL_FLOPS = 2 * _SIZE**3
_COPY_BYTES = 1 << 26


def square(dtype: torch.dtype) -> torch.Tensor:
    """Draw a matrix for the product that serves as the ceiling."""
    return torch.randn(_SIZE, _SIZE).to(dtype)


def ceilings(rounds: int) -> list[Result]:
    """Measure the rates of matrix products of 1024 x 1024 and of copying 64 MiB."""
    bf16, fp32 = square(torch.bfloat16), square(torch.float32)
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    times = interleaved(
        {
            "bf16": lambda: bf16 @ bf16,
            "fp32": lambda: fp32 @ fp32,
            "copy": lambda: target.copy_(source),
        },
        rounds=rounds,
        block=3,
    )
    results = [
        Result(
            PART,
            f"{name} matrix product 1024^3",
            {"ms": median(times[name]) * 1e3, "gflops": MATMUL_FLOPS / median(times[name]) / 1e9},
        )
        for name in ("bf16", "fp32")
    ]
    copied = 2 * _COPY_BYTES / median(times["copy"]) / 1e9
    results.append(
        Result(PART, "copy 64 MiB", {"ms": median(times["copy"]) * 1e3, "gb_per_s": copied})
    )
    return results

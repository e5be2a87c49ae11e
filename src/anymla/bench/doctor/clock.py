"""Times of calls and ceilings of any device, each with the means that it has."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch

_CPU_COPY_BYTES = 1 << 26
_PRODUCT = {"cpu": 1024, "cuda": 8192, "xpu": 4096}


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What this device does at most, measured.

    Attributes:
        bytes_per_s: of a copy, read and written bytes together.
        flops_per_s: of a large bfloat16 matrix product.
    """

    bytes_per_s: float
    flops_per_s: float

    def share(self, bytes_moved: int, flops: int, seconds: float) -> tuple[float, str]:
        """Least time over time taken, and which ceiling asks for the least time."""
        copying, computing = bytes_moved / self.bytes_per_s, flops / self.flops_per_s
        bound = "product" if computing > copying else "copy"
        return max(copying, computing) / seconds, bound


def measure_ceilings(device: torch.device) -> Ceilings:
    """Take a second to find out."""
    if device.type == "cuda":
        from anymla.bench.gpu_timing import copy_bandwidth, matmul_rate

        return Ceilings(copy_bandwidth(), matmul_rate())
    source = torch.zeros(_CPU_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copying = seconds_of(lambda: target.copy_(source), device)
    size = _PRODUCT[device.type]
    matrix = torch.randn(size, size, device=device).bfloat16()
    computing = seconds_of(lambda: matrix @ matrix, device)
    return Ceilings(2 * _CPU_COPY_BYTES / copying, 2 * size**3 / computing)


def seconds_of(call: Callable[[], object], device: torch.device, *, budget_s: float = 0.4) -> float:
    """Median seconds of a call, warm.

    On CUDA the calls are replayed as a graph, without the cost of launching them, if they can be
    captured; elsewhere each is waited for.
    """
    for _ in range(3):
        call()
    if device.type == "cuda":
        captured = _captured(call)
        if captured is not None:
            return captured
    synchronize(device)
    taken: list[float] = []
    began = time.perf_counter()
    while time.perf_counter() - began < budget_s or len(taken) < 3:
        start = time.perf_counter()
        call()
        synchronize(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def _captured(call: Callable[[], object]) -> float | None:
    from anymla.bench.gpu_timing import time_us

    try:
        return time_us([call] * 4, repetitions=10) / 1e6
    except RuntimeError:  # a call that waits for the device cannot be captured
        torch.cuda.synchronize()
        return None

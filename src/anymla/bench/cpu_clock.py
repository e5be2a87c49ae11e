"""The benchmark runner's clock on a CPU."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence

import torch

# Seconds after which a call is not repeated any more, and elements of the measured copy.
_BUDGET_S = 1.0
_COPIED = 1 << 26
_SIDE = 1024


class CpuClock:
    """Wall time of calls, one after the other."""

    device = torch.device("cpu")

    def time_us(self, calls: Sequence[Callable[[], object]], repetitions: int = 20) -> float:
        """Median microseconds of one call, after one call that does not count.

        Args:
            calls: the same call on different inputs, which are timed in turn.
            repetitions: rounds at most; there are fewer of what takes long.
        """
        calls[0]()
        taken: list[float] = []
        began = time.perf_counter()
        for _ in range(repetitions):
            start = time.perf_counter()
            for call in calls:
                call()
            end = time.perf_counter()
            taken.append((end - start) / len(calls))
            if end - began > _BUDGET_S:
                break
        return statistics.median(taken) * 1e6

    @functools.cache  # noqa: B019  # a process has one clock
    def copy_bandwidth(self) -> float:
        """Bytes a second of a large copy, read and written ones together."""
        return 2 * _COPIED / self.copy_us(2 * _COPIED) * 1e6

    @functools.cache  # noqa: B019
    def matmul_rate(self) -> float:
        """Bfloat16 operations a second of a large product."""
        matrix = torch.randn(_SIDE, _SIDE).bfloat16()
        return 2 * _SIDE**3 / self.time_us([lambda: matrix @ matrix]) * 1e6

    def copy_us(self, bytes_moved: int) -> float:
        """Microseconds of a copy that reads and writes so many bytes together."""
        source = torch.zeros(max(1, bytes_moved // 2), dtype=torch.uint8)
        target = torch.empty_like(source)
        return self.time_us([lambda: target.copy_(source)])

    def peak_bytes(self, call: Callable[[], object]) -> int:
        """Zero: nobody counts what a call takes of the host's memory."""
        call()
        return 0

    def kernel_times(self, call: Callable[[], object]) -> list[tuple[str, float]]:
        """No kernels: they are a GPU's."""
        call()
        return []

    def release(self) -> None:
        """Keep everything: the host's allocator gives back by itself."""

"""The benchmark runner's clock on a CPU."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence

import torch

# Seconds after which a call is not repeated any more, and number of elements in the measured copy.
_BUDGET_S = 1.0
_COPIED = 1 << 26
_SIDE = 1024


class CpuClock:
    """Wall time of calls, one after the other."""

    device = torch.device("cpu")

    def time_us(self, calls: Sequence[Callable[[], object]], repetitions: int = 20) -> float:
        """Return the median microseconds of one call, after one call that does not count.

        Args:
            calls: the same call on different inputs, which are timed in turn.
            repetitions: largest number of rounds; long calls get fewer.
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
        """Return the bytes per second of a large copy, counting read and written bytes."""
        return 2 * _COPIED / self.copy_us(2 * _COPIED) * 1e6

    @functools.cache  # noqa: B019
    def matmul_rate(self) -> float:
        """Return the bfloat16 operations per second of a large product."""
        matrix = torch.randn(_SIDE, _SIDE).bfloat16()
        return 2 * _SIDE**3 / self.time_us([lambda: matrix @ matrix]) * 1e6

    def copy_us(self, bytes_moved: int) -> float:
        """Return the microseconds of a copy that reads and writes this many bytes together."""
        source = torch.zeros(max(1, bytes_moved // 2), dtype=torch.uint8)
        target = torch.empty_like(source)
        return self.time_us([lambda: target.copy_(source)])

    def peak_bytes(self, call: Callable[[], object]) -> int:
        """Return zero, because the memory that a call takes on the host is not counted."""
        call()
        return 0

    def kernel_times(self, call: Callable[[], object]) -> list[tuple[str, float]]:
        """Return no kernels, because only GPUs have them."""
        call()
        return []

    def release(self) -> None:
        """Do nothing, because the host's allocator returns memory by itself."""

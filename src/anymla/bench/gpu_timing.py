"""Times on a GPU: CUDA-graph replay over rotating inputs, medians."""

from __future__ import annotations

import collections
import functools
import statistics
from collections.abc import Callable, Iterable, Sequence

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# Bytes that successive calls go through before inputs come round again: twice the largest L2.
_COLD_BYTES = 256 << 20
_MOST_COPIES = 64


def copies_for(bytes_moved: int) -> int:
    """How many sets of inputs defeat the cache."""
    return max(2, min(_MOST_COPIES, -(-_COLD_BYTES // max(bytes_moved, 1))))


def recorded(
    calls: Sequence[Callable[[], object]], stream: torch.cuda.Stream
) -> torch.cuda.CUDAGraph:
    """A graph of the calls on a stream; they have run, and it has been replayed, once."""
    # Copies of inputs may be in flight.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        stream.synchronize()
    return graph


def time_us(calls: Sequence[Callable[[], object]], repetitions: int = 20) -> float:
    """Median microseconds of one call, the calls replayed one after the other as a CUDA graph.

    Args:
        calls: the same call on different inputs.
        repetitions: replays that are timed.
    """
    stream = torch.cuda.Stream()
    graph = recorded(calls, stream)
    with torch.cuda.stream(stream):
        times = []
        for _ in range(repetitions):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


@functools.cache
def copy_bandwidth() -> float:
    """Measured bytes a second of a device copy, read and written bytes together.

    The faster of the driver's copy and an elementwise kernel, which are not the same.
    """
    source = torch.zeros(1 << 28, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    ways = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    microseconds = min(time_us([way] * 2, repetitions=10) for way in ways)
    return 2 * source.nbytes / microseconds * 1e6


@functools.cache
def copy_us(bytes_moved: int) -> float:
    """Measured microseconds of a copy that reads and writes ``bytes_moved`` bytes together.

    Of the same size as a case and timed in the same way, its launch included, where the bandwidth
    of ``copy_bandwidth`` is that of a copy so large that a launch does not count.
    """
    elements = max(1, bytes_moved // 4)

    def ready() -> Callable[[], object]:
        source = torch.zeros(elements, dtype=torch.bfloat16, device="cuda")
        target = torch.empty_like(source)
        return lambda: torch.neg(source, out=target)

    return time_us([ready() for _ in range(copies_for(bytes_moved))])


@functools.cache
def matmul_rate() -> float:
    """Measured bfloat16 floating-point operations a second of an 8192 x 8192 product."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    microseconds = time_us([lambda: torch.mm(a, b, out=out)] * 2, repetitions=5)
    return 2 * 8192**3 / microseconds * 1e6


def kernel_times(call: Callable[[], object]) -> list[tuple[str, float]]:
    """Names and microseconds of the kernels of one call."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return [
        (event.name, event.device_time_total)
        for event in seen.events()
        if event.device_type == DeviceType.CUDA
    ]


def sums(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Sums by name, the largest first."""
    sums: dict[str, float] = collections.defaultdict(float)
    for name, taken in times:
        sums[name] += taken
    ordered = sorted(sums.items(), key=lambda item: -item[1])
    return {name: round(taken, 1) for name, taken in ordered}


def peak_bytes(call: Callable[[], object]) -> int:
    """Memory that a call takes beyond what is held before it."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


class GraphClock:
    """The runner's clock on the current CUDA device."""

    device = torch.device("cuda")
    time_us = staticmethod(time_us)
    copy_us = staticmethod(copy_us)
    peak_bytes = staticmethod(peak_bytes)
    kernel_times = staticmethod(kernel_times)
    copy_bandwidth = staticmethod(copy_bandwidth)
    matmul_rate = staticmethod(matmul_rate)

    def release(self) -> None:
        """Give memory that is free back to the device."""
        torch.cuda.empty_cache()

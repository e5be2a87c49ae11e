"""Median times on a GPU over rotating inputs, by CUDA graphs, or between events on XPU."""

from __future__ import annotations

import collections
import functools
import statistics
from collections.abc import Callable, Iterable, Sequence

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# Bytes that successive calls touch before inputs repeat: twice the largest L2.
_COLD_BYTES = 256 << 20
_MOST_COPIES = 64


def copies_for(bytes_moved: int) -> int:
    """Return the number of input sets, 2 to 64, that keeps every call out of the cache."""
    return max(2, min(_MOST_COPIES, -(-_COLD_BYTES // max(bytes_moved, 1))))


def recorded(
    calls: Sequence[Callable[[], object]], stream: torch.cuda.Stream
) -> torch.cuda.CUDAGraph:
    """Record the calls as a graph on a stream, after running them once, and replay it once."""
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
    """Return the median microseconds of one call in a CUDA graph of all calls.

    Args:
        calls: the same call on different inputs.
        repetitions: number of timed replays.
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


def event_time_us(calls: Sequence[Callable[[], object]], repetitions: int = 20) -> float:
    """Return the median microseconds of one call on an Intel GPU, where calls are launched in turn.

    A launch's cost on the host counts where kernels do not take longer.

    Args:
        calls: the same call on different inputs.
        repetitions: number of timed rounds of the calls, after one that is not timed.
    """
    for call in calls:
        call()
    torch.xpu.synchronize()
    times = []
    for _ in range(repetitions):
        start = torch.xpu.Event(enable_timing=True)
        end = torch.xpu.Event(enable_timing=True)
        start.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def _time_on(device: str) -> Callable[..., float]:
    return event_time_us if device == "xpu" else time_us


@functools.cache
def copy_bandwidth(device: str = "cuda") -> float:
    """Measure the bytes per second of a device copy, counting read and written bytes.

    This is the faster of the driver's copy and an elementwise kernel, which differ.
    """
    source = torch.zeros(1 << 28, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    ways = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    microseconds = min(_time_on(device)([way] * 2, repetitions=10) for way in ways)
    return 2 * source.nbytes / microseconds * 1e6


@functools.cache
def copy_us(bytes_moved: int, device: str = "cuda") -> float:
    """Measure the microseconds of a copy that reads and writes ``bytes_moved`` bytes together.

    The copy has the size of a case and is timed in the same way, launch included. The copy of
    ``copy_bandwidth`` is so large that a launch does not count.
    """
    elements = max(1, bytes_moved // 4)

    def ready() -> Callable[[], object]:
        source = torch.zeros(elements, dtype=torch.bfloat16, device=device)
        target = torch.empty_like(source)
        return lambda: torch.neg(source, out=target)

    return _time_on(device)([ready() for _ in range(copies_for(bytes_moved))])


@functools.cache
def matmul_rate(device: str = "cuda") -> float:
    """Measure the bfloat16 operations per second of an 8192 x 8192 product."""
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(a)
    microseconds = _time_on(device)([lambda: torch.mm(a, b, out=out)] * 2, repetitions=5)
    return 2 * 8192**3 / microseconds * 1e6


def kernel_times(call: Callable[[], object], device: str = "cuda") -> list[tuple[str, float]]:
    """Profile a call and return the name and microseconds of each kernel that it launches."""
    module, kind = getattr(torch, device), device.upper()
    call()
    module.synchronize()
    with profile(activities=[getattr(ProfilerActivity, kind)]) as seen:
        call()
        module.synchronize()
    return [
        (event.name, event.device_time_total)
        for event in seen.events()
        if event.device_type == getattr(DeviceType, kind)
    ]


def sums(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Sum times by name, and return the largest first."""
    sums: dict[str, float] = collections.defaultdict(float)
    for name, taken in times:
        sums[name] += taken
    ordered = sorted(sums.items(), key=lambda item: -item[1])
    return {name: round(taken, 1) for name, taken in ordered}


def peak_bytes(call: Callable[[], object], device: str = "cuda") -> int:
    """Return the memory that a call takes beyond what is held before it, in bytes."""
    module = getattr(torch, device)
    call()
    module.synchronize()
    before = module.memory_allocated()
    module.reset_peak_memory_stats()
    call()
    module.synchronize()
    return int(module.max_memory_allocated() - before)


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
        """Return free memory to the device."""
        torch.cuda.empty_cache()


class EventClock:
    """The runner's clock on the current Intel GPU, where nothing is captured in a graph."""

    device = torch.device("xpu")
    time_us = staticmethod(event_time_us)
    copy_us = staticmethod(functools.partial(copy_us, device="xpu"))
    peak_bytes = staticmethod(functools.partial(peak_bytes, device="xpu"))
    kernel_times = staticmethod(functools.partial(kernel_times, device="xpu"))
    copy_bandwidth = staticmethod(functools.partial(copy_bandwidth, "xpu"))
    matmul_rate = staticmethod(functools.partial(matmul_rate, "xpu"))

    def release(self) -> None:
        """Return free memory to the device."""
        torch.xpu.empty_cache()


def gpu_clock() -> GraphClock | EventClock:
    """Return the clock of the GPU that torch sees."""
    return GraphClock() if torch.cuda.is_available() else EventClock()

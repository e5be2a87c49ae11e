"""Median times on a GPU over rotating inputs, by CUDA graphs, or between events on XPU."""

from __future__ import annotations

import collections
import functools
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], object]
# Bytes that successive calls touch before inputs repeat: twice the largest L2.
_COLD_BYTES = 256 << 20
_MOST_COPIES = 64


def copies_for(bytes_moved: int) -> int:
    """Return the number of input sets, 2 to 64, that keeps every call out of the cache."""
    return max(2, min(_MOST_COPIES, -(-_COLD_BYTES // max(bytes_moved, 1))))


def recorded(calls: Sequence[Call], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
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


def sums(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Sum times by name, and return the largest first."""
    sums: dict[str, float] = collections.defaultdict(float)
    for name, taken in times:
        sums[name] += taken
    ordered = sorted(sums.items(), key=lambda item: -item[1])
    return {name: round(taken, 1) for name, taken in ordered}


class GpuClock:
    """The runner's clock on the current GPU of one kind; ``GraphClock`` and ``EventClock`` time.

    Attributes:
        kind: name of the device's type, which is that of torch's module for it.
        device: device on which inputs are drawn.
    """

    kind: str
    device: torch.device

    def time_us(self, calls: Sequence[Call], repetitions: int = 20) -> float:
        """Return the median microseconds that a call takes.

        Args:
            calls: the same call on different inputs.
            repetitions: number of timed rounds of all calls.
        """
        raise NotImplementedError

    @functools.cache  # noqa: B019  # a process has one clock
    def copy_bandwidth(self) -> float:
        """Measure the bytes per second of a device copy, counting read and written bytes.

        This is the faster of the driver's copy and an elementwise kernel, which differ.
        """
        source = torch.zeros(1 << 28, dtype=torch.float32, device=self.kind)
        target = torch.empty_like(source)
        ways = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
        microseconds = min(self.time_us([way] * 2, repetitions=10) for way in ways)
        return 2 * source.nbytes / microseconds * 1e6

    @functools.cache  # noqa: B019
    def copy_us(self, bytes_moved: int) -> float:
        """Measure the microseconds of a copy that reads and writes ``bytes_moved`` bytes together.

        The copy has the size of a case and is timed in the same way, launch included. The copy of
        ``copy_bandwidth`` is so large that a launch does not count.
        """
        elements = max(1, bytes_moved // 4)

        def ready() -> Call:
            source = torch.zeros(elements, dtype=torch.bfloat16, device=self.kind)
            target = torch.empty_like(source)
            return lambda: torch.neg(source, out=target)

        return self.time_us([ready() for _ in range(copies_for(bytes_moved))])

    @functools.cache  # noqa: B019
    def matmul_rate(self) -> float:
        """Measure the bfloat16 operations per second of an 8192 x 8192 product."""
        a = torch.randn(8192, 8192, device=self.kind, dtype=torch.bfloat16)
        b = torch.randn(8192, 8192, device=self.kind, dtype=torch.bfloat16)
        out = torch.empty_like(a)
        microseconds = self.time_us([lambda: torch.mm(a, b, out=out)] * 2, repetitions=5)
        return 2 * 8192**3 / microseconds * 1e6

    def kernel_times(self, call: Call) -> list[tuple[str, float]]:
        """Profile a call and return the name and microseconds of each kernel that it launches."""
        module, kind = self._module, self.kind.upper()
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

    def peak_bytes(self, call: Call) -> int:
        """Return the memory that a call takes beyond what is held before it, in bytes."""
        module = self._module
        call()
        module.synchronize()
        before = module.memory_allocated()
        module.reset_peak_memory_stats()
        call()
        module.synchronize()
        return int(module.max_memory_allocated() - before)

    def release(self) -> None:
        """Return free memory to the device."""
        self._module.empty_cache()

    @property
    def _module(self) -> Any:
        return getattr(torch, self.kind)


class GraphClock(GpuClock):
    """The clock of CUDA devices: calls are replayed one after the other as a CUDA graph."""

    kind = "cuda"
    device = torch.device(kind)

    def time_us(self, calls: Sequence[Call], repetitions: int = 20) -> float:
        """Return the median microseconds that a call takes; see ``GpuClock``."""
        stream = torch.cuda.Stream()
        graph = recorded(calls, stream)
        with torch.cuda.stream(stream):
            return _median_us(torch.cuda.Event, graph.replay, len(calls), repetitions)


class EventClock(GpuClock):
    """The clock of Intel GPUs, where calls are launched one after the other, outside any graph.

    A launch's cost on the host counts where kernels do not take longer.
    """

    kind = "xpu"
    device = torch.device(kind)

    def time_us(self, calls: Sequence[Call], repetitions: int = 20) -> float:
        """Return the median microseconds that a call takes, after a round that does not count."""

        def launch() -> None:
            for call in calls:
                call()

        launch()
        torch.xpu.synchronize()
        return _median_us(torch.xpu.Event, launch, len(calls), repetitions)


def _median_us(new_event: Any, round_of_calls: Call, count: int, repetitions: int) -> float:
    """Return the median microseconds of one of ``count`` calls between events on a stream."""
    times = []
    for _ in range(repetitions):
        start, end = new_event(enable_timing=True), new_event(enable_timing=True)
        start.record()
        round_of_calls()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    return statistics.median(times)


def gpu_clock() -> GpuClock:
    """Return the clock of the GPU that torch sees."""
    return GraphClock() if torch.cuda.is_available() else EventClock()

"""When the kernels of a layer start and end in a graph's replay, and on which stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from anymla.bench.gpu_timing import recorded
from lab.trace import Event, end_of, traced

_REPLAYS = 4
# Number of layers in a graph, and the index of the one that is examined; others run before and
# after it.
_LAYERS, _LOOKED_AT = 4, 2


@dataclasses.dataclass(frozen=True)
class Span:
    """A kernel's time in microseconds since the start of its layer.

    Attributes:
        stream: number of the stream, in the order of first launches.
        start, end: times of the kernel; kernels launched early start before their predecessors end.
        adds: microseconds by which this kernel delays the layer's end.
        name: name of the kernel.
    """

    stream: int
    start: float
    end: float
    adds: float
    name: str


def timeline(calls: Sequence[Callable[[], object]], stream: torch.cuda.Stream) -> list[Span]:
    """Record the kernels of one layer among others.

    Args:
        calls: layers with the same kernels, called in turn.
        stream: stream to launch on.
    """
    chosen = [calls[i % len(calls)] for i in range(_LAYERS)]
    graph = recorded(chosen, stream)

    def replay() -> None:
        for _ in range(_REPLAYS):
            graph.replay()
            stream.synchronize()

    with torch.cuda.stream(stream):
        events = traced(replay)
    return spans_of(events, _REPLAYS, _LAYERS, _LOOKED_AT)


def spans_of(events: Sequence[Event], replays: int, layers: int, looked_at: int) -> list[Span]:
    """Extract one layer's kernels in the fastest of several replays from a trace."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    kernels.sort(key=lambda event: float(event["ts"]))
    each = len(kernels) // replays
    of_layer = each // layers
    assert 0 < of_layer * layers * replays == len(kernels)
    runs = [kernels[i * each : (i + 1) * each] for i in range(replays)]
    fastest = min(runs, key=lambda run: max(map(end_of, run)) - float(run[0]["ts"]))
    some = fastest[looked_at * of_layer : (looked_at + 1) * of_layer]
    begin, last = float(some[0]["ts"]), 0.0
    streams: dict[Any, int] = {}
    spans = []
    for event in some:
        start, end = float(event["ts"]) - begin, end_of(event) - begin
        stream = streams.setdefault(event["args"].get("stream"), len(streams))
        adds = round(max(0.0, end - last), 1)
        spans.append(Span(stream, round(start, 1), round(end, 1), adds, str(event["name"])))
        last = max(last, end)
    return spans


def idle_us(spans: Sequence[Span]) -> float:
    """Return the microseconds between a layer's first start and last end in which nothing ran."""
    idle, last = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.start):
        idle += max(0.0, span.start - last)
        last = max(last, span.end)
    return idle

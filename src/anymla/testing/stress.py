"""The same calls over and over beside each other, which must give the same bits every time.

Calls are recorded as CUDA graphs with their comparison, and replayed in a random order on two
streams, beside copies that come and go: what a call shares the device with is never the same.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_REPEATS = 8  # of a call in its graph
_LOAD_BYTES = 64 << 20
_TELL_SECONDS = 4


@dataclasses.dataclass(frozen=True)
class Repeated:
    """A call.

    Attributes:
        label: for people.
        run: launches it and returns new tensors.
        blocks: how many blocks of rows it reads.
    """

    label: str
    run: Callable[[], tuple[Tensor, ...]]
    blocks: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of it.

    Attributes:
        calls: how many.
        blocks: of all calls.
        seconds: that they took.
        different: labels of calls whose bits were not those of the first time, with how often.
    """

    calls: int
    blocks: int
    seconds: float
    different: dict[str, int]


def repeat(
    calls: Sequence[Repeated],
    blocks: int,
    *,
    seed: int = 0,
    limit: float = 60,
    tell: Callable[[Outcome], None] | None = None,
) -> Outcome:
    """Repeat calls.

    Args:
        calls: what to repeat.
        blocks: until they have read as many,
        limit: or for as many seconds.
        seed: of their order.
        tell: called every few seconds with what came of it so far.
    """
    counters = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in calls]
    graphs = [_recorded(call, counter) for call, counter in zip(calls, counters, strict=True)]
    load = torch.zeros(_LOAD_BYTES, dtype=torch.uint8, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    order, done, launched = random.Random(seed), 0, 0
    started = told = time.perf_counter()

    def outcome() -> Outcome:
        counts = [(call.label, int(counter)) for call, counter in zip(calls, counters, strict=True)]
        found = {label: count for label, count in counts if count}
        return Outcome(launched, done, time.perf_counter() - started, found)

    while done < blocks and time.perf_counter() - started < limit:
        for _ in range(16):
            # A graph's memory is its own, so it must not run beside itself.
            side = order.randrange(2)
            mine = range(side, len(calls), 2)
            if not mine:
                continue
            number = mine[order.randrange(len(mine))]
            with torch.cuda.stream(streams[side]):
                graphs[number][0].replay()
            done += calls[number].blocks * _REPEATS
            launched += _REPEATS
        if order.random() < 0.5:
            with torch.cuda.stream(streams[2]):
                load[: order.randrange(1, _LOAD_BYTES)].add_(1)
        torch.cuda.synchronize()
        if tell is not None and time.perf_counter() - told > _TELL_SECONDS:
            told = time.perf_counter()
            tell(outcome())
    return outcome()


def _recorded(call: Repeated, counter: Tensor) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of the call and of its comparison with its first results, some times over.

    The graph knows those results by their address: they must live as long.
    """
    first = [each.clone() for each in call.run()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_REPEATS):
            for result, want in zip(call.run(), first, strict=True):
                same = result.view(torch.uint8) == want.view(torch.uint8)
                counter.add_(~same.all())
    return graph, first

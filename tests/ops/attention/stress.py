"""Repetition of calls in parallel with each other, which must give the same bits every time.

Calls are recorded as CUDA graphs with their comparison, and replayed in a random order on two
streams, in parallel with copies: the load of the device differs each time.

The inputs and outputs of a graph live as long as the graph: results and their expected values are
held with it, all else is allocated while it is recorded and so belongs to its own pool. Results are
overwritten before every call, so that a missing write does not show the last call's value.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_REPEATS = 8  # repetitions of a call in its graph
_LOAD_BYTES = 64 << 20
_POISON = 0xFF  # NaN in every floating format of the results


@dataclasses.dataclass(frozen=True)
class Repeated:
    """One call that is repeated.

    Attributes:
        label: name of the call, for people.
        run: function that launches it.
        results: all tensors that it writes: contiguous, with rows of a multiple of four bytes.
        blocks: number of blocks of rows that it reads.
    """

    label: str
    run: Callable[[], object]
    results: tuple[Tensor, ...]
    blocks: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of the repetition.

    Attributes:
        calls: number of calls compared, as counted on the device.
        launched: number of calls launched, as counted on the host.
        blocks: number of blocks that all calls read.
        seconds: duration in seconds.
        different: labels of calls whose bits differed from the first time, with the number of
            times.
    """

    calls: int
    launched: int
    blocks: int
    seconds: float
    different: dict[str, int]


@dataclasses.dataclass(frozen=True)
class _Recorded:
    """The recorded graph of a repeated call and its comparison, and tensors at fixed addresses."""

    graph: torch.cuda.CUDAGraph
    call: Repeated
    wanted: list[Tensor]
    counts: Tensor  # int64 [2]: different, compared


def repeat(calls: Sequence[Repeated], blocks: int, *, limit: float = 60) -> Outcome:
    """Repeat calls in random order, and compare their results.

    Args:
        calls: calls to repeat.
        blocks: number of blocks to read before the end.
        limit: time limit in seconds.
    """
    recorded = [_record(call) for call in calls]
    load = torch.zeros(_LOAD_BYTES, dtype=torch.uint8, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    order, done, launched = random.Random(0), 0, 0
    started = time.perf_counter()

    while done < blocks and time.perf_counter() - started < limit:
        for _ in range(16):
            # A graph has memory of its own, so it must not run in parallel with itself.
            side = order.randrange(2)
            mine = recorded[side::2]
            if not mine:
                continue
            some = order.choice(mine)
            with torch.cuda.stream(streams[side]):
                some.graph.replay()
            done += some.call.blocks * _REPEATS
            launched += _REPEATS
        if order.random() < 0.5:
            with torch.cuda.stream(streams[2]):
                load[: order.randrange(1, _LOAD_BYTES)].add_(1)
        torch.cuda.synchronize()
    counts = [(each.call.label, each.counts.tolist()) for each in recorded]
    found = {label: different for label, (different, _) in counts if different}
    compared = sum(compared for _, (_, compared) in counts)
    return Outcome(compared, launched, done, time.perf_counter() - started, found)


def _record(call: Repeated) -> _Recorded:
    """Record the call and the comparison with its first results, several times over."""
    _poison(call.results)
    call.run()
    wanted = [_bits(result).clone() for result in call.results]
    counts = torch.zeros(2, dtype=torch.int64, device="cuda")
    one = torch.ones((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_REPEATS):
            _poison(call.results)
            call.run()
            pairs = zip(call.results, wanted, strict=True)
            wrong = torch.stack([(_bits(result) != want).any() for result, want in pairs]).any()
            counts.add_(torch.stack([wrong.to(torch.int64), one]))
    return _Recorded(graph, call, [*wanted, one], counts)


def _poison(results: tuple[Tensor, ...]) -> None:
    for result in results:
        result.view(torch.uint8).fill_(_POISON)


def _bits(result: Tensor) -> Tensor:
    return result.view(torch.int32)

"""The same calls over and over beside each other, which must give the same bits every time.

Calls are recorded as CUDA graphs with their comparison, and replayed in a random order on two
streams, beside copies that come and go: what a call shares the device with is never the same.

What a graph reads and writes lives as long as the graph: results and what they are compared with
are held beside it, everything else is allocated while it is recorded and so belongs to its own
pool. Results are overwritten before every call, or what a call leaves out would still be there from
the last one.
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
_POISON = 0xFF  # NaN of every floating format that results have


@dataclasses.dataclass(frozen=True)
class Repeated:
    """A call.

    Attributes:
        label: for people.
        run: launches it.
        results: what it writes, all of it: contiguous, of a multiple of four bytes a row.
        blocks: how many blocks of rows it reads.
    """

    label: str
    run: Callable[[], object]
    results: tuple[Tensor, ...]
    blocks: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of it.

    Attributes:
        calls: how many were compared, as the device has counted.
        launched: how many, as the host has.
        blocks: of all calls.
        seconds: that they took.
        different: labels of calls whose bits were not those of the first time, with how often.
    """

    calls: int
    launched: int
    blocks: int
    seconds: float
    different: dict[str, int]


@dataclasses.dataclass(frozen=True)
class _Recorded:
    """A graph of a call and its comparison, and what it knows by its address."""

    graph: torch.cuda.CUDAGraph
    call: Repeated
    wanted: list[Tensor]
    counts: Tensor  # int64 [2]: different, compared


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
    recorded = [_record(call) for call in calls]
    load = torch.zeros(_LOAD_BYTES, dtype=torch.uint8, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    order, done, launched = random.Random(seed), 0, 0
    started = told = time.perf_counter()

    def outcome() -> Outcome:
        counts = [(each.call.label, each.counts.tolist()) for each in recorded]
        found = {label: different for label, (different, _) in counts if different}
        compared = sum(compared for _, (_, compared) in counts)
        return Outcome(compared, launched, done, time.perf_counter() - started, found)

    while done < blocks and time.perf_counter() - started < limit:
        for _ in range(16):
            # A graph's memory is its own, so it must not run beside itself.
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
        if tell is not None and time.perf_counter() - told > _TELL_SECONDS:
            told = time.perf_counter()
            tell(outcome())
    return outcome()


def _record(call: Repeated) -> _Recorded:
    """A graph of the call and of its comparison with its first results, some times over."""
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

"""Times of functions that are compared with each other, and what rows say of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch.utils._python_dispatch import TorchDispatchMode

_Item = TypeVar("_Item")


class CountedCalls(TorchDispatchMode):
    """Context in which ``count`` counts the operators that torch dispatches, also views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count an operator and run it."""
        self.count += 1
        return func(*args, **(kwargs or {}))


def begun_within(
    items: Iterable[_Item], end: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[_Item]:
    """Yield items until one would begin later than ``end``, in the clock's seconds."""
    for item in items:
        if clock() > end:
            return
        yield item


def median(times: list[float]) -> float:
    """Return the median, in the unit of the input."""
    return statistics.median(times)


def spread(times: list[float]) -> tuple[float, float]:
    """Return the 10th and the 90th percentile."""
    ordered = sorted(times)
    last = len(ordered) - 1
    return ordered[round(0.1 * last)], ordered[round(0.9 * last)]


def milliseconds(times: list[float], name: str = "ms") -> dict[str, float]:
    """Fields of a row: median, 10th and 90th percentile of some seconds, in milliseconds."""
    low, high = spread(times)
    return {name: median(times) * 1e3, f"{name}_p10": low * 1e3, f"{name}_p90": high * 1e3}


def microseconds(times: list[float]) -> dict[str, float]:
    """Fields of a row: the same three in microseconds, each rounded to a tenth."""
    return {name: round(1e3 * ms, 1) for name, ms in milliseconds(times, "us").items()}


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    block: int,
    warm_up: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time functions in turn, so that whatever slows the machine down slows all of them.

    Args:
        functions: functions to time, by name.
        rounds: number of turns of all functions.
        block: calls of one function in a row, so that each finds its own data in the caches.
        warm_up: calls of each before anything counts.
        clock: seconds; ``time.process_time`` leaves out what other processes take, and adds up
            threads.

    Returns:
        Seconds of every call, by name, in the order of the calls.
    """
    for function in functions.values():
        for _ in range(warm_up):
            function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            for _ in range(block):
                start = clock()
                function()
                times[name].append(clock() - start)
    return times


def by_round(times: list[float], rounds: int) -> list[float]:
    """Return the median of each turn of ``interleaved``."""
    block = len(times) // rounds
    return [median(times[i * block : (i + 1) * block]) for i in range(rounds)]


def ratio_by_round(numerator: list[float], denominator: list[float], rounds: int) -> float:
    """Return the median over turns of the ratio of both medians, which cancels lasting noise."""
    pairs = zip(by_round(numerator, rounds), by_round(denominator, rounds), strict=True)
    return median([a / b for a, b in pairs])

"""One benchmark runner: a case's inputs, its subjects (ours and peers), medians, a row.

A family's ``cases`` module says what a case's subjects are; ``peers`` has other libraries' calls;
a ``Clock`` times. A row is a case's fields, what its subjects gave in their order, and what
``judge`` makes of them; ``facts`` are in every row of a command.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from anymla.bench.environment import environment
from anymla.bench.report import Result

Call = Callable[[], Any]
Values = dict[str, Any]
# What was asked of a row in words, and whether it was met; None where nothing was.
Verdict = tuple[str, bool] | None


class Versioned(Protocol):
    """A library beside which something is timed."""

    name: str

    def version(self) -> str | None:
        """Its release; None if the library does not say it."""
        ...


class Clock(Protocol):
    """Times on a device; ``gpu_timing.GraphClock`` on GPUs."""

    @property
    def device(self) -> torch.device:
        """Device on which inputs are drawn."""
        ...

    def time_us(self, calls: Sequence[Call], repetitions: int = 20) -> float:
        """Return the median microseconds of a call; successive calls take the next of ``calls``."""
        ...

    def copy_bandwidth(self) -> float:
        """Bytes a second of a large copy, read and written ones together."""
        ...

    def matmul_rate(self) -> float:
        """Bfloat16 operations a second of a large product."""
        ...

    def copy_us(self, bytes_moved: int) -> float:
        """Microseconds of a copy that moves so many bytes."""
        ...

    def peak_bytes(self, call: Call) -> int:
        """Memory that a call takes beyond what is held before it."""
        ...

    def kernel_times(self, call: Call) -> list[tuple[str, float]]:
        """Profile a call and return the name and microseconds of each launched kernel."""
        ...

    def release(self) -> None:
        """Give memory that is free back to the device."""
        ...


@dataclasses.dataclass(frozen=True)
class Subject:
    """Calls that are timed on a case's inputs, and the fields that follow from their time.

    Attributes:
        field: name of the row's field for the median microseconds.
        calls: the same call on different inputs, as many as defeat the caches; none where only
            ``before`` counts.
        repetitions: replays that are timed.
        per: operations in one call, of which the time is one's.
        before: fields of the row that are found before it is timed, its error for instance.
        after: fields that follow from its microseconds.
        within: a context that it is timed in.
        optional: left out of the row if it raises RuntimeError.
    """

    field: str
    calls: Sequence[Call] = ()
    repetitions: int = 20
    per: int = 1
    before: Callable[[], Values] = dict
    after: Callable[[float], Values] = lambda _: {}
    within: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    optional: bool = False


def unjudged(values: Values) -> tuple[Values, Verdict]:
    """The row as it is, of which nothing is asked."""
    return values, None


@dataclasses.dataclass(frozen=True)
class Case:
    """One row to be.

    Attributes:
        part: name of the benchmark's part.
        label: for people; the row's ``case``.
        subjects: draws the inputs on a clock's device; later subjects when the earlier are timed.
        fields: fields of the row that are known beforehand.
        judge: makes the row and the verdict of all values.
        seed: seed of the inputs.
    """

    part: str
    label: str
    subjects: Callable[[Clock], Iterable[Subject]]
    fields: Values = dataclasses.field(default_factory=dict)
    judge: Callable[[Values], tuple[Values, Verdict]] = unjudged
    seed: int = 0


def run(
    cases: Iterable[Case], clock: Clock, *, failures_are_rows: bool = False
) -> Iterator[Result]:
    """Measure the cases, one result each; none where a case has no subjects here.

    Args:
        cases: drawn one after the other, so that only one's inputs are held.
        clock: clock that times the calls, with the device of the inputs.
        failures_are_rows: a case that raises gives a row that says so; else the run ends.
    """
    for case in cases:
        try:
            measured = _measured(case, clock)
            if measured is None:
                continue
            values, verdict = case.judge(measured)
        except Exception as error:
            if not failures_are_rows:
                raise
            problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
            values, verdict = {"error": problem}, ("runs", False)
        clock.release()
        result = Result(case.part, case.label, values, *(verdict or (None, None)))
        del case  # which may hold weights, while the next one's are made
        yield result


@torch.inference_mode()
def _measured(case: Case, clock: Clock) -> Values | None:
    torch.manual_seed(case.seed)
    values: Values = {}
    for subject in case.subjects(clock):
        allowed = (RuntimeError,) if subject.optional else ()
        with subject.within(), contextlib.suppress(*allowed):
            found = subject.before()
            if subject.calls:
                taken = clock.time_us(subject.calls, subject.repetitions) / subject.per
                found |= {subject.field: taken} | subject.after(taken)
            values |= found
    return {**case.fields, "seed": case.seed, **values} if values else None


def ceilings(clock: Clock, of: Collection[str] = ("copy", "product")) -> Iterator[Result]:
    """Rows of what the device can do: a large copy, a large matrix product."""
    if "copy" in of:
        yield Result("device", "copy", {"tb_per_s": clock.copy_bandwidth() / 1e12})
    if "product" in of:
        yield Result("device", "bf16 product 8192^3", {"tflops": clock.matmul_rate() / 1e12})


def facts(command: str, device: Values, peers: Iterable[Versioned] = ()) -> Values:
    """Fields of every row of a command: machine, commit, versions, and the peers' versions."""
    return environment(command) | device | {peer.name: peer.version() for peer in peers}


def rounded(values: Values, digits: dict[str, int]) -> Values:
    """The values, those named with so many digits after the point."""
    return {
        name: round(value, digits[name]) if name in digits else value
        for name, value in values.items()
    }


def beside(
    ours: str, theirs: str, least: float, words: str
) -> Callable[[Values], tuple[Values, Verdict]]:
    """A judge: how many times as long the peer takes, where it was timed.

    Args:
        ours: field of our microseconds.
        theirs: field of the peer's.
        least: ratio that is asked for.
        words: target in words, for people.
    """

    def judge(values: Values) -> tuple[Values, Verdict]:
        if theirs not in values:
            return values, None
        ratio = values[theirs] / values[ours]
        return {**values, "ratio": ratio}, (words, ratio >= least)

    return judge

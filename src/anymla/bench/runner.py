"""The benchmark runner: from a case's inputs and subjects (ours and peers) to medians in a row.

A family's ``cases`` module defines a case's subjects, ``peers`` holds other libraries' calls, and a
``Clock`` times. A row consists of the case's fields, its subjects' fields in their order, and the
verdict of ``judge``; ``facts`` are in every row of a command.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from anymla.bench.cpu_clock import CpuClock
from anymla.bench.environment import environment
from anymla.bench.gpu_timing import GpuClock
from anymla.bench.report import Result

Call = Callable[[], Any]
Values = dict[str, Any]
# A row's target in words, and True if the row reaches it; None without a target.
Verdict = tuple[str, bool] | None


# Times on the device of the inputs.
Clock = CpuClock | GpuClock


class Versioned(Protocol):
    """A library beside which something is timed."""

    name: str

    def version(self) -> str | None:
        """Return the library's release; None if it does not say it."""
        ...


@dataclasses.dataclass(frozen=True)
class Subject:
    """Calls that are timed on a case's inputs, and the fields that follow from their time.

    Attributes:
        field: name of the row's field for the median microseconds.
        calls: the same call on different inputs, as many as defeat the caches; none if only
            ``before`` counts.
        repetitions: number of timed replays.
        per: operations in one call, among which its time is divided.
        before: function that returns fields before timing, such as the error.
        after: function from microseconds to further fields.
        within: context in which the calls are timed.
        optional: True to leave the subject out of the row if it raises RuntimeError.
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
    """Return the row as it is, without a target."""
    return values, None


@dataclasses.dataclass(frozen=True)
class Case:
    """One row to be measured.

    Attributes:
        part: name of the benchmark's part.
        label: text for people, the row's ``case``.
        subjects: function that draws the inputs on a clock's device and yields subjects, each one
            after the previous has been timed.
        fields: fields of the row that are known beforehand.
        judge: function from all values to the row and the verdict.
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
    """Measure the cases and yield one result each, or none for a case without subjects here.

    Args:
        cases: cases, drawn one after the other so that only one's inputs are held.
        clock: clock that times the calls, with the device of the inputs.
        failures_are_rows: True to report a case that raises in a row; False to end the run.
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
        del case  # it may hold weights while the next case's weights are made
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
    """Yield rows of the device's ceilings: a large copy and a large matrix product."""
    if "copy" in of:
        yield Result("device", "copy", {"tb_per_s": clock.copy_bandwidth() / 1e12})
    if "product" in of:
        yield Result("device", "bf16 product 8192^3", {"tflops": clock.matmul_rate() / 1e12})


def facts(command: str, device: Values, peers: Iterable[Versioned] = ()) -> Values:
    """Return the fields of every row of a command: machine, commit, and all versions."""
    return environment(command) | device | {peer.name: peer.version() for peer in peers}


def rounded(values: Values, digits: dict[str, int]) -> Values:
    """Round the named values to the given numbers of digits after the point."""
    return {
        name: round(value, digits[name]) if name in digits else value
        for name, value in values.items()
    }


def beside(
    ours: str, theirs: str | Sequence[str], least: float, words: str
) -> Callable[[Values], tuple[Values, Verdict]]:
    """Make a judge that adds how many times as long the fastest peer takes, if one was timed.

    Args:
        ours: name of the field of our microseconds.
        theirs: name of the field of the peer's microseconds, or several of them.
        least: smallest ratio that reaches the target.
        words: target in words, for people.
    """
    fields = [theirs] if isinstance(theirs, str) else theirs

    def judge(values: Values) -> tuple[Values, Verdict]:
        times = [values[field] for field in fields if field in values]
        if not times:
            return values, None
        ratio = min(times) / values[ours]
        return {**values, "ratio": ratio}, (words, ratio >= least)

    return judge

"""Runs cases against a backend, or against another library, and says what came out."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import random
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from anymla.ops import device as device_facts
from anymla.ops.registry import BackendUnavailable
from anymla.testing.conformance.adapters import Adapter
from anymla.testing.conformance.ops import Ops, all_operations
from anymla.testing.conformance.registry import Case, NotApplicable
from anymla.testing.poison import poisoned_empty
from anymla.testing.tolerance import observed_errors

PASSED, FAILED, NOT_APPLICABLE = "passed", "failed", "not applicable"


@dataclasses.dataclass(frozen=True)
class Subject:
    """What the cases judge.

    Attributes:
        backend: of the package's operations; None for the best of each.
        adapter: another library in place of some of them.
        device: where it runs.
    """

    backend: str | None = None
    adapter: Adapter | None = None
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))

    @property
    def name(self) -> str:
        """As rows and reports name it."""
        if self.adapter is not None:
            return self.adapter.name
        return self.backend or "best backend"

    def why_not(self, case: Case) -> str:
        """Why a case does not apply; "" if it does."""
        if case.gpu and self.device.type != "cuda":
            return "needs a CUDA device"
        if self.adapter is not None:
            return self.adapter.why_not(case)
        if self.backend is None or not case.operations:
            return ""
        names = [each for each in case.operations if self.backend not in _backends(each)]
        if names:
            return f"backend {self.backend} has no {', '.join(names)}"
        if self.backend == "reference" and case.gpu:
            return "a case about a device; the reference computes on the host"
        if self.backend == "reference" and case.bulk:
            return "a case about size; the reference loops in Python"
        if self.backend == "triton" and device_facts.INTERPRETED:
            if case.bulk:
                return "a case about size; Triton's interpreter takes minutes"
            if {"sparse_attention", "experts"} <= set(case.operations):
                return "a case of whole models; Triton's interpreter takes minutes, a GPU runs it"
        return ""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one case said.

    Attributes:
        case_id: "L1", ...
        story: what must hold.
        subject: what was judged.
        status: PASSED, FAILED or NOT_APPLICABLE.
        detail: the failure, or why it does not apply.
        seconds: it took.
        notes: what of the case was not judged, and why.
        error: largest error over what is allowed; None where only bits were compared.
    """

    case_id: str
    story: str
    subject: str
    status: str
    detail: str = ""
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    error: float | None = None


class _Tally:
    """Which calls of a case the library under test answered."""

    def __init__(self) -> None:
        self.answered = 0
        self.refused: collections.Counter[str] = collections.Counter()

    def watch(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The library's function; what it does not claim to do is done by this package."""

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                result = call(*args, **kwargs)
            except NotApplicable as reason:
                self.refused[f"{name}: {reason}"] += 1
                return all_operations()[name](*args, **kwargs)
            self.answered += 1
            return result

        return run

    def notes(self) -> tuple[str, ...]:
        """A line a reason."""
        return tuple(f"not judged: {count} x {why}" for why, count in self.refused.items())


def run_case(case: Case, subject: Subject) -> Outcome:
    """Run one case. Every failure, a crash of the case's own included, is an outcome."""
    named = (case.case_id, case.story, subject.name)
    reason = subject.why_not(case)
    if reason:
        return Outcome(*named, NOT_APPLICABLE, reason)
    tally = _Tally()
    ops = _ops(subject, tally)
    began = time.perf_counter()
    with observed_errors() as errors:
        status, detail = _judge(case, ops)
    seconds = round(time.perf_counter() - began, 2)
    if subject.adapter is not None and status == PASSED and not tally.answered:
        return Outcome(*named, NOT_APPLICABLE, "; ".join(tally.refused), seconds)
    return Outcome(*named, status, detail, seconds, tally.notes(), max(errors, default=None))


def run_cases(cases: Iterable[Case], subject: Subject) -> Iterator[Outcome]:
    """Run cases one after the other in this process."""
    for case in cases:
        yield run_case(case, subject)


def _ops(subject: Subject, tally: _Tally) -> Ops:
    if subject.adapter is None:
        return Ops(subject.backend, device=subject.device)
    functions = subject.adapter.functions
    replacements = {name: tally.watch(name, call) for name, call in functions.items()}
    dot_error = subject.adapter.dot_error
    return Ops("torch", replacements, device=subject.device, dot_error=dot_error)


def _judge(case: Case, ops: Ops) -> tuple[str, str]:
    seed = zlib.crc32(case.case_id.encode())
    random.seed(seed)
    torch.manual_seed(seed)
    silent = contextlib.redirect_stdout(io.StringIO())  # observed errors, which tests show
    try:
        with torch.no_grad(), poisoned_empty(), silent:
            case.run(ops)
    except AssertionError as failure:
        return FAILED, _line(failure)
    except (BackendUnavailable, NotApplicable) as reason:
        return NOT_APPLICABLE, _line(reason)
    except Exception as error:  # a library that raises on legal input fails the case
        return FAILED, f"raised {type(error).__name__}: {_line(error)}"
    return PASSED, ""


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _backends(operation: str) -> Iterable[str]:
    return all_operations()[operation].backends

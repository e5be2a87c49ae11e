"""Runs cases against a backend, or against another library, and collects the outcomes."""

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
    """Subject of the judgement.

    Attributes:
        backend: name of the backend of the package's operations; None for the best of each.
        adapter: adapter of another library that replaces some of them, or None.
        device: device of the calls.
    """

    backend: str | None = None
    adapter: Adapter | None = None
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))

    @property
    def name(self) -> str:
        """Name in rows and reports."""
        if self.adapter is not None:
            return self.adapter.name
        return self.backend or "best backend"

    def why_not(self, case: Case) -> str:
        """Return the reason why a case does not apply; "" if it does."""
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
    """Outcome of one case.

    Attributes:
        case_id: id of the case, such as "L1".
        story: requirement of the case.
        subject: name of the judged subject.
        status: one of PASSED, FAILED or NOT_APPLICABLE.
        detail: message of the failure, or the reason why the case does not apply.
        seconds: duration of the case in seconds.
        notes: parts of the case that were not judged, and why.
        error: largest error as a share of what is allowed; None if only bits were compared.
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
    """Records the calls of a case that the library under test answered."""

    def __init__(self) -> None:
        self.answered = 0
        self.refused: collections.Counter[str] = collections.Counter()

    def watch(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the library's function; this package answers calls that it does not claim."""

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
        """Return one line for each reason."""
        return tuple(f"not judged: {count} x {why}" for why, count in self.refused.items())


def run_case(case: Case, subject: Subject) -> Outcome:
    """Run one case. Every failure, a crash of the case itself included, is an outcome."""
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
    # observed errors are printed, for tests to show
    silent = contextlib.redirect_stdout(io.StringIO())
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

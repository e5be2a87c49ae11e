"""The list of cases, and how one is written."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable

from anymla.testing.conformance.ops import Ops

_MODULES = (
    "cache",
    "numbers",
    "records",
    "rope",
    "compressor",
    "indexer",
    "topk",
    "selection",
    "attention",
    "streams",
    "network",
    "projections",
    "shared",
    "drafter",
    "gpu",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing that went wrong somewhere.

    Attributes:
        case_id: "L1", "A10", ...
        story: what must hold, in a line.
        operations: the operations under test; empty if it is not about operations.
        also: operations that are judged as well by who has them (``Ops.has``).
        run: raises AssertionError if it does not hold.
        gpu: it needs a GPU, and makes its tensors there.
        bulk: it is about size, which the reference backends, written as loops, are not made for.
        quick: ``anymla doctor`` runs it; together they call every family of operations.
    """

    case_id: str
    story: str
    operations: tuple[str, ...]
    run: Callable[[Ops], None]
    gpu: bool = False
    bulk: bool = False
    quick: bool = False
    also: tuple[str, ...] = ()


class NotApplicable(Exception):
    """What is under test does not claim to do what a case asks; the message says what."""


CASES: dict[str, Case] = {}


def case(
    case_id: str,
    story: str,
    *operations: str,
    bulk: bool = False,
    gpu: bool = False,
    quick: bool = False,
    also: tuple[str, ...] = (),
) -> Callable[[Callable[[Ops], None]], Callable[[Ops], None]]:
    """Register the decorated function as a case."""

    def register(run: Callable[[Ops], None]) -> Callable[[Ops], None]:
        _add(Case(case_id, story, operations, run, bulk=bulk, gpu=gpu, quick=quick, also=also))
        return run

    return register


def load_cases() -> dict[str, Case]:
    """All cases by id, in the order of the list that they come from."""
    for module in _MODULES:
        importlib.import_module(f"anymla.testing.conformance.{module}")
    return dict(sorted(CASES.items(), key=lambda item: _place(item[0])))


def _place(case_id: str) -> tuple[int, int]:
    return "LQRCIAM".find(case_id[0]), int(case_id[1:])


def expect(condition: object, message: str) -> None:
    """Raise AssertionError with the message unless the condition holds."""
    if not condition:
        raise AssertionError(message)


def _add(new: Case) -> None:
    assert new.case_id not in CASES, f"{new.case_id} is registered twice"
    CASES[new.case_id] = new

"""The list of cases, and their registration."""

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
    "training",
    "training_blocks",
    "streams",
    "network",
    "projections",
    "v41",
    "drafter",
    "gpu",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One requirement that some implementation has violated.

    Attributes:
        case_id: short id, such as "L1" or "A10".
        story: requirement in one line.
        operations: operations under test; () for a case about other parts.
        also: operations that are judged as well if they are under test (``Ops.has``).
        run: function that raises AssertionError if the requirement is violated.
        gpu: True if it needs a GPU, and makes its tensors there.
        bulk: True if it is about size, for which the reference backends, written as loops, are too
            slow.
        quick: True if ``anymla doctor`` runs it; the quick cases together call every family of
            operations.
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
    """The subject does not claim a feature that a case needs; the message names it."""


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
    """Return all cases by id, in the order of their list."""
    for module in _MODULES:
        importlib.import_module(f"anymla.testing.conformance.{module}")
    return dict(sorted(CASES.items(), key=lambda item: _place(item[0])))


def _place(case_id: str) -> tuple[int, int]:
    return "LQRCIATM".find(case_id[0]), int(case_id[1:])


def expect(condition: object, message: str) -> None:
    """Raise AssertionError with the message unless the condition holds."""
    if not condition:
        raise AssertionError(message)


def _add(new: Case) -> None:
    assert new.case_id not in CASES, f"{new.case_id} is registered twice"
    CASES[new.case_id] = new

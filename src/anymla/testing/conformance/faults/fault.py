"""The list of deliberate faults, and how one is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from anymla.testing.conformance.ops import Ops

GOOD = Ops("torch")


@dataclasses.dataclass(frozen=True)
class Fault:
    """One wrong version of one operation.

    Attributes:
        name: what is wrong, in words joined by underscores.
        cases: ids of the cases it is meant for; others may notice it as well.
        operation: that is wrong.
        run: called instead.
    """

    name: str
    cases: tuple[str, ...]
    operation: str
    run: Callable[..., Any]

    @property
    def words(self) -> str:
        """What is wrong, in words."""
        return self.name.replace("_", " ")


FAULTS: list[Fault] = []


def fault(operation: str, *cases: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as a faulty version of an operation."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        FAULTS.append(Fault(run.__name__, cases, operation, run))
        return run

    return register

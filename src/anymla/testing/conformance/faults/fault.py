"""The list of deliberate faults, and their registration."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from anymla.testing.conformance.ops import Ops

GOOD = Ops("torch")


@dataclasses.dataclass(frozen=True)
class Fault:
    """One wrong version of one operation, or of another function.

    Attributes:
        name: description of the fault, in words joined by underscores.
        cases: ids of the cases that are meant to detect it; others may do so as well.
        operation: name of the faulty operation; or of the function, after its class for a method.
        run: replacement that is called. For a function that is no operation, the original is its
            first argument.
        owners: modules, or the class, in which the function is replaced; () for an operation.
    """

    name: str
    cases: tuple[str, ...]
    operation: str
    run: Callable[..., Any]
    owners: tuple[object, ...] = ()

    @property
    def words(self) -> str:
        """Description of the fault, in words."""
        return self.name.replace("_", " ")

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the function inside the block; an operation is left alone."""
        attribute = self.operation.rpartition(".")[2]
        with contextlib.ExitStack() as replaced:
            for owner in self.owners:
                wrong = self._instead_of(getattr(owner, attribute))
                replaced.enter_context(mock.patch.object(owner, attribute, wrong))
            yield

    def _instead_of(self, good: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*args: Any, **named: Any) -> Any:  # a function, so that classes bind it
            return self.run(good, *args, **named)

        return wrong


FAULTS: list[Fault] = []

_Register = Callable[[Callable[..., Any]], Callable[..., Any]]


def fault(operation: str, *cases: str) -> _Register:
    """Register the decorated function as a faulty version of an operation."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        FAULTS.append(Fault(run.__name__, cases, operation, run))
        return run

    return register


def fault_in(function: str, *owners: object, cases: tuple[str, ...]) -> _Register:
    """Register the decorated function as a faulty version of one that is no operation.

    Args:
        function: name of the function, after its class for a method.
        owners: the class, or the modules that call it by this name.
        cases: ids of the cases that are meant to detect it; others are not run.
    """

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        FAULTS.append(Fault(run.__name__, cases, function, run, owners))
        return run

    return register

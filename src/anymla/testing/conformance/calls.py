"""Record the backend of each operation that cases call, and why those that rank before refused."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from anymla.ops.registry import Backend, Operation
from anymla.testing.conformance.ops import all_operations


def family_of(operation: Operation[..., Any]) -> str:
    """Name of the package of ``anymla.ops`` that the operation is from."""
    return operation.__module__.split(".")[2]


@dataclasses.dataclass
class Calls:
    """Calls of one operation that one backend ran.

    Attributes:
        family: the operation's package.
        operation: name of the operation.
        backend: the backend's name.
        why_not: reasons against the backends that rank before, by name, at the first call.
        cases: ids of the cases that made the calls.
    """

    family: str
    operation: str
    backend: str
    why_not: dict[str, str]
    cases: list[str] = dataclasses.field(default_factory=list)


class Watch:
    """A record of all calls of operations, by (operation, backend), in the order of the first ones.

    Attributes:
        calls: record by (operation, backend) of the calls so far.
        case_id: id of the case that runs; whoever runs cases sets it.
    """

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str], Calls] = {}
        self.case_id = ""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record calls for as long as this lasts, those of layers and models too."""
        with contextlib.ExitStack() as watched:
            for operation in all_operations().values():
                backends = [
                    dataclasses.replace(backend, run=self._watched(operation, backend))
                    for backend in operation.backends.values()
                ]
                watched.enter_context(operation.with_backends(backends))
            yield

    def _watched(self, operation: Operation[..., Any], backend: Backend) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            key = operation.name, backend.name
            if key not in self.calls:
                reasons = _reasons(operation, backend.name, args, kwargs)
                self.calls[key] = Calls(family_of(operation), *key, reasons)
            cases = self.calls[key].cases
            if self.case_id not in cases:
                cases.append(self.case_id)
            return backend.run(*args, **kwargs)

        return run


def _reasons(
    operation: Operation[..., Any], taken: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, str]:
    """Reasons against each backend that ranks before the one that was taken, by name."""
    _, answers = operation.explain(*args, **kwargs)
    before = list(answers)[: list(answers).index(taken)]
    return {name: answers[name].reason or "runs only when it is named" for name in before}

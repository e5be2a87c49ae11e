"""The operations under test, by name."""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import anymla.ops
from anymla.ops._operation import Operation


@functools.cache
def all_operations() -> dict[str, Operation]:
    """Every public operation of ``anymla.ops`` by name."""
    found: dict[str, Operation] = {}
    for family in pkgutil.iter_modules(anymla.ops.__path__):
        if family.ispkg:
            module = importlib.import_module(f"anymla.ops.{family.name}")
            members = vars(module).values()
            found |= {each.name: each for each in members if isinstance(each, Operation)}
    return found


class Ops:
    """Operations as attributes, all of one backend.

    Attributes:
        backend: name of a backend, or None for the best one.
        replacements: functions to call in place of the operations of these names, with the same
            arguments. This is how another library, or a deliberate fault, is put to the test.
    """

    def __init__(
        self,
        backend: str | None = None,
        replacements: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self.backend = backend
        self.replacements = dict(replacements or {})

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in self.replacements:
            return self.replacements[name]
        if name not in all_operations():
            raise AttributeError(f"there is no operation {name!r}")
        return functools.partial(all_operations()[name], backend=self.backend)

    @contextlib.contextmanager
    def as_backend(self) -> Iterator[str | None]:
        """A backend name under which a whole model runs on these operations."""
        if not self.replacements:
            yield self.backend
            return
        name = "under-test"
        for operation in all_operations().values():
            operation.register(name, getattr(self, operation.name))
        try:
            yield name
        finally:
            for operation in all_operations().values():
                del operation.backends[name]


def all_backends() -> list[str]:
    """Names of the backends that some operation has."""
    names: dict[str, None] = {}
    for operation in all_operations().values():
        names |= dict.fromkeys(operation.backends)
    return sorted(names)

"""The operations under test, by name."""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

import anymla.ops
from anymla.ops.registry import Operation
from anymla.testing.device_bridge import on_device
from anymla.testing.tolerance import Bound, accumulation


@functools.cache
def all_operations() -> dict[str, Operation[..., Any]]:
    """Return every public operation of ``anymla.ops`` by name."""
    found: dict[str, Operation[..., Any]] = {}
    for operations in operations_by_family().values():
        found |= operations
    return found


@functools.cache
def operations_by_family() -> dict[str, dict[str, Operation[..., Any]]]:
    """Every public operation of ``anymla.ops`` by the name of its package and its own."""
    found: dict[str, dict[str, Operation[..., Any]]] = {}
    for family in pkgutil.iter_modules(anymla.ops.__path__):
        if family.ispkg:
            members = vars(importlib.import_module(f"anymla.ops.{family.name}")).values()
            operations = [each for each in members if isinstance(each, Operation)]
            found[family.name] = {each.name: each for each in operations}
    return found


class Ops:
    """Operations as attributes, all of one backend.

    Attributes:
        backend: name of a backend, or None for the best one.
        replacements: functions called instead of the operations of these names, with the same
            arguments, to test another library or a deliberate fault.
        device: device of the calls; the cases' CPU tensors are copied there and back, byte by byte.
            None leaves them where they are.
        dot_error: error of an index score's dot product relative to its terms' magnitudes, for
            a library that declares a narrower accumulator than float32.
    """

    def __init__(
        self,
        backend: str | None = None,
        replacements: Mapping[str, Callable[..., Any]] | None = None,
        *,
        device: torch.device | None = None,
        dot_error: Bound | None = None,
    ) -> None:
        self.backend = backend
        self.replacements = dict(replacements or {})
        self.device = device if device is not None and device.type != "cpu" else None
        self.dot_error = dot_error or accumulation(128, torch.float32)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in self.replacements:
            run = self.replacements[name]
        elif name in all_operations():
            run = functools.partial(all_operations()[name], backend=self.backend)
        else:
            raise AttributeError(f"there is no operation {name!r}")
        return run if self.device is None else on_device(run, self.device)

    def has(self, name: str) -> bool:
        """True if an operation is under test."""
        if self.replacements:
            return name in self.replacements
        return self.backend is None or self.backend in all_operations()[name].backends

    @contextlib.contextmanager
    def as_backend(self) -> Iterator[str | None]:
        """Return a backend name under which a whole model on the device uses these operations."""
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
                operation.unregister(name)


def all_backends() -> list[str]:
    """Return the names of all backends of the operations."""
    names: dict[str, None] = {}
    for operation in all_operations().values():
        names |= dict.fromkeys(operation.backends)
    return sorted(names)

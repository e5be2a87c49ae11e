"""Backends of operations: what runs a call, and whether it can."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any


class BackendUnavailable(RuntimeError):
    """This machine, or this backend, cannot run this call; the message says why."""


@dataclasses.dataclass(frozen=True)
class Support:
    """Whether a backend can run a call, and if not, why.

    Attributes:
        ok: it can.
        reason: why not.
        automatic: it may be chosen without having been named.
    """

    ok: bool
    reason: str = ""
    automatic: bool = True

    def __bool__(self) -> bool:
        return self.ok


SUPPORTED = Support(True)


@dataclasses.dataclass(frozen=True)
class Backend:
    """One implementation of an operation."""

    name: str
    run: Callable[..., Any]
    supports: Callable[..., Support] | None

    def support(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Support:
        """Whether this backend can run the call; nothing is launched."""
        return SUPPORTED if self.supports is None else self.supports(*args, **kwargs)


class LazyFunction:
    """A function whose module is imported when it is first called, or asked for its signature."""

    def __init__(self, module: str, name: str) -> None:
        """``name`` in the module of that dotted name."""
        self._module = module
        self._name = name
        self._run: Callable[..., Any] | None = None

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._load())

    def _load(self) -> Callable[..., Any]:
        if self._run is None:
            self._run = getattr(importlib.import_module(self._module), self._name)
        return self._run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._load()(*args, **kwargs)

"""Waiting for a second queue inside an operation, as late as it can.

An argument may still be in the making on another queue when an operation is called that reads it
only in its last launch. The caller leaves the waiting to the operation, and finds out if it forgot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

_wait: ContextVar[Callable[[], None] | None] = ContextVar("wait", default=None)


@contextlib.contextmanager
def waits_inside(wait: Callable[[], None]) -> Iterator[None]:
    """An operation that is called inside waits before it reads; for those that know how.

    Args:
        wait: lets what is launched afterwards wait.
    """
    token = _wait.set(wait)
    try:
        yield
        assert _wait.get() is None, "the operation has not waited for its arguments"
    finally:
        _wait.reset(token)


def wait_for_arguments() -> None:
    """Before the first launch that reads what may come from another queue; again does nothing."""
    wait = _wait.get()
    if wait is not None:
        _wait.set(None)
        wait()


def waits() -> bool:
    """Whether something may still be in the making on another queue."""
    return _wait.get() is not None

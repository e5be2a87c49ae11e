"""Whether numba can keep what it compiles for the next process."""

from __future__ import annotations

from numba import njit


def _nothing() -> None:
    """Compiled by nobody."""


def _keeps() -> bool:
    """Whether a folder can be written, beside the package or of the user; numba refuses if not."""
    try:
        njit(cache=True)(_nothing)
    except RuntimeError:
        return False
    return True


CACHE = _keeps()

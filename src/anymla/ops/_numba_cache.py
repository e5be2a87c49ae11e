"""Cache of the code that numba compiles, and the notice to a user who waits for it."""

from __future__ import annotations

import time

from numba import njit
from numba.core import event

from anymla.ops.compile_notice import NOTICE


class _Compilations(event.Listener):
    """Listener that reports compilations to the user; nested ones count as their caller's."""

    def __init__(self):
        self.depth, self.begin = 0, 0.0

    def on_start(self, what):
        """Report that a kernel which is not in the cache is being compiled."""
        self.depth += 1
        if self.depth == 1:
            self.begin = time.perf_counter()
            NOTICE.begin(what.data["dispatcher"].stats.cache_path if CACHE else "")

    def on_end(self, what):
        """Record that a compilation has ended, with or without success."""
        self.depth -= 1
        if not self.depth:
            NOTICE.add(time.perf_counter() - self.begin)


def _nothing():
    """Do nothing; this function is never compiled, only asked for its cache folder."""


def _keeps():
    """Return True if numba finds a folder for its cache: beside the package or in the home."""
    try:
        njit(cache=True)(_nothing)
    except RuntimeError:
        return False
    return True


# True if numba can keep compiled code for the next process.
CACHE = _keeps()
event.register("numba:compile", _Compilations())

"""Watch over compilation in service: kernels that Triton compiles after a warm-up has ended.

A request that meets such a kernel waits a second or more. The watch is switched on by the
environment variable ANYMLA_COMPILE_WATCH: ``warn`` logs each kernel and counts it, ``error`` raises
as well, where the kernel was to be launched. Gluon kernels are compiled by Triton, too. A kernel
that is found in Triton's cache is not compiled, and does not count.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

from anymla.ops.device import INTERPRETED, has_triton

VARIABLE = "ANYMLA_COMPILE_WATCH"
MODES = ("off", "warn", "error")


class CompiledInService(RuntimeError):
    """A kernel was compiled after the warm-up, which ``ANYMLA_COMPILE_WATCH=error`` forbids."""


class CompileWatch:
    """Watch of this process.

    Attributes:
        active: True while compilations are counted.
        compiled: number of kernels compiled in service.
        log: logger of a warning for each of them.
        noticed: functions that are called with each kernel's description.
    """

    def __init__(self) -> None:
        """Watch nothing yet."""
        self.active = False
        self.compiled = 0
        self.log = logging.getLogger("anymla.compile_watch")
        self.noticed: list[Callable[[str], None]] = []
        self._before: Any = None

    def begin(self, log: logging.Logger | None = None) -> bool:
        """Watch from now on, if the environment asks for it.

        Args:
            log: logger of warnings; None keeps the present one.

        Returns:
            True if compilations are watched.

        Raises:
            ValueError: the environment variable holds another value.
        """
        self.log = log or self.log
        if mode() == "off" or not has_triton() or INTERPRETED:
            return False
        from triton import knobs

        if knobs.compilation.listener != self._listen:
            self._before, knobs.compilation.listener = knobs.compilation.listener, self._listen
        self.active = True
        return True

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside the block, which compiles ahead of service."""
        active, self.active = self.active, False
        try:
            yield
        finally:
            self.active = active

    def _listen(self, *, src: Any, cache_hit: bool, **more: Any) -> None:
        if self._before is not None:
            self._before(src=src, cache_hit=cache_hit, **more)
        if cache_hit or not self.active:
            return
        self.compiled += 1
        said = f"kernel compiled in service: {describe(src)}"
        self.log.warning("anymla: %s", said)
        for notice in self.noticed:
            notice(said)
        if mode() == "error":
            raise CompiledInService(said)


def mode() -> str:
    """Return the environment's choice, one of ``MODES``.

    Raises:
        ValueError: the environment variable holds another value.
    """
    chosen = os.environ.get(VARIABLE, "off")
    if chosen not in MODES:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(MODES)}, got {chosen!r}")
    return chosen


def describe(source: Any) -> str:
    """Describe what Triton compiles: the kernel's name, constants, types, and hints of alignment.

    Args:
        source: Triton's ``ASTSource``, or a source of another kind, of which only the name is told.
    """
    name = str(getattr(source, "name", "a kernel"))
    names = getattr(getattr(source, "fn", None), "arg_names", None)
    if names is None:
        return name
    constants = {_named(names, place): value for place, value in source.constants.items()}
    hints = {_named(names, place): value for place, value in source.attrs.items() if value}
    aligned = {each for each, hint in hints.items() if ["tt.divisibility", 16] in hint}
    parts = [
        f"{each}={constants[each]}"
        if each in constants
        else f"{each}: {kind}{' aligned' if each in aligned else ''}"
        for each, kind in source.signature.items()
    ]
    return f"{name}({', '.join(parts)})"


def _named(names: list[str], place: Any) -> str:
    first, *rest = place if isinstance(place, tuple) else (place,)
    if isinstance(first, str):
        return first
    return names[first] + "".join(f"[{each}]" for each in rest)


WATCH = CompileWatch()

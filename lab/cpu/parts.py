"""Parts of the CPU suite, in the order in which they run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from anymla.bench.report import Result
from lab.cpu.attention import attention
from lab.cpu.ceilings import ceilings
from lab.cpu.context import CONTEXTS, context_curve
from lab.cpu.decode import decode
from lab.cpu.memory import cache_bytes, loading
from lab.cpu.packed import packed
from lab.cpu.selection import selection


def _in_directory(measure: Callable[[Path], list[Result]]) -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="anymla-bench-") as directory:
        return measure(Path(directory) / "checkpoint")


def parts(quick: bool) -> dict[str, Callable[[], list[Result]]]:
    """Return the suite's parts by name."""
    rounds = 3 if quick else 15
    contexts = CONTEXTS[:3] if quick else CONTEXTS
    turns = 2 if quick else 8
    return {
        "machine": lambda: ceilings(rounds),
        "attention": lambda: attention(rounds),
        "packed": lambda: packed(rounds),
        "selection": lambda: selection(rounds),
        "decode": lambda: _in_directory(lambda place: decode(place, turns)),
        "context": lambda: _in_directory(lambda place: context_curve(place, contexts, turns)),
        "memory": lambda: _in_directory(cache_bytes) + _in_directory(loading),
    }

"""Rows of results: one JSON object a line in a file, and a table on the screen."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Result:
    """One measurement.

    Attributes:
        part: which of the suite's parts.
        case: what was measured.
        values: numbers and words by name; units are in the names.
        target: what was asked of it, in words, or None.
        met: whether it was met; None without a target.
    """

    part: str
    case: str
    values: dict[str, Any]
    target: str | None = None
    met: bool | None = None

    def row(self, environment: dict[str, Any]) -> dict[str, Any]:
        """The JSON object."""
        verdict = {} if self.target is None else {"target": self.target, "met": self.met}
        return {"part": self.part, "case": self.case} | self.values | verdict | environment


def append_rows(path: Path, results: Iterable[Result], environment: dict[str, Any]) -> None:
    """Append the results to a file of JSON lines."""
    with path.open("a", encoding="utf-8") as file:
        for result in results:
            file.write(json.dumps(result.row(environment)) + "\n")


def table(results: Sequence[Result]) -> list[str]:
    """Lines for people: case, numbers, and how they compare with what was asked."""
    lines = []
    part = None
    width = max((len(result.case) for result in results), default=0)
    for result in results:
        if result.part != part:
            part = result.part
            lines += ["", part]
        lines.append(line(result, width))
    return lines[1:]


def line(result: Result, width: int) -> str:
    """One of the table's lines, its case as wide as the others'."""
    numbers = "  ".join(f"{name} {_short(value)}" for name, value in result.values.items())
    verdict = ""
    if result.target is not None:
        verdict = f"  [{'met' if result.met else 'MISSED'}: {result.target}]"
    return f"  {result.case:<{width}}  {numbers}{verdict}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

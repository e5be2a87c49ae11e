"""Rows of results: one JSON object a line in a file, and a line for people each."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from anymla.formats.files import naming, open_to_write
from anymla.formats.untrusted import Refused, read_bytes


@dataclasses.dataclass(frozen=True)
class Result:
    """One measurement.

    Attributes:
        part: name of the suite's part.
        case: name of the measured case.
        values: numbers and words by name; units are in the names.
        target: target in words, or None without one.
        met: True if the target was met; None without a target.
    """

    part: str
    case: str
    values: dict[str, Any]
    target: str | None = None
    met: bool | None = None

    def row(self, environment: dict[str, Any]) -> dict[str, Any]:
        """Return the result as a JSON object."""
        verdict = {} if self.target is None else {"target": self.target, "met": self.met}
        return {"part": self.part, "case": self.case} | self.values | verdict | environment


def append_rows(path: Path, results: Iterable[Result], environment: dict[str, Any]) -> None:
    """Append the results to a file of JSON lines."""
    append_lines(path, (result.row(environment) for result in results))


def append_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append rows to a file, one JSON object a line."""
    with naming(path), open_to_write(path, append=True) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a file of JSON lines, skipping blank lines.

    Raises:
        ValueError: a line is no JSON object; the message names file and line.
    """
    rows = []
    try:
        text = read_bytes(path).decode("utf-8")
    except Refused as error:
        raise ValueError(f"{path}: {error}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: no JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: a row must be an object")
        rows.append(row)
    return rows


def line(result: Result, width: int) -> str:
    """Format a result: its case, padded to ``width``, its numbers, and its target if any."""
    numbers = "  ".join(f"{name} {_short(value)}" for name, value in result.values.items())
    verdict = ""
    if result.target is not None:
        verdict = f"  [{'met' if result.met else 'MISSED'}: {result.target}]"
    return f"  {result.case:<{width}}  {numbers}{verdict}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

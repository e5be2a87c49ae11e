"""Load result rows, and say what each measured, on which device and with which versions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from anymla.bench.report import read_lines

Row = dict[str, Any]

# Rows say "flash" for DeepSeek-V4-Flash, which readers would take for FlashMLA.
MODELS = {"flash": "V4-Flash", "pro": "V4-Pro"}
_MODEL = re.compile(r"^(flash|pro)\b")


def load_rows(results: Path) -> list[Row]:
    """Read the rows of all ``*.jsonl`` files of a folder and add the file's name as ``file``.

    Raises:
        ValueError: if a line is no JSON object; the message names file and line.
    """
    paths = sorted(results.glob("*.jsonl"))
    return [{**row, "file": path.name} for path in paths for row in rows_of(path)]


def rows_of(path: Path) -> list[Row]:
    """Read the rows of a file of JSON lines; there are none if the file does not exist.

    Raises:
        ValueError: if a line is no JSON object; the message names file and line.
    """
    return read_lines(path) if path.exists() else []


def of_part(rows: Iterable[Row], part: str) -> list[Row]:
    """Return the rows of one part of a benchmark."""
    return [row for row in rows if row.get("part") == part]


def case_of(row: Row) -> str:
    """Return the case or the label of a row; "" if it has neither."""
    return str(row.get("case") or row.get("label") or "")


def name_of(row: Row) -> str:
    """Return the case of a row for people, with the model's proper name."""
    return _MODEL.sub(lambda found: MODELS[found[1]], case_of(row))


def is_gpu(row: Row) -> bool:
    """True if a row's device is a GPU; without a device, if its file's name begins with "gpu"."""
    if "device" in row:
        return str(row["device"]) != "cpu" and row.get("kind") != "CPU"
    return str(row.get("file", "")).startswith("gpu")


def device_of(row: Row) -> str:
    """Return the name of the GPU or CPU that a row was measured on."""
    if is_gpu(row):
        return str(row.get("device") or f"the device of {row['file']}")
    return str(row.get("cpu") or row.get("device") or "CPU")


def source(rows: Sequence[Row]) -> str:
    """Write device, date, versions, commit and command of some rows, each value once."""
    commits = _listed(str(row["commit"]) for row in rows if row.get("commit"))
    parts = [
        _listed(device_of(row) for row in rows),
        _listed(str(row["date"])[:10] for row in rows if row.get("date")),
        _listed(_versions(rows)),
        commits and f"commit {commits}",
        _listed(f"`{row['command']}`" for row in rows if row.get("command")),
    ]
    return "; ".join(part for part in parts if part)


def _versions(rows: Sequence[Row]) -> list[str]:
    """Return each row's versions in words; a row is left out if another has all of its and more."""
    names = ("torch", "cuda", "triton")
    said = dict.fromkeys(
        tuple(f"{name} {row[name]}" for name in names if row.get(name)) for row in rows
    )
    return [", ".join(each) for each in said if not any(set(each) < set(more) for more in said)]


def _listed(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(word for word in words if word))

"""The README's support table, from recorded evidence and nothing else."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

from anymla.bench.report import read_lines
from anymla.ops.device import TARGETS

MATRIX_FILE, RUNS_FILE = "build_matrix.jsonl", "gpu_tests.jsonl"


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Rows of a file of JSON lines; none if there is no such file.

    Raises:
        ValueError: a line is no JSON object; the message names file and line.
    """
    return read_lines(path) if path.exists() else []


def support_table(results: Path) -> list[str]:
    """Lines of the Markdown table.

    A cell says "run" if the family's tests passed on that architecture when they last ran there,
    or how many failed; "built n" if all n specialisations of its kernels were compiled for it and
    fit, "built m of n" otherwise.

    Args:
        results: folder with ``build_matrix.jsonl`` and ``gpu_tests.jsonl``.
    """
    built: dict[tuple[str, str], list[bool]] = collections.defaultdict(list)
    for row in rows_of(results / MATRIX_FILE):
        built[_family(row["module"]), row["target"]].append(row["ok"])
    ran = {(row["family"], row["target"]): row for row in rows_of(results / RUNS_FILE)}
    families = sorted({family for family, _ in built})
    lines = [
        "| operations | " + " | ".join(TARGETS) + " |",
        "|---" * (len(TARGETS) + 1) + "|",
    ]
    for family in families:
        cells = [_cell(built[family, target], ran.get((family, target))) for target in TARGETS]
        lines.append(f"| {family} | " + " | ".join(cells) + " |")
    return lines


def _family(module: str) -> str:
    return module.removeprefix("anymla.ops.").split(".")[0]


def _cell(builds: list[bool], ran: dict[str, Any] | None) -> str:
    if not builds:
        return "-"
    count = f"built {len(builds)}" if all(builds) else f"built {sum(builds)} of {len(builds)}"
    if ran is None or not ran["passed"]:
        return count
    told = f"run, {ran['failed']} of {ran['passed'] + ran['failed']} failed"
    return f"{told if ran['failed'] else '**run**'}, {count}"

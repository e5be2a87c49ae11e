"""The scripts of benchmarks/sglang on a CPU, each in a process of its own: hooks stay applied."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang: make test-sglang", allow_module_level=True)

SCRIPTS = Path(__file__).parents[3] / "benchmarks/sglang"


def run(script: Path, *words: str, **variables: str) -> None:
    paths = [str(SCRIPTS), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | variables
    subprocess.run(
        [sys.executable, "-W", "ignore", script, *words], check=True, env=environment, timeout=400
    )


def rows_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_both_engines_are_compared(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    parts = ("decode-8", "prefill-8", "selection")
    run(Path(__file__).with_name("small_backend.py"), str(rows), *parts, "--here")
    found = rows_in(rows)
    assert [row["part"] for row in found] == [
        *["SGLang's decode"] * 3,
        *["SGLang's prefill"] * 3,
        "SGLang's selection",
    ]
    for row in found[:-1]:
        assert row["us"] == 3.0
        assert row["times"] == 2.0
        assert 0 < row["error"] < 0.05
        assert 0 < row["sglang_error"] < 0.05
    assert found[-1]["missing"] == 0
    assert found[-1]["sglang_missing"] == 0


@pytest.mark.parametrize("switch", ["force,audit"])
def test_the_audit_names_each_fault(switch: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    run(SCRIPTS / "audit.py", str(rows), ANYMLA_SGLANG=switch)
    found = rows_in(rows)
    assert len(found) == 8
    assert all(row["ok"] for row in found), found

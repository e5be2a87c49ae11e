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
import torch

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


class _Elsewhere(torch.Tensor):
    """A tensor as if on another device: what is on the CPU cannot be indexed by it."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.__getitem__ and not isinstance(args[0], cls):
            raise RuntimeError("indices should be either on cpu or on the same device")
        result = super().__torch_function__(function, types, args, kwargs)
        return result.as_subclass(torch.Tensor) if function is torch.Tensor.cpu else result


def test_rows_are_decoded_wherever_they_are() -> None:
    from scene import MAIN_FP8, _decoded

    from anymla.formats.page_layout import get_layout

    written = torch.randn(8, 512)
    pages = torch.zeros(2, 4, 584, dtype=torch.uint8)
    get_layout(MAIN_FP8).write(pages, torch.arange(8), written)
    found = _decoded(pages.as_subclass(_Elsewhere), torch.tensor([5, 2]), MAIN_FP8)
    assert (found - written[[5, 2]]).abs().max() < 0.2


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

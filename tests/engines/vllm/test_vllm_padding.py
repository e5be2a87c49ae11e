"""Padding tokens of a step list nothing and write nothing."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from servers import look_up, needs_vllm

HERE = Path(__file__).parent
FAULTS = {
    *("entries of ratio 128", "entries of ratio 4", "visible entries", "window row"),
    *("state", "entry", "window list", "closed slot"),
}


def padded(device: str, directory: Path) -> dict[str, Any]:
    """The answer of ``padded_steps.py``, whose stand-ins for vLLM's modules need a process."""
    answer = directory / "padded.json"
    command = [sys.executable, str(HERE / "padded_steps.py"), str(answer), device]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def test_padding_lists_and_writes_nothing_and_each_fault_is_noticed(tmp_path: Path) -> None:
    found = padded("cpu", tmp_path)
    assert found["wrong"] == []
    assert found["noticed"].keys() == FAULTS
    assert all(found["noticed"].values()), found["noticed"]


@pytest.mark.gpu
def test_padding_lists_and_writes_nothing_on_a_gpu(tmp_path: Path) -> None:
    assert padded("cuda", tmp_path)["wrong"] == []


@needs_vllm
def test_builders_of_metadata_list_nothing_for_padding(tmp_path: Path) -> None:
    """Positions 3, 7, 127, 255 and 130, then three of padding."""
    found = look_up("padded_builders.py", tmp_path, "auto")
    window, dense = [4, 8, 128, 128, 128, 0, 0, 0], [0, 0, 1, 2, 1, 0, 0, 0]
    assert found["window"] == [window, window]
    assert found["ratio 128"] == [dense, dense]
    assert found["visible"] == [1, 2, 32, 64, 32, 0, 0, 0]
    every_fourth, every_128th = [0, 129, 287, 447, -1], [-1, -1, 8, 13, -1]
    assert found["closed"] == [every_fourth + [-1] * 3, every_128th + [-1] * 3]
    assert found["moved"] == []  # captured graphs read them where they lie

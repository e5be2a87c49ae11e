"""A step's plan of attention is made once, by the first of the layers that list alike."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def planned(device: str, directory: Path) -> dict[str, Any]:
    """The answer of ``shared_plans.py``, whose stand-ins for vLLM's modules need a process."""
    answer = directory / "plans.json"
    command = [sys.executable, str(HERE / "shared_plans.py"), str(answer), device]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def test_layers_that_list_alike_follow_one_plan_of_their_step(tmp_path: Path) -> None:
    found = planned("cpu", tmp_path)
    # Three tokens decode and two are prefilled; layers of ratio 0, 4 and 128, twice.
    one_step = [[tokens, 128, extra] for extra in (None, 16, 16) for tokens in (3, 2)]
    assert found["made"] == one_step * 2
    by_layer = [0, 1, 2, 3, 4, 5] * 2 + [6, 7, 8, 9, 10, 11] * 2
    assert found["given"] == by_layer


@pytest.mark.gpu
def test_a_graph_makes_the_plans_that_it_follows(tmp_path: Path) -> None:
    found = planned("cuda", tmp_path)
    assert found["values_that_differ"] == 0
    assert found["ulps"] <= 2  # of Triton's kernel, which follows none
    if found["hopper"]:
        assert all(found["made"])

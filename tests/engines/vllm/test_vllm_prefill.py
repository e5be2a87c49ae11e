"""Prefills of mixed steps attend to decoded workspaces as they would attend by slots."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from servers import look_up, needs_avx512, needs_vllm

HERE = Path(__file__).parent


def mixed(device: str, directory: Path) -> dict[str, Any]:
    """The answer of ``mixed_steps.py``, whose stand-ins for vLLM's modules need a process."""
    answer = directory / "mixed.json"
    command = [sys.executable, str(HERE / "mixed_steps.py"), str(answer), device]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_workspaces_hold_what_prefills_of_a_mixed_step_see(device: str, tmp_path: Path) -> None:
    found = mixed(device, tmp_path)
    # Layers of ratio 0, 4 and 128; six prefills in one workspace, and two in each.
    assert found["chunks"] == [1, 3] * 3
    assert max(found["apart"]) <= 2
    assert found["padding"] == 0
    assert found["overflows"] == 0, "all scratch memory is what the profile run has reserved"


@needs_vllm
@needs_avx512
def test_workspaces_by_vllms_own_builders(tmp_path: Path) -> None:
    """Attention of a mixed step beside vLLM's CPU kernel, with metadata of vLLM's builders."""
    found = look_up("mixed_builders.py", tmp_path, "auto")
    for way in ("decoded", "by slots"):
        assert len(found[way]) == 3
        assert max(found[way]) <= 2, way
    decoded, by_slots = found["chunks"]
    assert all(count > 1 for count in decoded), "no request's rows fit with all the others'"
    assert by_slots == [0, 0, 0]
    # Entries of ratio 128 are listed for decodes alone where prefills have workspaces.
    assert found["listed"] == [3, 274]

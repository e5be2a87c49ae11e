import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from measures import E4M3_STEP

HERE = Path(__file__).parent
RECORD = "ANYMLA_VLLM_RECORD"  # a file that `make test-vllm` writes, and that the test here reads
PARTS = {"query", "attention", "output projection", "window rows", "compressed rows", "index rows"}
PARTS |= {"index query", "index weights", "selection", "slots of ratio 128", "hyper-connections"}


@pytest.mark.gpu
@pytest.mark.skipif(not os.environ.get(RECORD), reason=f"{RECORD} names no recorded steps")
def test_the_plugins_layers_run_on_a_gpu(tmp_path: Path) -> None:
    found = replayed(Path(os.environ[RECORD]), "cuda", tmp_path)
    assert_as_vllms_own(found)
    assert sum(row["part"] == "captured" for row in found) == 3


def replayed(record: Path, device: str, directory: Path) -> list[dict[str, Any]]:
    """The answer of ``replay.py``, whose stand-ins for vLLM's modules need a process."""
    answer = directory / "replayed.json"
    command = [sys.executable, str(HERE / "replay.py"), str(record), str(answer), device]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(answer.read_text())
    return found


def assert_as_vllms_own(found: list[dict[str, Any]]) -> None:
    """As near to vLLM's own kernels as each part is in vLLM's worker."""
    assert {row["part"] for row in found} >= PARTS
    for row in found:
        assert row.get("ulps", 0) <= 2, row
        if row["part"] == "index weights":
            assert row["relative"] < 1e-6, row  # products and sums of float32 in another order
        elif "relative" in row:
            assert row["relative"] <= E4M3_STEP, row
            assert row["share_changed"] <= (0.01 if row["phase"] == "decode" else 0.001), row
        assert row.get("missed", 0) < 1e-5, row
        assert row.get("bytes_that_differ", 0) == 0, row
        assert "failed" not in row, row

"""Prepared launches, in a process in which kernels are not interpreted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_prepared_launches_reach_the_driver_as_tritons_own_do() -> None:
    inner = Path(__file__).with_name("prepared_launches.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(inner)]
    # Triton 3.9 warns while it is unset.
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-5000:] + found.stderr[-2000:]

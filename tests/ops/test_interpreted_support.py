"""Interpreted Triton backends run in the repaired interpreter, or not at all."""

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is an extra")

from anymla.ops import device
from anymla.ops.device import INTERPRETED
from crossrun import interpreter

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")

PLAIN = """
import torch
from anymla.ops.norm_rope import rms_norm
torch.manual_seed(0)
x, weight = torch.randn(4, 512).bfloat16(), torch.rand(512).bfloat16()
with torch.no_grad():
    got, want = (rms_norm(x, weight, 1e-6, backend=name) for name in ("triton", "reference"))
print((got != want).sum().item())
"""


def test_a_program_that_only_sets_the_variable_gets_the_repaired_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PLAIN], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "0\n"


def test_an_interpreter_that_cannot_be_repaired_is_refused(monkeypatch):
    def install():
        raise AttributeError("no attribute 'cast_impl'")

    monkeypatch.setattr(interpreter, "install", install)
    support = device._interpreter_support()
    assert not support
    assert re.search(r"triton 3\.\d+.* cannot be repaired \(no attribute", support.reason)

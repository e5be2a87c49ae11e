"""Kernels that a server compiles which meets prompts of all lengths, and those of gradients."""

import os
import subprocess
import sys

import pytest

# In a process that does not interpret kernels.
LAUNCHED = """
import torch
from anymla.ops.device import TARGETS
from anymla.ops.attention import prefill_attention
from lab.launches import META, recorded_launches

def empty(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device=META)

with recorded_launches(TARGETS["sm_90"]) as launches:
    for tokens in (1, 2, 7, 64, 1000, 8192):
        for entries in (0, 1, 255, 512, 8192):
            q = empty(tokens, 64, 512, dtype=torch.bfloat16)
            rows = empty(entries + tokens + 127, 512, dtype=torch.bfloat16)
            lists = empty(tokens, 512) if entries > 512 else None
            sink, ranges = empty(64, dtype=torch.float32), empty(tokens, 4)
            prefill_attention(q, rows, ranges, lists, window=128, entries=entries, sink=sink)
print([build.constants["LISTED"] for build in launches.builds.values()])
"""


def test_two_builds_serve_all_lengths():
    pytest.importorskip("triton")
    assert run(LAUNCHED) == "[False, True]\n"


def run(program: str) -> str:
    """Run a program that does not interpret kernels; return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


NARROW = """
import torch
from anymla.ops.attention.interface import prefill_attention_backward
from anymla.ops.device import TARGETS
from lab.launches import META, recorded_launches

def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device=META)

with recorded_launches(TARGETS["sm_90"]) as launches:
    dout, q, out = (empty(4, 16, 8) for _ in range(3))
    ranges, lse = empty(4, 4, dtype=torch.int32), empty(4, 16, dtype=torch.float32)
    prefill_attention_backward(
        dout, q, empty(4, 8), ranges, None, out, lse, window=2, backend="triton"
    )
builds = launches.builds.values()
print([build.constants["BC"] for build in builds if build.name == "backward_kernel"])
"""


def test_gradients_of_few_channels_fill_a_matrix_instruction():
    pytest.importorskip("triton")
    assert run(NARROW) == "[16]\n"

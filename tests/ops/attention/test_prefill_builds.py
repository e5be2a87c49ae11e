"""How many kernels a server compiles that meets prompts of all lengths."""

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
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", LAUNCHED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[False, True]\n", 0), done.stderr

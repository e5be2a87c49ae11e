"""numba's kernels where it can write no folder to keep them in."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba")

# As on a read-only file system, of a user without a home.
NOWHERE = """
import numba.core.caching as caching

def refuse(self):
    raise OSError("read-only")

for each in vars(caching).values():
    if isinstance(each, type) and hasattr(each, "ensure_cache_path"):
        each.ensure_cache_path = refuse
import torch
from anymla.ops._numba_cache import CACHE
from anymla.ops.linear import mxfp4_linear

with torch.inference_mode():
    ones = torch.full((32, 32), 0x22).byte(), torch.full((32, 2), 127).byte()
    out = mxfp4_linear(torch.ones(1, 64).bfloat16(), *ones, backend="numba")
print(CACHE, out.unique().tolist())
"""


def test_kernels_are_compiled_though_they_cannot_be_kept():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", NOWHERE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split(maxsplit=1) == ["False", "[64.0]\n"]

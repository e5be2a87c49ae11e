"""No operator of a layer with gradients reads anything back from a GPU; found out without one."""

import os
import subprocess
from pathlib import Path

import pytest

from anymla.child_process import python_command

pytest.importorskip("triton")

# Operators of layers as a CPU calls them, and then of tensors on a device that holds nothing.
PROGRAM = """
import sys
import torch
from unittest import mock
from anymla.ops.device import TARGETS
from lab.launches import recorded_launches
from test_compile import LAYERS, chain, loss

calls, call = [], torch.library.CustomOpDef.__call__

def noted(self, *args):
    calls.append((self, args))
    return call(self, *args)

def on_the_device(x):
    if isinstance(x, list):
        return [on_the_device(each) for each in x]
    return x.to("meta") if isinstance(x, torch.Tensor) else x

with mock.patch.object(torch.library.CustomOpDef, "__call__", noted):
    for name, stage in (
        ("window", "frozen"), ("ratio 4", "sparse"), ("ratio 4", "dense"),
        ("ratio 128", "frozen"), ("V4.1", "sparse"),
    ):
        kv_cache = "nvfp4" if name == "V4.1" else "fp8"
        run, inputs = chain(LAYERS[name], stage, kv_cache, torch.bfloat16)
        loss(run(*inputs)).backward()
builds = []
for name in sys.argv[1:]:
    with recorded_launches(TARGETS[name]) as launches:
        for operator, args in calls:
            try:
                operator._init_fn(*map(on_the_device, args))
            except RuntimeError as error:
                raise SystemExit(f"{name}, {operator._qualname}: {error}")
    builds.append(len(launches.builds))
print(len({operator._qualname for operator, _ in calls}), *builds)
"""


def test_nothing_is_read_back():
    here = Path(__file__).parent
    root = here.parents[1]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (root / "src", root, here)))
    done = subprocess.run(
        python_command("-W", "ignore", "-c", PROGRAM, "sm_90", "sm_80"),
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert not done.returncode, done.stderr[-2000:]
    operators, *builds = map(int, done.stdout.split())
    assert operators >= 14
    assert min(builds) > 5

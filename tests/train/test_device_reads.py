"""No operator of a layer with gradients reads anything back from a GPU; found out without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    for name, specs in LAYERS.items():
        for stage in ("frozen", "sparse", "dense"):
            run, inputs = chain(specs, stage, "nvfp4" if name == "V4.1" else "fp8", torch.bfloat16)
            loss(run(*inputs)).backward()
target = TARGETS[sys.argv[1]]
with recorded_launches(target) as launches:
    for operator, args in calls:
        launches.label = operator._qualname
        try:
            operator._init_fn(*map(on_the_device, args))
        except RuntimeError as error:
            raise SystemExit(f"{operator._qualname}: {error}")
print(len({operator._qualname for operator, _ in calls}), len(launches.builds))
"""


@pytest.mark.parametrize("target", ["sm_90", "sm_80"])
def test_nothing_is_read_back(target):
    here = Path(__file__).parent
    root = here.parents[1]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (root / "src", root, here)))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, target],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert not done.returncode, done.stderr[-2000:]
    operators, builds = map(int, done.stdout.split())
    assert operators >= 14
    assert builds > 5

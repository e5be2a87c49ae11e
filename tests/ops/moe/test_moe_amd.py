"""What launches of the experts tell Triton for AMD of their tensors; they are only compiled."""

import os
import subprocess
import sys

import pytest

from anymla.testing.triton_targets import backend_problem

pytestmark = pytest.mark.skipif(bool(backend_problem("hip")), reason=backend_problem("hip") or "-")

# In a process that does not interpret kernels. One call with lists and one with stacks, as on a
# device of the target: what each launch takes for offsets of 32 bits from a tensor's address.
LAUNCHES = """
import sys
from unittest import mock
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from anymla.formats.fp8_block import quantize_fp8_weight
from anymla.formats.mxfp4 import quantize_mxfp4
from anymla.ops import device as device_facts
from anymla.ops.moe import experts
from anymla.ops.registry import Support

name, weight_format = sys.argv[1:]
target = device_facts.TARGETS[name]
described = GPUTarget("hip", name, target.warp_size)
triton.runtime.driver.set_active(mock.Mock(get_current_target=lambda: described))
device_facts._support = lambda kind: Support(True)
device_facts.CPU = target
device_facts.target_of.cache_clear()
run = JITFunction.run

def compiled(self, *args, grid, warmup, **kwargs):
    made = run(self, *args, grid=grid, warmup=True, **kwargs)
    near = {
        self.arg_names[place]
        for (place,), attributes in made.src.attrs.items()
        if ["tt.pointer_range", 32] in attributes
    }
    print(label, self.fn.__name__, "amdgcn" in made.asm, *sorted(near))

JITFunction.run = compiled
width, count = 128, 3
quantise = {
    "plain": lambda w: (w,),
    "fp8": quantize_fp8_weight,
    "mxfp4": lambda w: quantize_mxfp4(w.bfloat16()),
}[weight_format]
weights = [[part for part in quantise(torch.randn(width, width))] for _ in range(count)]
codes = [each[0] if weight_format == "plain" else each[0].view(torch.uint8) for each in weights]
scales = [each[1] for each in weights if weight_format != "plain"]
given = {
    "x": torch.randn(2, width).bfloat16(),
    "ids": torch.zeros(2, 2, dtype=torch.int32),
    "weights": torch.rand(2, 2),
    "weight_format": weight_format, "swiglu_limit": 7.0, "quantize_activations": True,
}
for label, join in (("list", list), ("stack", torch.stack)):
    w, s = join(codes), join(scales) if scales else []
    experts(**given, w1=w, w3=w, w2=w, s1=s, s3=s, s2=s, backend="triton")
"""


def near_arguments(target, weight_format):
    """By list or stack and kernel: arguments of which Triton takes 32-bit offsets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHES, target, weight_format],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = {}
    for line in done.stdout.splitlines():
        label, kernel, compiled, *near = line.split()
        assert compiled == "True"
        found[label, kernel] = set(near)
    return found


@pytest.mark.parametrize(
    ("target", "weight_format"), [("gfx942", "plain"), ("gfx942", "mxfp4"), ("gfx1201", "fp8")]
)
def test_experts_may_lie_anywhere_on_amd(target, weight_format):
    """Buffer loads reach 2 GiB behind the first expert, and give zeros elsewhere.

    Triton 3.7 does not compile the choice between w1 and w3 either if both are taken for near.
    """
    found = near_arguments(target, weight_format)
    pair, down = {"w1", "s1", "w3", "s3"}, {"w2", "s2"}
    for label in ("list", "stack"):
        assert not found[label, "gate_up_kernel"] & pair
        assert "ids" in found[label, "gate_up_kernel"]  # a tensor of its own is near
    assert not found["list", "down_kernel"] & down
    assert "w2" in found["stack", "down_kernel"]

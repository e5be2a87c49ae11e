"""What launches tell Triton for AMD of the tensors whose addresses it may take for near."""

import os
import subprocess
import sys

import pytest

from crossrun.targets import backend_problem

pytestmark = pytest.mark.skipif(bool(backend_problem("hip")), reason=backend_problem("hip") or "-")

# In a process that does not interpret kernels, which are only compiled. A line for each launch: its
# label and kernel, and of which arguments Triton takes offsets of 32 bits.
COMPILED = """
import sys
from unittest import mock
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from anymla.ops import device as device_facts
from anymla.ops.registry import Support

target = device_facts.TARGETS[sys.argv[1]]
described = GPUTarget("hip", target.name, target.warp_size)
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
    assert "amdgcn" in made.asm
    print(label, self.fn.__name__, *sorted(near))

JITFunction.run = compiled
"""
# One call with lists of experts and one with stacks.
EXPERTS = """
from anymla.formats.fp8_block import quantize_fp8_weight
from anymla.formats.mxfp4 import quantize_mxfp4
from anymla.ops.moe import experts

weight_format, width, count = sys.argv[2], 128, 3
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
# A small cache alone, beside another one, and beside one of 3 GiB, which nothing touches.
ATTENTION = """
from anymla.formats.page_layout import ROWS_BF16_512, get_layout
from anymla.ops.attention import CacheRows, sparse_attention

layout = get_layout(ROWS_BF16_512)
small, other = layout.allocate(2, 4), layout.allocate(3, 4)
large = torch.empty(3 << 29, dtype=torch.bfloat16)[: 4 * 512 * 4].view(4, 4, 512)
lists = torch.zeros(2, 8, dtype=torch.int32)
q = torch.zeros(2, 2, 512)
first = CacheRows(small, ROWS_BF16_512, lists)
for label, extra in (("alone", None), ("small", other), ("large", large)):
    more = [] if extra is None else [CacheRows(extra, ROWS_BF16_512, lists.clone())]
    sparse_attention(q, [first, *more], backend="triton")
"""


def near_arguments(script, *arguments):
    """By label and kernel: arguments of which Triton takes offsets of 32 bits."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED + script, *arguments],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    return {(label, kernel): set(near) for label, kernel, *near in lines}


@pytest.mark.parametrize(
    ("target", "weight_format"), [("gfx942", "plain"), ("gfx942", "mxfp4"), ("gfx1201", "fp8")]
)
def test_experts_may_lie_anywhere(target, weight_format):
    """Buffer loads reach 2 GiB behind the first expert, and give zeros elsewhere.

    Triton 3.7 does not compile the choice between w1 and w3 either if both are taken for near.
    """
    found = near_arguments(EXPERTS, target, weight_format)
    pair, down = {"w1", "s1", "w3", "s3"}, {"w2", "s2"}
    for label in ("list", "stack"):
        assert not found[label, "gate_up_kernel"] & pair
        assert "ids" in found[label, "gate_up_kernel"]  # a tensor of its own is near
    assert not found["list", "down_kernel"] & down
    assert "w2" in found["stack", "down_kernel"]


def test_caches_of_any_size_are_attended_to_together():
    """Triton 3.7 does not compile the choice between two of which one is taken for near."""
    found = {label: near for (label, _), near in near_arguments(ATTENTION, "gfx942").items()}
    assert {"kv0_ptr", "list0_ptr"} <= found["alone"]
    for label in ("small", "large"):
        assert not found[label] & {"kv0_ptr", "kv1_ptr", "list0_ptr", "list1_ptr"}
        assert "q_ptr" in found[label]

"""Builds are what launchers launch: how a launch becomes one, and which kernels are launched."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from anymla.ops.device import TARGETS, target_of
from anymla.ops.pdl import pdl_launch
from lab.launches import recorded_launches

SM90 = TARGETS["sm_90"]


@triton.jit(do_not_specialize=["count"])
def copy_kernel(x, out, other, count, stride, BLOCK: tl.constexpr, KIND: tl.constexpr = "plain"):
    """Not run."""


def launch(**changes):
    given = {"other": None, "count": 16, "stride": 32, "BLOCK": 64, "num_warps": 2, **changes}
    x = torch.zeros(64, dtype=torch.bfloat16)
    copy_kernel[(1,)](x, x.float(), **given)


def build_of(**changes):
    with recorded_launches(SM90) as launches:
        launches.label = "a call"
        launch(**changes)
        launch(**changes)
    (build,) = launches.builds.values()
    return build


def test_a_launch_is_noted_as_what_is_compiled_for_it():
    build = build_of()
    assert (build.name, build.module, build.label) == ("copy_kernel", __name__, "a call")
    assert build.types == {"x": "*bf16", "out": "*fp32", "count": "i32", "stride": "i32"}
    assert build.constants == {"other": None, "BLOCK": 64, "KIND": "plain"}
    assert build.divisible == ("stride",)
    assert (build.num_warps, build.num_stages, build.registers) == (2, None, 0)


def test_arguments_are_specialised_as_triton_does():
    build = build_of(other=torch.zeros(4, dtype=torch.int64), count=1, stride=1, KIND="other")
    assert build.types == {"x": "*bf16", "out": "*fp32", "other": "*i64", "count": "i32"}
    assert build.constants == {"stride": 1, "BLOCK": 64, "KIND": "other"}
    assert build.divisible == ()
    assert build_of(stride=1 << 40).types["stride"] == "i64"
    options = build_of(num_stages=3, maxnreg=128, num_warps=8)
    assert (options.num_warps, options.num_stages, options.registers) == (8, 3, 128)


def test_launches_that_differ_are_noted_apart():
    with recorded_launches(SM90) as launches:
        for count in (1, 2, 16):  # not specialised
            launch(count=count)
        launch(stride=33)
        launch(BLOCK=128)
        launch(num_warps=4)
    assert len(launches.builds) == 4


def test_a_device_is_the_target_inside_and_itself_again_outside():
    device = torch.device("cpu")
    before = target_of(device), pdl_launch(device)
    with recorded_launches(SM90):
        from anymla.ops.attention import decode_support

        assert decode_support.target_of(device) is SM90
        assert pdl_launch(device)["PDL"]
    assert (target_of(device), pdl_launch(device)) == before


# In a process that does not interpret kernels.
DERIVED = """
import importlib, sys
from lab.build_matrix import builds_of
from lab.kernel_files import SHARED, kernel_modules
from anymla.ops.device import TARGETS
from lab.launches import derived_families
modules_of = kernel_modules()
for family in (*derived_families(), SHARED):
    launched = set()
    for target in sys.argv[1:]:
        found = [build for builds in builds_of(family, TARGETS[target]).values()
                 for build in builds]
        launched |= {build.kernel for build in found}
        if len({build.key for build in found}) < len(found):
            print(family, target, "twice")
    for module in modules_of[family]:
        for name, value in vars(importlib.import_module(module)).items():
            if name.endswith("_kernel") and value.__module__ == module and value not in launched:
                print(module, name)
"""


def printed_by(script, *arguments):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_kernel_with_derived_builds_is_launched_and_no_build_is_there_twice():
    assert printed_by(DERIVED, "sm_80", "sm_90", "gfx942", "gfx1201") == ""


# Decode layers of real size, whose tensors hold nothing, nor do their caches.
LAYERS = """
import sys
import torch
from lab.build_matrix import builds_of
from lab.kernel_files import SHARED
from anymla.bench.layer_setup import LayerSetup
from anymla.ops.device import TARGETS
from lab.launches import derived_families, recorded_launches
target = TARGETS[sys.argv[1]]
with recorded_launches(target) as launches:
    setup = LayerSetup("flash", 4, torch.device("meta"), experts=8, copies=1)
    setup.batch(64, 8192).run(setup.layers[0])  # another context than builds are derived with
for family in (*derived_families(), SHARED):
    built = {build.key for found in builds_of(family, target).values() for build in found}
    within = "anymla.ops._" if family == SHARED else f"anymla.ops.{family}."
    own = [build for build in launches.builds.values() if build.module.startswith(within)]
    print(family, len(own), *(each.name for each in own if each.key not in built), sep=",")
"""


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_what_a_layer_of_v4_launches_is_built(target):
    printed = [line.split(",") for line in printed_by(LAYERS, target).splitlines()]
    launched = {family: int(count) for family, count, *_ in printed}
    for family in ("compressor", "indexer", "linear", "moe", "norm_rope", "attention"):
        assert launched[family] > 0
    assert [line for line in printed if len(line) > 2] == []

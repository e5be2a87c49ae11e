"""What layers of real size launch of linear layers and experts is among the builds."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# In a process that does not interpret kernels; tensors hold nothing, nor do caches.
LAYERS = """
import sys
from unittest import mock
import torch
from anymla.bench import layer_setup
from lab.build_matrix import builds_of
from lab.kernel_files import SHARED
from anymla.bench.random_weights import RandomWeights
from anymla.layers.ranks import Ranks
from anymla.ops.device import TARGETS
from lab.launches import recorded_launches
fp8 = RandomWeights._fp8
mock.patch.object(layer_setup, "fill_randomly").start()
mock.patch("torch.distributed.all_reduce").start()
# As on CUDA devices.
mock.patch.object(RandomWeights, "_fp8", lambda *of: fp8(*of).with_float_scales()).start()
for target in map(TARGETS.get, sys.argv[1:]):
    with recorded_launches(target) as launches:
        for model, experts, ranks in (("flash", 256, 8), ("pro", 384, 1)):
            setup = layer_setup.LayerSetup(
                model, 4, torch.device("meta"), experts=experts, copies=1, ranks=Ranks(0, ranks)
            )
            for tokens in (1, 20, 50, 150, 700):
                launches.label = f"{model}, {ranks} GPUs, {tokens} tokens"
                setup.batch(tokens, 4096).run(setup.layers[0])
    for family, own in (("linear", ".linear."), ("moe", ".moe."), (SHARED, ".ops._")):
        built = {build.key for found in builds_of(family, target).values() for build in found}
        launched = [build for build in launches.builds.values() if own in build.module]
        missing = [f"{each.name} {each.label}" for each in launched if each.key not in built]
        print(target.name, family, len({build.name for build in launched}), *missing, sep=", ")
"""


def test_what_layers_launch_is_built():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", LAYERS, "sm_90", "gfx942"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [line.split(", ") for line in done.stdout.splitlines()]
    assert [family for _, family, *_ in found] == ["linear", "moe", "shared"] * 2
    for target, family, kernels, *missing in found:
        assert int(kernels) >= (1 if family == "shared" else 2), (target, family)
        assert not missing, (target, family)

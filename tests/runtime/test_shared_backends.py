"""What the operations of a DeepSeek-V4.1 step run on, on GPUs, and that it can be recorded.

Found out without a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# What is left to torch on a GPU, and why it may be: it launches several kernels, and waits for
# nothing. A value that the host looked at would be an error here, for no tensor holds anything.
TORCH = {
    "linear": "torch stands for the vendor's library, which multiplies on cuda and xpu alone",
    "linear_float32": "likewise",
}

# In a process that does not interpret kernels, which are not launched.
STEPS = '''
import json
import sys
from unittest import mock
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from anymla.model.load import load_model
from anymla.model.weights import Weights
from anymla.ops.device import TARGETS
from anymla.ops.registry import Operation
from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request
from lab.launches import recorded_launches

directory, *cases = sys.argv[1:]
resolve, packed, found, copied = Operation._resolve, Weights.packed, {}, []

class Watched(TorchDispatchMode):
    """Notes what comes from the host, which a device waits for and no graph can record."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        given = [each for each in args if isinstance(each, torch.Tensor) and each.ndim]
        if isinstance(made, torch.Tensor) and made.is_meta and any(one.is_cpu for one in given):
            copied.append(str(function))
        return made

def on_the_device(make):
    def made(data, *args, device=None, **kwargs):
        if device is not None and torch.device(device).type == "meta" and watching:
            copied.append("torch.tensor")
        return make(data, *args, device=device, **kwargs)
    return made

watching = False

def noted(self, args, kwargs, backend):
    chosen = resolve(self, args, kwargs, backend)
    found[case].setdefault(self.name, set()).add(chosen[0].name)
    return chosen

# As on CUDA devices.
mock.patch.object(Weights, "packed", lambda *a, **k: packed(*a, **k).with_float_scales()).start()
mock.patch.object(torch.Tensor, "pin_memory", lambda self: self).start()
mock.patch.object(Operation, "_resolve", noted).start()
for name in ("tensor", "as_tensor"):
    mock.patch.object(torch, name, on_the_device(getattr(torch, name))).start()
for case in cases:
    target, kv_cache = case.split()
    found[case] = {}
    with recorded_launches(TARGETS[target]), torch.inference_mode():
        model = load_model(directory, device="meta", progress=False)
        options = EngineOptions(
            decode="fixed", draft_tokens=5, kv_cache=kv_cache, max_requests=3, max_seq_len=448,
            chunk_size=96,
        )
        engine = Engine(model, options)
        runner = engine._runner
        runs = []
        for bucket in (runner.buckets[0], runner.buckets[-1]):
            steps = [runner._step(bucket, follows=follows) for follows in (False, True)]
            for step in (*steps, runner._block_step(runner._blocks, bucket)._step):
                step.rehearse()
                runs.append(step._run)
        engine.submit(Request("prompt", tuple(range(3, 93)), 4))
        (span,) = engine.scheduler.next_spans()
        caches = engine.store.layers[: model.config.num_hidden_layers]
        prompt = engine._planner.build([span])
        runs.append(lambda: model.logits(model.forward(prompt, caches)[-1:]))
        runs[-1]()
        # What has run before, as graphs are recorded.
        watching = True
        with Watched():
            for run in runs:
                run()
        watching = False
    found[case]["copied from the host"] = copied
    copied = []
print(json.dumps({case: {name: sorted(of) for name, of in each.items()}
                  for case, each in found.items()}))
'''

CASES = [f"{target} {kv_cache}" for target in ("sm_80", "sm_90") for kv_cache in ("nvfp4", "fp8")]


@pytest.fixture(scope="module")
def resolved(tmp_path_factory):
    """Backends by operation, by case."""
    from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint
    from anymla.testing.tiny_options import TinySharing

    ratios = (0, 2, 2, 1, 1, 1)
    sharing = TinySharing.of(ratios, candidate_blocks=5, candidate_block_size=4)
    directory = tmp_path_factory.mktemp("tiny")
    options = TinyOptions.shared(
        ratios=ratios, sharing=sharing, experts=16, index_topk=16, drafter="dspark",
        draft_experts=8, draft_experts_per_token=3,
    )  # fmt: skip
    write_tiny_checkpoint(directory, options)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", STEPS, str(directory), *CASES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_a_step_leaves_little_to_torch_and_asks_nothing_of_the_host(resolved, case):
    found = dict(resolved[case])
    assert found.pop("copied from the host") == []
    # All that there is to run: experts, products, caches, selection in two levels, attention.
    kinds = {"engram_gate", "engram_rows", "experts", "fp8_block_linear", "hc_gates"}
    assert kinds | {"sparse_attention", *TORCH} <= found.keys()
    left = {name for name, backends in found.items() if {"torch", "reference"} & {*backends}}
    assert left == TORCH.keys()

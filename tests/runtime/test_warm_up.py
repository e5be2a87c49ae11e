"""After a warm-up, traffic launches no specialisation of a kernel that it did not."""

import dataclasses
import os
import random
from unittest import mock

import pytest
import torch

from anymla.layers.moe import Router
from anymla.model.load import load_model
from anymla.ops.device import TARGETS
from anymla.ops.pdl import pdl_launch
from anymla.runtime import next_tokens, speculation, step_plan
from anymla.runtime.dspark_drafts import DSparkDrafter
from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request
from anymla.runtime.sampler import Sampling
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint

CPU = torch.device("cpu")
SMALL = TinyOptions(
    weights="fp4",
    ratios=(0, 4, 128),
    hidden=256,
    heads=4,
    index_topk=16,
    index_heads=4,
    experts=8,
    experts_per_token=2,
)


@pytest.fixture(scope="module", params=["mtp", "dspark"])
def model(request, tmp_path_factory):
    """On the CPU, with every tensor aligned as a device's allocator aligns it."""
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(directory, dataclasses.replace(SMALL, drafter=request.param))
    model = load_model(directory, dtype=torch.bfloat16, backend="triton", progress=False)
    for module in model.modules():
        for name, value in vars(module).items():
            setattr(module, name, _aligned(value))
    return model


def _aligned(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, Router) or type(value).__name__ in ("PackedWeight", "ExpertWeights"):
        for name, part in vars(value).items():
            object.__setattr__(value, name, _aligned(part))
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return list(torch.stack(value))
    return value


def _traffic(engine, seed):
    """Requests join, leave, speculate and are rolled back."""
    rng = random.Random(seed)
    for number in range(7):
        length = rng.choice([1, 2, 5, 16, 40, 63, 100, 150])
        prompt = tuple(rng.choices(range(3, 250), k=length))
        sampling = Sampling(0.8 * (number % 2), seed=number)
        engine.submit(Request(f"{seed}.{number}", prompt, rng.choice([2, 5, 9]), sampling))
    while engine.busy:
        engine.step()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="notes interpreted kernels")
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90"])
def test_traffic_compiles_nothing_new(model, target):
    pytest.importorskip("triton")
    from lab.launches import recorded_launches

    rng = random.Random(0)
    options = EngineOptions(
        decode="fixed", max_requests=3, max_seq_len=260, chunk_size=50, draft_tokens=1
    )
    with (
        # Rows and slots are computed, because tensors are indexed with them.
        recorded_launches(TARGETS[target], run="anymla.ops.step_indices.") as seen,
        # What kernels would have computed is garbage, of which no token can be chosen.
        mock.patch.object(next_tokens, "choose_tokens", _choose(rng)),
        mock.patch.object(speculation, "guess_tokens", _choose(rng)),
        mock.patch.object(DSparkDrafter, "_set_drafts", _some_drafts(rng)),
        mock.patch.object(next_tokens, "require_tokens", _known),
        mock.patch.object(next_tokens, "chosen_logprobs", lambda _, tokens: [0.0] * len(tokens)),
        mock.patch.object(step_plan, "HOST_TOKENS", 0),
    ):
        engine = Engine(model, options)
        engine._planner.context_step = 2048  # as on a device
        engine.warm_up()
        warmed = set(seen.builds)
        engine.workspace.overflows = 0
        _traffic(engine, 1)
        # Nor does any call need more scratch memory than the largest that were rehearsed.
        assert engine.workspace.num_bytes > 0
        assert engine.workspace.overflows == 0 or target != "sm_90"
        for seed in (2, 3):
            _traffic(engine, seed)
        assert len(warmed) > 40
        assert sorted(map(str, set(seen.builds) - warmed)) == []
        assert pdl_launch(CPU)["PDL"] == (target == "sm_90")  # as on the target
    assert not pdl_launch(CPU)["PDL"]  # and no kernel runs like that afterwards


def _choose(rng):
    return lambda logits, samplings, positions, best=None: rng.choices(
        range(3, 200), k=len(positions)
    )


def _known(tokens, positions, vocab):
    tokens[:] = [each % vocab for each in tokens]


def _some_drafts(rng):
    def give(self, states, rows, guesses):
        for state in states:
            state.drafts = rng.choices(range(3, 200), k=min(rng.randint(0, 1), state.remaining - 1))

    return give


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", ["mtp", "dspark"])
def test_a_gpu_compiles_nothing_after_a_warm_up(tmp_path, monkeypatch, drafter):
    """Counts what Triton is asked to compile, in a process whose kernels may all be known."""
    from triton.runtime.jit import JITFunction

    write_tiny_checkpoint(tmp_path, dataclasses.replace(SMALL, drafter=drafter))
    model = load_model(tmp_path, dtype=torch.bfloat16, device="cuda", progress=False)
    options = EngineOptions(max_requests=3, max_seq_len=260, chunk_size=50, draft_tokens=1)
    engine = Engine(model, options)
    engine.warm_up()
    compiled = []
    compile_now = JITFunction._do_compile

    def noted(self, *args, **kwargs):
        compiled.append(self.fn.__name__)
        return compile_now(self, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "_do_compile", noted)
    for seed in range(3):
        _traffic(engine, seed)
    assert compiled == []

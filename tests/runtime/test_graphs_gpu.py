"""Recorded steps on a GPU have the bits of the same steps called directly."""

import dataclasses
import random

import pytest
import torch

from anymla.model.load import load_model
from anymla.runtime import decode_runner
from anymla.runtime.device_step import Reads
from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request
from anymla.runtime.sampler import Sampling
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint
from anymla.testing.tiny_options import TinySharing

pytestmark = pytest.mark.gpu

SMALL = TinyOptions(ratios=(0, 4, 128), experts=16, index_topk=16)
_RATIOS = (0, 2, 2, 1, 1, 1)
CHECKPOINTS = {
    "mtp": SMALL,
    "dspark": dataclasses.replace(SMALL, drafter="dspark"),
    # Selections within blocks that an earlier layer keeps, n-grams of drafts, and their drafter.
    "v4.1": TinyOptions.shared(
        ratios=_RATIOS,
        sharing=TinySharing.of(_RATIOS, candidate_blocks=5, candidate_block_size=4),
        experts=16,
        index_topk=16,
        drafter="dspark",
        draft_experts=8,
        draft_experts_per_token=3,
    ),
}
LIMITS = {"max_requests": 3, "max_seq_len": 448, "chunk_size": 96}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(directory, CHECKPOINTS[request.param])
    return directory


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint, dtype=torch.bfloat16, device="cuda", progress=False)


def _requests(seed, count=10):
    rng = random.Random(seed)
    return [
        Request(
            f"{seed}.{number}",
            tuple(rng.choices(range(3, 250), k=rng.choice([1, 3, 17, 64, 130, 250, 400]))),
            rng.choice([1, 6, 14, 25]),
            Sampling(
                rng.choice([0.0, 0.8]), 0.9, number, repetition_penalty=rng.choice([1.0, 1.0, 1.2])
            ),
        )
        for number in range(count)
    ]


def _serve(engine, requests, seed):
    """Tokens and log-probabilities; requests join at random steps."""
    rng, waiting, done = random.Random(seed), list(requests), {}
    while waiting or engine.busy:
        while waiting and (not engine.busy or rng.random() < 0.4):
            engine.submit(waiting.pop(0))
        for each in engine.step().finished:
            done[each.request.request_id] = each.token_ids, each.logprobs
    return done


@pytest.mark.parametrize("draft_tokens", [0, 2, 5])
@pytest.mark.parametrize("changes", [{}, {"side_stream": True}], ids=["one queue", "two queues"])
def test_replayed_steps_have_the_bits_of_direct_ones(model, draft_tokens, changes):
    _check_replayed(model, draft_tokens, changes)


@pytest.mark.parametrize("draft_tokens", [1, 5, 7])
def test_replayed_steps_that_share_rows_have_the_bits_of_direct_ones(
    model, draft_tokens, monkeypatch
):
    """As large steps do: with padding, and requests of fewer tokens than the step has rows."""
    monkeypatch.setattr(decode_runner, "reads_in", lambda *_: lambda entries: Reads.DECODED)
    _check_replayed(model, draft_tokens, {})


def _check_replayed(model, draft_tokens, changes):
    results, engines = [], []
    for decode in ("graph", "fixed"):
        options = EngineOptions(decode=decode, draft_tokens=draft_tokens, **LIMITS, **changes)
        engine = Engine(model, options)
        results.append(_serve(engine, _requests(draft_tokens), draft_tokens))
        engines.append(engine)
    assert results[0] == results[1]
    replayed, direct = engines
    for group in replayed.store.groups:
        caches = zip(replayed.store.tensors(group), direct.store.tensors(group), strict=True)
        for one, other in caches:
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), group.name


def test_graphs_choose_the_tokens_of_a_cpu_in_float32(checkpoint):
    tokens = []
    for device, decode in (("cpu", "plain"), ("cuda", "graph")):
        model = load_model(checkpoint, dtype=torch.float32, device=device, progress=False)
        engine = Engine(model, EngineOptions(kv_cache="fp32", decode=decode, **LIMITS))
        done = _serve(engine, _requests(7, 4), 7)
        tokens.append({name: result[0] for name, result in done.items()})
    assert tokens[0] == tokens[1]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_device(model):
    """From integers to the layers' launches, in a replayed step and in one of a prompt."""
    engine = Engine(model, EngineOptions(decode="graph", **LIMITS))
    engine.run(_requests(3, 2))
    engine.submit(Request("last", tuple(range(3, 60)), 4))
    (span,) = engine.scheduler.next_spans()
    torch.cuda.synchronize()
    with torch.inference_mode():
        torch.cuda.set_sync_debug_mode("error")
        try:
            step = engine._planner.build([span])
            hidden = model.forward(step, engine.store.layers)
            model.logits(hidden[-1:])
        finally:
            torch.cuda.set_sync_debug_mode("default")

"""The engine with a real (tiny) model in float32."""

import dataclasses
import random
from contextlib import ExitStack, nullcontext
from unittest.mock import Mock

import pytest
import torch
from engine_runs import poison, small_engine
from torch import nn

from anymla.formats.fp8_block import dequantize_fp8_rows
from anymla.layers import heads
from anymla.layers.output_projection import OutputProjection
from anymla.model.load import load_model
from anymla.ops import registry
from anymla.ops.attention import prefill_attention
from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request
from anymla.runtime.sampler import Sampling
from anymla.testing.conformance.ops import all_operations
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint


def _prompt(length, seed=0):
    return tuple(random.Random(seed).choices(range(3, 250), k=length))


# 130 crosses the window and the first ratio-128 entry; 16 entries of 4 tokens are the selection.
REQUESTS = [
    Request("a", _prompt(130, 1), 24),
    Request("b", _prompt(5, 2), 12),
    Request("c", _prompt(67, 3), 18, Sampling(0.7, 0.95, 11)),
    Request("d", _prompt(290, 4), 9),
]


@pytest.fixture(scope="module")
def alone(tiny_model):
    """Each request by itself, its prompt in one piece."""
    return {
        request.request_id: small_engine(tiny_model).run([request])[0].token_ids
        for request in REQUESTS
    }


@pytest.mark.parametrize("chunk_size", [1, 13, 64])
def test_chunks_do_not_change_the_tokens(tiny_model, alone, chunk_size):
    request = REQUESTS[0]
    got = small_engine(tiny_model, chunk_size=chunk_size).run([request])[0]
    assert got.token_ids == alone["a"]


@pytest.fixture
def one_backend_a_call():
    """torch alone: where numba is there too, which of them runs depends on shapes."""
    with ExitStack() as stack:
        for operation in all_operations().values():
            if "numba" in operation.backends:
                stack.enter_context(operation.with_backends([operation.backends["torch"]]))
        yield


def test_every_call_of_every_step_passes_the_checks(
    tiny_model, alone, one_backend_a_call, monkeypatch
):
    """An engine's first step of a size is checked, so no further one of that size need be."""
    kinds = Mock(side_effect=registry._kind_of)
    monkeypatch.setattr(registry, "_kind_of", kinds)
    engine = small_engine(tiny_model)
    engine.submit(REQUESTS[0])
    engine.step()
    first = kinds.call_count
    assert first > 0
    engine.step()
    decode = kinds.call_count
    assert decode > first
    assert engine.run()[0].token_ids == alone["a"]
    assert kinds.call_count == decode
    monkeypatch.setattr("anymla.runtime.engine.skip_checks", lambda skip: nullcontext())
    checked = small_engine(tiny_model, chunk_size=50, draft_tokens=1)
    found = {done.request.request_id: done.token_ids for done in checked.run(REQUESTS)}
    assert found == alone
    assert kinds.call_count > 10 * first


@pytest.mark.parametrize("decode", ["plain", "fixed"])
@pytest.mark.parametrize("draft_tokens", [0, 1, 5])
def test_neighbours_and_speculation_do_not_change_the_tokens(
    tiny_model, alone, draft_tokens, decode
):
    """Requests join one after the other, in poisoned caches; three run at once."""
    engine = small_engine(tiny_model, chunk_size=50, draft_tokens=draft_tokens, decode=decode)
    waiting, done = list(REQUESTS), {}
    while waiting or engine.busy:
        if waiting:
            engine.submit(waiting.pop(0))
        poison(engine)
        for completion in engine.step().finished:
            done[completion.request.request_id] = completion.token_ids
    assert done == alone


@pytest.mark.parametrize("draft_tokens", [0, 2])
def test_workspaces_do_not_change_the_tokens(tiny_model, alone, draft_tokens, monkeypatch):
    """Prefill reads runs of one workspace, as it does on Hopper, beside decoding neighbours."""
    calls = []
    monkeypatch.setattr(
        heads,
        "prefill_attention",
        lambda *args, **more: calls.append(1) or prefill_attention(*args, **more),
    )
    engine = small_engine(tiny_model, chunk_size=50, draft_tokens=draft_tokens)
    engine._planner.chunks = True
    waiting, done = list(REQUESTS), {}
    while waiting or engine.busy:
        if waiting:
            engine.submit(waiting.pop(0))
        poison(engine)
        for completion in engine.step().finished:
            done[completion.request.request_id] = completion.token_ids
    assert calls
    assert done == alone


def test_workspaces_with_quantised_heads(tiny_model, monkeypatch):
    """The same prefill with the heads quantised in the attention, and after it."""
    calls = []

    def of_codes(self, codes, scales, dtype):
        heads = dequantize_fp8_rows(codes.view(torch.uint8), scales, torch.float32)
        weight = self.wo_a.dense(torch.float32).unflatten(0, (self.groups, -1))
        return torch.einsum("tgj,grj->tgr", heads, weight).flatten(1).to(dtype)

    # The tiny model's matrices are too small for the product of codes.
    monkeypatch.setattr(OutputProjection, "_from_codes", of_codes)
    for module in tiny_model.modules():
        if isinstance(module, OutputProjection):
            monkeypatch.setattr(module, "quantize_heads", True)
    monkeypatch.setattr(
        heads,
        "prefill_attention",
        lambda *args, **more: calls.append(1) or prefill_attention(*args, **more),
    )
    # The first decodes beside the second's prefill.
    requests = [
        dataclasses.replace(REQUESTS[3], max_new_tokens=2),
        dataclasses.replace(REQUESTS[3], request_id="beside", max_new_tokens=1),
    ]
    tokens = {}
    for chunks in (False, True):
        engine = small_engine(tiny_model, chunk_size=150)
        engine._planner.chunks = chunks
        engine.submit(requests[0])
        first = engine.step()
        engine.submit(requests[1])
        tokens[chunks] = [first.new_tokens, *(done.token_ids for done in engine.run())]
        assert bool(calls) == chunks
    assert tokens[True] == tokens[False]


@pytest.mark.parametrize("kv_cache", ["fp8", "fp8-nvfp4", "bf16", "fp32"])
def test_recycled_pages_leave_no_trace(tiny_model, kv_cache):
    """Conformance C9, bit for bit: pages full of others' rows, or of poison, are as good as new."""
    request = Request("b", _prompt(150, 7), 6, prompt_logprobs=True)
    engines = [small_engine(tiny_model, kv_cache=kv_cache) for _ in range(3)]
    used, poisoned, fresh = engines
    for engine in (used, poisoned):
        engine.run([Request("x", _prompt(250, 8), 4), Request("y", _prompt(140, 9), 9)])
    poison(poisoned)
    for name, pool in fresh.store.pools.items():
        # Hand out the same pages: rows are summed in the order in which they lie.
        pool._free = list(used.store.pools[name]._free)
    results = [engine.run([request])[0] for engine in engines]
    for got in results[:2]:
        assert got.token_ids == results[2].token_ids
        assert got.prompt_logprobs == results[2].prompt_logprobs
        assert got.logprobs == results[2].logprobs


def test_compressed_entries_in_a_record_of_their_own(tiny_model):
    """Windows as before, entries in half the bytes, and every kind of step reads them alike."""
    engine = small_engine(tiny_model, kv_cache="fp8-nvfp4")
    widths = {kind: set() for kind in ("window", "compressed", "index")}
    for cache in engine.store.layers:
        for kind, found in widths.items():
            held = getattr(cache, kind)
            found |= set() if held is None else {held.shape[2]}
    assert widths == {"window": {584}, "compressed": {288}, "index": {132}}
    request = Request("b", _prompt(290, 7), 0, prompt_logprobs=True)
    kinds = (("fp32", 512), ("fp8", 512), ("fp8-nvfp4", 512), ("fp8-nvfp4", 1))
    exact, *others = (
        small_engine(tiny_model, kv_cache=kind, chunk_size=size).run([request])[0]
        for kind, size in kinds
    )
    wanted = torch.tensor(exact.prompt_logprobs[1:])
    errors = [
        float((torch.tensor(each.prompt_logprobs[1:]) - wanted).abs().mean()) for each in others
    ]
    # Of a model with random weights, whose experts are chosen by a hair.
    assert max(errors[1:]) < 1.25 * errors[0]


def test_score_equals_decoding_step_by_step(tiny_model):
    """Log-probabilities of a prompt in chunks, and of the same tokens as they are generated."""
    first = small_engine(tiny_model).run([Request("a", _prompt(60), 80)])[0]
    whole = _prompt(60) + first.token_ids
    for chunk_size in (17, 512):
        engine = small_engine(tiny_model, chunk_size=chunk_size)
        scored = engine.run([Request("s", whole, 0, prompt_logprobs=True)])[0]
        # The same sums in another order: a few hundred float32 ulps of 1 through four layers.
        torch.testing.assert_close(
            torch.tensor(scored.prompt_logprobs[60:]),
            torch.tensor(first.logprobs),
            rtol=0,
            atol=1e-4,
        )


@pytest.fixture(scope="module")
def prophet(tmp_path_factory):
    """A model whose MTP layer is right by construction.

    Its backbone is one window-only layer, and its MTP layer is that layer again, fed with the
    embedding of the next token alone (which has unit RMS, so that its norm changes nothing): it
    computes at p what the backbone computes at p + 1, once the window no longer reaches token 0.
    """
    directory = tmp_path_factory.mktemp("prophet")
    options = TinyOptions(
        weights="bf16", ratios=(0,), hidden=128, heads=2, o_groups=1, q_lora=64, o_lora=64,
        experts=4, experts_per_token=2, moe_size=64, hash_layers=0, seed=3,
    )  # fmt: skip
    write_tiny_checkpoint(directory, options)
    model = load_model(directory, dtype=torch.float32, progress=False)
    model.embedding = torch.where(model.embedding >= 0, 1.0, -1.0)
    draft = model.drafts[0]
    draft.block, draft.head = model.layers[0], model.head
    draft.e_norm = torch.ones_like(draft.e_norm)
    draft.e_proj, draft.h_proj = nn.Identity(), _Zero()
    return model


class _Zero(nn.Module):
    def forward(self, x):
        return torch.zeros_like(x)


@pytest.mark.parametrize("draft_tokens", [1, 2, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_right_draft_is_always_accepted(prophet, draft_tokens, temperature):
    request = Request("a", _prompt(129), 60, Sampling(temperature, 0.9, 4))
    plain = small_engine(prophet).run([request])[0]
    engine = small_engine(prophet, draft_tokens=draft_tokens, chunk_size=40)
    engine.submit(request)
    steps = 0
    while engine.busy:
        poison(engine)
        finished = engine.step().finished
        steps += 1
    assert finished[0].token_ids == plain.token_ids
    assert finished[0].accepted == finished[0].drafted > 0
    # The prompt in four chunks, whose last gives one token, then 1 + draft_tokens a step.
    assert steps == 4 + -(-59 // (1 + draft_tokens))


def test_caches_take_the_bytes_of_their_pages(tiny_model):
    """Within 2 % of what the layouts say 300 tokens take, rounded up to pages."""
    request = Request("a", _prompt(280), 21)
    engine = Engine.for_requests(tiny_model, EngineOptions(chunk_size=64), [request])
    window = 4 * 4 * 37440  # ceil((127 + 64 - 1) / 64) + 1 pages of 64 tokens, 4 layers
    c4, index = 2 * 2 * 37440, 2 * 2 * 8640  # 75 entries, 2 layers
    c128 = 1728  # 2 entries
    state_c4, state_index = 2 * 19 * 32832, 2 * 19 * 8640  # ceil((7 + 64 - 1) / 4) + 1 pages
    state_c128 = 25 * 32832  # ceil((127 + 64 - 1) / 8) + 1 pages
    needed = window + c4 + index + c128 + state_c4 + state_index + state_c128
    null_pages = sum(
        cache.stride(0) * cache.itemsize
        for group in engine.store.groups
        for cache in engine.store.tensors(group)
    )
    assert engine.store.nbytes - null_pages == needed

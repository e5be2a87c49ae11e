"""DeepSeek-V4.1 whole on a GPU: against the float64 oracle, and against a CPU's float32."""

from __future__ import annotations

import random

import pytest
import torch

from anymla.model.load import load_model
from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request
from anymla.testing.oracle.check import check_run, hidden_error
from anymla.testing.oracle.recording import RecordedModel, Recorder
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint
from anymla.testing.tiny_options import TinySharing

pytestmark = pytest.mark.gpu

# Two sources of entries, three of selections, of which the last is narrowed to 5 blocks of 4;
# two layers with n-grams; a drafter.
_RATIOS = (0, 2, 2, 1, 1, 1)
OPTIONS = TinyOptions.shared(
    ratios=_RATIOS,
    sharing=TinySharing.of(
        _RATIOS, candidate_blocks=5, candidate_block_size=4, engram_layers=(1, 4)
    ),
    experts=16,
    index_topk=16,
    drafter="dspark",
    draft_experts=8,
    draft_experts_per_token=3,
)
LIMITS = {"max_requests": 3, "max_seq_len": 300}
LENGTHS, NEW = (1, 37, 190), 24
CACHES = ("fp32", "nvfp4", "fp8")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(directory, OPTIONS)
    return directory


@pytest.fixture(scope="module")
def on_gpu(checkpoint):
    return load_model(checkpoint, dtype=torch.float32, device="cuda", progress=False)


def _requests():
    rng = random.Random(5)
    return [
        Request(str(length), tuple(rng.choices(range(3, 250), k=length)), NEW, prompt_logprobs=True)
        for length in LENGTHS
    ]


def _serve(model, chunk_size, decode, draft_tokens=0):
    """Completions, and what was drafted by request and number of tokens."""
    options = EngineOptions(
        kv_cache="fp32", chunk_size=chunk_size, decode=decode, draft_tokens=draft_tokens, **LIMITS
    )
    engine, done, drafted = Engine(model, options), {}, {}
    for request in _requests():
        engine.submit(request)
    while engine.busy:
        for each in engine.step().finished:
            done[each.request.request_id] = each
        for state in engine.scheduler.running:
            if not state.is_prefill and state.drafts:
                drafted[state.request.request_id, len(state.tokens)] = list(state.drafts)
    return done, drafted


@pytest.fixture(scope="module")
def on_cpu(checkpoint):
    """Prompts in one piece each, tokens in plain steps; and guesses, which have no say."""
    model = load_model(checkpoint, dtype=torch.float32, device="cpu", progress=False)
    return _serve(model, 300, "plain"), _serve(model, 300, "plain", 5)


@pytest.mark.parametrize("draft_tokens", [0, 5])
@pytest.mark.parametrize("chunk_size", [300, 96, 13, 1])
def test_any_pieces_and_recorded_steps_are_what_a_cpu_computes(
    on_gpu, on_cpu, chunk_size, draft_tokens
):
    done, drafted = _serve(on_gpu, chunk_size, "graph", draft_tokens)
    (wanted, _), (_, guesses) = on_cpu
    worst = 0.0
    for name, want in wanted.items():
        got = done[name]
        assert got.token_ids == want.token_ids
        pairs = zip(
            (*got.prompt_logprobs[1:], *got.logprobs),
            (*want.prompt_logprobs[1:], *want.logprobs),
            strict=True,
        )
        worst = max(worst, *(abs(one - other) for one, other in pairs))
    # Both err by what the oracle lets a float32 run of six layers. Besides, where rounding decides
    # the sign of a dot, a gate of the two memories differs by sigmoid(1e-3) - sigmoid(-1e-3).
    error = 2 * hidden_error(torch.float32, len(_RATIOS), OPTIONS.hidden)
    print(f"log-probabilities differ by {worst:.1e}, {error:.1e} without n-grams")
    assert worst < error + 2 * 5e-4
    assert bool(drafted) == bool(draft_tokens)
    # Behind the same tokens the drafter guesses the same.
    common = drafted.keys() & guesses.keys()
    assert len(common) >= len(drafted) // 2
    assert {at: drafted[at] for at in common} == {at: guesses[at] for at in common}


RUNS = [
    *((dtype, cache, 33) for dtype in (torch.float32, torch.bfloat16) for cache in CACHES),
    *((torch.float32, "fp32", size) for size in (1, 300)),
    *((torch.bfloat16, "nvfp4", size) for size in (1, 300)),
]


@pytest.mark.parametrize(("dtype", "kv_cache", "chunk_size"), RUNS)
def test_a_run_is_right(checkpoint, dtype, kv_cache, chunk_size):
    recorder, prompt = Recorder(), tuple(range(3, 90))
    model = load_model(checkpoint, dtype=dtype, device="cuda", progress=False)
    recorded = RecordedModel(model, recorder)
    options = EngineOptions(kv_cache=kv_cache, chunk_size=chunk_size, decode="plain")
    request = Request("only", prompt, max_new_tokens=9)
    (done,) = Engine.for_requests(recorded, options, [request]).run([request])
    (recording,) = recorder.recordings
    tokens = [*prompt, *done.token_ids]
    report = check_run(
        checkpoint, recording, tokens, recorded.logprobs(recording, tokens), dtype=dtype
    )
    print("\n".join(report.lines()))
    assert report.ok, "\n".join(report.lines())
    assert report.rows["window"].rows == len(_RATIOS) * 95

"""The engine with a real (tiny) DSpark model in float32: its text, and what it drafts."""

import random
import unittest.mock

import pytest
from engine_runs import poison, small_engine

from anymla.layers import heads
from anymla.model.load import load_model
from anymla.ops.attention import prefill_attention
from anymla.runtime import decode_runner, next_tokens
from anymla.runtime.device_step import Reads
from anymla.runtime.request import Request
from anymla.runtime.sampler import Sampling
from anymla.testing.oracle import DSparkOracle, OracleModel
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint


def _prompt(length, seed=0):
    return tuple(random.Random(seed).choices(range(3, 250), k=length))


# 130 crosses the window and the first ratio-128 entry; 16 entries of 4 tokens are the selection.
REQUESTS = [
    Request("a", _prompt(130, 1), 24),
    Request("b", _prompt(5, 2), 12),
    Request("c", _prompt(67, 3), 18, Sampling(0.7, 0.95, 11)),
    Request("d", _prompt(290, 4), 9),
    Request("e", _prompt(124, 5), 30, Sampling(1.2, 1.0, 12)),
]


@pytest.fixture(scope="module")
def alone(dspark_model):
    """Each request by itself, without drafts, its prompt in one piece."""
    return {
        request.request_id: small_engine(dspark_model).run([request])[0].token_ids
        for request in REQUESTS
    }


def _serve(engine, replace=None):
    """Requests join one after the other, in poisoned caches; three run at once."""
    waiting, done = list(REQUESTS), {}
    while waiting or engine.busy:
        if waiting:
            engine.submit(waiting.pop(0))
        poison(engine)
        for completion in engine.step().finished:
            done[completion.request.request_id] = completion
        if replace is not None:
            for state in engine.scheduler.running:
                replace(state)
    return done


def _texts(done):
    return {name: each.token_ids for name, each in done.items()}


@pytest.mark.parametrize("decode", ["plain", "fixed"])
@pytest.mark.parametrize("draft_tokens", [1, 3, 5, 7])
def test_drafts_do_not_change_the_tokens(dspark_model, alone, draft_tokens, decode):
    engine = small_engine(dspark_model, chunk_size=50, draft_tokens=draft_tokens, decode=decode)
    done = _serve(engine)
    assert _texts(done) == alone
    assert sum(each.drafted for each in done.values()) > 50


@pytest.mark.parametrize("draft_tokens", [1, 5, 7])
def test_rows_decoded_once_a_request_do_not_change_the_tokens(
    dspark_model, alone, draft_tokens, monkeypatch
):
    """Verification steps attend to what requests share, as large ones do on Hopper."""
    workspaces = []

    def attend(q, *args, **more):
        workspaces.append(len(q))
        return prefill_attention(q, *args, **more)

    monkeypatch.setattr(heads, "prefill_attention", attend)
    monkeypatch.setattr(decode_runner, "reads_in", lambda *_: lambda entries: Reads.DECODED)
    engine = small_engine(dspark_model, chunk_size=50, draft_tokens=draft_tokens, decode="fixed")
    done = _serve(engine)
    assert _texts(done) == alone
    assert workspaces
    assert all(rows % (1 + draft_tokens) == 0 for rows in set(workspaces) if rows > 3)


@pytest.mark.parametrize("decode", ["plain", "fixed"])
@pytest.mark.parametrize("draft_tokens", [1, 2, 3, 4, 5, 6, 7])
def test_any_number_of_right_drafts(dspark_model, alone, draft_tokens, decode):
    """Right ones, wrong ones and the drafter's own, so that 0 to all of them are accepted."""
    rng, counts = random.Random(draft_tokens), set()

    def replace(state):
        known = alone[state.request.request_id][len(state.generated) :]
        for i, right in enumerate(known[: len(state.drafts)]):
            kind = rng.random()
            if kind < 0.8:
                state.drafts[i] = right
            elif kind < 0.9:
                state.drafts[i] = rng.randrange(3, 250)
        counts.add(sum(1 for _ in _right(state.drafts, known)))

    engine = small_engine(dspark_model, chunk_size=64, draft_tokens=draft_tokens, decode=decode)
    done = _serve(engine, replace)
    assert _texts(done) == alone
    assert counts == set(range(draft_tokens + 1))


def _right(drafts, known):
    for draft, right in zip(drafts, known, strict=False):
        if draft != right:
            return
        yield draft


@pytest.mark.parametrize("kv_cache", ["fp8", "fp8-nvfp4", "bf16"])
def test_other_rows_in_the_caches(dspark_model, kv_cache):
    """Of what precision the rows are is the same with drafts and without."""
    texts = [
        _texts(_serve(small_engine(dspark_model, kv_cache=kv_cache, draft_tokens=drafts)))
        for drafts in (0, 5)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("decode", ["plain", "fixed"])
@pytest.mark.parametrize("chunk_size", [37, 512])
def test_what_is_drafted_is_what_the_oracle_drafts(
    dspark_directory, dspark_model, decode, chunk_size
):
    """At every step of a text, from the streams of a float64 run of the whole text."""
    request = Request("a", _prompt(150, 9), 30)
    engine = small_engine(dspark_model, draft_tokens=5, decode=decode, chunk_size=chunk_size)
    engine.submit(request)
    drafted = {}
    while engine.busy:
        poison(engine)
        finished = engine.step().finished
        for state in engine.scheduler.running:
            if not state.is_prefill:
                drafted[len(state.tokens)] = list(state.drafts)
    text = [*request.token_ids, *finished[0].token_ids]
    oracle = DSparkOracle(dspark_directory)
    backbone = OracleModel(dspark_directory).run(text, keep_layers=True)
    context = oracle.context(oracle.taps(backbone))
    assert len(drafted) > 10
    for length, drafts in drafted.items():
        block = oracle.block([rows[: length - 1] for rows in context], text[length - 1])
        assert drafts == list(block.tokens)[: len(drafts)], length
        assert len(drafts) == min(5, 180 - length - 1)


def test_sampled_drafts_are_drawn_with_the_targets_noise(dspark_model):
    """Guesses of the same text differ by seed, and are the best ones where nothing is sampled."""
    found = {}
    for name, sampling in (
        ("greedy", Sampling()),
        ("nearly greedy", Sampling(1e-6, 1.0, 1)),
        ("one", Sampling(1.5, 1.0, 1)),
        ("again", Sampling(1.5, 1.0, 1)),
        ("other", Sampling(1.5, 1.0, 2)),
    ):
        engine = small_engine(dspark_model, draft_tokens=5)
        # All of the text is the prompt's: behind it stands one token, of which there is no choice.
        with unittest.mock.patch.object(next_tokens, "choose_tokens", return_value=[7]):
            engine.submit(Request("a", _prompt(20), 30, sampling))
            engine.step()
        found[name] = list(engine.state("a").drafts)
    assert found["greedy"] == found["nearly greedy"] != found["one"]
    assert found["one"] == found["again"] != found["other"]


def test_a_request_decodes_beside_prompts(dspark_model, alone):
    """Decoding requests are drafted for at fixed sizes, long prompts beside them not at all."""
    engine = small_engine(dspark_model, chunk_size=40, draft_tokens=5, decode="fixed")
    calls = []
    guess = engine._runner.draft_blocks
    engine._runner.draft_blocks = lambda *args: calls.append(len(args[0])) or guess(*args)
    assert _texts(_serve(engine)) == alone
    assert calls


def test_bfloat16_weights_of_every_kind(tmp_path):
    """As a checkpoint ships, in bfloat16 with FP8 rows: it runs, and drafts."""
    options = TinyOptions(
        ratios=(0, 4), hidden=128, heads=2, o_groups=1, q_lora=64, o_lora=64, index_heads=4,
        index_topk=16, experts=8, experts_per_token=2, moe_size=64, drafter="dspark",
        markov_rank=16,
    )  # fmt: skip
    write_tiny_checkpoint(tmp_path, options)
    model = load_model(tmp_path, progress=False)
    engine = small_engine(model, kv_cache="fp8", draft_tokens=5, decode="fixed")
    done = engine.run([Request("a", _prompt(140), 12), Request("b", _prompt(9), 12)])
    assert [len(each.token_ids) for each in done] == [12, 12]
    assert all(each.drafted > 10 for each in done)

"""DeepSeek-V4.1 with drafts: its texts, its guesses, and what rejected guesses leave behind."""

from __future__ import annotations

import collections
import random
import traceback

import pytest
import torch
from engine_runs import poison

from anymla.model import load
from anymla.model.load import load_model
from anymla.runtime.cache_view import read_rows
from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request
from anymla.runtime.sampler import Sampling
from anymla.testing.oracle import DSparkOracle, OracleModel
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint
from anymla.testing.tiny_options import TinySharing

# Two sources of entries, three of selections, of which the last is narrowed to 3 blocks of 4.
RATIOS = (0, 2, 2, 1, 1, 1)
OPTIONS = TinyOptions.shared(
    weights="bf16", ratios=RATIOS, hidden=96, heads=3, o_groups=1, o_lora=32, q_lora=64,
    index_heads=4, index_topk=6, experts=8, experts_per_token=3, moe_size=32, window=16,
    sharing=TinySharing.of(
        RATIOS, candidate_blocks=3, candidate_block_size=4, engram_layers=(1, 4)
    ),
    drafter="dspark", stages=2, markov_rank=16, draft_experts=4, draft_experts_per_token=2,
)  # fmt: skip
CACHES = {
    "window": (0, 1, 2, 3, 4, 5),
    "compressed": (1, 3),
    "index": (1, 3),
    "state": (1,),
}
FLOAT32 = 1e-5


def _prompt(length, seed):
    return tuple(random.Random(seed).choices(range(3, 250), k=length))


REQUESTS = [
    Request("a", _prompt(37, 1), 40),
    Request("b", _prompt(2, 2), 50),
    Request("c", _prompt(50, 3), 30, Sampling(0.8, 0.95, 11)),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("drafts")
    write_tiny_checkpoint(directory, OPTIONS)
    return directory


@pytest.fixture(scope="module")
def model(directory):
    return load_model(directory, dtype=torch.float32, progress=False)


def _engine(model, **changes):
    defaults = {"kv_cache": "fp32", "max_requests": 3, "max_seq_len": 100}
    return Engine(model, EngineOptions(**(defaults | changes)))


def _rows(engine, state):
    """Every final row that the backbone holds of a request: by cache and layer, and by number."""
    found = {}
    for kind, layers in CACHES.items():
        for layer in layers:
            held = read_rows(engine.store, state, layer, kind)
            found[kind, layer] = dict(enumerate(held.rows, held.first))
    return found


@pytest.fixture(scope="module")
def alone(model):
    """Texts without drafts, and the rows of every position, as one token a step leaves them."""
    texts, rows = {}, {}
    for request in REQUESTS:
        engine = _engine(model, chunk_size=1)
        engine.submit(request)
        name, every = request.request_id, {}
        while engine.busy:
            finished = engine.step().finished
            for state in engine.scheduler.running:
                for cache, held in _rows(engine, state).items():
                    every.setdefault(cache, {}).update(
                        {number: row.clone() for number, row in held.items()}
                    )
        texts[name], rows[name] = finished[0].token_ids, every
    return texts, rows


def _serve(engine, each_step=None):
    """Requests join one after the other, in poisoned caches."""
    waiting, done = list(REQUESTS), {}
    while waiting or engine.busy:
        if waiting:
            engine.submit(waiting.pop(0))
        poison(engine)
        for completion in engine.step().finished:
            done[completion.request.request_id] = completion
        if each_step is not None:
            for state in engine.scheduler.running:
                each_step(state)
    return done


def _texts(done):
    return {name: each.token_ids for name, each in done.items()}


@pytest.mark.parametrize("decode", ["plain", "fixed"])
@pytest.mark.parametrize("draft_tokens", [0, 1, 5])
def test_drafts_do_not_change_the_tokens(model, alone, draft_tokens, decode):
    engine = _engine(model, chunk_size=20, draft_tokens=draft_tokens, decode=decode)
    done = _serve(engine)
    assert _texts(done) == alone[0]
    assert sum(each.drafted for each in done.values()) >= 40 * bool(draft_tokens)


@pytest.mark.parametrize("kv_cache", ["nvfp4", "fp8"])
def test_other_rows_in_the_caches(directory, kv_cache, monkeypatch):
    """In float64: products of several rows are rounded otherwise, and codes are whole steps."""
    monkeypatch.setitem(load.DTYPES, "fp64", torch.float64)
    model = load_model(directory, dtype=torch.float64, progress=False)
    texts = [
        _texts(_serve(_engine(model, kv_cache=kv_cache, draft_tokens=drafts, decode=decode)))
        for drafts, decode in ((0, "plain"), (5, "fixed"))
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("decode", ["plain", "fixed"])
@pytest.mark.parametrize("draft_tokens", [2, 5])
def test_rejected_drafts_leave_what_decoding_leaves(model, alone, draft_tokens, decode):
    """Any number of right drafts behind any position: caches and n-grams as one token a step."""
    texts, rows = alone
    rng = random.Random(draft_tokens)
    engine = _engine(model, chunk_size=20, draft_tokens=draft_tokens, decode=decode)
    seen, worst = collections.Counter(), 0.0

    def check(state):
        nonlocal worst
        name = state.request.request_id
        for cache, held in _rows(engine, state).items():
            for number, row in held.items():
                want = rows[name][cache][number]
                error = float((row - want).abs().max() / want.abs().max())
                assert error < FLOAT32, (name, cache, number, len(state.tokens), error)
                worst = max(worst, error)
        known = texts[name][len(state.generated) :]
        parity = len(state.tokens) % 2
        right = min(range(draft_tokens + 1), key=lambda n: seen[n, parity])
        for i, token in enumerate(known[: len(state.drafts)]):
            state.drafts[i] = token if i < right else (token + rng.randrange(1, 240)) % 250
        if len(state.drafts) == draft_tokens:
            seen[right, parity] += 1

    assert _texts(_serve(engine, check)) == texts
    assert seen.keys() == {(n, parity) for n in range(draft_tokens + 1) for parity in (0, 1)}
    print(f"worst row {worst:.1e}")


def test_what_is_drafted_is_what_the_oracle_drafts(directory, model):
    """At every step of a text, from the streams of a float64 run of the whole text."""
    request = Request("a", _prompt(45, 9), 14)
    oracle = DSparkOracle(directory)
    for decode, chunk_size in (("plain", 17), ("fixed", 100)):
        engine = _engine(model, draft_tokens=5, decode=decode, chunk_size=chunk_size)
        engine.submit(request)
        drafted = {}
        while engine.busy:
            poison(engine)
            finished = engine.step().finished
            for state in engine.scheduler.running:
                if not state.is_prefill:
                    drafted[len(state.tokens)] = list(state.drafts)
        text = [*request.token_ids, *finished[0].token_ids]
        context = oracle.context(oracle.taps(OracleModel(directory).run(text, keep_layers=True)))
        assert len(drafted) > 5
        for length, drafts in drafted.items():
            block = oracle.block([rows[: length - 1] for rows in context], text[length - 1])
            assert drafts == list(block.tokens)[: len(drafts)], length
            assert len(drafts) == min(5, 59 - length - 1)


def test_steps_of_fixed_size_look_at_no_value(directory, monkeypatch):
    """As on a device, where a graph could not be recorded; the experts have kernels there."""
    from anymla.ops import _host
    from anymla.runtime.fixed_step import FixedStep

    run, looked = FixedStep._run, []

    def guarded(name):
        value = getattr(torch.Tensor, name)

        def look(self, *args, **rest):
            files = [frame.filename.rpartition("/")[2] for frame in traceback.extract_stack()]
            looked.append((name, tuple(files[-4:-1])))
            return value(self, *args, **rest)

        return look

    def watched(self):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(_host, "on_host", lambda x: False)
            for name in ("item", "tolist", "nonzero", "__bool__", "__int__", "__index__"):
                patched.setattr(torch.Tensor, name, guarded(name))
            return run(self)

    monkeypatch.setattr(FixedStep, "_run", watched)
    model = load_model(directory, backend="torch", progress=False)
    engine = _engine(model, draft_tokens=3, decode="fixed", kv_cache="nvfp4")
    (done,) = engine.run([Request("a", _prompt(30, 4), 6)])
    assert done.drafted > 0
    assert looked  # those of the experts
    assert [each for each in looked if "torch_experts.py" not in each[1]] == []


def test_previous_tokens_that_are_wrong_are_noticed(model, alone, monkeypatch):
    """Steps of fixed size that hash drafts of the step before give another text."""
    from anymla.runtime.ngrams import NgramBuffers

    right = NgramBuffers.fill

    def late(self, spans, places):
        if len(places) % 2:
            right(self, spans, places)

    monkeypatch.setattr(NgramBuffers, "fill", late)
    assert _texts(_serve(_engine(model, draft_tokens=0, decode="fixed"))) != alone[0]

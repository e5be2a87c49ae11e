"""Scheduling, paging and speculation, with a model in exact integers (see fake_model)."""

import dataclasses
import random

import pytest
import torch
from engine_runs import poison
from fake_model import SPECS, VOCAB, FakeModel, generate_alone
from hypothesis import given
from hypothesis import strategies as st

from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request
from anymla.runtime.sampler import Sampling


def _options(**changes):
    defaults = {"kv_cache": "fp32", "max_seq_len": 700, "max_requests": 3, "chunk_size": 100}
    return EngineOptions(**(defaults | changes))


def _prompt(length, seed=0):
    return tuple(random.Random(seed).choices(range(VOCAB), k=length))


def _run(engine, requests, join_at=()):
    """Run with free pages poisoned before every step; request i joins at step join_at[i]."""
    pending = list(zip([*join_at, *[0] * (len(requests) - len(join_at))], requests, strict=True))
    done, clock = {}, 0
    while pending or engine.busy:
        for when, request in list(pending):
            if when <= clock:
                engine.submit(request)
                pending.remove((when, request))
        poison(engine)
        for completion in engine.step().finished:
            done[completion.request.request_id] = completion
        clock += 1
    for pool in engine.store.pools.values():
        assert (pool.held, pool.reserved) == (0, 0)
    return done


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 126, 127, 128, 129, 255, 256, 257, 500])
def test_greedy_tokens_are_those_of_the_sums(length):
    prompt = _prompt(length)
    engine = Engine(FakeModel(), _options())
    done = _run(engine, [Request("a", prompt, 20)])
    assert list(done["a"].token_ids) == generate_alone(prompt, 20)
    assert done["a"].finish_reason == "length"


scenario = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(1, 300), min_size=1, max_size=4),
        "join_at": st.lists(st.integers(0, 12), min_size=4, max_size=4),
        "chunk_size": st.sampled_from([1, 7, 64, 100, 512]),
        "max_requests": st.integers(1, 3),
        "draft_tokens": st.integers(0, 9),
        "spare_tokens": st.integers(0, 200),
        "temperature": st.sampled_from([0.0, 0.0, 0.8]),
        "penalties": st.sampled_from([(1.0, 0.0, 0.0), (1.3, 0.0, 0.0), (1.0, 0.5, 0.25)]),
        "decode": st.sampled_from(["plain", "fixed"]),
    }
)


@given(scenario=scenario)
def test_tokens_depend_on_the_request_alone(scenario):
    """Whatever the chunking, the neighbours, joining, leaving and speculation."""
    requests = [
        Request(
            str(number),
            _prompt(length, number),
            1 + length % 23,
            Sampling(scenario["temperature"], 0.9, number, 0, 0.0, *scenario["penalties"]),
            stop_ids=frozenset([5]),
        )
        for number, length in enumerate(scenario["lengths"])
    ]
    decode = scenario["max_requests"] * (1 + scenario["draft_tokens"])
    options = _options(
        chunk_size=scenario["chunk_size"],
        max_requests=scenario["max_requests"],
        draft_tokens=scenario["draft_tokens"],
        max_batch_tokens=decode + scenario["spare_tokens"],
        max_seq_len=330,
        decode=scenario["decode"],
    )
    join_at = scenario["join_at"][: len(requests)]
    together = _run(Engine(FakeModel(), options), requests, join_at)
    for request in requests:
        alone = Engine(FakeModel(), _options(max_requests=1, chunk_size=512)).run([request])[0]
        assert together[request.request_id].token_ids == alone.token_ids
        assert together[request.request_id].finish_reason == alone.finish_reason


@pytest.mark.parametrize("draft_tokens", [1, 2, 9])
def test_speculation_saves_steps_and_changes_nothing(draft_tokens):
    request = Request("a", _prompt(150), 200)
    plain = Engine(FakeModel(), _options())
    expected = plain.run([request])[0]
    model = FakeModel()
    engine = Engine(model, _options(draft_tokens=draft_tokens))
    got = _run(engine, [request])["a"]
    assert got.token_ids == expected.token_ids
    # The fake's drafts are right unless a surprise, about every third token, comes between.
    assert 0 < got.accepted < got.drafted
    assert len(model.steps) < 0.75 * len(plain.model.steps)
    assert got.accepted == 199 - (len(model.steps) - 2)


def test_every_accept_count_leaves_the_state_of_plain_decoding():
    """Drafts that are right 0 .. 9 times, over ratio and page boundaries: same cache rows."""
    request = Request("a", _prompt(120), 60)

    def rows_at_the_end(engine):
        kept = {}

        def keep(engine, state):
            for group in engine.store.groups:
                table = engine.store.tables[group.name]
                last = state.computed // group.ratio
                kept[group.name] = [
                    cache[page].clone()[: last - column * group.page_size]
                    for cache in engine.store.tensors(group)[
                        : 1 if group.name == "window" else None
                    ]
                    for column, page in table.held(state.row).items()
                    if column >= group.obsolete_pages(state.computed)
                    and column * group.page_size < last
                ]

        engine.on_finish = keep
        engine.run([request])
        return kept

    expected = rows_at_the_end(Engine(FakeModel(), _options()))
    for draft_tokens in (1, 5, 9):
        got = rows_at_the_end(Engine(FakeModel(), _options(draft_tokens=draft_tokens)))
        for name in expected:
            assert len(got[name]) == len(expected[name])
            assert all(map(torch.equal, got[name], expected[name]))


class Predictable(FakeModel):
    """Never surprised: the next token follows from the last, and every draft is right."""

    def logits(self, hidden):
        return super().logits(torch.stack((hidden[..., 0], 0 * hidden[..., 1] + 1), -1))


@pytest.mark.parametrize("draft_tokens", [1, 3, 40])
def test_accepted_drafts_stay_within_the_reserved_pages(draft_tokens):
    """The guesses after 1 + k accepted tokens lie up to 2 k tokens ahead of the step's start."""
    engine = Engine(Predictable(), _options(draft_tokens=draft_tokens, chunk_size=1))
    done = _run(engine, [Request("a", _prompt(3), 600)])["a"]
    assert done.accepted == done.drafted
    assert len(engine.model.steps) == 3 + -(-599 // (1 + draft_tokens))


def test_drafts_do_not_exceed_what_may_be_generated():
    model = FakeModel()
    engine = Engine(model, _options(draft_tokens=9, max_seq_len=13))
    assert len(_run(engine, [Request("a", _prompt(10), 3)])["a"].token_ids) == 3
    assert max(step.max_seq_len for step in model.steps) <= 12


def test_a_stop_token_ends_the_request_among_accepted_drafts():
    prompt = _prompt(40)
    tokens = generate_alone(prompt, 30)
    stop = tokens[10]
    first = tokens.index(stop)
    for draft_tokens in (0, 4):
        engine = Engine(FakeModel(), _options(draft_tokens=draft_tokens))
        done = _run(engine, [Request("a", prompt, 30, stop_ids=frozenset([stop]))])["a"]
        assert list(done.token_ids) == tokens[: first + 1]
        assert done.finish_reason == "stop"


def test_decode_comes_first_and_the_budget_holds():
    model = FakeModel()
    engine = Engine(model, _options(max_batch_tokens=40, chunk_size=30))
    engine.submit(Request("a", _prompt(10), 30))
    engine.step()
    engine.submit(Request("b", _prompt(100), 2))
    engine.submit(Request("c", _prompt(100), 2))
    engine.step()
    assert model.steps[-1].query_lens == (1, 30, 9)
    assert model.steps[-1].num_decodes == 1
    engine.run()
    assert all(sum(step.query_lens) <= 40 for step in model.steps)


def test_drafts_count_in_the_budget():
    model = FakeModel()
    engine = Engine(model, _options(max_batch_tokens=40, chunk_size=30, draft_tokens=4))
    engine.submit(Request("a", _prompt(10), 30))
    engine.step()
    engine.submit(Request("b", _prompt(100), 2))
    engine.submit(Request("c", _prompt(100), 2))
    engine.step()
    # The token that was chosen and four guesses behind it, one chunk, and what is left.
    assert model.steps[-1].query_lens == (5, 30, 5)
    engine.run()
    assert all(sum(step.query_lens) <= 40 for step in model.steps)


def test_the_default_budget_has_room_for_every_draft_and_a_chunk():
    assert _options(draft_tokens=4).batch_tokens == 3 * 5 + 100
    with pytest.raises(ValueError, match=r"max_batch_tokens must be at least 15, .* got 14"):
        _options(draft_tokens=4, max_batch_tokens=14)


def test_a_full_pool_makes_requests_wait_in_order():
    requests = [Request(str(n), _prompt(200, n), 10) for n in range(4)]
    pages = {"c4": 2, "index": 2}  # two requests' worth
    engine = Engine(FakeModel(), _options(max_requests=4, pages=pages))
    for request in requests:
        engine.submit(request)
    engine.step()
    assert len(engine.scheduler.running) == 2
    assert len(engine.scheduler.waiting) == 2
    finished = []
    while engine.busy:
        finished += [done.request.request_id for done in engine.step().finished]
        assert engine.store.pools["c4"].held <= 2
    assert finished == ["0", "1", "2", "3"]
    assert all(pool.held == pool.reserved == 0 for pool in engine.store.pools.values())


def test_results_come_in_the_order_of_submission():
    requests = [Request("long", _prompt(9), 20), Request("short", _prompt(9), 2)]
    seen = []
    done = Engine(FakeModel(), _options()).run(
        requests, on_token=lambda name, token: seen.append((name, token))
    )
    assert [completion.request.request_id for completion in done] == ["long", "short"]
    for completion in done:
        name = completion.request.request_id
        assert tuple(token for who, token in seen if who == name) == completion.token_ids
        assert all(seconds >= 0 for seconds in completion.timings.as_dict().values())


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("a", ()), "request 'a': the prompt is empty"),
        (Request("a", (3, VOCAB)), "request 'a': unknown token id 61, the vocabulary has 61"),
        (Request("a", (-1,)), "unknown token id -1"),
        (Request("a", (1,), 0), "request 'a': max_new_tokens must be at least 1, got 0"),
        (
            Request("a", (1,) * 5000),
            "request 'a': the prompt has 5000 tokens, max_position_embeddings is 4096",
        ),
        (
            Request("a", (1,) * 4090, 7),
            "4090 prompt tokens and 7 new ones exceed max_position_embeddings of 4096",
        ),
        (
            Request("a", (1,) * 690, 11),
            "request 'a': its 701 tokens exceed the engine's max_seq_len of 700",
        ),
        (
            Request("a", (1,) * 500, 100),
            "request 'a' can never fit: its 600 tokens need 3 pages of cache group 'c4', "
            "which has 1",
        ),
    ],
)
def test_requests_that_cannot_run_are_refused(request_, message):
    engine = Engine(FakeModel(), _options(pages={"c4": 1}))
    with pytest.raises(ValueError, match=message):
        engine.submit(request_)
    assert not engine.busy
    assert engine.run([Request("a", (1, 2), 1)])


def test_images_are_refused():
    model = FakeModel()
    model.config.image_token_ids = (7,)
    engine = Engine(model, _options())
    message = "request 'a': token id 7 stands for an image .image_token_id., and images are not r"
    with pytest.raises(ValueError, match=message):
        engine.submit(Request("a", (3, 7, 7)))
    assert not engine.busy
    assert engine.run([Request("a", (1, 2), 1)])


def test_an_id_can_be_used_once_at_a_time():
    engine = Engine(FakeModel(), _options())
    engine.submit(Request("a", (1,), 2))
    with pytest.raises(ValueError, match="request 'a': this id is in use"):
        engine.submit(Request("a", (2,), 2))
    engine.run()
    assert engine.run([Request("a", (2,), 2)])


def test_bad_options():
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        _options(chunk_size=0)
    with pytest.raises(ValueError, match="max_batch_tokens must be at least 6"):
        _options(max_batch_tokens=5, draft_tokens=1)
    with pytest.raises(ValueError, match=r"kv_cache must be one of fp8, .*, got 'int4'"):
        Engine(FakeModel(), _options(kv_cache="int4"))
    with pytest.raises(ValueError, match=r"unknown cache groups \['c7'\]; there are \['c128'"):
        Engine(FakeModel(), _options(pages={"c7": 1}))
    with pytest.raises(ValueError, match="speculation needs a drafter"):
        Engine(FakeModel(SPECS[:4]), _options(draft_tokens=1))


def test_an_engine_for_given_requests_has_no_page_to_spare():
    requests = [Request(str(n), _prompt(length), 5) for n, length in enumerate((300, 20, 150))]
    options = _options(max_requests=2)
    engine = Engine.for_requests(FakeModel(), options, requests)
    assert engine.options.max_seq_len == 305
    assert {name: pool.capacity for name, pool in engine.store.pools.items()} == {
        "window": 5 + 3,
        "c4": 2 + 1,
        "index": 2 + 1,
        "state_c4": 28 + 28,
        "state_index": 28 + 28,
        "c128": 1 + 1,
        "state_c128": 30 + 20,
    }
    assert {done.request.request_id for done in engine.run(requests)} == {"0", "1", "2"}
    with pytest.raises(ValueError, match="no request"):
        Engine.for_requests(FakeModel(), options, [])


def test_cache_bytes_are_the_layouts():
    """The draft layer's window is there only if it drafts; see docs/formats.md for the strides."""
    pages = {"window": 3, "c4": 1, "index": 1, "state_c4": 3, "state_index": 3, "c128": 1}
    options = _options(kv_cache="fp8", pages=pages | {"state_c128": 17})
    strides = 4 * 37440 * 4 + 2 * 2 * (37440 + 8640) + 2 * 4 * (32832 + 8640)
    strides += 2 * 1728 + 18 * 32832
    assert Engine(FakeModel(), options).store.nbytes == strides
    drafting = dataclasses.replace(options, draft_tokens=1)
    assert Engine(FakeModel(), drafting).store.nbytes == strides + 4 * 37440


@pytest.mark.parametrize("chunk_size", [1, 5, 64, 512])
def test_prompt_logprobs_do_not_depend_on_chunks(chunk_size):
    prompt = _prompt(150)
    model = FakeModel()
    engine = Engine(model, _options(chunk_size=chunk_size))
    done = _run(engine, [Request("a", prompt, 0, prompt_logprobs=True)])["a"]
    assert done.token_ids == ()
    assert done.finish_reason == "length"
    assert done.prompt_logprobs[0] is None
    for position in (1, 2, 77, 149):
        assert done.prompt_logprobs[position] == pytest.approx(
            _logprob(prompt[:position], prompt[position]), abs=1e-5
        )


@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_generated_tokens_come_with_their_logprobs(draft_tokens):
    """Of the model's own distribution, whatever the temperature."""
    prompt = _prompt(30)
    request = Request("a", prompt, 12, Sampling(2.0, 0.9, 1), stop_ids=frozenset([8]))
    done = _run(Engine(FakeModel(), _options(draft_tokens=draft_tokens)), [request])["a"]
    assert len(done.logprobs) == len(done.token_ids)
    text = prompt + done.token_ids
    for place, logprob in enumerate(done.logprobs, start=30):
        assert logprob == pytest.approx(_logprob(text[:place], text[place]), abs=1e-5)


def _logprob(prompt, token):
    """From the fake's definition: -0.25 times the distance from the greedy token."""
    best = generate_alone(prompt, 1)[0]
    logits = torch.tensor([-0.25 * ((other - best) % VOCAB) for other in range(VOCAB)])
    return float(logits.double().log_softmax(-1)[token])


def test_logits_of_a_prompt_come_in_blocks(monkeypatch):
    monkeypatch.setattr("anymla.runtime.scoring._BLOCK_ELEMENTS", 10 * VOCAB + 3)
    model = FakeModel()
    request = Request("a", _prompt(95), 1, prompt_logprobs=True)
    done = Engine(model, _options()).run([request])[0]
    assert max(model.logit_rows) == 10
    assert len(done.prompt_logprobs) == 95


def test_broken_logits_stop_the_run():
    model = FakeModel()
    model.logits = lambda hidden: torch.full((len(hidden), VOCAB), torch.nan)
    with pytest.raises(FloatingPointError, match="logits for position 4"):
        Engine(model, _options()).run([Request("a", (1, 2, 3, 4), 1)])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 1.0, 3), Sampling(0.8, 0.9, 3)])
@pytest.mark.parametrize("decode", ["plain", "fixed"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_guess_that_is_no_number_ends_the_drafts(sampling, decode, value):
    """Behind every token that 5 divides; neighbours go on."""
    model = FakeModel()
    logits = model.mtp_logits

    def broken(hidden):
        fifth = hidden[:, 0, :1] % 5 == 0
        return torch.where(fifth, value, logits(hidden))

    model.mtp_logits = broken
    requests = [Request(str(n), _prompt(30 + n, n), 60, sampling) for n in range(3)]
    plain = _run(Engine(FakeModel(), _options()), requests)
    engine = Engine(model, _options(draft_tokens=3, decode=decode))
    for request in requests:
        engine.submit(request)
    lengths = set()
    while engine.busy:
        for done in engine.step().finished:
            assert done.token_ids == plain[done.request.request_id].token_ids
        for state in engine.scheduler.running:
            if not state.is_prefill:
                *before, last = [state.tokens[-1], *state.drafts]
                assert all(token % 5 for token in before)
                assert last % 5 == 0 or len(state.drafts) == min(3, state.remaining - 1)
                lengths.add(len(state.drafts))
    assert lengths == {0, 1, 2, 3}


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 9])
def test_a_cancelled_request_leaves_nothing_behind(steps):
    """Waiting, in its prompt, or generating; the others' tokens stay, its pages are free again."""
    prompts = {name: _prompt(230, seed) for seed, name in enumerate("abcd")}
    engine = Engine(FakeModel(), _options())
    for name, prompt in prompts.items():
        engine.submit(Request(name, prompt, 12))
    done = {}
    for _ in range(steps):
        for completion in engine.step().finished:
            done[completion.request.request_id] = completion
    cut = engine.cancel("b"), engine.cancel("d")
    with pytest.raises(KeyError):
        engine.cancel("b")
    while engine.busy:
        poison(engine)
        for completion in engine.step().finished:
            done[completion.request.request_id] = completion
    assert set(done) == {"a", "c"}
    for name, completion in done.items():
        assert list(completion.token_ids) == generate_alone(prompts[name], 12)
    for name, completion in zip("bd", cut, strict=True):
        assert completion.finish_reason == "stop"
        expected = generate_alone(prompts[name], 12)
        assert list(completion.token_ids) == expected[: len(completion.token_ids)]
    for pool in engine.store.pools.values():
        assert (pool.held, pool.reserved) == (0, 0)


@pytest.mark.parametrize("draft_tokens", [0, 2])
def test_only_the_steps_that_are_wanted_are_prepared(draft_tokens):
    engine = Engine(FakeModel(), _options(draft_tokens=draft_tokens, decode="fixed"))
    engine.warm_up(only=lambda bucket: bucket.requests == 2 and bucket.tokens == 1 + draft_tokens)
    assert {step.query_lens for step in engine.model.steps} == {(1 + draft_tokens,) * 2}
    wanted = _run(Engine(FakeModel(), _options()), [Request("a", _prompt(30), 9)])["a"]
    assert engine.run([Request("a", _prompt(30), 9)])[0].token_ids == wanted.token_ids

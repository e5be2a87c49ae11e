"""Requests that go on where the caches of an earlier one end."""

import random

import pytest
from engine_runs import poison
from fake_model import VOCAB, FakeModel, generate_alone
from hypothesis import given, settings
from hypothesis import strategies as st

from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request


def _options(**changes):
    defaults = {
        "kv_cache": "fp32",
        "max_seq_len": 900,
        "max_requests": 1,
        "chunk_size": 100,
        "keep_caches": True,
    }
    return EngineOptions(**(defaults | changes))


def _run(engine, *requests):
    for request in requests:
        engine.submit(request)
    done = {}
    while engine.busy:
        poison(engine)
        done |= {each.request.request_id: each for each in engine.step().finished}
    return [done[request.request_id] for request in requests]


def _tokens(length, seed=0):
    return tuple(random.Random(seed).choices(range(VOCAB), k=length))


turn = st.fixed_dictionaries(
    {
        "kept": st.sampled_from([0, 3, 15, 16, 17, 60, 500]),  # of the tokens before its end
        "said": st.integers(1, 120),
        "answer": st.integers(1, 80),
    }
)
script = st.fixed_dictionaries(
    {
        "turns": st.lists(turn, min_size=2, max_size=3),
        "chunk_size": st.sampled_from([7, 64, 512]),
        "max_requests": st.integers(1, 2),
        "draft_tokens": st.sampled_from([0, 0, 1, 3]),
        "decode": st.sampled_from(["plain", "fixed"]),
    }
)


@settings(max_examples=15)
@given(script=script)
def test_a_dialogue_has_the_tokens_of_a_fresh_engine(script):
    """Whatever is kept of the text before, with free pages poisoned before every step."""
    turns = script.pop("turns")
    engine = Engine(FakeModel(), _options(max_seq_len=1400, **script))
    text: tuple[int, ...] = ()
    for number, each in enumerate(turns):
        text = text[: max(0, len(text) - each["kept"])] + _tokens(each["said"], number)
        (done,) = _run(engine, Request("a", text, each["answer"], stop_ids=frozenset([5])))
        fresh = Engine(FakeModel(), _options(max_seq_len=1400, keep_caches=False))
        (alone,) = fresh.run([Request("a", text, each["answer"], stop_ids=frozenset([5]))])
        assert done.token_ids == alone.token_ids
        assert done.cached < len(text)
        text += done.token_ids
    for kept in engine.scheduler.kept:
        engine.store.release(kept)
    for pool in engine.store.pools.values():
        assert (pool.held, pool.reserved) == (0, 0)


@pytest.mark.parametrize("draft_tokens", [0, 2])
def test_a_continued_text_is_read_from_its_end_on(draft_tokens):
    engine = Engine(FakeModel(), _options(draft_tokens=draft_tokens))
    first = _tokens(300)
    (done,) = _run(engine, Request("a", first, 200))
    assert done.cached == 0
    longer = first + done.token_ids + _tokens(9, 1)
    engine.submit(Request("b", longer, 20))
    report = engine.step()
    # The last token of an answer has never run.
    assert report.prompt_tokens == 10
    while engine.busy:
        (*_, last) = engine.step().finished or [None]
    assert last.cached == len(longer) - 10
    assert list(last.token_ids) == generate_alone(longer, 20)
    fresh = Engine(FakeModel(), _options(draft_tokens=draft_tokens, keep_caches=False))
    (alone,) = fresh.run([Request("c", longer, 20)])
    assert (last.drafted, last.accepted) == (alone.drafted, alone.accepted)


def test_an_answer_left_out_costs_its_own_length_only():
    """The next prompt parts from the last one a little before its end, far behind the window."""
    engine = Engine(FakeModel(), _options())
    first = _tokens(300)
    _run(engine, Request("a", first, 400))
    other = first[:-2] + _tokens(30, 1)
    assert other[298] != first[298]
    (done,) = _run(engine, Request("b", other, 20))
    assert done.cached == 300 - 16
    assert list(done.token_ids) == generate_alone(other, 20)


def test_what_parts_early_is_read_anew():
    engine = Engine(FakeModel(), _options())
    first = _tokens(400)
    _run(engine, Request("a", first, 100))
    other = first[:150] + _tokens(200, 1)
    (done,) = _run(engine, Request("b", other, 20))
    assert done.cached == 0
    assert list(done.token_ids) == generate_alone(other, 20)


def test_a_cancelled_request_is_continued_as_well():
    engine = Engine(FakeModel(), _options(chunk_size=64))
    first = _tokens(300)
    for steps in (2, 9):  # within the prompt, and within the answer
        engine.submit(Request("a", first, 100))
        for _ in range(steps):
            engine.step()
        said = engine.cancel("a").token_ids
        longer = first + said + _tokens(7, steps)
        (done,) = _run(engine, Request("b", longer, 20))
        assert done.cached == (128 if steps == 2 else len(first + said) - 1)
        assert list(done.token_ids) == generate_alone(longer, 20)


def test_kept_caches_give_way_to_requests_that_have_nothing_in_common():
    engine = Engine(FakeModel(), _options(max_requests=2, max_seq_len=400))
    prompts = [_tokens(200, seed) for seed in range(4)]
    for number, prompt in enumerate(prompts):
        (done,) = _run(engine, Request(str(number), prompt, 20))
        assert list(done.token_ids) == generate_alone(prompt, 20)
    assert [each.request.request_id for each in engine.scheduler.kept] == ["2", "3"]
    both = _run(engine, *(Request(f"again {n}", prompts[n], 20) for n in (3, 2)))
    assert [done.cached for done in both] == [200 - 16, 200 - 16]


def test_scores_of_a_prompt_need_all_of_it():
    engine = Engine(FakeModel(), _options())
    prompt = _tokens(50)
    for _ in range(2):
        (done,) = _run(engine, Request("a", prompt, 0, prompt_logprobs=True))
        assert done.cached == 0
        assert len(done.prompt_logprobs) == 50

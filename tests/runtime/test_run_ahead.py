"""Steps that are launched before the tokens of the step in front of them are known."""

import pytest
import torch
from engine_runs import poison
from fake_block_model import FakeBlockModel
from fake_model import FakeModel, generate_alone
from hypothesis import given
from hypothesis import strategies as st
from test_engine import _prompt, _run

from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request
from anymla.runtime.sampler import Sampling

DRAFTS = [0, 1, 5]


def _engine(draft_tokens, **changes):
    options = {"kv_cache": "fp32", "max_seq_len": 700, "max_requests": 3, "chunk_size": 100}
    options |= {"decode": "fixed", "draft_tokens": draft_tokens}
    model = FakeBlockModel() if draft_tokens else FakeModel()
    return Engine(model, EngineOptions(**(options | changes)))


def _counted(engine):
    """The engine's steps that are launched ahead, counted in a list."""
    counts, launch = [], engine._runner.launch_next

    def launch_next(*args):
        following = launch(*args)
        counts.append(following is not None)
        return following

    engine._runner.launch_next = launch_next
    return counts


@pytest.mark.parametrize("draft_tokens", DRAFTS)
@given(
    lengths=st.lists(st.integers(1, 260), min_size=1, max_size=4),
    news=st.lists(st.integers(1, 30), min_size=4, max_size=4),
    join_at=st.lists(st.integers(0, 12), min_size=4, max_size=4),
    max_requests=st.integers(1, 3),
    stop=st.integers(0, 60),
)
def test_tokens_are_those_without(draft_tokens, lengths, news, join_at, max_requests, stop):
    """Whoever joins, ends at its length or by a stop token while a step is under way."""
    requests = [
        Request(str(i), _prompt(length, i), new, stop_ids=frozenset([stop]))
        for i, (length, new) in enumerate(zip(lengths, news, strict=False))
    ]
    engine = _engine(draft_tokens, max_requests=max_requests)
    done = _run(engine, requests, join_at[: len(requests)])
    for request in requests:
        wanted = generate_alone(request.token_ids, request.max_new_tokens)
        end = wanted.index(stop) + 1 if stop in wanted else len(wanted)
        completion = done[request.request_id]
        assert list(completion.token_ids) == wanted[:end]
        assert completion.finish_reason == ("stop" if stop in wanted else "length")


@pytest.mark.parametrize("draft_tokens", DRAFTS)
def test_all_steps_but_the_first_are_launched_ahead(draft_tokens):
    engine = _engine(draft_tokens)
    counts = _counted(engine)
    requests = [Request("a", _prompt(9), 30), Request("b", _prompt(20, 1), 30)]
    engine.run(requests)
    assert counts[0]
    assert sum(counts) >= 30 // (2 + draft_tokens)
    off = _engine(draft_tokens, run_ahead=False)
    counts = _counted(off)
    assert [done.token_ids for done in off.run(requests)] == [
        tuple(generate_alone(request.token_ids, 30)) for request in requests
    ]
    assert not any(counts)


@pytest.mark.parametrize("draft_tokens", DRAFTS)
@pytest.mark.parametrize("steps", [2, 3, 5])
def test_a_request_is_cancelled_while_a_step_is_under_way(draft_tokens, steps):
    engine = _engine(draft_tokens)
    prompts = {name: _prompt(20, seed) for seed, name in enumerate("abc")}
    for name, prompt in prompts.items():
        engine.submit(Request(name, prompt, 40))
    for _ in range(steps):
        engine.step()
    assert engine._ahead is not None
    cut = engine.cancel("b")
    assert list(cut.token_ids) == generate_alone(prompts["b"], 40)[: len(cut.token_ids)]
    engine.submit(Request("d", _prompt(60, 9), 20))  # takes the row and the pages
    done = {}
    while engine.busy:
        poison(engine)
        for completion in engine.step().finished:
            done[completion.request.request_id] = list(completion.token_ids)
    assert done == {
        "a": generate_alone(prompts["a"], 40),
        "c": generate_alone(prompts["c"], 40),
        "d": generate_alone(_prompt(60, 9), 20),
    }
    for pool in engine.store.pools.values():
        assert (pool.held, pool.reserved) == (0, 0)


@pytest.mark.parametrize("draft_tokens", DRAFTS)
def test_all_requests_are_cancelled_while_a_step_is_under_way(draft_tokens):
    engine = _engine(draft_tokens)
    engine.submit(Request("a", _prompt(40), 40))
    engine.step()
    engine.step()
    assert engine._ahead is not None
    engine.cancel("a")
    assert not engine.busy
    (done,) = engine.run([Request("b", _prompt(7, 2), 12)])
    assert list(done.token_ids) == generate_alone(_prompt(7, 2), 12)


def test_who_can_join_does_at_the_next_step():
    """A step ahead would make a waiting request wait for two."""
    engine = _engine(0)
    engine.submit(Request("a", _prompt(5), 40))
    engine.step()
    engine.step()
    assert engine._ahead is not None
    engine.submit(Request("b", _prompt(5, 1), 3))
    assert engine.step().prompt_tokens == 0  # the step that was under way
    assert engine._ahead is None
    assert engine.step().prompt_tokens == 5
    full = _engine(0, max_requests=1)
    for name in "ab":
        full.submit(Request(name, _prompt(5), 8))
    full.step()
    full.step()
    assert full._ahead is not None  # nobody can join


@pytest.mark.parametrize(
    ("draft_tokens", "changes", "sampling"),
    [
        (0, {}, Sampling(0.8)),
        (5, {}, Sampling(0.8)),
        (5, {"adapt_drafts": True}, Sampling()),
        (5, {"least_survival": 0.1}, Sampling()),
    ],
)
def test_what_the_host_decides_is_waited_for(draft_tokens, changes, sampling):
    engine = _engine(draft_tokens, **changes)
    counts = _counted(engine)
    engine.run([Request("a", _prompt(9), 12, sampling)])
    assert not any(counts)


@pytest.mark.parametrize("draft_tokens", DRAFTS)
def test_logits_that_are_no_numbers_stop_the_run(draft_tokens):
    """Also those of a step that was launched behind others."""
    engine = _engine(draft_tokens)
    logits, calls = engine.model.logits, []

    def broken(hidden):
        calls.append(None)
        return logits(hidden) * (torch.nan if len(calls) > 4 else 1)

    engine.model.logits = broken
    with pytest.raises(FloatingPointError, match=r"the logits for position \d+ are not numbers"):
        engine.run([Request("a", _prompt(9), 60)])

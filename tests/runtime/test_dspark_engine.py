"""DSpark drafts in the engine, with a model in exact integers (see fake_block_model)."""

import random

import pytest
import torch
from engine_runs import poison
from fake_block_model import BLOCK, STAGES, FakeBlockModel, guess_alone
from fake_model import VOCAB, FakeModel, generate_alone
from hypothesis import given
from hypothesis import strategies as st

from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request
from anymla.runtime.sampler import Sampling, best_tokens, choose_tokens


def _options(**changes):
    defaults = {
        "kv_cache": "fp32",
        "max_seq_len": 700,
        "max_requests": 3,
        "chunk_size": 100,
        "draft_tokens": 5,
    }
    return EngineOptions(**(defaults | changes))


def _prompt(length, seed=0):
    return tuple(random.Random(seed).choices(range(VOCAB), k=length))


def _expected_drafts(engine, state):
    """What the drafter must guess for a request, of its tokens alone."""
    count = engine.options.draft_tokens
    sampling, first = state.request.sampling, len(state.tokens)

    def choose(best, i):
        distance = (torch.arange(VOCAB) - best) % VOCAB
        # Guesses are drawn from the whole distribution.
        whole = Sampling(sampling.temperature, 1.0, sampling.seed)
        return choose_tokens(-0.25 * distance.unsqueeze(0), [whole], [first + i])[0]

    guesses = guess_alone(
        state.tokens,
        count,
        erratic=engine.model.erratic,
        block=max(count, BLOCK),
        choose=None if sampling.is_greedy else choose,
    )
    return guesses[: min(count, state.remaining - 1)]


def _run(engine, requests, join_at=(), replace=None):
    """Run with free pages poisoned before every step, and every draft checked after it.

    Request i joins at step join_at[i]; ``replace`` may change the drafts before they are verified.
    """
    pending = list(zip([*join_at, *[0] * (len(requests) - len(join_at))], requests, strict=True))
    done, clock, checked = {}, 0, 0
    while pending or engine.busy:
        for when, request in list(pending):
            if when <= clock:
                engine.submit(request)
                pending.remove((when, request))
        poison(engine)
        for completion in engine.step().finished:
            done[completion.request.request_id] = completion
        for state in engine.scheduler.running:
            if engine.options.draft_tokens and not state.is_prefill:
                expected = _expected_drafts(engine, state)
                if engine.options.adapt_drafts:
                    assert state.drafts == expected[: len(state.drafts)]
                else:
                    assert state.drafts == expected
                checked += 1
                if replace is not None:
                    replace(state)
        clock += 1
    for pool in engine.store.pools.values():
        assert (pool.held, pool.reserved) == (0, 0)
    return done, checked


@pytest.mark.parametrize("length", [1, 2, 3, 4, 63, 64, 65, 126, 127, 128, 129, 191, 192, 193, 300])
@pytest.mark.parametrize("chunk_size", [1, 50, 512])
def test_a_prompt_fills_the_context(length, chunk_size):
    """In one piece, in chunks, and in a last chunk that is shorter than the window."""
    prompt = _prompt(length)
    engine = Engine(FakeBlockModel(erratic=True), _options(chunk_size=chunk_size))
    done, checked = _run(engine, [Request("a", prompt, 12)])
    assert list(done["a"].token_ids) == generate_alone(prompt, 12)
    assert checked > 3


def test_older_tokens_of_a_prompt_are_left_out():
    """The context reaches a window back from the first block, and no further."""
    model = FakeBlockModel()
    _run(Engine(model, _options(chunk_size=70)), [Request("a", _prompt(300), 3)])
    written = sorted({position for step in model.committed for (position,) in step})
    assert written == list(range(300 - 128, 300))


def test_prompts_of_one_step_leave_their_own_taps():
    """Longer than the window, so that only some rows of each are wanted, beside a decoding one."""
    lengths = (40, 150, 200)
    requests = [Request(str(n), _prompt(length, n), 9) for n, length in enumerate(lengths)]
    options = _options(chunk_size=512, max_batch_tokens=700)
    done, checked = _run(Engine(FakeBlockModel(erratic=True), options), requests, (0, 2, 2))
    for request in requests:
        got = done[request.request_id].token_ids
        assert list(got) == generate_alone(request.token_ids, 9)
    assert checked > 10


scenario = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(1, 300), min_size=1, max_size=4),
        "join_at": st.lists(st.integers(0, 12), min_size=4, max_size=4),
        "chunk_size": st.sampled_from([1, 7, 64, 100, 512]),
        "max_requests": st.integers(1, 3),
        "draft_tokens": st.integers(1, 9),
        "spare_tokens": st.integers(0, 200),
        "temperature": st.sampled_from([0.0, 0.0, 0.8]),
        "decode": st.sampled_from(["plain", "fixed"]),
        "erratic": st.booleans(),
        "adapt": st.booleans(),
        "ahead": st.booleans(),
        "seed": st.integers(0, 1000),
    }
)


@given(scenario=scenario)
def test_tokens_depend_on_the_request_alone(scenario):
    """Random traffic; drafts are the right ones, some are then replaced by right or random ones.

    A step that is launched before the one before it has ended verifies the drafts on the device, so
    that none can be replaced.
    """
    requests = [
        Request(
            str(number),
            _prompt(length, number),
            1 + length % 37,
            Sampling(scenario["temperature"], 0.9, number),
            stop_ids=frozenset([5]),
        )
        for number, length in enumerate(scenario["lengths"])
    ]
    alone = {
        request.request_id: Engine(
            FakeModel(), _options(max_requests=1, chunk_size=512, draft_tokens=0)
        ).run([request])[0]
        for request in requests
    }
    decode = scenario["max_requests"] * (1 + scenario["draft_tokens"])
    options = _options(
        chunk_size=scenario["chunk_size"],
        max_requests=scenario["max_requests"],
        draft_tokens=scenario["draft_tokens"],
        max_batch_tokens=decode + scenario["spare_tokens"],
        max_seq_len=340,
        decode=scenario["decode"],
        adapt_drafts=scenario["adapt"],
        run_ahead=scenario["ahead"],
    )
    rng = random.Random(scenario["seed"])

    def replace(state):
        known = alone[state.request.request_id].token_ids[len(state.generated) :]
        for i, right in enumerate(known[: len(state.drafts)]):
            kind = rng.random()
            if kind < 0.6:
                state.drafts[i] = right
            elif kind < 0.7:
                state.drafts[i] = rng.randrange(VOCAB)

    engine = Engine(FakeBlockModel(erratic=scenario["erratic"]), options)
    join_at = scenario["join_at"][: len(requests)]
    together, _ = _run(engine, requests, join_at, None if scenario["ahead"] else replace)
    for name, expected in alone.items():
        assert together[name].token_ids == expected.token_ids
        assert together[name].finish_reason == expected.finish_reason
        assert together[name].logprobs == pytest.approx(expected.logprobs, abs=1e-5)


@pytest.mark.parametrize("draft_tokens", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("decode", ["plain", "fixed"])
def test_twelve_requests_at_once(draft_tokens, decode):
    """Every width of verification, with ids that follow from the position: an echo would show."""
    requests = [
        Request(str(n), _prompt(20 + 11 * n, n), 30, Sampling(0.9 * (n % 2), 1.0, n))
        for n in range(12)
    ]
    plain = Engine(FakeModel(), _options(max_requests=12, draft_tokens=0)).run(requests)
    options = _options(max_requests=12, draft_tokens=draft_tokens, decode=decode, max_seq_len=200)
    done, checked = _run(Engine(FakeBlockModel(), options), requests)
    assert {each.request.request_id: each.token_ids for each in plain} == {
        name: each.token_ids for name, each in done.items()
    }
    assert checked > 12
    drafted = sum(each.drafted for each in done.values())
    accepted = sum(each.accepted for each in done.values())
    assert 0.1 * drafted < accepted < drafted


def test_padding_has_no_block():
    """Five requests in a bucket of eight: the others' rows go to no expert and write nothing."""
    model = FakeBlockModel()
    requests = [Request(str(n), _prompt(9, n), 8) for n in range(5)]
    _run(Engine(model, _options(max_requests=8, decode="fixed")), requests)
    full = [step for step in model.blocks if len(step.query_lens) == 8 and step.is_valid.any()]
    assert full
    for step in full:
        present = step.is_valid.view(8, BLOCK)
        assert present.all(1).tolist() == present.any(1).tolist()
        assert not present[5:].any()
        padding = ~step.is_valid
        assert (step.token_to_req[padding] == -1).all()
        assert (step.groups["window"].slot_mapping[padding] == -1).all()
        for rows in (step.window, step.dense["context"]):
            assert not rows.lengths[padding].any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_save_steps(temperature):
    request = Request("a", _prompt(150), 200, Sampling(temperature, 1.0, 3))
    plain = Engine(FakeModel(), _options(draft_tokens=0))
    expected = plain.run([request])[0]
    model = FakeBlockModel()
    done, _ = _run(Engine(model, _options()), [request])
    assert done["a"].token_ids == expected.token_ids
    assert 0 < done["a"].accepted < done["a"].drafted
    assert len(model.steps) < 0.75 * len(plain.model.steps)
    assert done["a"].accepted == 199 - (len(model.steps) - 2)


def test_rejected_drafts_at_a_page_edge_leave_nothing():
    """Every draft is wrong for 200 tokens, so that each page edge is met at each alignment."""

    def spoil(state):
        known = expected.token_ids[len(state.generated) :]
        for i, right in enumerate(known[: len(state.drafts)]):
            state.drafts[i] = (right + 1) % VOCAB

    request = Request("a", _prompt(120), 200)
    expected = Engine(FakeModel(), _options(draft_tokens=0)).run([request])[0]
    for draft_tokens in (5, 7):
        engine = Engine(FakeBlockModel(erratic=True), _options(draft_tokens=draft_tokens))
        done, checked = _run(engine, [request], replace=spoil)
        assert done["a"].token_ids == expected.token_ids
        assert done["a"].accepted == 0
        assert checked == 199


@pytest.mark.parametrize("accepted", range(6))
def test_every_accept_count_leaves_the_rows_of_plain_decoding(accepted):
    """All caches, the drafter's too, after steps in which just so many drafts were right."""
    request = Request("a", _prompt(120), 61)
    text = Engine(FakeModel(), _options(draft_tokens=0)).run([request])[0].token_ids

    def rows_at_the_end(replace):
        kept = {}

        def keep(engine, state):
            for group in engine.store.groups:
                table = engine.store.tables[group.name]
                kept[group.name] = []
                for layer, cache in zip(group.layers, engine.store.tensors(group), strict=True):
                    # A drafter does not follow the last two steps, when there is nothing to guess.
                    last = (state.computed - 12 * (layer >= 4)) // group.ratio
                    kept[group.name] += [
                        cache[page].clone()[: last - column * group.page_size]
                        for column, page in table.held(state.row).items()
                        if column >= group.obsolete_pages(state.computed)
                        and column * group.page_size < last
                    ]

        engine = Engine(FakeBlockModel(), _options(), on_finish=keep)
        _run(engine, [request], replace=replace)
        return kept

    def so_many(state):
        known = text[len(state.generated) :]
        state.drafts = [
            right if i < accepted else (right + 1) % VOCAB
            for i, right in enumerate(known[: len(state.drafts)])
        ]

    expected = rows_at_the_end(lambda state: state.drafts.clear())
    got = rows_at_the_end(so_many)
    assert len(expected["window"]) == (4 + STAGES) * 3
    assert not any(bool(rows.isnan().any()) for rows in expected["window"])
    for name, rows in expected.items():
        assert len(got[name]) == len(rows)
        assert all(map(torch.equal, got[name], rows))


def test_blocks_reach_beyond_the_longest_request():
    """The last blocks stand where no page is: all of their rows are there all the same."""
    engine = Engine(FakeBlockModel(erratic=True), _options(draft_tokens=7, max_seq_len=73))
    done, checked = _run(engine, [Request("a", _prompt(60), 13)])
    assert len(done["a"].token_ids) == 13
    assert checked > 2


def test_few_drafts_come_from_a_whole_block():
    """Two guesses are the first two of the block that was trained."""
    engine = Engine(FakeBlockModel(erratic=True), _options(draft_tokens=2))
    engine.submit(Request("a", _prompt(30), 9))
    engine.step()
    (state,) = engine.scheduler.running
    assert state.drafts == guess_alone(state.tokens, 5, erratic=True)[:2]
    assert state.drafts != guess_alone(state.tokens, 2, erratic=True, block=2)


def test_unlikely_guesses_are_not_verified():
    model = FakeBlockModel()
    guess = model.guess_block

    def doubtful(h, anchors, choose):
        survival = torch.tensor([0.9, 0.7, 0.4, 0.2, 0.1]).expand(len(anchors), -1)
        return type(guess(h, anchors, choose))(guess(h, anchors, choose).tokens, survival)

    model.guess_block = doubtful
    for least, count in ((0.0, 5), (0.1, 5), (0.15, 4), (0.5, 2), (0.95, 0)):
        engine = Engine(model, _options(least_survival=least))
        engine.submit(Request("a", _prompt(30), 9))
        engine.step()
        assert len(engine.state("a").drafts) == count
        assert list(engine.run()[0].token_ids) == generate_alone(_prompt(30), 9)
    with pytest.raises(ValueError, match=r"least_survival must be in \[0, 1\], got 1.5"):
        _options(least_survival=1.5)


def test_a_guess_that_is_no_number_ends_the_block():
    model = FakeBlockModel()
    guess = model.guess_block

    def broken(h, anchors, choose):
        def third_is_nan(logits, i):
            return choose(logits * (torch.nan if i == 2 else 1), i)

        return guess(h, anchors, third_is_nan)

    model.guess_block = broken
    model.guess_best_block = lambda h, anchors: (
        broken(h, anchors, lambda x, _: best_tokens(x)).tokens
    )
    engine = Engine(model, _options())
    engine.submit(Request("a", _prompt(30), 9))
    engine.step()
    assert len(engine.state("a").drafts) == 2
    assert list(engine.run()[0].token_ids) == generate_alone(_prompt(30), 9)


def test_sampled_tokens_have_the_models_distribution():
    """Chi-square of the distance from the best token over 2880 draws, drafts accepted and not.

    16 degrees of freedom exceed 45 with probability 1e-4.
    """
    requests = [Request(str(n), _prompt(9, n), 48, Sampling(1.5, 1.0, 100 + n)) for n in range(60)]
    done, _ = _run(Engine(FakeBlockModel(), _options(max_requests=8)), requests)
    distances = []
    for each in done.values():
        text = [*each.request.token_ids, *each.token_ids]
        for place in range(9, len(text)):
            best = generate_alone(text[:place], 1)[0]
            distances.append((text[place] - best) % VOCAB)
    assert sum(each.accepted for each in done.values()) > 300
    assert sum(each.drafted - each.accepted for each in done.values()) > 300
    expected = (-0.25 / 1.5 * torch.arange(VOCAB).double()).softmax(0) * len(distances)
    observed = torch.bincount(torch.tensor(distances), minlength=VOCAB).double()
    edges = [*range(16), VOCAB]
    chi = sum(
        float((observed[a:b].sum() - expected[a:b].sum()) ** 2 / expected[a:b].sum())
        for a, b in zip([0, *edges], edges, strict=False)
        if b > a
    )
    print(f"chi-square {chi:.1f} over {len(distances)} draws")
    assert chi < 45


def test_the_draft_caches_are_there_only_if_it_drafts():
    layers = Engine(FakeBlockModel(), _options(draft_tokens=0)).store.layers
    assert len(layers) == 4
    assert len(Engine(FakeBlockModel(), _options(draft_tokens=1)).store.layers) == 4 + STAGES

"""Penalties: their formulas, with and without drafts, and beside requests that have none."""

import random

import pytest
import torch
from fake_block_model import FakeBlockModel
from fake_model import VOCAB, FakeModel, generate_alone

from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.penalties import TokenCounts
from anymla.runtime.request import Request
from anymla.runtime.sampler import Sampling

CPU = torch.device("cpu")


class Raised(FakeModel):
    """With positive logits among them, which repetition divides."""

    def logits(self, hidden):
        return super().logits(hidden) + 4


class RaisedBlocks(FakeBlockModel):
    def logits(self, hidden):
        return super().logits(hidden) + 4


def penalised(logits: torch.Tensor, prompt, generated, drafts, **penalties) -> torch.Tensor:
    counts = TokenCounts(prompt, logits.shape[-1], CPU)
    return counts.penalised(logits, Sampling(**penalties), generated, drafts)


@pytest.mark.parametrize("penalty", [1.3, 0.5, 100.0])
def test_repetition_is_transformers(penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    torch.manual_seed(0)
    logits, prompt, generated = torch.randn(1, 50) * 5, [3, 3, 7, 49], [9, 7]
    theirs = RepetitionPenaltyLogitsProcessor(penalty)
    want = theirs(torch.tensor([prompt + generated]), logits.clone())
    got = penalised(logits, prompt, generated, [], repetition_penalty=penalty)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_presence_and_frequency_count_what_was_generated() -> None:
    logits = torch.zeros(1, 6)
    got = penalised(logits, [0, 1], [1, 2, 2, 5], [], presence_penalty=0.5, frequency_penalty=0.25)
    assert got.tolist() == [[0, -0.75, -1.0, 0, 0, -0.75]]
    got = penalised(logits, [0], [1], [], presence_penalty=-2.0)
    assert got.tolist() == [[0, 2, 0, 0, 0, 0]]


def test_a_row_of_drafts_follows_those_before_it() -> None:
    """As many rows as drafts and one, or the last few of them."""
    torch.manual_seed(1)
    logits, prompt, generated, drafts = torch.randn(4, 9), [4], [2, 2], [5, 5, 4]
    how = {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.125}
    alone = [
        penalised(logits[row : row + 1], prompt, generated + drafts[:row], [], **how)
        for row in range(4)
    ]
    got = penalised(logits, prompt, generated, drafts, **how)
    assert torch.equal(got, torch.cat(alone))
    assert torch.equal(penalised(logits[2:], prompt, generated, drafts, **how), got[2:])


def test_counts_grow_with_the_text() -> None:
    counts, how = TokenCounts([1], 4, CPU), Sampling(frequency_penalty=1.0)
    logits = torch.zeros(1, 4)
    assert counts.penalised(logits, how, [2], []).tolist() == [[0, 0, -1, 0]]
    assert counts.penalised(logits, how, [2, 2, 3], [3]).tolist() == [[0, 0, -2, -2]]
    assert counts.penalised(logits, how, [2, 2, 3], []).tolist() == [[0, 0, -2, -1]]


def text(prompt: tuple[int, ...], count: int, sampling: Sampling) -> list[int]:
    """Best tokens of the fake model, with penalties, one logit at a time."""
    tokens: list[int] = []
    while len(tokens) < count:
        (best,) = generate_alone((*prompt, *tokens), 1)
        values = []
        for token in range(VOCAB):
            value = 4 - 0.25 * ((token - best) % VOCAB)
            if token in prompt or token in tokens:
                factor = sampling.repetition_penalty
                value = value / factor if value > 0 else value * factor
            value -= sampling.frequency_penalty * tokens.count(token)
            value -= sampling.presence_penalty * (token in tokens)
            values.append(value)
        tokens.append(values.index(max(values)))
    return tokens


HOW = [
    Sampling(repetition_penalty=1.5),
    Sampling(presence_penalty=2.0, frequency_penalty=0.5),
    Sampling(repetition_penalty=0.5, frequency_penalty=1.0),
]


@pytest.mark.parametrize("sampling", HOW)
@pytest.mark.parametrize("decode", ["plain", "fixed"])
@pytest.mark.parametrize("draft_tokens", [0, 1, 5])
@pytest.mark.parametrize("kind", [Raised, RaisedBlocks])
def test_drafts_change_no_token(kind, draft_tokens, decode, sampling) -> None:
    prompt = tuple(random.Random(3).choices(range(VOCAB), k=40))
    options = EngineOptions(
        kv_cache="fp32",
        max_seq_len=200,
        max_requests=2,
        draft_tokens=draft_tokens,
        decode=decode,
    )
    engine = Engine(kind(), options)
    # Beside a request that takes the model's own best tokens.
    first, second = engine.run([Request("a", prompt, 40, sampling), Request("b", prompt, 40)])
    assert list(first.token_ids) == text(prompt, 40, sampling)
    assert list(second.token_ids) == generate_alone(prompt, 40)
    assert first.token_ids != second.token_ids
    assert first.drafted > 0 or not draft_tokens


def test_logprobs_are_the_models_own() -> None:
    prompt = (1, 2, 3)
    engine = Engine(FakeModel(), EngineOptions(kv_cache="fp32", max_seq_len=50))
    done = engine.run([Request("a", prompt, 5, Sampling(repetition_penalty=3.0))])[0]
    tokens = list(prompt)
    for token, logprob in zip(done.token_ids, done.logprobs, strict=True):
        (best,) = generate_alone(tokens, 1)
        logits = -0.25 * ((torch.arange(VOCAB) - best) % VOCAB)
        assert logprob == pytest.approx(float(logits.log_softmax(0)[token]), abs=1e-5)
        tokens.append(token)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"repetition_penalty": 0.0}, r"repetition_penalty must be in \[0.01, 100\], got 0.0"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty must be in"),
        ({"presence_penalty": 101.0}, r"presence_penalty must be in \[-100, 100\], got 101.0"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be in"),
    ],
)
def test_penalties_that_cannot_be_meant(given, message) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**given)

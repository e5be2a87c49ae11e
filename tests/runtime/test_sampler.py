import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anymla.runtime.sampler import Sampling, choose_tokens, uniform

GREEDY = Sampling()


def test_greedy_takes_the_lowest_of_the_best():
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [5.0, 5.0, 5.0, 5.0], [-math.inf, 0, -1, -2]])
    assert choose_tokens(logits, [GREEDY] * 3, [0, 1, 2]) == [1, 0, 1]


def test_no_rows():
    assert choose_tokens(torch.zeros(0, 4), [], []) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0)])
def test_broken_logits_are_an_error(bad, sampling):
    logits = torch.zeros(2, 4)
    logits[1, 2] = bad
    with pytest.raises(FloatingPointError, match="logits for position 8 are not numbers"):
        choose_tokens(logits, [sampling] * 2, [7, 8])
    with pytest.raises(FloatingPointError, match="position 7"):
        choose_tokens(torch.full((1, 4), -math.inf), [sampling], [7])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -0.1}, "temperature must be finite and >= 0, got -0.1"),
        ({"temperature": math.nan}, "temperature must be finite"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, "top_p must be in"),
        ({"seed": 2**63}, "seed must fit in 64 bits"),
    ],
)
def test_bad_sampling(arguments, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**arguments)


def _kept(logits, temperature, top_p):
    """Brute force: the smallest set with mass >= p, most probable first, lowest id on ties."""
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    probabilities = [w / math.fsum(weights) for w in weights]
    order = sorted(range(len(logits)), key=lambda i: (-probabilities[i], i))
    kept, mass = [], 0.0
    for token in order:
        kept.append(token)
        mass += probabilities[token]
        if mass >= top_p:
            break
    return kept, [probabilities[token] / mass for token in kept]


@given(
    logits=st.lists(st.integers(-6, 6).map(lambda n: n / 2), min_size=2, max_size=9),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_p=st.sampled_from([0.05, 0.333, 0.5, 0.81, 1.0]),
    seed=st.integers(0, 2**62),
)
def test_top_p_inverts_the_distribution_of_the_smallest_set(logits, temperature, top_p, seed):
    kept, probabilities = _kept(logits, temperature, top_p)
    number = uniform(seed, 5)
    edges = [math.fsum(probabilities[: i + 1]) for i in range(len(kept))]
    if min(abs(number - edge) for edge in edges) < 1e-9:
        return  # the two ways of summing may fall on either side
    expected = next(token for token, edge in zip(kept, edges, strict=True) if number < edge)
    sampling = Sampling(temperature, top_p, seed)
    assert choose_tokens(torch.tensor([logits]), [sampling], [5]) == [expected]


def test_frequencies_follow_the_probabilities():
    """Chi-square over 4000 positions; 5 degrees of freedom exceed 25.7 with probability 1e-4."""
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -0.5])
    draws = 4000
    chosen = choose_tokens(
        logits.expand(draws, -1), [Sampling(temperature=1.0, seed=3)] * draws, range(draws)
    )
    expected = logits.double().softmax(-1) * draws
    observed = torch.bincount(torch.tensor(chosen), minlength=6)
    assert float(((observed - expected) ** 2 / expected).sum()) < 25.7


def test_a_choice_depends_on_its_seed_and_position_only():
    logits = torch.randn(6, 50)
    samplings = [Sampling(1.0, 0.9, seed) for seed in (1, 1, 2, 2, 3, 3)]
    positions = [10, 11, 10, 11, 10, 11]
    together = choose_tokens(logits, samplings, positions)
    alone = [
        choose_tokens(logits[i : i + 1], samplings[i : i + 1], positions[i : i + 1])[0]
        for i in range(6)
    ]
    assert together == alone
    assert len({uniform(seed, p) for seed in range(-3, 20) for p in range(20)}) == 23 * 20


def test_tiny_temperature_is_greedy_and_does_not_overflow():
    logits = torch.tensor([[1.0, 80.0, 79.0]])
    assert choose_tokens(logits, [Sampling(temperature=1e-300)], [0]) == [1]


def test_random_numbers_are_those_of_every_release():
    """Golden: a release that changed them would change everyone's sampled texts."""
    golden = [0.0564663990004608, 0.44008326622012284, 0.5687207756392662]
    assert [uniform(0, 0), uniform(0, 1), uniform(-1, 0)] == golden

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anymla.runtime.sampler import (
    Sampling,
    choose_tokens,
    gumbel_noise,
    noise_key,
    sample_tokens,
)

GREEDY = Sampling()
GOLDEN = [-0.3774886, -0.6536437, 1.0604265, -0.260307, 0.2090231, 0.4541109]


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
        ({"top_k": -2}, "top_k must be at least 0, got -2"),
        ({"min_p": -0.1}, r"min_p must be in \[0, 1\], got -0.1"),
        ({"min_p": 1.5}, "min_p must be in"),
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


def test_no_restriction_in_both_spellings():
    assert Sampling(top_k=-1) == Sampling(top_k=0)
    assert not Sampling(temperature=1.0, top_k=-1).is_restricted


MASK = (1 << 64) - 1


def _noise(seed, position, token):
    """Brute force: output ``token`` of SplitMix64 from the key, in Python's integers."""
    z = ((noise_key(seed, position) & MASK) + (token + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    u = (((z ^ (z >> 31)) >> 1) + 0.5) * 2.0**-63
    return -math.log(-math.log1p(-u))


def test_noise_is_that_of_python_integers():
    keys = [noise_key(seed, position) for seed, position in ((0, 0), (-5, 9), (2**62, 10**6))]
    got = gumbel_noise(torch.tensor(keys), 2000)
    want = [
        [_noise(seed, position, token) for token in range(2000)]
        for seed, position in ((0, 0), (-5, 9), (2**62, 10**6))
    ]
    want = torch.tensor(want, dtype=torch.float64)
    # u is rounded to 24 bits, which tells where it is near 1; the logarithms to a few units.
    power = (-want).exp()
    slack = 2.0**-24 * power.expm1() / power + 1e-6 * (1 + want.abs())
    assert bool(((got - want).abs() <= slack).all())
    assert bool((slack[want > 0] < 2e-5).all())


def test_noise_is_gumbels():
    """Mean, variance and tail of 10^6 values; five deviations of each estimate."""
    keys = torch.tensor([noise_key(seed, 7) for seed in range(100)])
    noise = gumbel_noise(keys, 10_000).double().flatten()
    n = len(noise)
    assert bool(noise.isfinite().all())
    variance = math.pi**2 / 6
    assert abs(float(noise.mean()) - 0.5772156649) < 5 * (variance / n) ** 0.5
    # Of the squared deviation: the excess kurtosis is 12 / 5.
    assert abs(float(noise.var()) - variance) < 5 * variance * (4.4 / n) ** 0.5
    for edge in (-1.0, 0.5, 3.0, 8.0):
        share = math.exp(-math.exp(-edge))
        seen = float((noise < edge).double().mean())
        assert abs(seen - share) < 5 * (share * (1 - share) / n) ** 0.5


def test_neighbouring_keys_positions_and_tokens_are_independent():
    keys = torch.tensor([noise_key(seed, p) for seed in range(50) for p in range(40)])
    noise = gumbel_noise(keys, 500).double()
    deviates = (noise - noise.mean()) / noise.std()
    for one, other in (
        (deviates[1:], deviates[:-1]),
        (deviates[40:], deviates[:-40]),
        (deviates[:, 1:], deviates[:, :-1]),
        (deviates[1:, 1:], deviates[:-1, :-1]),
        (deviates[1:, :-1], deviates[:-1, 1:]),
    ):
        assert abs(float((one * other).mean())) < 5 / one.numel() ** 0.5


@given(
    logits=st.lists(st.integers(-6, 6).map(lambda n: n / 2), min_size=2, max_size=9),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_p=st.sampled_from([0.05, 0.333, 0.5, 0.81, 1.0]),
    seed=st.integers(0, 2**62),
)
def test_the_best_of_the_smallest_set_with_noise(logits, temperature, top_p, seed):
    kept, _ = _kept(logits, temperature, top_p)
    values = {token: logits[token] / temperature + _noise(seed, 5, token) for token in kept}
    best, *others = sorted(values.values(), reverse=True)
    if others and best - others[0] < 1e-4:
        return  # float32 may round to either side
    expected = max(values, key=values.get)
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


def test_frequencies_follow_the_smallest_set():
    """Chi-square over 4000 positions; 2 degrees of freedom exceed 18.4 with probability 1e-4."""
    logits = [0.0, 1.0, -1.0, 0.5, 2.0, -0.5]
    kept, probabilities = _kept(logits, 0.8, 0.85)
    assert len(kept) == 3
    draws = 4000
    chosen = choose_tokens(
        torch.tensor(logits).expand(draws, -1), [Sampling(0.8, 0.85, 5)] * draws, range(draws)
    )
    assert set(chosen) == set(kept)
    chi = sum(
        (chosen.count(token) - draws * p) ** 2 / (draws * p)
        for token, p in zip(kept, probabilities, strict=True)
    )
    assert chi < 18.4


def test_close_distributions_choose_alike():
    """Two tokens of the same noise agree as often as the docstring of the sampler says."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(30, generator=generator) * 2
    draft = target + 0.5 * torch.randn(30, generator=generator)
    p, q = target.double().softmax(0), draft.double().softmax(0)
    ratios = torch.maximum(p.unsqueeze(0) / p.unsqueeze(1), q.unsqueeze(0) / q.unsqueeze(1))
    agree = float((1 / ratios.sum(1)).sum())
    draws = 20_000
    samplings = [Sampling(temperature=1.0, seed=1)] * draws
    both = [
        choose_tokens(logits.expand(draws, -1), samplings, range(draws))
        for logits in (target, draft)
    ]
    seen = sum(one == other for one, other in zip(*both, strict=True)) / draws
    print(f"agree {seen:.4f}, expected {agree:.4f}, at most {float(torch.minimum(p, q).sum()):.4f}")
    assert abs(seen - agree) < 5 * (agree * (1 - agree) / draws) ** 0.5


def test_greedy_and_sampled_rows_in_one_batch():
    logits = torch.randn(5, 40)
    samplings = [GREEDY, Sampling(1.0, seed=3), GREEDY, Sampling(0.7, 0.5, 4), Sampling(2.0, 1, 5)]
    together = choose_tokens(logits, samplings, range(5))
    alone = [choose_tokens(logits[i : i + 1], samplings[i : i + 1], [i])[0] for i in range(5)]
    assert together == alone
    temperatures = torch.tensor([each.temperature for each in samplings])
    keys = torch.tensor([noise_key(each.seed, i) for i, each in enumerate(samplings)])
    on_device = sample_tokens(logits, temperatures, keys).tolist()
    # The drafts' way knows no top-p.
    assert [on_device[i] for i in (0, 1, 2, 4)] == [together[i] for i in (0, 1, 2, 4)]


def test_rows_come_in_blocks(monkeypatch):
    logits = torch.randn(9, 50)
    keys = torch.tensor([noise_key(1, i) for i in range(9)])
    whole = sample_tokens(logits, torch.ones(9), keys)
    monkeypatch.setattr("anymla.runtime.scoring._BLOCK_ELEMENTS", 100)
    assert torch.equal(sample_tokens(logits, torch.ones(9), keys), whole)


def test_impossible_tokens_and_broken_rows():
    logits = torch.tensor([[-math.inf, 1.0, -math.inf], [math.nan, 1.0, 2.0], [-math.inf] * 3])
    keys = torch.tensor([5, 6, 7])
    for temperature in (1e-38, 1.0, math.inf):
        got = sample_tokens(logits, torch.full((3,), temperature), keys)
        assert got.tolist() == [1, 3, 3]


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
    assert len({noise_key(seed, p) for seed in range(-3, 20) for p in range(20)}) == 23 * 20


def test_tiny_temperature_is_greedy_and_does_not_overflow():
    logits = torch.tensor([[1.0, 80.0, 79.0]])
    assert choose_tokens(logits, [Sampling(temperature=1e-300)], [0]) == [1]


def test_noise_is_that_of_every_release():
    """Golden: a release that changed it would change everyone's sampled texts."""
    keys = torch.tensor([noise_key(0, 0), noise_key(0, 1), noise_key(-1, 0)])
    noise = gumbel_noise(keys, 1000)[:, [0, 999]]
    torch.testing.assert_close(noise.flatten(), torch.tensor(GOLDEN))


def _restricted(logits, temperature, top_k, top_p, min_p):
    """Brute force: top-k, then the nucleus of what is left, then what min_p allows of the best."""
    weights = {i: math.exp((x - max(logits)) / temperature) for i, x in enumerate(logits)}
    order = sorted(weights, key=lambda i: (-weights[i], i))[: top_k or None]
    total, mass, kept = math.fsum(weights[i] for i in order), 0.0, []
    for token in order:
        kept.append(token)
        mass += weights[token] / total
        if mass >= top_p:
            break
    return {token for token in kept if weights[token] >= min_p * weights[order[0]]}


@given(
    logits=st.lists(st.integers(-20, 20), min_size=1, max_size=12, unique=True),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.3, 0.7, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_restrictions_leave_out_what_brute_force_leaves_out(logits, top_k, top_p, min_p):
    """All that is left is drawn at some position, and nothing else ever is."""
    values = [x / 8 for x in logits]
    sampling = Sampling(temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p)
    rows = torch.tensor([values] * 64)
    drawn = set(choose_tokens(rows, [sampling] * 64, list(range(64))))
    allowed = _restricted(values, 0.7, top_k, top_p, min_p)
    assert drawn <= allowed
    if len(allowed) == 1:
        assert drawn == allowed


@pytest.mark.parametrize("only_one", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-9}])
def test_the_strictest_restrictions_take_the_best(only_one):
    logits = torch.randn(20, 50)
    sampled = choose_tokens(logits, [Sampling(temperature=3.0, **only_one)] * 20, [0] * 20)
    assert sampled == choose_tokens(logits, [GREEDY] * 20, [0] * 20)

"""The greedy choice against float64, ties and numbers that are none included."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import a_device

from anymla.layers.ranks import ALONE
from anymla.ops.choice import best_logits

BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.filterwarnings("ignore"))]


def _wanted(logits, x, weight):
    wide = logits.double()
    if x is not None:
        wide = wide + x.double() @ weight.double().T
    return wide


def _check(backend, logits, x=None, weight=None):
    value, token, log_sum = best_logits(logits, x, weight, backend=backend)
    wide = _wanted(logits, x, weight)
    assert (value.dtype, token.dtype, log_sum.dtype) == (torch.float32, torch.int64, torch.float32)
    picked = wide.gather(1, token.unsqueeze(1)).squeeze(1)
    # Sums of products round differently: what is chosen is as good as the best.
    bound = 0.0 if x is None else 1e-5 * (1 + float(wide.abs().amax()))
    assert float((wide.amax(1) - picked).max()) <= bound
    assert float((value.double() - picked).abs().max()) <= bound
    assert torch.allclose(log_sum.double(), wide.logsumexp(1), atol=1e-4, rtol=1e-5)
    return token


@settings(max_examples=12)
@given(
    rows=st.integers(1, 5), vocab=st.integers(1, 4500), seed=st.integers(0, 99), half=st.booleans()
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_largest_and_the_sum(backend, rows, vocab, seed, half):
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(rows, vocab, generator=generator)
    logits = logits.bfloat16() if half else logits
    token = _check(backend, logits)
    assert torch.equal(token, best_logits(logits, backend="reference")[1])


@settings(max_examples=8)
@given(
    rows=st.integers(1, 20), vocab=st.integers(1, 700), rank=st.integers(1, 70),
    seed=st.integers(0, 99), half=st.booleans(),
)  # fmt: skip
@pytest.mark.parametrize("backend", BACKENDS)
def test_with_a_term_of_low_rank(backend, rows, vocab, rank, seed, half):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 3 * vocab, generator=generator)[:, vocab : 2 * vocab]
    x = torch.randn(rows, rank, generator=generator)
    weight = torch.randn(vocab, rank, generator=generator)
    if half:
        x, weight = x.bfloat16(), weight.bfloat16()
    _check(backend, logits, x, weight)


@pytest.mark.parametrize("vocab", [7, 3000])
@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_equals_and_what_is_no_number(backend, vocab):
    logits = torch.randn(5, vocab)
    logits[0, [2, 5, vocab - 1]] = 9.0  # the lowest of equals
    logits[1, 3], logits[1, 1] = torch.nan, torch.inf
    logits[1, vocab - 1] = torch.nan  # the first NaN, which infinity is not
    logits[2] = -torch.inf
    logits[3, 4] = torch.inf
    logits[4] = 0.0
    value, token, log_sum = best_logits(logits, backend=backend)
    assert token.tolist() == [2, 3, 0, 4, 0]
    assert value[0] == 9
    assert value[1].isnan()
    assert value[2:].tolist() == [-torch.inf, torch.inf, 0]
    assert log_sum[1].isnan()
    assert log_sum[2:4].tolist() == [-torch.inf, torch.inf]
    chosen, logprobs = ALONE.best((value, token, log_sum), first=0, vocab=vocab)
    assert chosen.tolist() == [2, vocab, vocab, vocab, 0]
    assert logprobs[0] == value[0] - log_sum[0]


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_no_rows(backend):
    for each in best_logits(torch.zeros(0, 9), backend=backend):
        assert each.shape == (0,)


def test_what_is_refused():
    logits = torch.zeros(2, 9)
    with pytest.raises(ValueError, match="best_logits: weight must be given together with x"):
        best_logits(logits, torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"best_logits: logits must be \[T, V\] with V at least 1"):
        best_logits(torch.zeros(2, 0))
    with pytest.raises(ValueError, match="weight"):
        best_logits(logits, torch.zeros(2, 3), torch.zeros(9, 4))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "vocab", "rank"), [(1, 129280, 0), (6, 32320, 256), (48, 129280, 256), (3, 99, 24)]
)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_on_a_device(backend, rows, vocab, rank):
    device = a_device()
    logits = 5 * torch.randn(rows, vocab, device=device)
    if not rank:
        token = _check(backend, logits)
        assert torch.equal(token, best_logits(logits, backend="reference")[1])
        return
    x, weight = (torch.randn(n, rank, device=device).bfloat16() for n in (rows, vocab))
    _check(backend, logits, x, weight)

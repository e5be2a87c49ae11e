"""Blocks of entries that are kept, and scores outside of them that are hidden."""

import pytest
import torch
from paged import DEVICE_BACKENDS, a_device, use_backend, use_device_backend, without_waiting

from anymla.ops.indexer import mask_candidates, select_candidate_blocks

BACKENDS = ("reference", "torch", "triton", "triton as on Arc A")


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    return use_backend(request.param, monkeypatch)


def _blocks(row):
    return [block for block in row.tolist() if block >= 0]


def test_the_newest_block_is_kept_whatever_its_scores(backend):
    logits = torch.tensor([[9.0, 1, 8, 1, 7, 1, -5, float("nan")]])
    lengths = torch.tensor([7], dtype=torch.int32)
    chosen = select_candidate_blocks(logits, lengths, 2, block_size=2, backend=backend)
    assert chosen.tolist() == [[0, 3]]


def test_rows_with_few_blocks_keep_them_all(backend):
    logits = torch.randn(4, 10)
    lengths = torch.tensor([0, 1, 4, 10], dtype=torch.int32)
    chosen = select_candidate_blocks(logits, lengths, 4, block_size=4, backend=backend)
    assert [_blocks(row) for row in chosen] == [[], [0], [0], [0, 1, 2]]
    assert chosen[3].tolist() == [0, 1, 2, -1]


def test_hidden_entries_make_no_block(backend):
    logits = torch.full((1, 12), -torch.inf)
    logits[0, 5] = 0.0
    lengths = torch.tensor([12], dtype=torch.int32)
    chosen = select_candidate_blocks(logits, lengths, 3, block_size=4, backend=backend)
    assert chosen.tolist() == [[1, 2, -1]]


def test_equal_blocks_are_kept_in_order(backend):
    logits = torch.zeros(1, 20)
    lengths = torch.tensor([20], dtype=torch.int32)
    chosen = select_candidate_blocks(logits, lengths, 3, block_size=4, backend=backend)
    assert chosen.tolist() == [[0, 1, 4]]


@pytest.mark.parametrize("width", [0, 1, 7, 8, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block_size", [4, 5])
def test_backends_agree_with_the_reference(backend, width, dtype, block_size):
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("Triton kernels compute in float32")
    logits, lengths = drawn(9, width, dtype)
    kept = [
        select_candidate_blocks(logits, lengths, 3, block_size=block_size, backend=each)
        for each in ("reference", backend)
    ]
    assert torch.equal(*kept)
    masked = [logits.clone(), logits.clone()]
    for one, each in zip(masked, ("reference", backend), strict=True):
        mask_candidates(one, kept[0], block_size=block_size, backend=each)
    assert torch.equal(*(one.nan_to_num(9) for one in masked))


def drawn(rows, width, dtype=torch.float32):
    """Scores with many equal ones, some -inf and NaN, and lengths beyond both ends."""
    random = torch.Generator().manual_seed(width)
    logits = torch.randn(rows, width, generator=random, dtype=dtype).round(decimals=1)
    what = torch.rand(rows, width, generator=random)
    logits[what < 0.5] = -torch.inf
    logits[what > 0.97] = torch.nan
    return logits, torch.randint(-1, width + 3, (rows,), generator=random).int()


@pytest.mark.parametrize(("width", "count", "block_size"), [(5000, 16, 8), (700, 300, 2)])
def test_long_rows_and_more_blocks_than_there_are(backend, width, count, block_size):
    """Of scores in rows that lie apart; long ones are selected from in splits."""
    wide, lengths = drawn(2, width + 3)
    logits = wide[:, :width]
    want = select_candidate_blocks(logits, lengths, count, block_size=block_size, backend="torch")
    got = select_candidate_blocks(logits, lengths, count, block_size=block_size, backend=backend)
    assert torch.equal(got, want)
    here, there = (wide.clone() for _ in range(2))
    mask_candidates(here[:, :width], want.flip(1), block_size=block_size, backend=backend)
    mask_candidates(there[:, :width], want, block_size=block_size, backend="torch")
    assert torch.equal(here.nan_to_num(9), there.nan_to_num(9))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", DEVICE_BACKENDS[1:])
@pytest.mark.parametrize(("rows", "width", "count"), [(1, 300_001, 2048), (64, 40_000, 2048)])
def test_a_device_gives_what_a_cpu_does_without_waiting(backend, rows, width, count, monkeypatch):
    backend = use_device_backend(backend, monkeypatch)
    logits, lengths = drawn(rows, width)
    want = select_candidate_blocks(logits, lengths, count, block_size=8, backend="torch")
    masked = logits.clone()
    mask_candidates(masked, want, block_size=8, backend="torch")
    device = a_device()
    there, lengths = logits.to(device), lengths.to(device)
    with without_waiting(device):
        got = select_candidate_blocks(there, lengths, count, block_size=8, backend=backend)
        mask_candidates(there, got, block_size=8, backend=backend)
    assert torch.equal(got.cpu(), want)
    assert torch.equal(there.cpu().nan_to_num(9), masked.nan_to_num(9))


def test_numbers_that_are_no_block_name_nothing(backend):
    logits = torch.arange(10.0).unsqueeze(0)
    blocks = torch.tensor([[-1, 7, 2, -5]], dtype=torch.int32)
    mask_candidates(logits, blocks, block_size=4, backend=backend)
    assert logits[0, 8:].tolist() == [8, 9]
    assert bool((logits[0, :8] == -torch.inf).all())


def test_a_count_or_a_size_of_zero_is_refused():
    logits, lengths = torch.zeros(1, 4), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="select_candidate_blocks: count must be >= 1"):
        select_candidate_blocks(logits, lengths, 0, block_size=4)
    with pytest.raises(ValueError, match="mask_candidates: block_size must be >= 1"):
        mask_candidates(logits, lengths.unsqueeze(1), block_size=0)

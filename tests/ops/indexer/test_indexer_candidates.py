"""Blocks of entries that are kept, and scores outside of them that are hidden."""

import pytest
import torch

from anymla.ops.indexer import mask_candidates, select_candidate_blocks

BACKENDS = ("reference", "torch")


def _blocks(row):
    return [block for block in row.tolist() if block >= 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_newest_block_is_kept_whatever_its_scores(backend):
    logits = torch.tensor([[9.0, 1, 8, 1, 7, 1, -5, float("nan")]])
    lengths = torch.tensor([7], dtype=torch.int32)
    chosen = select_candidate_blocks(logits, lengths, 2, block_size=2, backend=backend)
    assert chosen.tolist() == [[0, 3]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_with_few_blocks_keep_them_all(backend):
    logits = torch.randn(4, 10)
    lengths = torch.tensor([0, 1, 4, 10], dtype=torch.int32)
    chosen = select_candidate_blocks(logits, lengths, 4, block_size=4, backend=backend)
    assert [_blocks(row) for row in chosen] == [[], [0], [0], [0, 1, 2]]
    assert chosen[3].tolist() == [0, 1, 2, -1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_entries_make_no_block(backend):
    logits = torch.full((1, 12), -torch.inf)
    logits[0, 5] = 0.0
    lengths = torch.tensor([12], dtype=torch.int32)
    chosen = select_candidate_blocks(logits, lengths, 3, block_size=4, backend=backend)
    assert chosen.tolist() == [[1, 2, -1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_blocks_are_kept_in_order(backend):
    logits = torch.zeros(1, 20)
    lengths = torch.tensor([20], dtype=torch.int32)
    chosen = select_candidate_blocks(logits, lengths, 3, block_size=4, backend=backend)
    assert chosen.tolist() == [[0, 1, 4]]


@pytest.mark.parametrize("width", [0, 1, 7, 8, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torch_agrees_with_the_reference(width, dtype):
    generator = torch.Generator().manual_seed(width)
    logits = torch.randn(9, width, generator=generator, dtype=dtype).round(decimals=1)
    lengths = torch.randint(-1, width + 3, (9,), generator=generator).int()
    kept = [
        select_candidate_blocks(logits, lengths, 3, block_size=4, backend=backend)
        for backend in BACKENDS
    ]
    assert torch.equal(*kept)
    masked = [logits.clone(), logits.clone()]
    for one, backend in zip(masked, BACKENDS, strict=True):
        mask_candidates(one, kept[0], block_size=4, backend=backend)
    assert torch.equal(*masked)


@pytest.mark.parametrize("backend", BACKENDS)
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

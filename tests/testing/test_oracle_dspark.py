"""The DSpark oracle: what it sees, and what it does not."""

import dataclasses

import pytest
import torch

from anymla.testing.oracle import DSparkOracle
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint

TINY = TinyOptions(
    weights="bf16",
    ratios=(0,),
    hidden=64,
    heads=2,
    o_groups=1,
    q_lora=32,
    o_lora=32,
    experts=4,
    experts_per_token=2,
    moe_size=32,
    window=16,
    drafter="dspark",
    markov_rank=8,
)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory) -> DSparkOracle:
    directory = tmp_path_factory.mktemp("dspark")
    write_tiny_checkpoint(directory, TINY)
    return DSparkOracle(directory)


def _context(oracle: DSparkOracle, length: int) -> list[torch.Tensor]:
    taps = len(oracle.dspark.target_layers)
    return oracle.context(torch.randn(length, taps, 64, dtype=torch.float64))


def test_stages_are_counted_by_the_tensors(tmp_path) -> None:
    write_tiny_checkpoint(tmp_path, dataclasses.replace(TINY, stages=2))
    oracle = DSparkOracle(tmp_path)
    assert oracle.stages == 2
    assert len(_context(oracle, 3)) == 2


def test_the_window_hangs_on_the_block(oracle) -> None:
    """Position T - W is the first that matters, to all rows alike."""
    context = _context(oracle, 30)
    block = oracle.block(context, 9)
    for distance, seen in ((17, False), (16, True), (1, True)):
        changed = [rows.clone() for rows in context]
        for rows in changed:
            rows[-distance] += 1
        moved = (oracle.block(changed, 9, tokens=block.tokens).logits - block.logits).abs().amax(1)
        assert bool((moved > 1e-6).all()) == seen
        assert bool((moved > 0).any()) == seen


def test_rows_of_a_block_see_each_other(oracle) -> None:
    context = _context(oracle, 5)
    five = oracle.block(context, 9)
    three = oracle.block(context, 9, size=3, tokens=five.tokens)
    assert bool(((five.logits[:3] - three.logits).abs().amax(1) > 1e-6).all())


def test_a_guess_reaches_the_next_ones_only(oracle) -> None:
    context = _context(oracle, 5)
    ones, others = (oracle.block(context, 9, tokens=(1, 2, tok, 4, 5)) for tok in (3, 30))
    moved = (ones.logits - others.logits).abs().amax(1) > 1e-6
    assert moved.tolist() == [False, False, False, True, False]
    assert ones.confidence is not None
    assert others.confidence is not None
    sure = (ones.confidence - others.confidence).abs() > 1e-6
    assert sure.tolist() == [False, False, False, True, False]


def test_what_is_chosen_is_the_best(oracle) -> None:
    block = oracle.block(_context(oracle, 40), 3)
    assert list(block.tokens) == block.logits.argmax(1).tolist()
    assert len(block.tokens) == 5

"""Every block of training runs at a small size, and its gradients are those of a second run."""

import pytest
import torch

from lab.training_blocks import BLOCKS, SMALL, gradients


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_run(name):
    with torch.enable_grad():
        block = BLOCKS[name](140, SMALL)
        first, again = (gradients(block, "cpu")[0] for _ in range(2))
    assert any(each is not None and each.any() for each in first)
    for a, b in zip(first, again, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)

import dataclasses

import pytest

from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint

SMALL = TinyOptions(
    weights="fp4",
    ratios=(0, 4, 128),
    hidden=128,
    heads=2,
    o_groups=1,
    q_lora=64,
    o_lora=64,
    index_heads=4,
    index_topk=16,
    experts=8,
    experts_per_token=2,
    moe_size=64,
    rope_factor=1.0,
)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Directory of a checkpoint with FP4 experts, all ratios and one MTP layer."""
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(directory, SMALL)
    return directory


@pytest.fixture(scope="session")
def tiny_without_mtp(tmp_path_factory):
    """The same without an MTP layer."""
    directory = tmp_path_factory.mktemp("plain")
    write_tiny_checkpoint(directory, dataclasses.replace(SMALL, mtp=0))
    return directory


@pytest.fixture(scope="session")
def tiny_dspark(tmp_path_factory):
    """The same with a DSpark drafter."""
    directory = tmp_path_factory.mktemp("dspark")
    write_tiny_checkpoint(directory, dataclasses.replace(SMALL, drafter="dspark", markov_rank=16))
    return directory

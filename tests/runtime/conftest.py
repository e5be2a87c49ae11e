import dataclasses

import pytest
import torch

from anymla.model.load import load_model
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint

SMALL = TinyOptions(
    weights="bf16",
    ratios=(0, 4, 128, 4),
    hidden=128,
    heads=3,
    o_groups=1,
    q_lora=64,
    o_lora=64,
    index_heads=4,
    index_topk=16,
    experts=8,
    experts_per_token=2,
    moe_size=64,
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """All ratios, an indexer that must choose, hash and biased routing, one MTP layer; float32."""
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(directory, SMALL)
    return load_model(directory, dtype=torch.float32, progress=False)


@pytest.fixture(scope="session")
def dspark_directory(tmp_path_factory):
    """The same with a DSpark drafter of three stages, and the context of three layers."""
    directory = tmp_path_factory.mktemp("dspark")
    write_tiny_checkpoint(directory, dataclasses.replace(SMALL, drafter="dspark", markov_rank=24))
    return directory


@pytest.fixture(scope="session")
def dspark_model(dspark_directory):
    """In float32."""
    return load_model(dspark_directory, dtype=torch.float32, progress=False)

"""The oracle's V4.1 drafter against a little of what nemo-automodel's gave once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from record_nemo import DRAFTS, RECORDED_DRAFTS
from v41_cases import DRAFTER, DRAFTER_LENGTHS, drafter_taps

from anymla.testing.oracle import DSparkOracle
from anymla.testing.tiny_checkpoint import write_tiny_checkpoint

GIVEN: dict[str, Any] = json.loads(RECORDED_DRAFTS.read_text(encoding="utf-8"))
BOUND = 1e-5


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> DSparkOracle:
    directory: Path = tmp_path_factory.mktemp("drafter")
    write_tiny_checkpoint(directory, DRAFTER)
    return DSparkOracle(directory)


def _error(oracle: DSparkOracle, length: int) -> float:
    given = GIVEN[str(length)]
    block = oracle.block(oracle.context(drafter_taps(length).double()), 9, tokens=DRAFTS)
    want = torch.tensor(given["logits"], dtype=torch.float64)
    return float((block.logits[:, : want.shape[1]] - want).abs().max()) / given["largest"]


@pytest.mark.parametrize("length", DRAFTER_LENGTHS)
def test_blocks_are_the_recorded_ones(oracle: DSparkOracle, length: int) -> None:
    assert _error(oracle, length) < BOUND


@pytest.mark.parametrize(
    "changes",
    [{"window": 17}, {"norm_eps": 1e-2}, {"swiglu_limit": 10.0}, {"sinkhorn_iters": 1}],
    ids=str,
)
def test_other_numbers_are_noticed(oracle: DSparkOracle, changes: dict[str, Any]) -> None:
    config = oracle.config
    oracle.config = dataclasses.replace(config, **changes)
    try:
        assert _error(oracle, 40) > 10 * BOUND
    finally:
        oracle.config = config


def test_the_experts_a_token_visits_are_the_drafters(oracle: DSparkOracle) -> None:
    config = oracle.config
    assert config.dspark is not None
    dspark = dataclasses.replace(config.dspark, experts_per_token=config.experts_per_token)
    oracle.config = dataclasses.replace(config, dspark=dspark)
    try:
        assert _error(oracle, 3) > 10 * BOUND
    finally:
        oracle.config = config

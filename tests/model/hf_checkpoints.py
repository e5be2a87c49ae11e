"""Small random checkpoints that both anymla and transformers read."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from anymla.testing import tiny_checkpoint
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint

SMALL = TinyOptions(
    weights="bf16", hidden=96, heads=4, o_groups=2, o_lora=32, q_lora=64, index_heads=16,
    index_topk=12, experts=16, experts_per_token=4, moe_size=64, mtp=0,
)  # fmt: skip
CASES = {
    # name: (options, changes to config.json that TinyOptions does not offer)
    "flash": (SMALL, {}),
    "pro": (
        dataclasses.replace(
            SMALL, ratios=(128, 128, 4, 128, 4), heads=6, o_groups=3, o_lora=16, index_topk=7,
            hash_layers=3, experts=12, experts_per_token=3, seed=1,
        ),
        {},
    ),
    "window": (
        dataclasses.replace(
            SMALL, ratios=(4, 0, 4), heads=5, o_groups=1, window=24, rope_factor=4.0,
            index_topk=20, index_heads=64, hash_layers=0, mtp=1, seed=2,
        ),
        {},
    ),
    "streams": (
        dataclasses.replace(SMALL, ratios=(0, 4), heads=1, o_groups=1, rope_factor=1.5, seed=3),
        {"hc_mult": 2, "hc_sinkhorn_iters": 5, "hc_eps": 1e-3, "routed_scaling_factor": 2.5},
    ),
    "fp8": (
        dataclasses.replace(
            SMALL, weights="fp8", ratios=(4, 128, 0), hidden=128, moe_size=128, q_lora=96, seed=4
        ),
        {},
    ),
    "fp8 with float32 scales": (
        dataclasses.replace(
            SMALL, weights="fp8", scale_format="fp32", ratios=(128, 4), hash_layers=0, seed=5
        ),
        {},
    ),
    "fp4": (dataclasses.replace(SMALL, weights="fp4", ratios=(0, 4, 128, 4), seed=6), {}),
}  # fmt: skip


def write_pair(directory: Path, options: TinyOptions, changes: dict[str, Any]) -> Path:
    """Write ``directory/own``; return where transformers finds its weights, unquantised."""
    quantised = options.weights != "bf16"
    original = tiny_checkpoint.tiny_config
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_checkpoint, "tiny_config", lambda o: {**original(o), **changes})
        write_tiny_checkpoint(
            directory / "own", options, twin=directory / "twin" if quantised else None
        )
    return directory / ("twin" if quantised else "own")

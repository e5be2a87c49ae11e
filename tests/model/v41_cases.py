"""Small DeepSeek-V4.1 models that runs are compared on."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from anymla.testing.tiny_options import TinyOptions, TinySharing

FLASH = (0, 0, 2, 2, 1, 1, 1, 1)
TOKENS = 97

_SMALL: dict[str, Any] = {
    "weights": "bf16", "hidden": 96, "heads": 4, "o_groups": 2, "o_lora": 32, "q_lora": 64,
    "index_heads": 8, "index_topk": 6, "experts": 16, "experts_per_token": 4, "moe_size": 64,
    "window": 16, "vocab": 258,
}  # fmt: skip


def shared(ratios: tuple[int, ...] = FLASH, **changes: Any) -> TinyOptions:
    """A small model; fields of ``TinySharing`` and of ``TinyOptions``."""
    fields = {field.name for field in dataclasses.fields(TinySharing)}
    blocks = {"candidate_blocks": 3, "candidate_block_size": 4}
    sharing = {name: value for name, value in changes.items() if name in fields}
    rest = {name: value for name, value in changes.items() if name not in fields}
    given = TinySharing.of(ratios, **(blocks | sharing))
    return TinyOptions.shared(**(_SMALL | {"ratios": ratios, "sharing": given} | rest))


CASES = {
    "flash": shared(),
    "no candidates": shared(candidate_source=-1, seed=1),
    "no engram": shared(engram_layers=(), seed=2, index_topk=9),
    # Several sources of one ratio, a source behind a layer that reuses, ratio 1 first.
    "sources": shared(
        (1, 1, 2, 2, 2, 0, 1, 1, 1),
        kv_sources=(0, 2, 3, 6),
        index_sources=(0, 2, 3, 4, 6, 7),
        candidate_source=6,
        engram_layers=(0, 3, 8),
        engram_heads=3,
        heads=6,
        o_groups=3,
        seed=3,
    ),
    "ratio 3": shared((0, 3, 3, 1), candidate_source=-1, window=5, seed=4),
    "fp8": shared(weights="fp8", hidden=128, seed=5),
    "fp4": shared(weights="fp4", hidden=128, seed=6),
}


DRAFTER = shared(
    drafter="dspark", markov_rank=16, draft_experts=8, draft_experts_per_token=3, seed=7
)
DRAFTER_LENGTHS = (3, 16, 17, 29, 40)


def drafter_taps(length: int) -> torch.Tensor:
    """Taps [T, 3, hidden] of a context of so many positions, for ``DRAFTER``."""
    generator = torch.Generator().manual_seed(length)
    return torch.randn(length, 3, DRAFTER.hidden, generator=generator)

"""Small checkpoints to load, and copies of them with something wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from anymla.testing.tiny_checkpoint import TinyOptions

# One layer of each sort; sizes that are no multiples of the FP8 block.
SMALL = TinyOptions(
    ratios=(0, 4, 128),
    hidden=160,
    heads=4,
    o_lora=96,
    q_lora=64,
    index_topk=8,
    index_heads=2,
    experts=4,
    experts_per_token=2,
    moe_size=96,
)

Tensors = dict[str, Tensor]


def changed(
    source: Path,
    target: Path,
    change: Callable[[Tensors], Any] | None = None,
    **config: Any,
) -> Path:
    """A copy of a single-file checkpoint with other tensors, or other values in config.json."""
    target.mkdir(exist_ok=True)
    values = json.loads((source / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(values))
    tensors = load_file(source / "model.safetensors")
    if change is not None:
        change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target

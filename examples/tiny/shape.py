"""The tiny model's ``config.json``: V4's architecture as it is, 4 layers and a draft layer."""

from __future__ import annotations

from typing import Any

from anymla.testing.published import FLASH

_SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 64,
    "compress_ratios": [0, 4, 128, 4, 0],
    "index_n_heads": 16,
    "index_topk": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "num_hash_layers": 1,
    "torch_dtype": "bfloat16",
    "attention_dropout": 0.0,
}


def config(vocab: int, **changes: Any) -> dict[str, Any]:
    """The configuration; V4-Flash's own values wherever size does not matter."""
    return FLASH | _SIZES | {"vocab_size": vocab} | changes

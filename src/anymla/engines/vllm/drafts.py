"""Storage of the context of vLLM's DSpark drafter by anymla's operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from anymla.engines.vllm.attention import AnymlaAttention
from anymla.ops.kv_cache import quantize_and_insert_k_cache
from anymla.ops.norm_rope import rope


def inserting(theirs: Callable[..., None]) -> Callable[..., None]:
    """Return a function that stores a stage's context, anymla's for its own layers."""

    def insert(attn: Any, kv: Tensor, positions: Tensor, slot_mapping: Tensor) -> None:
        ours = isinstance(attn, AnymlaAttention)
        (insert_context_kv if ours else theirs)(attn, kv, positions, slot_mapping)

    return insert


def insert_context_kv(attn: Any, kv: Tensor, positions: Tensor, slot_mapping: Tensor) -> None:
    """Rotate rows of the context and store them in a stage's window cache.

    vLLM's own kernel converts to FP8, which some devices that anymla supports cannot do.

    Args:
        attn: attention layer of the stage, one of anymla's.
        kv: normed rows [T, D] of the context.
        positions: int64 [T], position of each row.
        slot_mapping: int64 [T], slot of each row; negative slots are skipped.
    """
    table = attn.rotary_emb.cos_sin_cache
    rows = rope(kv.unsqueeze(1), positions, table, backend=attn.backend).squeeze(1)
    cache = attn.swa_cache_layer.kv_cache
    quantize_and_insert_k_cache(rows, cache, slot_mapping, backend=attn.backend)

"""Estimate from sizes alone which texts fit beside a model's weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from anymla.model.checkpoint import TensorInfo
from anymla.model.config import ModelConfig
from anymla.model.rank_sizes import rank_bytes
from anymla.runtime.cache_size import cache_sizes

# Fraction of memory left for activations, workspaces, graphs and the driver.
_KEPT_FREE = 0.1


@dataclasses.dataclass(frozen=True)
class Fit:
    """Room for texts on a device of a given memory, beside its weights.

    Attributes:
        free_bytes: bytes left for caches, a tenth of the memory being kept free; may be negative.
        longest: most tokens of a single text, at most the model's limit; 0 if none fits.
        texts: number of texts that fit at once, by context length.
    """

    free_bytes: int
    longest: int
    texts: dict[int, int]


@dataclasses.dataclass(frozen=True)
class RankPlan:
    """Sizes of a model that is shared by a number of ranks.

    Attributes:
        weight_bytes: bytes of weights on the rank that has most.
        fit: room for texts; None if the device's memory is not known.
    """

    weight_bytes: int
    fit: Fit | None


def memory_plan(
    tensors: Mapping[str, TensorInfo],
    config: ModelConfig,
    kv_cache: str,
    contexts: Sequence[int],
    rank_counts: Sequence[int],
    memory: int | None,
) -> dict[int, RankPlan]:
    """Compute, by number of ranks, the weights that each keeps and the texts that fit beside them.

    Caches are whole on every rank, because all heads share their rows.

    Args:
        tensors: tensors of the checkpoint that are read.
        config: configuration of the checkpoint.
        kv_cache: name of a cache format, a key of ``CACHE_FORMATS``.
        contexts: lengths of texts in tokens.
        rank_counts: numbers of ranks to plan for.
        memory: bytes of a device's memory, or None.
    """
    plans = {}
    for ranks in rank_counts:
        weights = rank_bytes(tensors, config, ranks)
        fit = None
        if memory is not None:
            free = int(memory * (1 - _KEPT_FREE)) - weights
            fit = _fit(config, kv_cache, contexts, free)
        plans[ranks] = RankPlan(weights, fit)
    return plans


def _fit(config: ModelConfig, kv_cache: str, contexts: Sequence[int], free: int) -> Fit:
    texts = {
        length: max(0, free) // held
        for length, held in _held(config, kv_cache, list(contexts)).items()
    }
    low, high = 0, config.max_position_embeddings
    while low < high:
        middle = (low + high + 1) // 2
        if _held(config, kv_cache, [middle])[middle] <= free:
            low = middle
        else:
            high = middle - 1
    return Fit(free, low, texts)


def _held(config: ModelConfig, kv_cache: str, contexts: list[int]) -> dict[int, int]:
    """Return the bytes of all caches of one text, by its length."""
    sizes = cache_sizes(config, kv_cache, contexts)
    return {length: sum(size.held_bytes[length] for size in sizes) for length in contexts}

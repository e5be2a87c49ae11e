"""Bytes of weights that a rank keeps, computed before anything is read."""

from __future__ import annotations

import math
from collections.abc import Mapping

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.model.checkpoint import TensorInfo
from anymla.model.config import ModelConfig
from anymla.model.schema import expected_tables, weight_kind

# Projections of which every rank has the part of its heads and groups.
_SHARED = ("attn.wq_b", "attn.wo_a", "attn.wo_b")


def rank_bytes(tensors: Mapping[str, TensorInfo], config: ModelConfig, ranks: int) -> int:
    """Return the bytes of weights on the rank that has most, on a device other than the CPU.

    Tables of n-grams do not count: they stay in their files.

    Args:
        tensors: tensors of the checkpoint that are read.
        config: configuration of the checkpoint.
        ranks: number of ranks that share the model.
    """
    tables = expected_tables(config)
    total = 0
    for name, info in tensors.items():
        prefix, _, leaf = name.rpartition(".")
        if prefix in tables:
            continue
        if ".ffn.experts." in prefix:
            total += info.nbytes if _is_with_most(config, prefix, ranks) else 0
        else:
            kept = _kept_bytes(tensors, config, prefix, leaf, info)
            total += kept // _sharers(config, prefix, ranks)
    return total


def _is_with_most(config: ModelConfig, prefix: str, ranks: int) -> bool:
    """True for the experts of a layer that are on the rank with most of them."""
    drafts = prefix.startswith("mtp.") and config.dspark is not None
    experts, _ = config.experts_of("dspark" if drafts else "backbone")
    number = prefix.partition(".ffn.experts.")[2].partition(".")[0]
    return int(number) < math.ceil(experts / ranks)


def _sharers(config: ModelConfig, prefix: str, ranks: int) -> int:
    """Return the number of ranks with equal parts of a layer; 1 if each, or one, has all of it."""
    if prefix.endswith(_SHARED):
        return ranks
    if prefix == "head":
        return 1 if config.vocab_size % ranks else ranks
    if ".ffn.shared_experts." in prefix:
        width = config.moe_intermediate_size * config.n_shared_experts
        return 1 if width % (ranks * config.family.weight_block) else ranks
    return 1


def _kept_bytes(
    tensors: Mapping[str, TensorInfo], config: ModelConfig, prefix: str, leaf: str, info: TensorInfo
) -> int:
    """Return a tensor's bytes after loading: some weights are decoded, and FP8 scales widened."""
    kind = weight_kind(tensors, prefix)
    if kind == "plain":
        return info.nbytes
    whole = config.family.weight_block == FP8_BLOCK
    decoded = prefix in ("embed", "head") or (
        prefix.endswith(".attn.wo_a") and (kind != "fp8" or not whole)
    )
    if decoded:
        values = math.prod(info.shape) * (1 if kind == "fp8" else 2)
        return 2 * values if leaf == "weight" else 0
    widened = kind == "fp8" and leaf == "scale"
    return 4 * math.prod(info.shape) if widened else info.nbytes

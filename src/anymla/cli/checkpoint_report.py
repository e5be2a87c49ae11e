"""The report of ``anymla inspect --checkpoint`` as data."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from anymla.model.build import rank_counts
from anymla.model.checkpoint import Checkpoint
from anymla.model.config import ModelConfig
from anymla.model.described import described_checkpoint, lacks_weights
from anymla.model.drafts import present_config, readable, unread_lines
from anymla.model.layer_specs import layer_specs
from anymla.model.schema import expected_linears, weight_kind
from anymla.model.verify import verify, verify_names
from anymla.runtime.cache_size import cache_sizes
from anymla.runtime.memory_plan import memory_plan

_CONTEXTS = (1024, 8192, 65536, 1048576)
_RANKS = (1, 2, 4, 8)

# Parts of the network by patterns of tensor names; the first match counts.
_PARTS = (
    (r"^mtp\.", "mtp"),
    (r"\.engram\.", "engram"),
    (r"\.ffn\.experts\.", "routed experts"),
    (r"\.ffn\.shared_experts\.", "shared experts"),
    (r"\.ffn\.gate\.", "router"),
    (r"\.attn\.indexer\.", "indexer"),
    (r"\.attn\.compressor\.", "compressor"),
    (r"\.attn\.", "attention"),
    (r"hc_", "hyper-connections"),
    (r"^(embed|head)\.", "embedding and head"),
    (r"norm\.", "norms"),
)


def checkpoint_report(
    directory: Path, kv_cache: str, memory: float | None = None
) -> dict[str, Any]:
    """Describe a checkpoint directory in JSON values.

    Args:
        directory: directory with ``config.json`` and safetensors, or with ``config.json`` and an
            index: then sizes follow from these, and no values are read.
        kv_cache: name of the cache format for the sizes.
        memory: memory of one device in GB, for the texts that fit; None for the weights alone.

    Raises:
        ConfigError, CheckpointError: the directory is no checkpoint, a file cannot be read, or the
            files hold another drafter than the configuration describes. Missing, unexpected or
            wrong tensors are part of the report instead.
    """
    declared = ModelConfig.from_dir(directory)
    described = lacks_weights(directory)
    held = described_checkpoint(directory, declared) if described else Checkpoint.open(directory)
    checkpoint = readable(held, declared)
    config = present_config(checkpoint, declared)
    found = verify_names(checkpoint, config) if described else verify(checkpoint, config)
    contexts = [n for n in _CONTEXTS if n < config.max_position_embeddings]
    contexts.append(config.max_position_embeddings)
    sizes = cache_sizes(config, kv_cache, contexts)
    total = {n: sum(size.held_bytes[n] for size in sizes) for n in contexts}
    return {
        "directory": str(directory),
        "ok": found.ok,
        "described": described,
        "files": len({info.file for info in checkpoint.values()}),
        "tensors": len(checkpoint),
        "bytes": checkpoint.nbytes,
        "layers": config.num_hidden_layers,
        "compress_ratios": list(config.backbone_ratios),
        "mtp_layers": config.num_nextn_predict_layers,
        "mtp_layers_declared": declared.num_nextn_predict_layers,
        "dspark_declared": declared.dspark is not None,
        "dspark": None if config.dspark is None else dataclasses.asdict(config.dspark),
        "sources": _sources(config),
        "engram": None if config.engram is None else dataclasses.asdict(config.engram),
        "unread": unread_lines(held, declared),
        "experts": config.n_routed_experts,
        "expert_dtype": config.expert_dtype,
        "quantization": (
            None if config.quantization is None else dataclasses.asdict(config.quantization)
        ),
        "parts": _parts(checkpoint),
        "kinds": _kinds(checkpoint, config),
        "missing": list(found.missing),
        "unexpected": list(found.unexpected),
        "wrong": list(found.wrong),
        "cache": {
            "format": kv_cache,
            "groups": [dataclasses.asdict(size) for size in sizes],
            "total_bytes": total,
            "bytes_per_token": {n: held / n for n, held in total.items()},
        },
        "plan": _plan(checkpoint, config, kv_cache, contexts, memory),
    }


def _plan(
    checkpoint: Checkpoint,
    config: ModelConfig,
    kv_cache: str,
    contexts: list[int],
    memory: float | None,
) -> dict[str, Any]:
    """Return weights by the number of devices that share the model, and the texts that fit."""
    counts = [count for count in _RANKS if count in rank_counts(config)]
    nbytes = None if memory is None else int(memory * 1e9)
    plans = memory_plan(checkpoint, config, kv_cache, contexts, counts, nbytes)
    return {
        "memory_bytes": nbytes,
        "ranks": {count: dataclasses.asdict(plan) for count, plan in plans.items()},
    }


def _sources(config: ModelConfig) -> dict[str, Any] | None:
    """Return the layers that others share; None if every layer has its own."""
    for spec in layer_specs(config):
        if (spec.kv_source, spec.index_source, spec.candidates) != (None, None, None):
            return dataclasses.asdict(config.sources)
    return None


def part_of(name: str) -> str:
    """Return the part of the network that a tensor belongs to."""
    return next((part for pattern, part in _PARTS if re.search(pattern, name)), "other")


def _parts(checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    """Count tensors and bytes by part of the network, largest first."""
    return _grouped((part_of(name), 1, info.nbytes) for name, info in checkpoint.items())


def _kinds(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, dict[str, int]]:
    """Count tensors and bytes by storage kind; a linear layer counts with its scales."""
    kind_of: dict[str, str] = {}
    for prefix in expected_linears(config):
        kind = weight_kind(checkpoint, prefix)
        for leaf in ("weight", "scale", "weight_scale", "weight_scale_2"):
            kind_of[f"{prefix}.{leaf}"] = f"{kind} linear layers"
    return _grouped(
        (kind_of.get(name, f"other, {info.dtype}"), 1, info.nbytes)
        for name, info in checkpoint.items()
    )


def _grouped(items: Any) -> dict[str, dict[str, int]]:
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for label, count, nbytes in items:
        sums[label][0] += count
        sums[label][1] += nbytes
    ordered = sorted(sums.items(), key=lambda item: -item[1][1])
    return {label: {"tensors": count, "bytes": nbytes} for label, (count, nbytes) in ordered}

"""Conversion of a configuration to one LayerSpec per layer."""

from __future__ import annotations

from typing import Any

from anymla.layers.spec import LayerSpec
from anymla.model.config import ModelConfig
from anymla.model.config_sources import last_source


def layer_specs(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Return specs of the backbone's layers, then of the draft layers, which are window only."""
    specs = [_backbone(config, index) for index in range(config.num_hidden_layers)]
    drafts = "mtp" if config.dspark is None else "dspark"
    first = config.num_hidden_layers
    specs += [_spec(config, first + index, drafts, 0) for index in range(config.draft_layers)]
    return tuple(specs)


def _backbone(config: ModelConfig, index: int) -> LayerSpec:
    ratio, sources = config.compress_ratios[index], config.sources
    selects = index in sources.index
    kv = last_source(sources.kv, index) if ratio else None
    chooser = last_source(sources.index, index) if ratio else None
    # A layer shares a chooser's selection only if the chooser is its entries' source or comes after
    # it.
    shares = chooser is not None and kv is not None and chooser >= kv
    candidates = sources.candidates
    narrowed = selects and candidates is not None and index >= candidates.source
    return _spec(
        config,
        index,
        "backbone",
        ratio,
        selects=selects,
        kv_source=None if kv == index else kv,
        index_source=chooser if shares and not selects else None,
        candidates=candidates if narrowed else None,
        shares_selection=selects and _is_followed(config, index),
    )


def _is_followed(config: ModelConfig, index: int) -> bool:
    """True if a layer without an indexer attends to this layer's selection."""
    return any(
        ratio and last_source(config.sources.index, behind) == index
        for behind, ratio in enumerate(config.backbone_ratios)
        if behind > index and last_source(config.sources.kv, behind) != behind
    )


def _spec(
    config: ModelConfig,
    index: int,
    role: str,
    ratio: int,
    *,
    selects: bool = False,
    **shared: Any,
) -> LayerSpec:
    family = config.family
    return LayerSpec(
        index=index,
        role=role,
        ratio=ratio,
        overlap=bool(ratio) and ratio == family.overlap_ratio,
        selects=selects,
        window=config.sliding_window,
        selection_width=config.index_topk if selects else 0,
        position_bias=family.position_bias,
        latent_keys=family.latent_keys,
        hadamard=family.hadamard,
        norms_heads=family.norms_heads,
        **shared,
    )

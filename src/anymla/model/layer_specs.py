"""From a configuration to one LayerSpec a layer."""

from __future__ import annotations

from anymla.layers.spec import LayerSpec
from anymla.model.config import ModelConfig

OVERLAP_RATIO = 4


def layer_specs(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Specs of the backbone's layers, then of the draft layers, which are window only."""
    specs = []
    drafts = "mtp" if config.dspark is None else "dspark"
    for index in range(config.num_hidden_layers + config.draft_layers):
        is_draft = index >= config.num_hidden_layers
        ratio = 0 if is_draft else config.compress_ratios[index]
        ratio = ratio if ratio > 1 else 0
        selects = ratio == OVERLAP_RATIO
        specs.append(
            LayerSpec(
                index=index,
                role=drafts if is_draft else "backbone",
                ratio=ratio,
                overlap=selects,
                selects=selects,
                window=config.sliding_window,
                selection_width=config.index_topk if selects else 0,
            )
        )
    return tuple(specs)

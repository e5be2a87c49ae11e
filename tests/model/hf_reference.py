"""transformers' DeepSeek-V4 on one sequence, with everything its layers computed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from traces import Scores, Trace


class HuggingFace:
    """transformers' model of a checkpoint directory, in float32."""

    def __init__(self, directory: Path) -> None:
        from transformers import DeepseekV4ForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, report = DeepseekV4ForCausalLM.from_pretrained(
                directory,
                dtype=torch.float32,
                experts_implementation="eager",
                output_loading_info=True,
            )
        left = {name: found for name, found in report.items() if found}
        assert not left, f"transformers could not place every tensor: {left}"
        wrong = [name for name, p in model.named_parameters() if p.dtype != torch.float32]
        assert not wrong, f"not in float32: {wrong}"
        self.model = model.eval()

    @torch.no_grad()
    def run(self, token_ids: list[int], pieces: list[int] | None = None) -> tuple[Trace, Scores]:
        """Run a sequence from its start, at once or in consecutive pieces of the given lengths."""
        from transformers import DynamicCache

        seen: dict[tuple[str, int], list[Tensor]] = {}
        handles = self._watch(seen)
        ids = torch.tensor([token_ids])
        cache = DynamicCache(config=self.model.config)
        logits = []
        try:
            for piece in ids.split(pieces or [len(token_ids)], dim=1):
                # By place: 5.24 calls it cache, and 5.23 past_key_values.
                out = self.model(piece, None, None, cache, use_cache=True)
                logits.append(out.logits[0])
        finally:
            for handle in handles:
                handle.remove()
        layers = range(len(self.model.model.layers))

        def joined(name: str) -> list[Tensor]:
            return [torch.cat(seen[name, layer]) for layer in layers]

        entry_scores = {
            layer: _joined_columns(seen["entry scores", layer])
            for layer in layers
            if ("entry scores", layer) in seen
        }
        expert_scores = {
            layer: torch.cat(seen["expert scores", layer])
            for layer in layers
            if ("expert scores", layer) in seen
        }
        trace = Trace(
            attention=joined("attention"),
            ffn=joined("ffn"),
            streams=joined("streams"),
            logits=torch.cat(logits),
            entries={
                layer: [
                    set(row) - {-1} for piece in seen["entries", layer] for row in piece.tolist()
                ]
                for layer in entry_scores
            },
            experts={
                layer: [set(r) for r in rows.tolist()]
                for layer, rows in enumerate(joined("experts"))
            },
        )
        return trace, Scores(entry_scores, expert_scores)

    def _watch(self, seen: dict[tuple[str, int], list[Tensor]]) -> list[Any]:
        handles = []

        def keep(module: nn.Module, name: str, layer: int, pick: Any) -> None:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                seen.setdefault((name, layer), []).append(pick(module, output).clone())

            handles.append(module.register_forward_hook(hook))

        for index, layer in enumerate(self.model.model.layers):
            keep(layer.self_attn, "attention", index, lambda _, output: output[0][0])
            keep(layer.mlp, "ffn", index, lambda _, output: output[0])
            keep(layer, "streams", index, lambda _, output: output[0])
            keep(layer.mlp.gate, "experts", index, lambda _, output: output[2])
            if not layer.mlp.is_hash:
                keep(layer.mlp.gate, "expert scores", index, _ranked_experts)
            if hasattr(layer.self_attn.compressor, "indexer"):
                indexer = layer.self_attn.compressor.indexer
                keep(indexer, "entries", index, lambda _, output: output[0])
                keep(indexer.scorer, "entry scores", index, lambda _, output: output[0])
        return handles


def _ranked_experts(gate: Any, output: Any) -> Tensor:
    return functional.softplus(output[0]).sqrt() + gate.e_score_correction_bias


def _joined_columns(pieces: list[Tensor]) -> Tensor:
    """Rows of growing width as one matrix; entries that did not exist yet are -inf."""
    width = max(piece.shape[1] for piece in pieces)
    return torch.cat(
        [functional.pad(piece, (0, width - piece.shape[1]), value=-torch.inf) for piece in pieces]
    )

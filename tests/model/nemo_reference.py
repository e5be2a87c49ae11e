"""nemo-automodel's DeepSeek-V4.1 on one sequence, with everything its layers computed.

It is NVIDIA's port of DeepSeek's own code, for training: whole sequences only. It rounds cache rows
and index queries as the released model does; without ``rounds`` they stay as they are computed, and
with it they are rounded to bfloat16 first, as they are when that is what layers compute in.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from traces import Scores, Trace

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.deepseek_v41 import attention
    from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41Config
    from nemo_automodel.components.models.deepseek_v41.model import DeepseekV41ForCausalLM
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging


class Nemo:
    """nemo-automodel's model of a checkpoint directory, in float32."""

    def __init__(self, directory: Path) -> None:
        values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        text = values["text_config"] | {"dtype": "float32"}
        del text["model_type"]
        if "engram_layer_ids" not in text:
            text |= {"engram_layer_ids": [], "engram_num_embeddings": []}
        logging.set_verbosity_error()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = DeepseekV41Config(
                text_config=text, vision_config={"num_hidden_layers": 0}, dtype="float32"
            )
            self.model = DeepseekV41ForCausalLM(
                config,
                backend=BackendConfig(
                    attn="eager",
                    linear="torch",
                    rms_norm="torch_fp32",
                    experts="torch",
                    dispatcher="torch",
                ),
                tokenizer=PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json")),
            ).eval()
        stored = {}
        for path in sorted(directory.glob("*.safetensors")):
            stored |= load_file(path)
        state = {
            name: value.float() if value.is_floating_point() else value
            for name, value in self.model.state_dict_adapter.from_hf(stored).items()
        }
        found = self.model.load_state_dict(state, strict=False)
        unread = ("engram_hash", "bias_vl")
        left = [name for name in found.missing_keys if not any(each in name for each in unread)]
        assert not left, left
        for name, value in self.model.named_parameters():
            if name.endswith("bias_vl"):  # of image tokens: seen if a text's token used it
                value.data.fill_(torch.nan)
        assert not found.unexpected_keys, found.unexpected_keys
        self.config = config.text_config

    @torch.no_grad()
    def run(self, token_ids: list[int], *, rounds: bool = False) -> tuple[Trace, Scores]:
        """Run a sequence from its start."""
        seen: dict[tuple[str, int], Tensor] = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._watched(seen))
            stack.enter_context(_rows(rounds=rounds))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            logits = self.model(torch.tensor([token_ids])).logits[0]
        layers = range(len(self.model.model.layers))

        def every(name: str) -> list[Tensor]:
            return [seen[name, layer] for layer in layers]

        def some(name: str) -> dict[int, Tensor]:
            return {layer: seen[name, layer] for layer in layers if (name, layer) in seen}

        trace = Trace(
            attention=every("attention"),
            ffn=every("ffn"),
            streams=every("streams"),
            logits=logits.float(),
            entries={
                layer: [set(row) - {-1} for row in rows.tolist()]
                for layer, rows in some("entries").items()
            },
            experts={
                layer: [set(row) for row in rows.tolist()]
                for layer, rows in enumerate(every("experts"))
            },
        )
        ratios = {layer: self.config.compress_ratios[layer] for layer in trace.entries}
        return trace, Scores(some("entry scores"), some("expert scores"), ratios)

    @contextlib.contextmanager
    def _watched(self, seen: dict[tuple[str, int], Tensor]) -> Iterator[None]:
        handles = []
        gates = []
        for index, layer in enumerate(self.model.model.layers.values()):
            hooks = ((layer.attn, self._attention), (layer.ffn, _ffn), (layer, _streams))
            for module, keep in hooks:
                handles.append(
                    module.register_forward_hook(_hook(keep, seen, index), with_kwargs=True)
                )
            gate = layer.ffn.gate
            gates.append(gate)
            gate._route_scores = _routed(gate, seen, index)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for gate in gates:
                del gate._route_scores

    def _attention(
        self, module: Any, args: Any, kwargs: Any, output: Any, seen: Any, layer: int
    ) -> None:
        seen["attention", layer] = output.hidden_states[0].clone()
        if module.indexer is None:
            return
        state, indexer = output.state, module.indexer
        seen["entries", layer] = state.topk_indices[0].clone()
        x = args[0] if args else kwargs["hidden_states"]
        angles = module.rotary_emb(kwargs["position_ids"])
        queries = indexer.wq_b(module.q_norm(module.wq_a(x)))
        queries = queries.unflatten(-1, (indexer.num_heads, indexer.head_dim))
        queries = attention.quantize_cache(
            attention._apply_rope(queries, angles), format="mxfp4", block_size=32
        )
        weights = indexer.weights_proj(x) * (indexer.head_dim**-0.5 * indexer.num_heads**-0.5)
        scores = torch.einsum("bshd,btd->bsht", queries, state.index_keys).relu()
        scores = (scores * weights.unsqueeze(-1)).sum(2)[0]
        if indexer.uses_candidates:
            scores = scores.masked_fill(~state.candidates[0], -torch.inf)
        seen["entry scores", layer] = scores


def _hook(keep: Any, seen: dict[tuple[str, int], Tensor], layer: int) -> Any:
    def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        keep(module, args, kwargs, output, seen, layer)

    return hook


def _ffn(module: Any, args: Any, kwargs: Any, output: Any, seen: Any, layer: int) -> None:
    seen["ffn", layer] = output[0].clone()


def _streams(module: Any, args: Any, kwargs: Any, output: Any, seen: Any, layer: int) -> None:
    seen["streams", layer] = output[0][0].clone()


def _routed(gate: Any, seen: dict[tuple[str, int], Tensor], layer: int) -> Any:
    route = type(gate)._route_scores

    def routed(scores: Tensor) -> Any:
        ranked = functional.softplus(scores.float()).sqrt() + gate.e_score_correction_bias
        seen["expert scores", layer] = ranked.detach().clone()
        result = route(gate, scores)
        seen["experts", layer] = result[1].clone()
        return result

    return routed


@contextlib.contextmanager
def _rows(*, rounds: bool) -> Iterator[None]:
    """Round cache rows and index queries from bfloat16, or leave them as they are computed."""
    quantize = attention.quantize_cache

    def rounded(values: Tensor, **how: Any) -> Tensor:
        return quantize(values.bfloat16().float(), **how) if rounds else values

    attention.quantize_cache = rounded
    try:
        yield
    finally:
        attention.quantize_cache = quantize

"""transformers' attention layer of DeepSeek-V4, computed by anymla's operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Attention,
    apply_rotary_pos_emb,
)

from anymla import train
from anymla.engines.transformers.batch import PAGE, Batch, Plan, Windows
from anymla.engines.transformers.cache import Joined, layer_of
from anymla.formats.page_layout import ROWS_BF16_128, ROWS_FP32_128
from anymla.ops.attention import prefill_attention
from anymla.ops.indexer import select_topk

NAME = "anymla"
_INDEX_CHANNELS = 128


class AnymlaDeepseekV4Attention(DeepseekV4Attention):
    """``DeepseekV4Attention`` unless the model's attention implementation is "anymla".

    Parameters, their names and their initialisation are those of the parent.
    """

    def forward(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; arguments and results are the parent's, without attention weights.

        Raises:
            ValueError: something is asked for that "anymla" does not compute.
        """
        if self.config._attn_implementation != NAME:
            return super().forward(hidden_states, *args, **kwargs)
        return self._attend(hidden_states, *args, **kwargs), None

    def _attend(
        self,
        hidden_states: Tensor,
        position_embeddings: dict[str, tuple[Tensor, Tensor]],
        position_ids: Tensor,
        attention_mask: Batch | Tensor | None,
        cache: Any = None,
        *,
        past_key_values: Any = None,  # the cache's name until transformers 5.23
        **kwargs: Any,
    ) -> Tensor:
        batch = attention_mask if isinstance(attention_mask, Batch) else Batch(attention_mask)
        cache = past_key_values if cache is None else cache
        count, window = len(hidden_states), self.sliding_window
        compressor: Any = self.compressor
        layer = None if cache is None else layer_of(cache, self.layer_idx, window, count)
        kept = layer.kept if layer else ()
        plan = batch.plan(position_ids, count, window, kept)
        self._refuse(plan, kwargs)
        joined = Joined(plan, kept)
        overlap = self.layer_type == "compressed_sparse_attention"
        windows = plan.windows(compressor.compress_rate if compressor else 0, overlap)

        x = plan.real(hidden_states)
        cos, sin = (plan.real(part) for part in position_embeddings[self.rope_layer_type])
        latent = self.q_a_norm(self.q_a_proj(x))
        q = self.q_b_norm(self.q_b_proj(latent).unflatten(-1, (-1, self.head_dim)))
        q = apply_rotary_pos_emb(q, cos, sin, unsqueeze_dim=2)[0]
        kv = self.kv_norm(self.kv_proj(x)).unsqueeze(2)
        kv = apply_rotary_pos_emb(kv, cos, sin, unsqueeze_dim=2)[0, :, 0]
        tokens = [span.tokens for span in plan.spans]
        kv = joined.join("rows", kv, tokens, [window - 1] * len(tokens))

        entries, lists = kv[:0], None
        if compressor is not None:
            entries = _pooled(compressor, x, plan, windows, joined, "compressor")
        if overlap:
            with torch.no_grad():
                lists = _selected(compressor.indexer, x, latent, cos, sin, plan, windows, joined)
        sink = self.sinks.to(torch.promote_types(self.sinks.dtype, torch.float32))
        if torch.is_grad_enabled():
            packed = plan.training(windows.ratio)
            out, _ = train.attention(q, kv, entries, packed, lists, sink, scale=self.scaling)
        else:
            out, _ = prefill_attention(
                q, torch.cat((kv, entries)), windows.ranges, lists, window=window,
                entries=windows.most, sink=sink, scale=self.scaling,
            )  # fmt: skip
        if layer is not None:
            layer.advance(plan, joined)
        out = apply_rotary_pos_emb(out.unsqueeze(0), cos, -sin, unsqueeze_dim=2)
        grouped = self.o_a_proj(out.flatten(2).unflatten(2, (self.config.o_groups, -1)))
        return plan.padded(self.o_b_proj(grouped.flatten(2)))

    def _refuse(self, plan: Plan, kwargs: dict[str, Any]) -> None:
        """Raise ValueError if something is asked for that is not computed."""
        if kwargs.get("output_attentions") or self.config.output_attentions:
            raise ValueError(f"{_OURS} has no attention weights: output_attentions must be False")
        if self.training and self.attention_dropout:
            raise ValueError(
                f"{_OURS} has no dropout: attention_dropout must be 0, got {self.attention_dropout}"
            )
        if not getattr(self.config, "is_causal", True):
            raise ValueError(f"{_OURS} attends to earlier tokens only: is_causal must be True")
        if torch.is_grad_enabled() and any(span.past for span in plan.spans):
            raise ValueError(
                f"{_OURS} has no gradients through tokens of an earlier call: go on with a cache "
                "under torch.no_grad(), or train with use_cache=False"
            )


_OURS = f'attn_implementation="{NAME}"'


def _pooled(
    module: Any, x: Tensor, plan: Plan, windows: Windows, joined: Joined, name: str
) -> Tensor:
    """Pool the windows that the tokens x [1, T, hidden] close; return all entries [E, D].

    ``module`` is a compressor or an indexer of transformers.
    """
    tokens, width = [span.tokens for span in plan.spans], module.head_dim
    kv, gate = (
        joined.join(f"{name} {part}", project(x)[0], tokens, windows.pending)
        for part, project in (("kv", module.kv_proj), ("gate", module.gate_proj))
    )
    bias = module.position_bias

    def members(rows: Tensor, which: Tensor) -> Tensor:
        return rows.index_select(0, which.flatten()).unflatten(0, which.shape)

    values, weights = members(kv, windows.members), members(gate, windows.members) + bias
    if values.shape[-1] == 2 * width:  # a first half for the window after, a second for its own
        before = members(kv[:, :width], windows.before).masked_fill(windows.alone, 0)
        values = torch.cat((before, values[..., width:]), 1)
        before = members(gate[:, :width], windows.before) + bias[:, :width]
        before = before.masked_fill(windows.alone, -torch.inf)
        weights = torch.cat((before, weights[..., width:]), 1)
    weights = weights.softmax(1, dtype=torch.float32).to(values.dtype)
    entries = module.kv_norm((values * weights).sum(1))[None, None]
    at = windows.positions.unsqueeze(0)
    cos, sin = module.rotary_emb(entries, position_ids=at, layer_type=module.rope_layer_type)
    entries = apply_rotary_pos_emb(entries, cos, sin)[0, 0]
    return joined.join(f"{name} entries", entries, windows.closed, windows.entries)


def _selected(
    indexer: Any,
    x: Tensor,
    latent: Tensor,
    cos: Tensor,
    sin: Tensor,
    plan: Plan,
    windows: Windows,
    joined: Joined,
) -> Tensor | None:
    """Return the entries selected for each token, [T, K] int32, or None for all of them."""
    keys = _pooled(indexer, x, plan, windows, joined, "indexer")
    if windows.most <= indexer.index_topk:
        return None
    if keys.shape[1] != _INDEX_CHANNELS:
        raise ValueError(
            f"{_OURS} selects by index keys of {_INDEX_CHANNELS} channels, got index_head_dim="
            f"{keys.shape[1]}"
        )
    q = indexer.q_b_proj(latent).unflatten(-1, (-1, indexer.head_dim))
    q = apply_rotary_pos_emb(q, cos, sin, unsqueeze_dim=2)[0]
    scorer = indexer.scorer
    weights = scorer.weights_proj(x)[0].float() * (scorer.weights_scaling * scorer.softmax_scale)
    bfloat16 = keys.dtype == torch.bfloat16
    if not bfloat16:
        keys = keys.float()
    pages = [functional.pad(k, (0, 0, 0, -len(k) % PAGE)) for k in keys.split(windows.entries)]
    selected: Tensor = select_topk(
        q,
        torch.cat(pages).unflatten(0, (-1, PAGE)),
        weights,
        windows.visible,
        windows.block_table,
        indexer.index_topk,
        token_to_req=plan.owner,
        layout=ROWS_BF16_128 if bfloat16 else ROWS_FP32_128,
    )
    return selected

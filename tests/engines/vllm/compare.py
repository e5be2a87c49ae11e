"""vLLM's own CPU kernels beside anymla's, on the inputs of a real step; runs inside a worker."""

from __future__ import annotations

import collections
from typing import Any

import measures
import record
import torch
from torch import Tensor, nn
from vllm import _custom_ops as vllm_ops
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v4.cpu.cpu_compressor import DeepseekV4CPUCompressor
from vllm.models.deepseek_v4.cpu.cpu_sparse import (
    DeepseekV4CPUAttention,
    _fused_indexer_q_rope_quant_cpu,
)

from anymla.engines.vllm.attention import AnymlaAttention
from anymla.engines.vllm.compressor import AnymlaCompressor
from anymla.engines.vllm.hyper_connection import LAYERS
from anymla.engines.vllm.indexer import AnymlaIndexer, AnymlaSparseAttnIndexer
from anymla.formats.page_layout import INDEX_FP8, MAIN_FP8, get_layout

# By (part, compress ratio, decode or prefill): the worst of each measure, and how many calls.
_worst: dict[tuple[str, int, str], dict[str, float]] = collections.defaultdict(dict)


def report() -> list[dict[str, Any]]:
    """Every part that was compared, and the worst that was seen of it."""
    keys = ("part", "ratio", "phase")
    return [dict(zip(keys, key, strict=True)) | values for key, values in sorted(_worst.items())]


def compare(model: nn.Module) -> None:
    """From now on every layer of the model computes each step both ways."""
    for module in model.modules():
        if isinstance(module, AnymlaAttention):
            groups = module.wo_a_groups.contiguous()
            module._wo_a_packed = torch.ops._C.convert_weight_packed(groups)
            module.__class__ = _Attention
        elif isinstance(module, AnymlaCompressor):
            DeepseekV4CPUCompressor.cache_norm_weight_fp32(module)
            module.__class__ = _Compressor
        elif isinstance(module, AnymlaIndexer):
            module.__class__ = _Indexer
        elif isinstance(module, AnymlaSparseAttnIndexer):
            module.__class__ = _Scores
        elif type(module) in LAYERS.values():
            module.forward = _both_ways(module)


def _both_ways(layer: nn.Module) -> Any:
    """A hyper-connection layer's ``forward`` beside vLLM's."""
    base = type(layer).__mro__[1]

    def forward(*args: Any, **kwargs: Any) -> Any:
        ours = type(layer).forward(*args, **kwargs)
        if _phase() is not None:
            dense = [arg.contiguous() if isinstance(arg, Tensor) else arg for arg in args]
            theirs = base.forward_cpu(layer, *dense, **kwargs)
            pairs = [(ours, theirs)] if isinstance(ours, Tensor) else zip(ours, theirs, strict=True)
            for mine, other in pairs:
                assert mine.shape == other.shape
                part = "streams" if mine.dtype == torch.bfloat16 else "gates"
                _note(f"{base.__name__} {part}", 0, ulps=measures.ulps(mine, other))
        return ours

    return forward


def _phase() -> str | None:
    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict):
        return None
    prefills = [m.num_prefill_tokens for m in metadata.values() if hasattr(m, "num_prefill_tokens")]
    return "prefill" if max(prefills) else "decode"


def _note(part: str, ratio: int, **measures: float) -> None:
    phase = _phase()
    assert phase is not None
    seen = _worst[part, ratio, phase]
    seen["calls"] = seen.get("calls", 0) + 1
    for name, value in measures.items():
        # a NaN must not lose against a number
        worst = seen.get(name, 0.0)
        seen[name] = value if value != value or value > worst else worst


class _Attention(AnymlaAttention):
    def _fused_qnorm_rope_kv_insert(
        self, q: Tensor, kv: Tensor, positions: Tensor, attn_metadata: Any
    ) -> Tensor:
        if not isinstance(attn_metadata, dict):
            return q
        slots = attn_metadata[self.swa_cache_layer.prefix].slot_mapping
        cache, layout = self.swa_cache_layer.kv_cache, get_layout(MAIN_FP8)
        arguments = kv, positions, attn_metadata
        given = q.clone()
        theirs = DeepseekV4CPUAttention._fused_qnorm_rope_kv_insert(self, q.clone(), *arguments)
        their_rows = layout.read(cache, slots, torch.float32)
        layout.write(cache, slots, torch.ones_like(their_rows))
        ours = super()._fused_qnorm_rope_kv_insert(q, *arguments)
        our_rows = layout.read(cache, slots, torch.float32)
        _note("query", self.compress_ratio, ulps=measures.ulps(ours, theirs))
        _note("window rows", self.compress_ratio, **measures.changed(our_rows, their_rows))
        some = record.some_rows(len(q))
        inputs = {"q": given, "kv": kv, "positions": positions}
        rows = {"some": some, "theirs": theirs[some], "their_rows": their_rows.bfloat16()}
        record.keep(self.prefix, "query", **inputs, **rows)
        return ours

    def forward_mqa(self, q: Tensor, kv: Tensor, positions: Tensor, output: Tensor) -> None:
        super().forward_mqa(q, kv, positions, output)
        if _phase() is not None:
            theirs = torch.zeros_like(output)
            DeepseekV4CPUAttention.forward_mqa(self, q, kv, positions, theirs)
            _note("attention", self.compress_ratio, ulps=measures.ulps(output, theirs))
            record.keep_metadata(self)
            chosen = self.topk_indices_buffer
            chosen = None if self.indexer is None else chosen[: len(q)]
            some = record.some_rows(len(q))
            record.keep(self.prefix, "attention", chosen=chosen, some=some, theirs=theirs[some])

    def _o_proj(self, o: Tensor, positions: Tensor) -> Tensor:
        if _phase() is not None:
            wo_b = self._modules["wo_b"]
            self._modules["wo_b"] = nn.Identity()
            theirs = DeepseekV4CPUAttention._o_proj(self, o, positions)
            ours = super()._o_proj(o, positions)
            self._modules["wo_b"] = wo_b
            _note("output projection", self.compress_ratio, ulps=measures.ulps(ours, theirs))
            some = record.some_rows(len(o))
            rows = {"o": o[some], "positions": positions[some], "theirs": theirs[some]}
            record.keep(self.prefix, "projection", **rows)
        return super()._o_proj(o, positions)


class _Compressor(AnymlaCompressor):
    def forward(self, kv_score: Tensor, positions: Tensor, rotary_emb: Any) -> None:
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            return
        cache = self._static_forward_context[self.k_cache_prefix].kv_cache
        layout = get_layout(MAIN_FP8 if self.head_dim == 512 else INDEX_FP8)
        slots = metadata[self.k_cache_prefix].slot_mapping[: len(positions)]
        slots = slots[slots >= 0]
        DeepseekV4CPUCompressor.forward(self, kv_score, positions, rotary_emb)
        theirs = layout.read(cache, slots, torch.float32)
        layout.write(cache, slots, torch.ones_like(theirs))
        states, state_slots = (
            self.state_cache.kv_cache,
            metadata[self.state_cache.prefix].slot_mapping,
        )
        states[state_slots // states.shape[1], state_slots % states.shape[1]] = 1.0
        super().forward(kv_score, positions, rotary_emb)
        ours = layout.read(cache, slots, torch.float32)
        part = "compressed rows" if self.head_dim == 512 else "index rows"
        _note(part, self.compress_ratio, **measures.changed(ours, theirs))
        given = {"kv_score": kv_score, "positions": positions, "slots": slots}
        record.keep(self.k_cache_prefix, part, **given, theirs=theirs.bfloat16())


class _Indexer(AnymlaIndexer):
    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        q, scales, weights = super().forward(*args, **kwargs)
        if _phase() is not None:
            step = get_forward_context().attn_metadata[self.k_cache.prefix]
            assert step.visible.tolist() == ((args[4] + 1) // 4).tolist()
        if q is not None and _phase() is not None:
            _, qr, _, raw_weights, positions, rotary_emb = args[:6]
            raw = self._wq_b_proj(qr).unflatten(-1, (self.n_head, self.head_dim))
            table, heads = rotary_emb.cos_sin_cache, self.n_head**-0.5
            theirs, their_weights = _fused_indexer_q_rope_quant_cpu(
                positions, raw, table, raw_weights, self.softmax_scale, heads
            )
            _note("index query", 4, **measures.changed(q.float(), theirs.float()))
            _note("index weights", 4, **measures.changed(weights, their_weights))
            given = {"raw": raw, "raw_weights": raw_weights, "positions": positions}
            given |= {"theirs": theirs, "their_weights": their_weights}
            record.keep(self.prefix, "index query", **given)
        return q, scales, weights


class _Scores(AnymlaSparseAttnIndexer):
    def forward(
        self, hidden_states: Tensor, q_quant: Tensor, k: Tensor | None, weights: Tensor
    ) -> Tensor:
        chosen = super().forward(hidden_states, q_quant, k, weights)
        if _phase() is None:
            return chosen
        cache = self.k_cache.kv_cache
        step = get_forward_context().attn_metadata[self.k_cache.prefix]
        visible = step.visible
        tokens = len(visible)
        scores = vllm_ops.fp8_paged_mqa_logits_cpu(
            q_quant[:tokens],
            cache.view(len(cache), -1),
            weights[:tokens],
            visible,
            step.block_table[step.req_id_per_token[:tokens].long()],
            cache.shape[1],
            int(visible.max()),
        )
        missed = measures.missed(scores, chosen[:tokens], visible)
        _note("selection", 4, missed=missed)
        given = {"q": q_quant[:tokens], "weights": weights[:tokens]}
        record.keep(self.k_cache.prefix, "selection", **given, scores=scores)
        return chosen

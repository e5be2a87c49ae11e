"""vLLM's DeepSeek-V4 attention layer with anymla's operations inside."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context

from anymla.engines.vllm import report
from anymla.engines.vllm.metadata import SPARSE_BACKEND, WINDOW_BACKEND
from anymla.engines.vllm.pinned import PLATFORMS
from anymla.formats.fp8_block import dequantize_fp8_weight
from anymla.layers.rows import Rows
from anymla.ops.linear import grouped_output_projection
from anymla.ops.norm_rope import fused_q_kv_rmsnorm, qnorm_rope_kv_insert
from anymla.ops.selection import compute_global_topk_indices_and_lens
from anymla.ops.sparse_attention import sparse_attention

_MODULE, _, _CLASS = PLATFORMS[report.this_machine().platform].base.partition(":")
_Base: Any = getattr(importlib.import_module(_MODULE), _CLASS)


class AnymlaAttention(_Base):
    """One class for every device: projections, caches and metadata are vLLM's own.

    Attributes:
        backend: of anymla's operations; None lets each choose by device.
    """

    backend: str | None = None
    backend_cls = SPARSE_BACKEND
    swa_backend_cls = WINDOW_BACKEND

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.wo_a.quant_method.process_weights_after_loading = self._keep_wo_a

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        return num_heads

    def _wrap_wo_a_process_weights_after_loading(self) -> None:
        """Nothing: here vLLM's CPU layer would have its own packing of ``wo_a`` called."""

    def _keep_wo_a(self, layer: nn.Module) -> None:
        """Decode the grouped weight as loaded; it never runs as a linear layer of vLLM's."""
        self.wo_a_groups = _decoded(layer).view(self.n_local_groups, self.o_lora_rank, -1)
        for name, parameter in list(layer.named_parameters(recurse=False)):
            setattr(layer, name, nn.Parameter(parameter.new_empty(0), requires_grad=False))

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.rotary_emb.cos_sin_cache = self.rotary_emb.cos_sin_cache.float()
        for owner in (self, self.indexer):
            prepare = getattr(getattr(owner, "compressor", None), "cache_norm_weight_fp32", None)
            if prepare is not None:  # vLLM's own compressor on a CPU
                prepare()

    def _split_qkv_and_norm(self, qr_kv: Tensor) -> tuple[Tensor, None, Tensor]:
        qr, kv = qr_kv.split([self.q_lora_rank, self.head_dim], dim=-1)
        weights = self.q_norm.weight.data, self.kv_norm.weight.data
        qr, kv = fused_q_kv_rmsnorm(qr, kv, *weights, self.eps, backend=self.backend)
        return qr, None, kv

    def _fused_qnorm_rope_kv_insert(
        self, q: Tensor, kv: Tensor, positions: Tensor, attn_metadata: Any
    ) -> Tensor:
        if not isinstance(attn_metadata, dict):
            return q  # memory profiling: there are no caches yet
        window = self.swa_cache_layer
        slots = attn_metadata[window.prefix].slot_mapping
        table = self.rotary_emb.cos_sin_cache
        return qnorm_rope_kv_insert(
            q, kv, window.kv_cache, slots, positions, table, self.eps, backend=self.backend
        )

    def forward_mqa(self, q: Tensor, kv: Tensor, positions: Tensor, output: Tensor) -> None:
        attn_metadata = get_forward_context().attn_metadata
        if not isinstance(attn_metadata, dict):
            output.zero_()
            return
        window = attn_metadata[self.swa_cache_layer.prefix]
        decodes = window.num_decode_tokens
        tokens = decodes + window.num_prefill_tokens
        entries = self._entries(attn_metadata, tokens)
        decoding = Rows(window.decode_swa_indices, window.decode_swa_lens)
        prefilled = Rows(window.prefill_swa_indices, window.prefill_swa_lens)
        for span, rows in ((slice(0, decodes), decoding), (slice(decodes, tokens), prefilled)):
            if span.start < span.stop:
                listed = entries and Rows(entries.indices[span], entries.lengths[span])
                kind = self.compress_ratio, span.start
                sparse_attention(
                    q[span],
                    self.swa_cache_layer.kv_cache,
                    rows.indices,
                    rows.lengths,
                    sink=self.attn_sink,
                    scale=self.scale,
                    extra_cache=listed and self.kv_cache,
                    extra_indices=listed and listed.indices,
                    extra_lengths=listed and listed.lengths,
                    plan=window.tile_sched_swaonly.of(kind, q.shape[1], rows, listed),
                    out=output[span],
                    backend=self.backend,
                )
        output[tokens:].zero_()

    def _entries(self, attn_metadata: Any, tokens: int) -> Rows | None:
        """Each token's entries in the compressed cache."""
        if self.compress_ratio <= 1:
            return None
        metadata = attn_metadata[self.prefix]
        if self.indexer is None:
            return Rows(metadata.c128a_global_decode_topk_indices, metadata.c128a_decode_topk_lens)
        slots, lengths = compute_global_topk_indices_and_lens(
            self.topk_indices_buffer[:tokens],
            metadata.req_id_per_token,
            metadata.block_table,
            metadata.block_size // self.compress_ratio,
            attn_metadata[self.swa_cache_layer.prefix].is_valid_token,
            backend=self.backend,
        )
        return Rows(slots, lengths)

    def _o_proj(self, o: Tensor, positions: Tensor) -> Tensor:
        table = self.rotary_emb.cos_sin_cache
        z = grouped_output_projection(o, positions, table, self.wo_a_groups, backend=self.backend)
        return self.wo_b(z)


def _decoded(layer: Any) -> Tensor:
    """The weight of a linear layer that vLLM has just loaded, in bfloat16."""
    weight, scale = layer.weight.data, getattr(layer, "weight_scale_inv", None)
    if weight.dtype == torch.bfloat16:
        return weight
    if weight.dtype != torch.float8_e4m3fn or scale is None:
        raise NotImplementedError(f"wo_a is neither bf16 nor FP8 in blocks, but {weight.dtype}")
    scale = scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale.float()
    return dequantize_fp8_weight(weight.view(torch.uint8), scale.data, torch.bfloat16)

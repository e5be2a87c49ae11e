"""vLLM's DeepSeek-V4 attention layer on anymla's operations, and the base of V4.1's layer."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context

from anymla.engines.vllm import report
from anymla.engines.vllm.metadata import ANY, SPARSE_BACKEND, WINDOW_BACKEND
from anymla.engines.vllm.pinned import PLATFORMS
from anymla.engines.vllm.prefill import Chunk, plans_of_step, scratch_memory, workspace_rows
from anymla.formats.fp8_block import dequantize_fp8_weight
from anymla.formats.page_layout import MAIN_FP8
from anymla.layers.rows import Rows
from anymla.ops.attention import prefill_attention, sparse_attention
from anymla.ops.kv_cache import dequantize_and_gather_k_cache
from anymla.ops.linear import grouped_output_projection
from anymla.ops.norm_rope import fused_q_kv_rmsnorm, qnorm_rope_kv_insert
from anymla.ops.step_indices import compute_global_topk_indices_and_lens
from anymla.ops.streams import scratch, scratch_scope

_PLATFORM = report.this_machine().platform
_MODULE, _, _CLASS = PLATFORMS[_PLATFORM].base.partition(":")
_Base: Any = getattr(importlib.import_module(_MODULE), _CLASS)


class AttentionAdapter(ANY):
    """Mixin before an attention class of vLLM, whose projections, caches and metadata stay its own.

    Attributes:
        backend: name of the backend of anymla's operations; None to choose by device.
        scratch_bytes: most bytes of vLLM's workspace that attention may need.
    """

    backend: str | None = None
    scratch_bytes = 0

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        return num_heads

    def _keep_wo_a(self, layer: nn.Module) -> None:
        """Decode the grouped weight as loaded; it never runs as a linear layer of vLLM."""
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

    def forward_mqa(self, q: Tensor, kv: Tensor, positions: Tensor, output: Tensor) -> None:
        attn_metadata = get_forward_context().attn_metadata
        with scratch_memory(self.scratch_bytes):
            if isinstance(attn_metadata, dict):
                self._attend(q, positions, attn_metadata, output)
            else:
                output.zero_()  # memory profiling

    def _attend(
        self, q: Tensor, positions: Tensor, attn_metadata: dict[str, Any], output: Tensor
    ) -> None:
        window = attn_metadata[self.swa_cache_layer.prefix]
        before = window.num_decode_tokens
        end = before + window.num_prefill_tokens
        decoding = Rows(window.decode_swa_indices, window.decode_swa_lens)
        self._attend_by_slots(q, attn_metadata, slice(0, before), decoding, output)
        chunks = self._chunks(attn_metadata, positions)
        for chunk in chunks:
            self._attend_decoded(q, attn_metadata, chunk, output)
        if chunks:
            end = chunks[-1].tokens.stop
        else:
            prefilled = Rows(window.prefill_swa_indices, window.prefill_swa_lens)
            self._attend_by_slots(q, attn_metadata, slice(before, end), prefilled, output)
        if end < len(output):
            output[end:].zero_()

    def _chunks(self, attn_metadata: dict[str, Any], positions: Tensor) -> list[Chunk]:
        """Return the prefills of the step that attend to a workspace."""
        return []

    def _attend_decoded(
        self, q: Tensor, attn_metadata: dict[str, Any], chunk: Chunk, output: Tensor
    ) -> None:
        """Attend to the decoded rows that a chunk of prefills can see."""
        tokens, selected = chunk.tokens, None
        with scratch_scope():
            rows = scratch((*chunk.shape, self.head_dim), q.dtype, q.device)
            windows = rows[:, chunk.entries :]
            entries = rows[:, : chunk.entries]
            parts: list[tuple[Any, ...]] = [
                (self.swa_cache_layer, windows, chunk.seq_lens, chunk.gather_lens),
                (self, entries, chunk.entry_lens, None),
            ]
            for layer, decoded, lengths, last in parts[: 2 if chunk.entries else 1]:
                table = attn_metadata[layer.prefix].block_table[chunk.requests]
                dequantize_and_gather_k_cache(
                    decoded, layer.kv_cache, lengths, last, table, backend=self.backend
                )
            if self.indexer is not None and chunk.entries > self.topk_indices_buffer.shape[1]:
                selected = self.topk_indices_buffer[tokens]
            prefill_attention(
                q[tokens],
                rows.flatten(0, 1),
                chunk.ranges,
                selected,
                window=chunk.window,
                entries=chunk.entries,
                sink=self.attn_sink,
                scale=self.scale,
                out=output[tokens],
                backend=self.backend,
            )

    def _attend_by_slots(
        self,
        q: Tensor,
        attn_metadata: dict[str, Any],
        tokens: slice,
        rows: Rows,
        output: Tensor,
    ) -> None:
        """Attend to rows in the caches; ``rows`` are the window rows of each of the tokens."""
        if tokens.start == tokens.stop:
            return
        plans = plans_of_step(attn_metadata, attn_metadata[self.swa_cache_layer.prefix])
        entries = self._entries(attn_metadata, tokens)
        listed = [rows.in_cache(self.swa_cache_layer.kv_cache, MAIN_FP8)]
        if entries is not None:
            listed.append(entries.in_cache(self._compressed_kv_cache(), MAIN_FP8))
        sparse_attention(
            q[tokens],
            listed,
            sink=self.attn_sink,
            scale=self.scale,
            plan=plans.of((self.compress_ratio, tokens.start), q.shape[1], rows, entries),
            out=output[tokens],
            backend=self.backend,
        )

    def _entries(self, attn_metadata: Any, tokens: slice) -> Rows | None:
        """Return the entries of tokens in the compressed cache; None in a window-only layer."""
        raise NotImplementedError

    def _selected_entries(
        self, metadata: Any, attn_metadata: dict[str, Any], tokens: slice
    ) -> Rows:
        """Return the selected entries of tokens, in the cache of that metadata."""
        slots, lengths = compute_global_topk_indices_and_lens(
            self.topk_indices_buffer[tokens],
            metadata.req_id_per_token[tokens],
            metadata.block_table,
            metadata.block_size // self.compress_ratio,
            attn_metadata[self.swa_cache_layer.prefix].is_valid_token[tokens],
            backend=self.backend,
        )
        return Rows(slots, lengths)

    def _o_proj(self, o: Tensor, positions: Tensor) -> Tensor:
        table = self.rotary_emb.cos_sin_cache
        z = grouped_output_projection(o, positions, table, self.wo_a_groups, backend=self.backend)
        return self.wo_b(z)


class AnymlaAttention(AttentionAdapter, _Base):
    """DeepSeek-V4's attention layer, one class for every device."""

    backend_cls = SPARSE_BACKEND
    swa_backend_cls = WINDOW_BACKEND

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.wo_a.quant_method.process_weights_after_loading = self._keep_wo_a
        if _PLATFORM == "rocm":
            # As in vLLM's own layer there: HIP may hang where streams wait outside of a graph.
            self.aux_stream_list = None
            if self.indexer is not None:
                self.indexer.aux_stream = None
        sizes = self.max_model_len, self.max_num_batched_tokens, self.window_size
        rows = workspace_rows(*sizes, self.compress_ratio, self.PREFILL_CHUNK_SIZE)
        self.scratch_bytes = rows * self.head_dim * torch.bfloat16.itemsize

    def _wrap_wo_a_process_weights_after_loading(self) -> None:
        """Do nothing; vLLM's CPU layer would apply its own packing to ``wo_a`` here."""

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

    def _compressed_kv_cache(self) -> Tensor:
        return self.kv_cache

    def _chunks(self, attn_metadata: dict[str, Any], positions: Tensor) -> list[Chunk]:
        window = attn_metadata[self.swa_cache_layer.prefix]
        return plans_of_step(attn_metadata, window).chunks(
            window, positions, self.compress_ratio, self.PREFILL_CHUNK_SIZE
        )

    def _entries(self, attn_metadata: Any, tokens: slice) -> Rows | None:
        if self.compress_ratio <= 1:
            return None
        metadata = attn_metadata[self.prefix]
        if self.indexer is not None:
            return self._selected_entries(metadata, attn_metadata, tokens)
        return Rows(
            metadata.c128a_global_decode_topk_indices[tokens],
            metadata.c128a_decode_topk_lens[tokens],
        )


def _decoded(layer: Any) -> Tensor:
    """Decode the weight of a linear layer that vLLM has just loaded, to bfloat16 or float32."""
    weight, scale = layer.weight.data, getattr(layer, "weight_scale_inv", None)
    by_row = getattr(layer, "weight_scale", None)
    if weight.dtype in (torch.bfloat16, torch.float32):
        return weight
    by_32 = len(weight), weight.shape[1] // 32
    if (
        weight.dtype == torch.float8_e4m3fn
        and scale is None
        and by_row is not None
        and by_row.element_size() == 1
        and by_row.shape == by_32
    ):
        # V4.1's blocks have 32 rows; vLLM has repeated a block's scale for each of them.
        scales = by_row.data.view(torch.uint8)[::32]
        return dequantize_fp8_weight(weight.view(torch.uint8), scales, torch.bfloat16, 32)
    if weight.dtype != torch.float8_e4m3fn or scale is None:
        raise NotImplementedError(f"wo_a is neither plain nor FP8 in blocks, but {weight.dtype}")
    scale = scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale.float()
    return dequantize_fp8_weight(weight.view(torch.uint8), scale.data, torch.bfloat16)

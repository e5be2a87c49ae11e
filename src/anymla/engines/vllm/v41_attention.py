"""vLLM's DeepSeek-V4.1 attention layer with anymla's operations inside.

Layers share entries and selections in V4.1: an entry's cache may be another layer's, and so may the
selection in the common buffer. vLLM decides both.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v41.attention import DeepseekV4Attention
from vllm.platforms import current_platform

from anymla.engines.vllm import v41_rows
from anymla.engines.vllm.attention import AttentionAdapter
from anymla.engines.vllm.metadata import WINDOW_BACKEND
from anymla.engines.vllm.v41_metadata import SPARSE_BACKEND
from anymla.formats.page_layout import MAIN_FP8
from anymla.layers.rows import Rows
from anymla.ops.linear import grouped_output_projection, linear_float32
from anymla.ops.norm_rope import rope


class AnymlaV41Attention(AttentionAdapter, DeepseekV4Attention):
    """V4.1's attention layer for every device whose caches have rows of 584 bytes."""

    backend_cls = SPARSE_BACKEND
    swa_backend_cls = WINDOW_BACKEND

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        if self.kv_mxfp8:
            raise NotImplementedError("vLLM keeps rows of another format than 584 bytes here")
        self.wo_a.quant_method.process_weights_after_loading = self._keep_wo_a
        if self.compressor is not None:  # a product in float32, of the weight as it was loaded
            method = self.compressor.fused_wkv_wgate.quant_method
            method.process_weights_after_loading = lambda layer: None
        if not current_platform.is_cuda():
            self.aux_stream_list = None

    def _run_parallel_input_projections(
        self, hidden_states: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        scores, weights = None, None
        if self.compressor is not None:
            weight = self.compressor.fused_wkv_wgate.weight
            scores = linear_float32(hidden_states, weight, backend=self.backend)
        if self.indexer is not None:
            weights, _ = self.indexer.weights_proj(hidden_states)
        return self._fused_wqa_wkv_gemm(hidden_states), scores, weights

    def _fused_qnorm_rope_kv_insert(
        self, q: Tensor, kv: Tensor, positions: Tensor, attn_metadata: Any
    ) -> Tensor:
        """Rotate the heads, which V4.1 does not norm, and write window rows."""
        if not isinstance(attn_metadata, dict):
            return q  # memory profiling: there are no caches yet
        table = self.rotary_emb.cos_sin_cache
        self._insert_window(kv, positions, attn_metadata)
        rotated: Tensor = rope(q, positions, table, backend=self.backend)
        return rotated

    def _insert_window(self, kv: Tensor, positions: Tensor, attn_metadata: dict[str, Any]) -> None:
        window = self.swa_cache_layer
        v41_rows.insert(
            kv,
            positions,
            window.kv_cache,
            attn_metadata[window.prefix],
            self.rotary_emb.cos_sin_cache,
            ratio=1,
            layout=MAIN_FP8,
            backend=self.backend,
        )

    def forward_kv(self, positions: Tensor, hidden_states: Tensor) -> None:
        """Write the caches as ``forward`` does, without attending."""
        attn_metadata = get_forward_context().attn_metadata
        projected, scores, _ = self._run_parallel_input_projections(hidden_states)
        _, _, kv = self._split_qkv_and_norm(projected)
        if isinstance(attn_metadata, dict):
            self._insert_window(kv, positions, attn_metadata)
        if self.compressor is not None:
            latent = self.compressor(scores, positions)
            if self.indexer is not None and self.indexer.owns_k:
                self.indexer._produce_k(latent, positions, self.indexer_rotary_emb)
            self.compressor.insert_cache(latent, positions, self.rotary_emb)

    def _entries(self, attn_metadata: Any, tokens: slice) -> Rows | None:
        if not self.compress_ratio:
            return None
        metadata = attn_metadata[self.compressed_cache_prefix]
        return self._selected_entries(metadata, attn_metadata, tokens)

    def _o_proj(self, attn_out: Tensor, positions: Tensor) -> Tensor:
        table = self.rotary_emb.cos_sin_cache
        z = grouped_output_projection(
            attn_out, positions, table, self.wo_a_groups, backend=self.backend
        )
        return self._wo_b_proj(z)

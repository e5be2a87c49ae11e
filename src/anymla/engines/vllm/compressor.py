"""vLLM's compressor with anymla's operations inside."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v4.compressor import DeepseekCompressor

from anymla.formats.page_layout import INDEX_FP8, INDEX_MXFP4, MAIN_FP8
from anymla.ops.compressor import compress_norm_rope_insert, save_partial_states


class AnymlaCompressor(DeepseekCompressor):
    """Compressor of the main cache or of the index cache."""

    backend: str | None = None

    def forward(self, kv_score: Tensor, positions: Tensor, rotary_emb: Any) -> None:
        attn_metadata = get_forward_context().attn_metadata
        if not isinstance(attn_metadata, dict):
            return
        states, state = attn_metadata[self.state_cache.prefix], self.state_cache.kv_cache
        tokens = len(states.token_to_req_indices)
        kv, score = kv_score[:tokens].chunk(2, dim=-1)
        save_partial_states(
            kv,
            score,
            self.ape,
            positions[:tokens],
            state,
            states.slot_mapping[:tokens],
            compress_ratio=self.compress_ratio,
            backend=self.backend,
        )
        width = state.shape[-1] // 2
        self._compress_norm_rope_store(
            states, state, width, positions, rotary_emb, attn_metadata, {}
        )

    def _compress_norm_rope_store(
        self,
        state_metadata: Any,
        state_cache: Tensor,
        state_width: int,
        positions: Tensor,
        rotary_emb: Any,
        attn_metadata: dict[str, Any],
        pdl_kwargs: dict[str, Any],
    ) -> None:
        """Store the entries of complete windows; a method of vLLM itself from 0.33 on."""
        requests = state_metadata.token_to_req_indices
        # A batch is padded for a captured graph. Outside of a graph, there are fewer request ids
        # than slots.
        tokens = len(requests)
        index_layout = INDEX_MXFP4 if self.use_fp4_cache else INDEX_FP8
        compress_norm_rope_insert(
            state_cache,
            state_metadata.block_table,
            state_metadata.slot_mapping[:tokens],
            requests,
            positions[:tokens],
            self.norm.weight,
            self.rms_norm_eps,
            rotary_emb.cos_sin_cache,
            self._static_forward_context[self.k_cache_prefix].kv_cache,
            attn_metadata[self.k_cache_prefix].slot_mapping[:tokens],
            compress_ratio=self.compress_ratio,
            overlap=self.overlap,
            layout=MAIN_FP8 if self.head_dim == 512 else index_layout,
            backend=self.backend,
        )

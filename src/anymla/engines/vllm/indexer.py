"""vLLM's lightning indexer with anymla's operations inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.models.deepseek_v4.attention import DeepseekV4Indexer, DeepseekV4IndexerCache

from anymla.engines.vllm.metadata import ANY, INDEXER_BACKEND
from anymla.engines.vllm.prefill import scratch_memory
from anymla.engines.vllm.step import once
from anymla.formats.page_layout import INDEX_FP8, INDEX_MXFP4
from anymla.layers.selection import all_entries
from anymla.ops.indexer import indexer_q_rope_quant, select_topk
from anymla.ops.indexer.interface import SCRATCH_BYTES


class AnymlaIndexerCache(DeepseekV4IndexerCache):
    """Cache of index keys, addressed by metadata of anymla's builder."""

    def get_attn_backend(self) -> type:
        return INDEXER_BACKEND


class IndexerAdapter(ANY):
    """Mixin before an indexer of vLLM: computes its queries if entries have to be selected."""

    backend: str | None = None

    def _fits(self, step: Any, positions: Tensor) -> bool:
        """True if every entry of the step's requests fits the selection."""
        fits: bool = step.max_seq_len // self.compress_ratio <= self.topk_tokens
        return fits and not _is_captured(positions)

    def _choose_all(self, step: Any, made_of: object) -> None:
        """Select every entry, unless an earlier layer did so for the same ``made_of``."""
        buffer = self.topk_indices_buffer

        def write() -> None:
            chosen = all_entries(step.visible, self.topk_tokens)
            buffer[: len(chosen)] = chosen

        once(("entries", id(buffer)), write, of=made_of)

    def _queries(
        self,
        qr: Tensor,
        qr_scale: Tensor | None,
        weights: Tensor,
        positions: Tensor,
        rotary_emb: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return queries, scales of packed queries, and weights of the heads."""
        q, q_scales, weights = indexer_q_rope_quant(
            self._wq_b_proj(qr, qr_scale).unflatten(-1, (self.n_head, self.head_dim)),
            weights,
            positions,
            rotary_emb.cos_sin_cache,
            softmax_scale=self.softmax_scale,
            head_scale=self.n_head**-0.5,
            quant="mxfp4" if self.use_fp4_kv else "fp8",
            backend=self.backend,
        )
        return q, q_scales if self.use_fp4_kv else None, weights


class AnymlaIndexer(IndexerAdapter, DeepseekV4Indexer):
    """Index queries of DeepSeek-V4; the compressor inside, vLLM's or anymla's, writes the keys."""

    def _get_cache_cls(self) -> type:
        return AnymlaIndexerCache

    def _get_attn_cls(self) -> type:
        return AnymlaSparseAttnIndexer

    def forward(
        self,
        hidden_states: Tensor,
        qr: Tensor,
        compressed_kv_score: Tensor,
        indexer_weights: Tensor,
        positions: Tensor,
        rotary_emb: Any,
        qr_scale: Tensor | None = None,
        skip_compressor: bool = False,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Write index keys; return queries, scales and weights, None if every entry is selected."""
        if not skip_compressor:
            self.compressor(compressed_kv_score, positions, rotary_emb)
        attn_metadata = get_forward_context().attn_metadata
        if isinstance(attn_metadata, dict):
            step = attn_metadata[self.k_cache.prefix]
            if self._fits(step, positions):
                self._choose_all(step, attn_metadata)
                return None, None, None
        return self._queries(qr, qr_scale, indexer_weights, positions, rotary_emb)


class AnymlaSparseAttnIndexer(SparseAttnIndexer):
    """Scores of index keys, and the selection."""

    backend: str | None = None

    def __init__(
        self,
        k_cache: Any,
        quant_block_size: int,
        scale_fmt: str,
        topk_tokens: int,
        head_dim: int,
        max_model_len: int,
        max_total_seq_len: int,
        topk_indices_buffer: Tensor,
        **kwargs: Any,
    ) -> None:
        CustomOp.__init__(self)  # vLLM's own constructor requires DeepGEMM
        self.k_cache, self.topk_indices_buffer = k_cache, topk_indices_buffer
        self.compress_ratio = kwargs["compress_ratio"]
        self.layout = INDEX_MXFP4 if kwargs["use_fp4_cache"] else INDEX_FP8

    def forward(
        self, hidden_states: Tensor, q_quant: Any, k: Tensor | None, weights: Tensor
    ) -> Tensor:
        attn_metadata = get_forward_context().attn_metadata
        with scratch_memory(SCRATCH_BYTES):
            if isinstance(attn_metadata, dict):
                self._select(q_quant, weights, attn_metadata[self.k_cache.prefix])
        return self.topk_indices_buffer

    def _select(self, q_quant: Any, weights: Tensor, step: Any) -> None:
        """Write the entries selected for each token of a step."""
        q, q_scales = q_quant if isinstance(q_quant, tuple) else (q_quant, None)
        for tokens, longest in step.selections:
            select_topk(
                q[tokens],
                self.k_cache.kv_cache,
                weights[tokens],
                step.visible[tokens],
                step.block_table,
                self.topk_indices_buffer.shape[1],
                max_context=longest,
                token_to_req=step.req_id_per_token[tokens],
                layout=self.layout,
                q_scales=None if q_scales is None else q_scales[tokens],
                out=self.topk_indices_buffer[tokens],
                backend=self.backend,
            )


def _is_captured(tensor: Tensor) -> bool:
    """True if a graph records this step, because it will then serve longer requests as well."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()

"""vLLM's lightning indexer of DeepSeek-V4.1 with anymla's operations inside."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v41.attention import DeepseekV4Indexer, DeepseekV4IndexerCache

from anymla.engines.vllm import v41_rows
from anymla.engines.vllm.indexer import AnymlaSparseAttnIndexer, IndexerAdapter
from anymla.engines.vllm.v41_metadata import INDEXER_BACKEND
from anymla.formats.page_layout import INDEX_FP8, INDEX_MXFP4
from anymla.layers.selection import TwoLevels, select_entries
from anymla.ops.norm_rope import rms_norm


class AnymlaV41IndexerCache(DeepseekV4IndexerCache):
    """Cache of index keys, addressed by metadata of anymla's builder."""

    def get_attn_backend(self) -> type:
        return INDEXER_BACKEND


class AnymlaV41Scores(AnymlaSparseAttnIndexer):
    """Scores and selection, in two levels if blocks of entries are kept or selected within."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.blocks = kwargs["candidate_blocks"]
        self.block_size = kwargs["candidate_block_size"]
        self.keeps = kwargs["candidate_write"]

    def _select(self, q_quant: Any, weights: Tensor, step: Any) -> None:
        longest = max((longest for _, longest in step.selections), default=0)
        if self.blocks is None or longest <= self.blocks.shape[1] * self.block_size:
            super()._select(q_quant, weights, step)
            return
        q, q_scales = q_quant if isinstance(q_quant, tuple) else (q_quant, None)
        tokens = len(step.visible)
        select_entries(
            q[:tokens],
            None if q_scales is None else q_scales[:tokens],
            weights[:tokens],
            step.visible,
            self.k_cache.kv_cache,
            step.block_table,
            query_lens=step.query_lens,
            num_decodes=step.num_decodes,
            max_context=longest,
            layout=self.layout,
            out=self.topk_indices_buffer[:tokens],
            token_to_req=step.req_id_per_token,
            levels=TwoLevels(self.blocks[:tokens], self.block_size, self.keeps),
            backend=self.backend,
        )


class AnymlaV41Indexer(IndexerAdapter, DeepseekV4Indexer):
    """Index queries, and keys that are projected from the entries."""

    attn_cls = AnymlaV41Scores

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if vllm_config.attention_config.indexer_sparse_logits:
            raise NotImplementedError("anymla's indexer has no indexer_sparse_logits")
        super().__init__(vllm_config, *args, **kwargs)
        self.k_cache.__class__ = AnymlaV41IndexerCache

    def _produce_k(self, latent: Tensor | None, positions: Tensor, rotary_emb: Any) -> None:
        attn_metadata = get_forward_context().attn_metadata
        if not isinstance(attn_metadata, dict) or latent is None:
            return
        norm = self.k_norm
        projected, _ = self.wk(latent)
        v41_rows.insert(
            rms_norm(projected, norm.weight.data, norm.variance_epsilon, backend=self.backend),
            positions,
            self.k_cache.kv_cache,
            attn_metadata[self.k_cache.prefix],
            rotary_emb.cos_sin_cache,
            ratio=self.compress_ratio,
            layout=INDEX_MXFP4 if self.use_fp4_kv else INDEX_FP8,
            backend=self.backend,
        )

    def forward_q(
        self,
        qr: Tensor,
        qr_scale: Tensor | None,
        indexer_weights: Tensor,
        positions: Tensor,
        rotary_emb: Any,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self._queries(qr, qr_scale, indexer_weights, positions, rotary_emb)

    def forward(
        self,
        qr: Tensor,
        latent: Tensor | None,
        indexer_weights: Tensor,
        positions: Tensor,
        rotary_emb: Any,
        qr_scale: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Write index keys; return queries, scales and weights, None if every entry is selected.

        vLLM 0.33 passes further arguments that repeat these, unless contexts are split between
        ranks.
        """
        if self.owns_k:
            self._produce_k(latent, positions, rotary_emb)
        attn_metadata = get_forward_context().attn_metadata
        if isinstance(attn_metadata, dict):
            step = attn_metadata[self.k_cache.prefix]
            if self._fits(step, positions):
                # Layers that share keys share metadata; other layers overwrite the common buffer.
                self._choose_all(step, step)
                return None, None, None
        return self.forward_q(qr, qr_scale, indexer_weights, positions, rotary_emb)

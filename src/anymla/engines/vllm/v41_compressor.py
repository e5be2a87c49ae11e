"""vLLM's compressor of DeepSeek-V4.1 with anymla's operations inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v4.compressor import CompressorBackend
from vllm.models.deepseek_v41.compressor import CompressorStateCache, DeepseekCompressor
from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

from anymla.engines.vllm import v41_rows
from anymla.formats.page_layout import MAIN_FP8
from anymla.ops.compressor import compress_norm, save_partial_states
from anymla.ops.norm_rope import rms_norm

_ALIGNMENT = 576  # bytes, alignment of pages with rows of 584 bytes


class AnymlaStateCache(CompressorStateCache):
    """States addressed by position, as in DeepSeek-V4, where vLLM's V4.1 has a ring buffer.

    A step may then have any number of tokens, because no state overwrites another's slot.

    Attributes:
        sliding_window: number of tokens that an entry is pooled from.
    """

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return SlidingWindowMLASpec(
            block_size=self.block_size,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=self.state_dim,
            dtype=self.dtype,
            sliding_window=self.sliding_window,
            alignment=_ALIGNMENT,
        )

    def get_attn_backend(self) -> type:
        return CompressorBackend


class AnymlaV41Compressor(DeepseekCompressor):
    """Compressor that writes entries and returns the latent for the index keys.

    Attributes:
        ape: float32 [ratio, D] of zeros, because V4.1 has no position bias.
    """

    backend: str | None = None

    def adopt(self) -> None:
        """Finish vLLM's object after its class has been replaced by this one."""
        if self.state_cache is None:
            return
        self.state_cache.__class__ = AnymlaStateCache
        self.state_cache.sliding_window = self.compress_ratio
        ape = torch.zeros(self.compress_ratio, self.head_dim, dtype=torch.float32)
        self.register_buffer("ape", ape, persistent=False)

    def forward(self, kv_score: Tensor, positions: Tensor) -> Tensor | None:
        """Return the latent [T, D]; zero for tokens that complete no entry."""
        attn_metadata = get_forward_context().attn_metadata
        if not isinstance(attn_metadata, dict):
            return None
        dtype = self.fused_wkv_wgate.weight.dtype
        norm, eps = self.norm.weight.data, self.rms_norm_eps
        if self.state_cache is None:
            latent: Tensor = rms_norm(kv_score, norm, eps, backend=self.backend)
            return latent.to(dtype)
        states, state = attn_metadata[self.state_cache.prefix], self.state_cache.kv_cache
        tokens = len(states.token_to_req_indices)
        kv, score = kv_score[:tokens].chunk(2, dim=-1)
        slots = states.slot_mapping[:tokens]
        save_partial_states(
            kv,
            score,
            self.ape,
            positions[:tokens],
            state,
            slots,
            compress_ratio=self.compress_ratio,
            backend=self.backend,
        )
        pooled = compress_norm(
            state,
            states.block_table,
            slots,
            states.token_to_req_indices,
            positions[:tokens],
            norm,
            eps,
            compress_ratio=self.compress_ratio,
            overlap=False,
            backend=self.backend,
        )
        return pooled.to(dtype)

    def insert_cache(self, latent: Tensor | None, positions: Tensor, rotary_emb: Any) -> None:
        """Write the entries to the cache."""
        if latent is None:
            return
        v41_rows.insert(
            latent,
            positions,
            self._static_forward_context[self.k_cache_prefix].kv_cache,
            get_forward_context().attn_metadata[self.k_cache_prefix],
            rotary_emb.cos_sin_cache,
            ratio=self.compress_ratio,
            layout=MAIN_FP8,
            backend=self.backend,
        )

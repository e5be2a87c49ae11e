"""vLLM's metadata of a V4.1 step, without the parts that only FlashMLA and DeepGEMM read."""

from __future__ import annotations

from typing import Any

from vllm.models.deepseek_v41.sparse_mla import (
    DeepseekV4SparseMLABackend,
    DeepseekV4SparseMLAMetadataBuilder,
)
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.mla.indexer import DeepseekV41IndexerBackend

from anymla.engines.vllm.metadata import IndexMetadata, backend_of, split_requests


class V41IndexBuilder(IndexMetadata, DeepseekV4SparseMLAMetadataBuilder):
    """Metadata of V4.1's index keys."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """Build V4's metadata, and ``query_lens``, tokens of each request, decodes first."""
        cm = common_attn_metadata
        built = super().build(common_prefix_len, cm, fast_build)
        built.num_decodes = split_requests(self, cm)[0]
        built.query_lens = tuple(cm.query_start_loc_cpu.diff().tolist())
        return built


def _any_page(kv_cache_spec: Any = None) -> list[Any]:
    """Return the supported page sizes, multiples of 16 tokens, which is a CPU's page size."""
    return [MultipleOf(16)]


SPARSE_BACKEND = backend_of(
    "ANYMLA_SPARSE_DSV41",
    DeepseekV4SparseMLABackend,
    DeepseekV4SparseMLAMetadataBuilder,
    get_supported_kernel_block_sizes=_any_page,
)
INDEXER_BACKEND = backend_of(
    "ANYMLA_INDEXER_DSV41",
    DeepseekV41IndexerBackend,
    V41IndexBuilder,
    get_supported_kernel_block_sizes=_any_page,
)

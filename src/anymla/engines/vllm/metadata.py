"""vLLM's metadata of a step, less what only FlashMLA and DeepGEMM read."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.models.deepseek_v4.sparse_mla import (
    DeepseekV4SparseMLABackend,
    DeepseekV4SparseMLAMetadataBuilder,
)
from vllm.v1.attention.backends.mla import sparse_swa
from vllm.v1.attention.backends.mla.indexer import DeepseekV4IndexerBackend

from anymla.layers.plans import Plans
from anymla.ops.selection import compressed_rows


class CompressedBuilder(DeepseekV4SparseMLAMetadataBuilder):
    """Builds the metadata of both compressed caches; vLLM's index builder asks for DeepGEMM."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        built = super().build(common_prefix_len, common_attn_metadata, fast_build)
        built.positions = common_attn_metadata.positions[: built.num_actual_tokens]
        return built

    def _build_c128a_metadata(self, cm: Any, req_id_per_token: Tensor) -> dict[str, Tensor]:
        """Slots of all entries that each token sees, in the buffers that captured graphs read."""
        tokens, width = cm.num_actual_tokens, max(1, cm.max_seq_len // self.compress_ratio)
        slots, _, lengths = compressed_rows(
            cm.positions[:tokens],
            req_id_per_token,
            cm.block_table_tensor,
            ratio=self.compress_ratio,
            block_size=self.kv_cache_spec.block_size // self.compress_ratio,
            width=width,
            is_valid_token=cm.slot_mapping[:tokens] >= 0,
        )
        rows = self.c128a_global_decode_buffer[:tokens, :width].copy_(slots)
        counts = self.c128a_decode_lens_buffer[:tokens].copy_(lengths)
        return {"c128a_global_decode_topk_indices": rows, "c128a_decode_topk_lens": counts}


class WindowBuilder(sparse_swa.DeepseekSparseSWAMetadataBuilder):
    """Window metadata; ``build`` is vLLM's own."""

    def build_tile_scheduler(self, num_decode_tokens: int) -> dict[str, Plans]:
        """Hold anymla's plans where vLLM holds FlashMLA's: of a step, or of one step of a draft.

        They are one object, whatever the type of a layer. In vLLM 0.32.0 ``build`` reads five
        types, but the CPU builder returns three and its model stops with KeyError 'c1a'.
        """
        return dict.fromkeys(("swaonly", "c4a", "c128a", "c1a", "c2a"), Plans())


def _backend(name: str, base: Any, builder: type) -> type:
    """A backend of vLLM's with that name in its logs, that builder, and no demand on the device."""
    methods: dict[str, Any] = {
        "__module__": __name__,
        "get_name": staticmethod(lambda: name),
        "get_builder_cls": staticmethod(lambda: builder),
        "supports_compute_capability": staticmethod(lambda capability: True),
    }
    return type(name, (base,), methods)


SPARSE_BACKEND = _backend("ANYMLA_SPARSE_DSV4", DeepseekV4SparseMLABackend, CompressedBuilder)
INDEXER_BACKEND = _backend("ANYMLA_INDEXER_DSV4", DeepseekV4IndexerBackend, CompressedBuilder)
WINDOW_BACKEND = _backend("ANYMLA_WINDOW_DSV4", sparse_swa.DeepseekSparseSWABackend, WindowBuilder)

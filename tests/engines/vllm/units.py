"""Parts of the adapters that a CPU never reaches by itself: ``units.py ANSWER.json``."""

from __future__ import annotations

import contextlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import streams
import torch
import vllm.model_executor.kernels.mhc as vllm_streams
from torch import Tensor, nn
from vllm.models.deepseek_v4.nvidia import model as cuda_model
from vllm.models.deepseek_v4.nvidia import mtp as cuda_draft
from vllm.models.deepseek_v4.xpu import model as xpu_model

from anymla.engines.vllm import attention, hyper_connection, indexer, model, report
from anymla.formats.fp8_block import dequantize_fp8_weight, quantize_fp8_weight


def stream_functions() -> dict[str, float]:
    """Largest difference of each function for CUDA from vLLM's in plain torch."""
    made = streams.calls()
    (h, *site), normed = made["mhc_pre_tilelang"]
    (x, _, *gates), _ = made["mhc_post_tilelang"]
    weight = normed["norm_weight"]

    def norm(y: Tensor) -> Tensor:
        wide = y.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (scaled * weight.float()).to(torch.bfloat16)

    def their_pre(h: Tensor) -> tuple[Tensor, ...]:
        post, comb, y = vllm_streams.mhc_pre_torch(h, *site)
        return post, comb, norm(y)

    repeated = x.unsqueeze(1).expand(-1, streams.STREAMS, -1).contiguous()
    expanded = vllm_streams.mhc_post_torch(x, h, *gates)
    theirs = {
        "mhc_pre_tilelang": their_pre(h),
        "mhc_pre_broadcast_tilelang": (repeated, *their_pre(repeated)),
        "mhc_post_tilelang": (expanded,),
        "mhc_fused_post_pre_tilelang": (expanded, *their_pre(expanded)),
    }
    found = {}
    for name, (arguments, keywords) in made.items():
        ours = hyper_connection.FUNCTIONS[name](*arguments, **keywords)
        found[name] = apart(ours if isinstance(ours, tuple) else (ours,), theirs[name])
    return found


def apart(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> float:
    """Largest difference, relative to the largest value of its tensor; infinite for shapes."""
    found = [0.0]
    for mine, other in zip(ours, theirs, strict=True):
        if mine.shape != other.shape or mine.dtype != other.dtype:
            return float("inf")
        size = other.float().abs().max()
        found.append(float((mine.float() - other.float()).abs().max() / size))
    return max(found)


def decoded_weights() -> dict[str, bool]:
    """Whether a projection in each format that vLLM loads is decoded to its exact values."""
    dense = streams.bf16(256, 512)
    result = {"bf16": torch.equal(attention._decoded(layer_of(dense)), dense)}
    for name in ("ue8m0", "fp32"):
        codes, scales = quantize_fp8_weight(dense, name)
        wanted = dequantize_fp8_weight(codes, scales, torch.bfloat16)
        held = scales.view(torch.float8_e8m0fnu) if name == "ue8m0" else scales
        given = layer_of(codes.view(torch.float8_e4m3fn), held)
        result[name] = torch.equal(attention._decoded(given), wanted)
    try:
        attention._decoded(layer_of(torch.zeros(4, 4, dtype=torch.uint8)))
    except NotImplementedError as error:
        result["refused"] = "torch.uint8" in str(error)
    return result


def layer_of(weight: Tensor, scale: Tensor | None = None) -> nn.Module:
    layer = nn.Module()
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if scale is not None:
        layer.weight_scale_inv = nn.Parameter(scale, requires_grad=False)
    return layer


def seams() -> dict[str, bool]:
    """Whether each platform's model gets anymla's class while it is built, and its own back."""
    result = {}
    config = types.SimpleNamespace(kernel_config=types.SimpleNamespace(enable_jit_warmup=True))
    for platform, module, chosen in (
        ("cuda", cuda_model, lambda: cuda_model._select_dsv4_attn_cls(config)),
        ("xpu", xpu_model, lambda: xpu_model.DeepseekV4XPUAttention),
    ):
        before = dict(vars(module))
        model._MACHINE = report.Machine(platform, (8, 0) if platform == "cuda" else None)
        with contextlib.suppress(ZeroDivisionError), model._anymla_layers(config):
            during = chosen() is attention.AnymlaAttention
            quiet = not config.kernel_config.enable_jit_warmup
            raise ZeroDivisionError
        restored = vars(module) == before and config.kernel_config.enable_jit_warmup
        result[platform] = during and quiet and restored
    # the draft model builds its layer by the backbone's class, so that it meets the same seam
    result["draft"] = cuda_draft.DeepseekV4DecoderLayer is cuda_model.DeepseekV4DecoderLayer
    return result


def indexer_of_another_model() -> list[str]:
    """What an indexer runs in a process that serves DeepSeek-V3.2: all of it vLLM's."""
    seen = []
    config = types.SimpleNamespace(hf_config=types.SimpleNamespace(model_type="deepseek_v32"))
    indexer.get_current_vllm_config = lambda: types.SimpleNamespace(model_config=config)

    def construct(self: nn.Module, *args: object, **kwargs: object) -> None:
        nn.Module.__init__(self)
        seen.append("constructor")

    indexer.SparseAttnIndexer.__init__ = construct
    indexer.SparseAttnIndexer.forward = lambda self, *args: seen.append("forward")
    indexer.AnymlaSparseAttnIndexer("cache", 128).forward("x", "q", None, "weights")
    return seen


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    answer: dict[str, Any] = {
        "streams": stream_functions(),
        "weights": decoded_weights(),
        "seams": seams(),
        "another model": indexer_of_another_model(),
    }
    Path(sys.argv[1]).write_text(json.dumps(answer))

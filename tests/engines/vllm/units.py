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
from vllm.models.deepseek_v4 import attention as vllm_attention
from vllm.models.deepseek_v4.nvidia import model as cuda_model
from vllm.models.deepseek_v4.nvidia import mtp as cuda_draft
from vllm.models.deepseek_v4.xpu import model as xpu_model

from anymla.engines.vllm import (
    attention,
    compressor,
    hyper_connection,
    indexer,
    model,
    report,
)
from anymla.engines.vllm.parts import with_parts
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
    """Whether each platform's model gets anymla's classes while it is built, and its own back."""
    result = {}
    config = types.SimpleNamespace(
        kernel_config=types.SimpleNamespace(enable_jit_warmup=True),
        attention_config=types.SimpleNamespace(backend=None),
        speculative_config=None,
        parallel_config=types.SimpleNamespace(world_size_across_dp=1),
        model_config=types.SimpleNamespace(hf_config=types.SimpleNamespace()),
    )
    for platform, module, chosen in (
        ("cuda", cuda_model, lambda: cuda_model._select_dsv4_attn_cls(config)),
        ("xpu", xpu_model, lambda: xpu_model.DeepseekV4XPUAttention),
    ):
        before = dict(vars(module)), dict(vars(vllm_attention))
        model._MACHINE = report.Machine(platform, (8, 0) if platform == "cuda" else None)
        with contextlib.suppress(ZeroDivisionError), model._anymla_layers(config):
            during = issubclass(chosen(), attention.AnymlaAttention)
            during &= vllm_attention.SparseAttnIndexer is indexer.AnymlaSparseAttnIndexer
            quiet = not config.kernel_config.enable_jit_warmup
            raise ZeroDivisionError
        restored = (vars(module), vars(vllm_attention)) == before
        restored &= config.kernel_config.enable_jit_warmup
        result[platform] = during and quiet and restored
    model._PLAN = [report.Part("compressor", True, "asked for")]
    for name, chosen in (
        ("cuda", lambda: cuda_model._select_dsv4_attn_cls(config)),
        ("xpu", lambda: xpu_model.DeepseekV4XPUAttention),
    ):
        model._MACHINE, theirs = report.Machine(name), chosen()
        with model._anymla_layers(config):
            kept = config.kernel_config.enable_jit_warmup
            kept &= vllm_attention.SparseAttnIndexer is indexer.SparseAttnIndexer
            made = chosen()
        result[f"{name}, compressor alone"] = (
            kept
            and made is not theirs
            and issubclass(made, theirs)
            and made.parts == {"compressor"}
        )
    # the draft model builds its layer by the backbone's class, so that it meets the same seam
    result["draft"] = cuda_draft.DeepseekV4DecoderLayer is cuda_model.DeepseekV4DecoderLayer
    return result


class _Base(nn.Module):
    """An attention layer as vLLM's constructor leaves it; ``asks`` as 0.33 does for the indexer."""

    def __init__(self, kind: str, asks: bool, compressor: type) -> None:
        super().__init__()
        self.kv_cache_dtype = kind
        self.compressor, made = bare(compressor), vllm_attention.DeepseekV4Indexer
        self.indexer = bare(self._get_indexer_cls(None) if asks else made)
        asked = self.indexer if asks else types.SimpleNamespace()
        cache = getattr(asked, "_get_cache_cls", lambda: vllm_attention.DeepseekV4IndexerCache)
        pools = getattr(asked, "_get_compressor_cls", lambda: compressor)
        self.indexer.k_cache, self.indexer.compressor = bare(cache()), bare(pools())


class _Asking(_Base):
    def _get_indexer_cls(self, vllm_config: Any) -> type:
        return vllm_attention.DeepseekV4Indexer


def bare(kind: type) -> Any:
    """A module of that class, without its constructor."""
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    return made


def inside_a_layer() -> dict[str, list[bool]]:
    """By the parts replaced: whether the main compressor, the indexer, its cache and its compressor
    are anymla's. The same whether vLLM asks the layer for its indexer (0.33) or not."""
    found: dict[str, list[bool]] = {}
    theirs = vllm_attention.DeepseekCompressor
    for parts in (["attention"], ["indexer"], ["compressor"], ["indexer", "compressor"]):
        for asks, base in ((False, _Base), (True, _Asking)):
            layer = with_parts(base, frozenset(parts))("fp8_ds_mla", asks, theirs)
            inner = layer.indexer
            pairs = [
                (layer.compressor, compressor.AnymlaCompressor),
                (inner, indexer.AnymlaIndexer),
                (inner.k_cache, indexer.AnymlaIndexerCache),
                (inner.compressor, compressor.AnymlaCompressor),
            ]
            ours = [isinstance(module, kind) for module, kind in pairs]
            if asks and found["+".join(parts)] != ours:
                raise AssertionError((parts, ours))
            found["+".join(parts)] = ours
    return found


def other_rows() -> str:
    """What is said of a compressor that would write into a cache of other rows."""
    try:
        with_parts(_Base, frozenset({"compressor"}))("bfloat16", False, nn.Module)
    except ValueError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    answer: dict[str, Any] = {
        "streams": stream_functions(),
        "weights": decoded_weights(),
        "seams": seams(),
        "inside": inside_a_layer(),
        "other rows": other_rows(),
    }
    Path(sys.argv[1]).write_text(json.dumps(answer))

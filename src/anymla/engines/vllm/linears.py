"""vLLM's FP8 linear layers of DeepSeek-V4, multiplied by anymla's kernels for few tokens.

These are the layers of attention and of the shared expert. Weights stay where vLLM loaded them, so
that its own kernels multiply them for more tokens. The same holds for the weight of the output
projection by groups of heads (``wo_a``), which vLLM does not run as a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
from vllm.models.deepseek_v4.attention import DeepseekV4Attention
from vllm.models.deepseek_v4.nvidia.model import DeepseekV4DecoderLayer, DeepseekV4MLP
from vllm.models.deepseek_v4.nvidia.ops.o_proj import compute_fp8_einsum_recipe
from vllm.utils.deep_gemm import fp8_einsum, is_deep_gemm_supported

from anymla.engines.vllm import codes
from anymla.formats.fp8_block import FP8_BLOCK
from anymla.formats.quantized_rows import QuantizedRows
from anymla.formats.ue8m0 import decode_ue8m0
from anymla.layers.codes import as_kwargs
from anymla.layers.linear import Linear, PackedWeight
from anymla.ops.linear import grouped_output_projection_fp8, inverse_rope_fp8_quant
from anymla.ops.moe import swiglu
from anymla.ops.norm_rope import fused_q_kv_rmsnorm

# DeepGEMM's recipe: a scale for each row and 128 channels of heads, and for 128 x 128 of a weight.
_EINSUM = (1, FP8_BLOCK, FP8_BLOCK)


def install(model: nn.Module) -> None:
    """Replace the classes of a model's layers, before its weights are loaded."""
    for layer in model.modules():
        if isinstance(layer, DeepseekV4DecoderLayer):
            _install_attention(layer.attn, layer.hc_attn_fn)
            _install_shared_expert(layer.ffn.shared_experts, layer.hc_ffn_fn)


def _install_attention(attention: Any, site: nn.Parameter) -> None:
    theirs = type(attention)
    attention.__class__ = type(theirs.__name__, (Fp8Attention, theirs), {})
    attention.prepare_wo_a = attention.wo_a.quant_method.process_weights_after_loading
    attention.wo_a.quant_method.process_weights_after_loading = attention._hold_wo_a
    _exchange(attention.fused_wqa_wkv, site)
    _exchange(attention.wq_b)
    _exchange(attention.wo_b)
    if attention.indexer is not None:
        _exchange(attention.indexer.wq_b)


def _install_shared_expert(expert: Any, site: nn.Parameter) -> None:
    if type(expert) is DeepseekV4MLP and hasattr(expert.act_fn, "swiglu_limit"):
        expert.__class__ = SharedExpert
        _exchange(expert.gate_up_proj, site)
        _exchange(expert.down_proj)


def _exchange(layer: Any, site: nn.Parameter | None = None) -> None:
    """Make a linear layer multiply by anymla's kernels if its weight is FP8 in blocks.

    Args:
        layer: linear layer of vLLM.
        site: ``fn`` of the hyper-connection whose result the layer reads, or None.
    """
    method = layer.quant_method
    if type(method) is Fp8LinearMethod and method.weight_block_size == [FP8_BLOCK, FP8_BLOCK]:
        method.__class__ = Fp8Linear
        method.site, method.held = site, None


class Fp8Linear(Fp8LinearMethod):
    """Multiplication of one FP8 layer; never constructed, a method's class is replaced by it.

    Attributes:
        site: ``fn`` of the hyper-connection before the layer, see ``_exchange``.
        held: weight in anymla's form; None if vLLM has packed it for its own kernel.
    """

    backend: str | None = None
    site: nn.Parameter | None = None
    held: Linear | None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Let vLLM prepare its kernel, and check that it left the weight unchanged."""
        weight, scale = layer.weight.data, layer.weight_scale_inv.data.clone()
        super().process_weights_after_loading(layer)
        self.held = None
        if _is_unchanged(layer, weight, scale):
            packed = PackedWeight("fp8", weight.view(torch.uint8), _bytes_or_float(scale))
            self.held = Linear(packed, quantize_activations=True, backend=self.backend)
            if self.site is not None:
                codes.mark(self.site)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        tokens = x.numel() // x.shape[-1]
        if self.held is None or bias is not None or not 0 < tokens <= codes.MOST_CODED_TOKENS:
            return super().apply(layer, x, bias)
        return self.held(x, codes.attached(x))


def _is_unchanged(layer: Any, weight: Tensor, scale: Tensor) -> bool:
    """True if a layer's codes and scales are those that were loaded."""
    now = layer.weight.data
    same = now.dtype == weight.dtype == torch.float8_e4m3fn and now.shape == weight.shape
    if not same or now.data_ptr() != weight.data_ptr():
        return False
    # If scales are powers of two already, no kernel of vLLM changes the codes.
    if scale.dtype == torch.float8_e8m0fnu:
        return True
    prepared = layer.weight_scale_inv.data
    return prepared.dtype == scale.dtype and torch.equal(prepared.flatten(), scale.flatten())


def _bytes_or_float(scale: Tensor) -> Tensor:
    return scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale


class SharedExpert(DeepseekV4MLP):
    """The expert that every token passes through; never constructed, its class is assigned."""

    backend: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, hidden] to [T, hidden]; for few tokens SwiGLU also quantises its result."""
        if len(x) > codes.MOST_CODED_TOKENS:
            return super().forward(x)
        gate_up, _ = self.gate_up_proj(x)
        gate, up = gate_up.chunk(2, dim=-1)
        rows = QuantizedRows.empty(len(x), gate.shape[-1], x.device)
        inner = swiglu(gate, up, self.act_fn.swiglu_limit, backend=self.backend, **as_kwargs(rows))
        out, _ = self.down_proj(codes.attach(inner, rows))
        return out


class Fp8Attention(DeepseekV4Attention):
    """Work between attention's FP8 products; a base class before vLLM's or anymla's attention.

    Attributes:
        prepare_wo_a: vLLM's function that would process the grouped weight.
        wo_a_codes: uint8 e4m3 codes [G, rank, J]; None if ``wo_a`` is not FP8.
        wo_a_scales: float32 [G, rank / 128, J / 128] scales of the codes.
    """

    backend: str | None = None
    prepare_wo_a: Callable[[Any], None]
    wo_a_codes: Tensor | None = None
    wo_a_scales: Tensor

    def _hold_wo_a(self, layer: Any) -> None:
        """Keep the grouped weight as loaded; it never runs as a linear layer of vLLM."""
        weight, scale = layer.weight.data, getattr(layer, "weight_scale_inv", None)
        blocks = self.o_lora_rank % FP8_BLOCK == weight.shape[1] % FP8_BLOCK == 0
        if weight.dtype != torch.float8_e4m3fn or scale is None or not blocks:
            self.prepare_wo_a(layer)
            return
        factors = _bytes_or_float(scale.data)
        factors = decode_ue8m0(factors, torch.float32) if factors.dtype == torch.uint8 else factors
        groups = self.n_local_groups
        self.wo_a_codes = weight.view(torch.uint8).view(groups, self.o_lora_rank, -1)
        self.wo_a_scales = factors.view(groups, self.o_lora_rank // FP8_BLOCK, -1)

    def _split_qkv_and_norm(self, qr_kv: Tensor) -> tuple[Tensor, None, Tensor]:
        """Also quantise the query latent, which one or two products read."""
        if len(qr_kv) > codes.MOST_CODED_TOKENS:
            return super()._split_qkv_and_norm(qr_kv)
        qr, kv = qr_kv.split([self.q_lora_rank, self.head_dim], dim=-1)
        rows = QuantizedRows.empty(len(qr), self.q_lora_rank, qr.device)
        weights = self.q_norm.weight.data, self.kv_norm.weight.data
        qr, kv = fused_q_kv_rmsnorm(
            qr, kv, *weights, self.eps, backend=self.backend, **as_kwargs(rows)
        )
        return codes.attach(qr, rows), None, kv

    def _o_proj(self, o: Tensor, positions: Tensor) -> Tensor:
        if self.wo_a_codes is None:
            return super()._o_proj(o, positions)
        table, groups = self.rotary_emb.cos_sin_cache, self.n_local_groups
        heads, scales = inverse_rope_fp8_quant(
            o, positions, table, n_groups=groups, backend=self.backend
        )
        if len(o) > codes.MOST_CODED_TOKENS and _has_einsum():
            # H200, V4-Flash, against vLLM's whole projection: 256 tokens 28.7 us against 37.1,
            # 2,048 171 against 260. With anymla's kernels alone it takes 79.9 and 214, and for 128
            # tokens 21.7 against 20.2.
            z = o.new_empty((len(o), groups, self.o_lora_rank))
            weight = self.wo_a_codes.view(torch.float8_e4m3fn), self.wo_a_scales
            fp8_einsum("bhr,hdr->bhd", (heads, scales), weight, z, recipe=_EINSUM)
            return self.wo_b(z.flatten(1))
        z = grouped_output_projection_fp8(
            heads, scales, self.wo_a_codes, self.wo_a_scales, backend=self.backend
        )
        return self.wo_b(z)


def _has_einsum() -> bool:
    """True if DeepGEMM can multiply groups with the scales kept here."""
    return is_deep_gemm_supported() and compute_fp8_einsum_recipe()[0] == _EINSUM

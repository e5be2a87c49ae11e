"""Linear layers in torch: weights are decoded in blocks of rows, and each block is multiplied.

The output projection is one batched product over the groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK, dequantize_fp8_rows, dequantize_fp8_weight
from anymla.formats.quantized_rows import QuantizedRows
from anymla.ops import _gemm
from anymla.ops._torch_norm_rope import rope
from anymla.ops.linear.config import OUT_DTYPES


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Backend of ``interface.linear`` in torch; see its contract."""
    return _gemm.gemm(x, weight)


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """Backend of ``interface.linear_float32`` in torch; see its contract."""
    narrow = x.dtype == weight.dtype and x.dtype.itemsize == 2
    if narrow and x.is_cuda and torch.version.hip is None:
        rows = x.reshape(-1, x.shape[-1])
        out = torch.mm(rows, weight.t(), out_dtype=torch.float32)
        return out.view(*x.shape[:-1], -1)
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    return _gemm.gemm(x.to(wide), weight.to(wide))


def fp8_block_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    quantize_activations: bool = False,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
    quant_block: int = FP8_BLOCK,
) -> Tensor:
    """Backend of ``interface.fp8_block_linear`` in torch; see its contract."""
    coded = None
    if codes is not None and code_scales is not None:
        coded = QuantizedRows(codes, code_scales)
    return _gemm.fp8_gemm(
        x, weight, scale, quantize=quantize_activations, coded=coded, block=quant_block
    )


def mxfp4_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    quantize_activations: bool = False,
    quant_block: int = FP8_BLOCK,
) -> Tensor:
    """Backend of ``interface.mxfp4_linear`` in torch; see its contract."""
    return _gemm.mxfp4_gemm(x, weight, scale, quantize=quantize_activations, block=quant_block)


def nvfp4_linear(x: Tensor, weight: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """Backend of ``interface.nvfp4_linear`` in torch; see its contract."""
    return _gemm.nvfp4_gemm(x, weight, scale, global_scale)


def grouped_output_projection(
    o: Tensor, positions: Tensor, cos_sin_cache: Tensor, wo_a: Tensor
) -> Tensor:
    """Backend of ``interface.grouped_output_projection`` in torch; see its contract."""
    rotated = rope(o, positions, cos_sin_cache, inverse=True)
    return _by_group(rotated.view(o.shape[0], wo_a.shape[0], wo_a.shape[2]), wo_a)


def grouped_output_projection_fp8(
    o: Tensor, o_scale: Tensor, wo_a: Tensor, wo_a_scale: Tensor, *, out_dtype: str = "bf16"
) -> Tensor:
    """Backend of ``interface.grouped_output_projection_fp8`` in torch; see its contract."""
    dtype = OUT_DTYPES[out_dtype]
    # Power-of-two scales keep both operands exact in bfloat16; float32 scales need float32
    # products.
    exact = wo_a_scale.dtype == torch.uint8 and o.device.type == "cpu" and out_dtype == "bf16"
    operand = torch.bfloat16 if exact else torch.promote_types(dtype, torch.float32)
    heads = dequantize_fp8_rows(o.view(torch.uint8), o_scale, operand)
    groups, rank, width = wo_a.shape
    weight = dequantize_fp8_weight(wo_a.flatten(0, 1), wo_a_scale.flatten(0, 1), operand)
    return _by_group(heads, weight.view(groups, rank, width)).to(dtype)


def _by_group(heads: Tensor, weight: Tensor) -> Tensor:
    """Multiply [T, G, J] by [G, rank, J] to [T, G * rank]."""
    if len(heads) == 1 and _gemm.is_host_row(heads.flatten()):
        pairs = zip(heads.unbind(1), weight.unbind(0), strict=True)
        return torch.cat(_gemm.gemv_each(list(pairs)), -1)
    return torch.bmm(heads.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1).flatten(1)

"""The output projection in torch: one batched product over the groups."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.fp8_block import dequantize_fp8_rows, dequantize_fp8_weight
from anymla.ops._gemm import gemv_each, is_host_row
from anymla.ops._torch_norm_rope import rope
from anymla.ops.output_projection.dtypes import OUT_DTYPES


def grouped_output_projection(
    o: Tensor, positions: Tensor, cos_sin_cache: Tensor, wo_a: Tensor
) -> Tensor:
    """See ``interface.grouped_output_projection``."""
    rotated = rope(o, positions, cos_sin_cache, inverse=True)
    return _by_group(rotated.view(o.shape[0], wo_a.shape[0], wo_a.shape[2]), wo_a)


def grouped_output_projection_fp8(
    o: Tensor, o_scale: Tensor, wo_a: Tensor, wo_a_scale: Tensor, *, out_dtype: str = "bf16"
) -> Tensor:
    """See ``interface.grouped_output_projection_fp8``."""
    dtype = OUT_DTYPES[out_dtype]
    # Powers of two keep both operands exact in bfloat16; float32 scales need float32 products.
    exact = wo_a_scale.dtype == torch.uint8 and o.device.type == "cpu" and out_dtype == "bf16"
    operand = torch.bfloat16 if exact else torch.promote_types(dtype, torch.float32)
    heads = dequantize_fp8_rows(o.view(torch.uint8), o_scale, operand)
    groups, rank, width = wo_a.shape
    weight = dequantize_fp8_weight(wo_a.flatten(0, 1), wo_a_scale.flatten(0, 1), operand)
    return _by_group(heads, weight.view(groups, rank, width)).to(dtype)


def _by_group(heads: Tensor, weight: Tensor) -> Tensor:
    """Multiply [T, G, J] by [G, rank, J] to [T, G * rank]."""
    if len(heads) == 1 and is_host_row(heads.flatten()):
        pairs = zip(heads.unbind(1), weight.unbind(0), strict=True)
        return torch.cat(gemv_each(list(pairs)), -1)
    return torch.bmm(heads.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1).flatten(1)

"""The mathematics of the output projection."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.fp8_block import dequantize_fp8_rows, dequantize_fp8_weight
from anymla.ops._reference import rope
from anymla.ops.output_projection.dtypes import OUT_DTYPES


def grouped_output_projection(
    o: Tensor, positions: Tensor, cos_sin_cache: Tensor, wo_a: Tensor
) -> Tensor:
    """See ``interface.grouped_output_projection``."""
    wide = torch.promote_types(o.dtype, torch.float32)
    rotated = rope(o, positions, cos_sin_cache, inverse=True)
    groups = rotated.to(wide).reshape(len(o), len(wo_a), wo_a.shape[2])
    return torch.einsum("tgj,grj->tgr", groups, wo_a.to(wide)).flatten(1).to(o.dtype)


def grouped_output_projection_fp8(
    o: Tensor, o_scale: Tensor, wo_a: Tensor, wo_a_scale: Tensor, *, out_dtype: str = "bf16"
) -> Tensor:
    """See ``interface.grouped_output_projection_fp8``."""
    dtype = OUT_DTYPES[out_dtype]
    wide = torch.promote_types(dtype, torch.float32)
    heads = dequantize_fp8_rows(o.view(torch.uint8), o_scale, wide)
    weight = torch.stack(
        [
            dequantize_fp8_weight(codes, scale, wide)
            for codes, scale in zip(wo_a, wo_a_scale, strict=True)
        ]
    )
    return torch.einsum("tgj,grj->tgr", heads, weight).flatten(1).to(dtype)

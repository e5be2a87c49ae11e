"""Reference of the linear layers and of attention's output projection, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.fp8_block import (
    FP8_BLOCK,
    dequantize_fp8_rows,
    dequantize_fp8_weight,
    quantize_fp8_rows,
)
from anymla.formats.mxfp4 import dequantize_mxfp4
from anymla.formats.nvfp4 import dequantize_nvfp4
from anymla.formats.quantized_rows import QuantizedRows
from anymla.ops._check import wide_dtype
from anymla.ops._reference import rope
from anymla.ops.linear.config import OUT_DTYPES


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight^T``; see ``interface.linear``."""
    wide = wide_dtype(x.dtype)
    return (x.to(wide) @ weight.to(wide).T).to(x.dtype)


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight^T`` in float32 or wider; see ``interface.linear_float32``."""
    wide = wide_dtype(x.dtype, weight.dtype)
    return x.to(wide) @ weight.to(wide).T


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
    """Return ``x @ (codes * scale)^T``; see ``interface.fp8_block_linear``."""
    dense = dequantize_fp8_weight(weight, scale, wide_dtype(x.dtype), quant_block)
    if codes is None or code_scales is None:
        return _product(x, dense, quantize_activations, quant_block)
    rows = QuantizedRows(codes, code_scales).decoded(x[..., 0].numel(), dense.dtype)
    return _product(rows.view(x.shape), dense, False).to(x.dtype)


def mxfp4_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    quantize_activations: bool = False,
    quant_block: int = FP8_BLOCK,
) -> Tensor:
    """Return ``x @ (codes * scale)^T``; see ``interface.mxfp4_linear``."""
    dense = dequantize_mxfp4(weight, scale, wide_dtype(x.dtype))
    return _product(x, dense, quantize_activations, quant_block)


def nvfp4_linear(x: Tensor, weight: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """Return ``x @ (codes * block scale * global scale)^T``; see ``interface.nvfp4_linear``."""
    return _product(x, dequantize_nvfp4(weight, scale, global_scale, wide_dtype(x.dtype)), False)


def grouped_output_projection(
    o: Tensor, positions: Tensor, cos_sin_cache: Tensor, wo_a: Tensor
) -> Tensor:
    """Reference of ``interface.grouped_output_projection``; see its contract."""
    wide = wide_dtype(o.dtype)
    rotated = rope(o, positions, cos_sin_cache, inverse=True)
    groups = rotated.to(wide).reshape(len(o), len(wo_a), wo_a.shape[2])
    return torch.einsum("tgj,grj->tgr", groups, wo_a.to(wide)).flatten(1).to(o.dtype)


def grouped_output_projection_fp8(
    o: Tensor, o_scale: Tensor, wo_a: Tensor, wo_a_scale: Tensor, *, out_dtype: str = "bf16"
) -> Tensor:
    """Reference of ``interface.grouped_output_projection_fp8``; see its contract."""
    dtype = OUT_DTYPES[out_dtype]
    wide = wide_dtype(dtype)
    heads = dequantize_fp8_rows(o.view(torch.uint8), o_scale, wide)
    weight = torch.stack(
        [
            dequantize_fp8_weight(codes, scale, wide)
            for codes, scale in zip(wo_a, wo_a_scale, strict=True)
        ]
    )
    return torch.einsum("tgj,grj->tgr", heads, weight).flatten(1).to(dtype)


def _product(x: Tensor, dense: Tensor, quantize: bool, block: int = FP8_BLOCK) -> Tensor:
    wide = x.to(dense.dtype)
    if quantize:
        wide = dequantize_fp8_rows(*quantize_fp8_rows(x, block), dense.dtype, block)
    return (wide @ dense.T).to(x.dtype)

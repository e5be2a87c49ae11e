"""Linear layers in torch: the weight is decoded in blocks of rows, each multiplied at once."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.nvfp4 import dequantize_nvfp4
from anymla.formats.quantized_rows import QuantizedRows
from anymla.ops import _gemm


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """See ``interface.linear``."""
    return _gemm.gemm(x, weight)


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """See ``interface.linear_float32``."""
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
) -> Tensor:
    """See ``interface.fp8_block_linear``."""
    coded = None
    if codes is not None and code_scales is not None:
        coded = QuantizedRows(codes, code_scales)
    return _gemm.fp8_gemm(x, weight, scale, quantize=quantize_activations, coded=coded)


def mxfp4_linear(
    x: Tensor, weight: Tensor, scale: Tensor, *, quantize_activations: bool = False
) -> Tensor:
    """See ``interface.mxfp4_linear``."""
    return _gemm.mxfp4_gemm(x, weight, scale, quantize=quantize_activations)


def nvfp4_linear(x: Tensor, weight: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """See ``interface.nvfp4_linear``."""
    dtype = torch.promote_types(x.dtype, torch.float32)

    def decode(start: int, stop: int) -> Tensor:
        return dequantize_nvfp4(weight[start:stop], scale[start:stop], global_scale, dtype)

    return _gemm.decoded_gemm(x.to(dtype), decode, len(weight), x.dtype)

"""Linear layers in torch: the weight is decoded in blocks of rows, each multiplied at once.

A decoded value is an e4m3 or e2m1 code times a power of two, which bfloat16 holds exactly wherever
it is a normal number, so bfloat16 activations multiply bfloat16 weights and only the result is
rounded. Scales in float32 need float32 products.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK, dequantize_fp8_weight
from anymla.formats.mxfp4 import dequantize_mxfp4
from anymla.formats.nvfp4 import dequantize_nvfp4
from anymla.formats.quantized_rows import QuantizedRows
from anymla.ops.linear.torch_activations import rounded_to_fp8
from anymla.ops.linear.torch_product import product

# Decoded elements alive at a time: 8 MiB of bfloat16 or 16 MiB of float32, whatever the weight.
_DECODED_ELEMENTS = 1 << 22

# ue8m0 bytes whose product with any e4m3 or e2m1 code is a normal bfloat16 number, or zero.
_EXACT_BYTES = (32, 240)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """See ``interface.linear``."""
    return product(x, weight)


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """See ``interface.linear_float32``."""
    narrow = x.dtype == weight.dtype and x.dtype.itemsize == 2
    if narrow and x.is_cuda and torch.version.hip is None:
        rows = x.reshape(-1, x.shape[-1])
        out = torch.mm(rows, weight.t(), out_dtype=torch.float32)
        return out.view(*x.shape[:-1], -1)
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    return product(x.to(wide), weight.to(wide))


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
    given, rows, columns = x, *weight.shape
    if codes is not None and code_scales is not None:
        given = QuantizedRows(codes, code_scales).decoded(x[..., 0].numel()).view(x.shape)
    dtype = _product_dtype(x, scale)
    step = max(1, _DECODED_ELEMENTS // max(1, columns * FP8_BLOCK)) * FP8_BLOCK

    def decode(start: int) -> Tensor:
        scales = scale[start // FP8_BLOCK : -(-min(start + step, rows) // FP8_BLOCK)]
        return dequantize_fp8_weight(weight[start : start + step], scales, dtype)

    quantize = quantize_activations and codes is None
    return _product(given, decode, rows, step, dtype, quantize).to(x.dtype)


def mxfp4_linear(
    x: Tensor, weight: Tensor, scale: Tensor, *, quantize_activations: bool = False
) -> Tensor:
    """See ``interface.mxfp4_linear``."""
    rows = weight.shape[0]
    dtype = _product_dtype(x, scale)
    step = max(1, _DECODED_ELEMENTS // max(1, 2 * weight.shape[1]))

    def decode(start: int) -> Tensor:
        stop = start + step
        return dequantize_mxfp4(weight[start:stop], scale[start:stop], dtype)

    return _product(x, decode, rows, step, dtype, quantize_activations)


def nvfp4_linear(x: Tensor, weight: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """See ``interface.nvfp4_linear``."""
    rows = weight.shape[0]
    dtype = torch.promote_types(x.dtype, torch.float32)
    step = max(1, _DECODED_ELEMENTS // max(1, 2 * weight.shape[1]))

    def decode(start: int) -> Tensor:
        stop = start + step
        return dequantize_nvfp4(weight[start:stop], scale[start:stop], global_scale, dtype)

    return _product(x, decode, rows, step, dtype, False)


def _product(
    x: Tensor,
    decode: Callable[[int], Tensor],
    rows: int,
    step: int,
    dtype: torch.dtype,
    quantize: bool,
) -> Tensor:
    operand = rounded_to_fp8(x, dtype) if quantize else x.to(dtype)
    if rows <= step:
        return product(operand, decode(0)).to(x.dtype)
    parts = [product(operand, decode(start)).to(x.dtype) for start in range(0, rows, step)]
    return torch.cat(parts, -1)


def _product_dtype(x: Tensor, scale: Tensor) -> torch.dtype:
    """Dtype in which decoded weights, and activations rounded to FP8, are exact."""
    if x.dtype != torch.bfloat16 or scale.dtype != torch.uint8 or x.device.type != "cpu":
        return torch.promote_types(x.dtype, torch.float32)
    if not scale.numel():
        return x.dtype
    low, high = torch.aminmax(scale)
    exact = _EXACT_BYTES[0] <= int(low) and int(high) <= _EXACT_BYTES[1]
    return x.dtype if exact else torch.float32

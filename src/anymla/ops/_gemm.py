"""GEMMs ``x @ weight^T`` in torch, the weight plain or as stored: for linear layers and experts.

A decoded value is an e4m3 or e2m1 code times a power of two. bfloat16 holds it exactly wherever it
is a normal number, so bfloat16 activations multiply bfloat16 weights, and only the result is
rounded. Scales in float32 need float32 products.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.backends import mkldnn
from torch.nn import functional

from anymla.formats.e4m3 import E4M3_MAX
from anymla.formats.fp8_block import (
    ACTIVATION_AMAX_FLOOR,
    FP8_BLOCK,
    dequantize_fp8_rows,
    dequantize_fp8_weight,
    quantize_fp8_rows,
)
from anymla.formats.mxfp4 import dequantize_mxfp4
from anymla.formats.nvfp4 import dequantize_nvfp4
from anymla.formats.quantized_rows import QuantizedRows
from anymla.formats.ue8m0 import scale_exponent
from anymla.ops import _host

# Largest number of decoded elements alive at a time: 8 MiB of bfloat16 or 16 MiB of float32 for any
# weight.
_DECODED_ELEMENTS = 1 << 22
# ue8m0 bytes whose product with any e4m3 or e2m1 code is a normal bfloat16 number, or zero.
EXACT_BYTES = (32, 240)

_SMALLEST_NORMAL = 2.0**-6
# Adding and then subtracting this rounds a float32 to steps of 2^-9, e4m3's subnormal step.
_SUBNORMAL_MAGIC = 1.5 * 2.0**14
_DROPPED_BITS = 23 - 3
_FEW_BLOCKS = 32  # up to here scales are cheaper as Python numbers than as tensors


def gemm(x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``x @ weight^T``, accumulated in float32 or wider and rounded once."""
    return gemv_each([(x, weight)])[0] if is_host_row(x) else functional.linear(x, weight)


def gemv_each(pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Compute ``gemm`` of each pair (x, weight); each x is one row as by ``is_host_row``."""
    if not mkldnn.enabled:
        return [functional.linear(x, weight) for x, weight in pairs]
    mkldnn.enabled = False  # type: ignore[assignment]  # a property of the module
    try:
        return [functional.linear(x, weight) for x, weight in pairs]
    finally:
        mkldnn.enabled = True  # type: ignore[assignment]


def is_host_row(x: Tensor) -> bool:
    """Return True if x [..., K] is one bfloat16 row on the host, where call overhead dominates."""
    return x.dtype == torch.bfloat16 and x.numel() == x.shape[-1] and _host.on_host(x)


def fp8_gemm(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    quantize: bool = False,
    coded: QuantizedRows | None = None,
    block: int = FP8_BLOCK,
) -> Tensor:
    """Compute ``x @ decoded^T`` of an e4m3 weight [N, K] with a scale per ``block`` x ``block``."""
    dtype = _operand_dtype(x, scale)
    if coded is not None:
        operand = coded.decoded(x[..., 0].numel()).view(x.shape).to(dtype)
    else:
        operand = rounded_to_fp8(x, dtype, block) if quantize else x.to(dtype)

    def decode(start: int, stop: int) -> Tensor:
        blocks = slice(start // block, -(-stop // block))
        return dequantize_fp8_weight(weight[start:stop], scale[blocks], dtype, block)

    return decoded_gemm(operand, decode, len(weight), x.dtype, block)


def mxfp4_gemm(
    x: Tensor, weight: Tensor, scale: Tensor, *, quantize: bool = False, block: int = FP8_BLOCK
) -> Tensor:
    """Compute ``x @ decoded^T`` of packed e2m1 [N, K/2] with ue8m0 scales [N, K/32].

    See ``fp8_gemm``.
    """
    dtype = _operand_dtype(x, scale)
    operand = rounded_to_fp8(x, dtype, block) if quantize else x.to(dtype)

    def decode(start: int, stop: int) -> Tensor:
        return dequantize_mxfp4(weight[start:stop], scale[start:stop], dtype)

    return decoded_gemm(operand, decode, len(weight), x.dtype)


def nvfp4_gemm(x: Tensor, weight: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """Compute ``x @ decoded^T`` of packed e2m1 [N, K/2], e4m3 scales [N, K/16], one float32 [1]."""
    dtype = torch.promote_types(x.dtype, torch.float32)

    def decode(start: int, stop: int) -> Tensor:
        return dequantize_nvfp4(weight[start:stop], scale[start:stop], global_scale, dtype)

    return decoded_gemm(x.to(dtype), decode, len(weight), x.dtype)


def decoded_gemm(
    operand: Tensor,
    decode: Callable[[int, int], Tensor],
    rows: int,
    out_dtype: torch.dtype,
    row_step: int = 1,
) -> Tensor:
    """Multiply by a weight that is decoded one block of rows at a time.

    Args:
        operand: activations in the dtype to multiply in, [..., K].
        decode: function that decodes rows ``start`` to ``stop`` of the weight to the operand's
            dtype.
        rows: number of rows N of the weight.
        out_dtype: dtype of the result.
        row_step: number that a block's row count must be a multiple of.

    Returns:
        Products [..., N] of ``out_dtype``.
    """
    step = max(1, _DECODED_ELEMENTS // max(1, operand.shape[-1] * row_step)) * row_step
    if rows <= step:
        return gemm(operand, decode(0, rows)).to(out_dtype)
    starts = range(0, rows, step)
    parts = [gemm(operand, decode(at, min(at + step, rows))).to(out_dtype) for at in starts]
    return torch.cat(parts, -1)


def _operand_dtype(x: Tensor, scale: Tensor) -> torch.dtype:
    """Return a dtype that holds decoded weights and activations rounded to FP8 exactly."""
    if x.dtype == torch.bfloat16 and x.device.type == "cpu" and exact_in_bf16(scale):
        return x.dtype
    return torch.promote_types(x.dtype, torch.float32)


def exact_in_bf16(scale: Tensor) -> bool:
    """Return True if every code times every one of these scales is zero or a normal bfloat16.

    Reads the values, so it synchronises with the device.
    """
    if scale.dtype != torch.uint8:
        return False
    if not scale.numel():
        return True
    low, high = torch.aminmax(scale)
    return EXACT_BYTES[0] <= int(low) and int(high) <= EXACT_BYTES[1]


def rounded_to_fp8(x: Tensor, dtype: torch.dtype, block: int = FP8_BLOCK) -> Tensor:
    """Quantise in blocks of channels and decode again, without going through codes.

    Equal to quantising with ``quantize_fp8_rows`` and decoding the codes, and several times faster
    on a CPU: rounding to e4m3 drops 20 mantissa bits of a float32, which is done on its integer
    bits.

    Args:
        x: values to round, [..., K] floating point.
        dtype: dtype of the result; bfloat16 holds every rounded value exactly.
        block: number of channels that share a scale.

    Returns:
        Rounded values, [..., K] of ``dtype``.
    """
    if x.dtype == torch.float64:
        return dequantize_fp8_rows(*quantize_fp8_rows(x, block), dtype, block)
    width = x.shape[-1]
    short = -width % block
    wide = functional.pad(x.float(), (0, short)) if short else x.float()
    blocks = wide.unflatten(-1, (-1, block))
    if 0 < blocks.numel() <= _FEW_BLOCKS * block and _host.on_host(x):
        rounded = _few_blocks_rounded(blocks)
        if rounded is not None:
            return rounded.view(*x.shape[:-1], -1)[..., :width].to(dtype)
    exponent = scale_exponent(blocks.abs().amax(-1, keepdim=True), E4M3_MAX, ACTIVATION_AMAX_FLOOR)
    one = torch.ones_like(exponent, dtype=torch.float32)
    scaled = (blocks * torch.ldexp(one, -exponent)).clamp_(-E4M3_MAX, E4M3_MAX)
    bits = scaled.view(torch.int32)
    half = (1 << (_DROPPED_BITS - 1)) - 1
    odd = (bits >> _DROPPED_BITS).bitwise_and_(1)
    normal = odd.add_(bits).add_(half).bitwise_and_(-(1 << _DROPPED_BITS)).view(torch.float32)
    subnormal = (scaled + _SUBNORMAL_MAGIC).sub_(_SUBNORMAL_MAGIC)
    rounded = torch.where(scaled.abs() < _SMALLEST_NORMAL, subnormal, normal)
    decoded = rounded.mul_(torch.ldexp(one, exponent)).flatten(-2)
    return decoded[..., :width].to(dtype)


def _few_blocks_rounded(blocks: Tensor) -> Tensor | None:
    """Round float32 blocks [..., block] with scales found in Python; None if not all are finite."""
    flat = blocks.flatten(0, -2)
    largest = flat.abs().amax(-1).clamp_(min=ACTIVATION_AMAX_FLOOR).mul_(1.0 / E4M3_MAX).tolist()
    if not math.isfinite(sum(largest)):
        return None
    scales = []
    for ratio in largest:
        mantissa, exponent = math.frexp(ratio)
        # ceil(log2(ratio)): frexp's mantissa lies in [0.5, 1), and is 0.5 at powers of two.
        scales.append(math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent))
    scale = torch.tensor(scales).unsqueeze_(1)
    codes = (flat / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.to(torch.float32).mul_(scale)

"""Activations rounded to what FP8 kernels would see of them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from anymla.formats.e4m3 import E4M3_MAX
from anymla.formats.fp8_block import (
    ACTIVATION_AMAX_FLOOR,
    FP8_BLOCK,
    dequantize_fp8_rows,
    quantize_fp8_rows,
)
from anymla.formats.ue8m0 import scale_exponent

_SMALLEST_NORMAL = 2.0**-6
# Adding and subtracting it rounds a float32 to steps of 2^-9, e4m3's below its smallest normal.
_SUBNORMAL_MAGIC = 1.5 * 2.0**14
_DROPPED_BITS = 23 - 3


def rounded_to_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Quantise in runs of 128 channels and decode again, without going through codes.

    Equal to ``dequantize_fp8_rows(*quantize_fp8_rows(x), dtype)``, several times faster on a CPU:
    rounding to e4m3 is rounding away 20 mantissa bits of a float32, done on its integer bits.

    Args:
        x: [..., K] floating point.
        dtype: of the result; bfloat16 holds every rounded value exactly.

    Returns:
        [..., K] of ``dtype``.
    """
    if x.dtype == torch.float64:
        return dequantize_fp8_rows(*quantize_fp8_rows(x), dtype)
    width = x.shape[-1]
    short = -width % FP8_BLOCK
    wide = functional.pad(x.float(), (0, short)) if short else x.float()
    runs = wide.unflatten(-1, (-1, FP8_BLOCK))
    exponent = scale_exponent(runs.abs().amax(-1, keepdim=True), E4M3_MAX, ACTIVATION_AMAX_FLOOR)
    one = torch.ones_like(exponent, dtype=torch.float32)
    scaled = (runs * torch.ldexp(one, -exponent)).clamp_(-E4M3_MAX, E4M3_MAX)
    bits = scaled.view(torch.int32)
    half = (1 << (_DROPPED_BITS - 1)) - 1
    odd = (bits >> _DROPPED_BITS).bitwise_and_(1)
    normal = odd.add_(bits).add_(half).bitwise_and_(-(1 << _DROPPED_BITS)).view(torch.float32)
    subnormal = (scaled + _SUBNORMAL_MAGIC).sub_(_SUBNORMAL_MAGIC)
    rounded = torch.where(scaled.abs() < _SMALLEST_NORMAL, subnormal, normal)
    decoded = rounded.mul_(torch.ldexp(one, exponent)).flatten(-2)
    return decoded[..., :width].to(dtype)

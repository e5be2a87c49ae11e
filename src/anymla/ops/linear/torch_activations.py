"""Activations rounded to what FP8 kernels would see of them."""

from __future__ import annotations

import math

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
from anymla.ops import _host

_SMALLEST_NORMAL = 2.0**-6
# Adding and subtracting it rounds a float32 to steps of 2^-9, e4m3's below its smallest normal.
_SUBNORMAL_MAGIC = 1.5 * 2.0**14
_DROPPED_BITS = 23 - 3
_FEW_RUNS = 32  # up to here a scale costs less as a Python number than all of them as tensors


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
    if 0 < runs.numel() <= _FEW_RUNS * FP8_BLOCK and _host.on_host(x):
        rounded = _few_runs(runs)
        if rounded is not None:
            return rounded.view(*x.shape[:-1], -1)[..., :width].to(dtype)
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


def _few_runs(runs: Tensor) -> Tensor | None:
    """Round float32 runs [..., 128] with scales found in Python; None if one is not finite."""
    flat = runs.reshape(-1, FP8_BLOCK)
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

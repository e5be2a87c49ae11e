"""Decoder of e4m3 codes by integer instructions, several times faster on CPUs than a table or cast.

A code is ``s eeee mmm``. After sign extension to 16 bits, a shift left by 4 and a mask, its
exponent is in the lowest bits of bfloat16's exponent and its mantissa in the highest bits of
bfloat16's mantissa. Read as bfloat16 this is the code's value times 2^-120, subnormal codes
included. The factor 2^120 is folded into the scale that multiplies the values in any case.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_SHIFT = 120  # the result is value * 2^-E4M3_SHIFT

# Scale bytes b (2^(b - 127)) for which code * 2^-120 * 2^(b - 7) is exact in bfloat16: the factor
# must stay finite, and the smallest step of a subnormal code, 2^(b - 136), must not fall below
# bfloat16's, 2^-133.
EXACT_SCALE_BYTES = (3, 254 - E4M3_SHIFT)


def e4m3_values_shifted(codes: Tensor) -> Tensor:
    """Decode codes to bfloat16 values times 2^-120.

    NaN codes are not recognised (they give +-480 * 2^-120): call ``has_nan_code`` first.

    Args:
        codes: uint8 or int8 codes of any shape.

    Returns:
        bfloat16 values of the same shape, contiguous.
    """
    bits = codes.view(torch.int8).to(torch.int16, memory_format=torch.contiguous_format)
    return bits.mul_(16).bitwise_and_(-0x7810).view(torch.bfloat16)


def has_nan_code(codes: Tensor) -> bool:
    """True if any code is 0x7F or 0xFF; reading the values waits for the device."""
    if codes.numel() == 0:
        return False
    return int((codes.view(torch.int8) & 0x7F).amax()) == 0x7F


def shifted_scale(scale_bytes: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute scales ``2^(byte - 127) * 2^120`` in bfloat16 or float32 by writing exponent bits.

    Args:
        scale_bytes: uint8 bytes within ``EXACT_SCALE_BYTES``.
        dtype: dtype of the result, torch.bfloat16 or torch.float32.

    Returns:
        Scales of the same shape in ``dtype``.
    """
    if dtype == torch.bfloat16:
        return scale_bytes.to(torch.int16).add_(E4M3_SHIFT).mul_(1 << 7).view(dtype)
    return scale_bytes.to(torch.int32).add_(E4M3_SHIFT).mul_(1 << 23).view(dtype)


def scales_are_exact(scale_bytes: Tensor) -> bool:
    """True if every scale byte is within ``EXACT_SCALE_BYTES``; waits for the device."""
    if scale_bytes.numel() == 0:
        return True
    low, high = torch.aminmax(scale_bytes)
    return int(low) >= EXACT_SCALE_BYTES[0] and int(high) <= EXACT_SCALE_BYTES[1]

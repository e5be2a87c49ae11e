"""Power-of-two scales stored as one exponent byte: value = 2^(byte - 127)."""

from __future__ import annotations

import torch
from torch import Tensor


def scale_exponent(amax: Tensor, code_max: float, floor: float) -> Tensor:
    """Return the exponent of the smallest power-of-two scale with which a block fits its codes.

    ``e = ceil(log2(max(amax, floor) / code_max))``, read from the float32 bits of
    ``amax * (1 / code_max)``: the exponent field, plus one where the mantissa is not zero. This
    is what DeepSeek-V4's quantisers compute, without an approximate logarithm.

    Args:
        amax: largest magnitude of each block, any shape, >= 0.
        code_max: largest magnitude of a code (448 for e4m3, 6 for e2m1).
        floor: lower bound applied to ``amax``.

    Returns:
        int32 exponents, same shape; 128 or more where ``amax`` is infinite or NaN.
    """
    ratio = amax.float().clamp(min=floor) * (1.0 / code_max)
    bits = ratio.view(torch.int32)
    return (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).int()


# Largest exponent of the scale that values are divided by; only blocks that are not finite exceed
# it.
LARGEST_CODE_EXPONENT = 126


def encode_ue8m0(exponent: Tensor) -> Tensor:
    """Return the bytes of power-of-two scales: ``exponent + 127`` clamped to 0..255, uint8."""
    return (exponent + 127).clamp(0, 255).to(torch.uint8)


def decode_ue8m0(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode scale bytes: ``2^(byte - 127)``, and NaN for byte 255 (OCP MX specification 1.0).

    Args:
        codes: uint8 scale bytes of any shape.
        dtype: dtype of the result. Byte 0 (2^-127) is subnormal in float32 and bfloat16.

    Returns:
        Scales of the same shape.
    """
    if codes.dtype != torch.uint8:
        raise TypeError(f"decode_ue8m0: codes must be uint8, got {codes.dtype}")
    # The byte is float32's exponent field; only 2^-127 needs a mantissa bit (subnormal).
    bits = codes.int() << 23
    bits = torch.where(codes == 0, 0x00400000, bits)
    bits = torch.where(codes == 255, 0x7FC00000, bits)
    return bits.view(torch.float32).to(dtype)

"""MXFP4: e2m1 codes with one power-of-two scale for 32 channels (OCP MX specification 1.0)."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.e2m1 import E2M1_MAX, decode_packed_e2m1, encode_e2m1, pack_nibbles
from anymla.formats.ue8m0 import LARGEST_CODE_EXPONENT, decode_ue8m0, encode_ue8m0, scale_exponent

MXFP4_BLOCK = 32
MXFP4_AMAX_FLOOR = 6 * 2.0**-126


def quantize_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise blocks of 32 channels.

    ``e = clamp(ceil(log2(amax / 6)), -127, 127)`` with amax floored at 6 * 2^-126; a value is the
    e2m1 code nearest to ``x * 2^-e``, ties to even, saturating (DeepSeek-V4 inference/kernel.py).

    Args:
        x: [..., n] floating point, n a multiple of 32.

    Returns:
        Packed codes uint8 [..., n/2] and scale bytes uint8 [..., n/32].

    Raises:
        ValueError: if n is not a multiple of 32.
    """
    if x.shape[-1] % MXFP4_BLOCK:
        raise ValueError(f"quantize_mxfp4: last dim must be a multiple of 32, got {x.shape[-1]}")
    blocks = x.unflatten(-1, (-1, MXFP4_BLOCK))
    amax = blocks.abs().amax(-1)
    exponent = scale_exponent(amax, E2M1_MAX, MXFP4_AMAX_FLOOR).clamp(-127, 127)
    wide = blocks if x.dtype == torch.float64 else blocks.float()
    power = exponent.clamp(max=LARGEST_CODE_EXPONENT).unsqueeze(-1)
    codes = encode_e2m1(torch.ldexp(wide, -power))
    return pack_nibbles(codes.flatten(-2)), encode_ue8m0(exponent)


def dequantize_mxfp4(packed: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode packed [..., n/2] with scale bytes [..., n/32] to values [..., n] of ``dtype``.

    The result is exact in bfloat16 and wider if the value is a normal number.
    """
    values = decode_packed_e2m1(packed, dtype).unflatten(-1, (-1, MXFP4_BLOCK))
    return (values * decode_ue8m0(scales, dtype).unsqueeze(-1)).flatten(-2)

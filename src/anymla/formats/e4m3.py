"""8-bit floats with 4 exponent bits and 3 mantissa bits: OCP e4m3fn and AMD's e4m3fnuz.

Codes are uint8. The decoders are exact for every code; the encoders round to nearest even and
saturate. Format definitions: OCP 8-bit Floating Point Specification 1.0 (e4m3fn) and the AMD
CDNA3 ISA document (e4m3fnuz).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

E4M3_MAX = 448.0
E4M3FNUZ_MAX = 240.0


@functools.cache
def _decode_table(fnuz: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Compute all 256 values from the definition of the format."""
    code = torch.arange(256, dtype=torch.int32)
    sign = torch.where(code >= 128, -1.0, 1.0).double()
    exponent, mantissa = (code >> 3) & 15, (code & 7).double()
    bias = 8 if fnuz else 7
    normal = (1 + mantissa / 8) * torch.exp2((exponent - bias).double())
    subnormal = mantissa / 8 * 2.0 ** (1 - bias)
    value = sign * torch.where(exponent > 0, normal, subnormal)
    nan = code == 0x80 if fnuz else (code & 0x7F) == 0x7F
    return torch.where(nan, torch.nan, value).to(device=device, dtype=dtype)


def decode_e4m3(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode OCP e4m3fn codes.

    Args:
        codes: uint8 codes of any shape.
        dtype: dtype of the result; every value is exact in bfloat16 and wider.

    Returns:
        Values of the same shape. Codes 0x7F and 0xFF give NaN.
    """
    return _decode(codes, dtype, fnuz=False)


def decode_e4m3fnuz(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode e4m3fnuz codes (bias 8, no negative zero, 0x80 is NaN); see ``decode_e4m3``."""
    return _decode(codes, dtype, fnuz=True)


def encode_e4m3(x: Tensor) -> Tensor:
    """Encode to OCP e4m3fn: round to nearest even, saturate at 448, NaN becomes 0x7F.

    Args:
        x: floating point tensor of any shape.

    Returns:
        uint8 codes of the same shape.
    """
    clamped = x.clamp(-E4M3_MAX, E4M3_MAX)
    codes = _round_to_float32_odd(clamped).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), torch.full_like(codes, 0x7F), codes)


def encode_e4m3fnuz(x: Tensor) -> Tensor:
    """Encode to e4m3fnuz: round to nearest even, saturate at 240, NaN becomes 0x80."""
    clamped = _round_to_float32_odd(x.clamp(-E4M3FNUZ_MAX, E4M3FNUZ_MAX)).float()
    magnitude = clamped.abs()
    # A code step is 2^(exponent - 3); below the smallest normal, 2^-7, steps stay at 2^-10.
    exponent = torch.where(magnitude > 0, torch.frexp(magnitude).exponent, -6).clamp(min=-6) - 1
    steps = torch.round(torch.ldexp(magnitude, 3 - exponent)).to(torch.int32)
    # Codes are consecutive in steps within and across binades, subnormals included.
    codes = steps + (exponent + 7) * 8
    codes = torch.where((clamped < 0) & (codes > 0), codes + 128, codes)
    return torch.where(x.isnan(), 0x80, codes).to(torch.uint8)


def _round_to_float32_odd(x: Tensor) -> Tensor:
    """Narrow float64 to float32 such that a second rounding is correct at ties.

    Two roundings to nearest may differ from a single one; with rounding to odd in between they do
    not. Narrower inputs are returned unchanged.
    """
    if x.dtype != torch.float64:
        return x
    narrow = x.float()
    exact = narrow.double() == x
    bits = narrow.view(torch.int32)
    toward_zero = torch.where(narrow.double().abs() > x.abs(), bits - 1, bits)
    return torch.where(exact | x.isnan(), bits, toward_zero | 1).view(torch.float32)


def _decode(codes: Tensor, dtype: torch.dtype, *, fnuz: bool) -> Tensor:
    if codes.dtype != torch.uint8:
        raise TypeError(f"decode_e4m3: codes must be uint8, got {codes.dtype}")
    return _decode_table(fnuz, dtype, codes.device)[codes.int()]

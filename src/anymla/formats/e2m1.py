"""4-bit floats with 2 exponent bits and 1 mantissa bit, two to a byte.

Codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign. In a packed byte the low nibble is
the earlier channel. Definition: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

E2M1_MAX = 6.0
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Midpoints between neighbouring values. A tie goes to the even code, so a midpoint belongs to the
# code above it exactly if that code is even.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def encode_e2m1(x: Tensor) -> Tensor:
    """Encode to e2m1 codes: round to nearest even, saturate at 6; NaN becomes 6.

    Args:
        x: floating point tensor of any shape.

    Returns:
        uint8 codes 0..15 of the same shape.
    """
    magnitude = torch.nan_to_num(x.abs(), nan=E2M1_MAX)
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for below, midpoint in enumerate(_MIDPOINTS):
        above_is_even = (below + 1) % 2 == 0
        code += magnitude >= midpoint if above_is_even else magnitude > midpoint
    negative = torch.signbit(x) & ~x.isnan()  # casts may produce NaN of either sign
    return code | (negative.to(torch.uint8) << 3)


def decode_e2m1(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode e2m1 codes 0..15 (uint8, any shape) exactly; same shape, in ``dtype``."""
    table = torch.tensor(_VALUES + tuple(-v for v in _VALUES), dtype=dtype, device=codes.device)
    return table[codes.int()]


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack codes [..., 2n] into bytes [..., n]: channel 2j in the low nibble of byte j."""
    low, high = codes[..., 0::2], codes[..., 1::2]
    return low | (high << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Invert ``pack_nibbles``: bytes [..., n] to codes [..., 2n], uint8."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def decode_packed_e2m1(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode bytes [..., n] to values [..., 2n], exactly.

    Dtypes of up to 32 bits take one look-up a byte, because both values are read as one integer.
    """
    if dtype.itemsize > 4:
        return decode_e2m1(unpack_nibbles(packed), dtype)
    pairs = _pair_table(dtype, packed.device).index_select(0, packed.flatten().int())
    return pairs.view(dtype).view(*packed.shape[:-1], 2 * packed.shape[-1])


@functools.cache
def _pair_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Build the table [256] of both values of every byte, as one integer of twice their width."""
    every = torch.arange(256, dtype=torch.uint8, device=device)
    both = torch.int32 if dtype.itemsize == 2 else torch.int64
    return decode_e2m1(unpack_nibbles(every.unsqueeze(1)), dtype).view(both).squeeze(1)

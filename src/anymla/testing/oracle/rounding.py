"""Rounding to small number formats in float64, from the formats' definitions.

Values are looked up, not computed: the non-negative values of a format in order of their codes,
and the midpoints between neighbours. A value on a midpoint goes to the even code.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0


@functools.cache
def e4m3_values() -> Tensor:
    """Return the 127 finite non-negative values of OCP e4m3fn; the index is the code."""
    values = []
    for code in range(127):
        exponent, mantissa = divmod(code, 8)
        if exponent == 0:
            values.append(mantissa * 2.0**-9)
        else:
            values.append((8 + mantissa) * 2.0 ** (exponent - 10))
    return torch.tensor(values, dtype=torch.float64)


@functools.cache
def e2m1_values() -> Tensor:
    """Return the 8 non-negative values of OCP e2m1; the index is the code."""
    return torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def nearest_code(magnitude: Tensor, values: Tensor) -> Tensor:
    """Return codes (indices into ``values``) of the nearest values; ties to even, saturating."""
    midpoints = (values[1:] + values[:-1]) / 2
    code = torch.searchsorted(midpoints, magnitude.contiguous())
    on_tie = magnitude == midpoints[code.clamp(max=len(midpoints) - 1)]
    return code + (on_tie & (code % 2 == 1)).long()


def round_to(x: Tensor, values: Tensor) -> Tensor:
    """Return the nearest value of a signed format, NaN for NaN."""
    rounded = torch.copysign(values[nearest_code(x.abs().nan_to_num(), values)], x)
    return torch.where(x.isnan(), x, rounded)


def to_bfloat16(x: Tensor) -> Tensor:
    """Round float64 to the nearest bfloat16 value, once, ties to even; stays float64."""
    exponent = torch.frexp(x).exponent.clamp(min=-125)
    unit = torch.exp2(exponent.double() - 8)
    return torch.where(x.isfinite(), torch.round(x / unit) * unit, x)


def to_float32(x: Tensor) -> Tensor:
    """Round float64 to the nearest float32 value; stays float64."""
    return x.float().double()


def scale_exponent(amax: Tensor, largest: float) -> Tensor:
    """Compute ceil(log2(amax / largest)) of positive float64, exact at powers of two."""
    mantissa, exponent = torch.frexp(amax / largest)
    return (exponent - (mantissa == 0.5).to(exponent.dtype)).long()


def decode_e4m3(codes: Tensor) -> Tensor:
    """Decode uint8 OCP e4m3fn codes to float64."""
    table = torch.cat((e4m3_values(), torch.tensor([torch.nan], dtype=torch.float64)))
    return torch.cat((table, -table))[codes.long()]


def decode_e2m1_pairs(packed: Tensor) -> Tensor:
    """Decode packed e2m1 [..., n] -> [..., 2n] to float64; the low nibble comes first."""
    table = torch.cat((e2m1_values(), -e2m1_values()))
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return table[codes.long()]


def decode_ue8m0(codes: Tensor) -> Tensor:
    """Compute 2^(code - 127) in float64; code 255 is NaN."""
    powers = torch.exp2(codes.double() - 127)
    return torch.where(codes == 255, torch.nan, powers)


def hadamard(x: Tensor) -> Tensor:
    """Apply the normalised Walsh-Hadamard transform to the last dim, in Sylvester's order."""
    n = x.shape[-1]
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < n:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return x @ matrix / n**0.5

"""Rows of a cache as tiles of 128 and 64 channels, in the precision of the matrix products.

An FP8 row is three tiles of two blocks of codes, one block of codes, and the bfloat16 tail:
448 + 64 channels = 128 + 128 + 128 + 64 + 64. A plain row is tiles of 128 and what is left.

In float16 every row is multiplied by ``LIFT`` = 2^7. Then e4m3 times a power of two is exact for
scale bytes 105 (the least that a writer emits) to 127, and the tail for magnitudes below 512.
Whatever lies outside becomes NaN or infinite on purpose: the caller sees it in the sums and
computes again in bfloat16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anymla.formats.triton_cast import e4m3_to_fp16, e4m3_to_fp32, ue8m0_to_fp32

FLOAT16 = tl.constexpr(0)
BFLOAT16 = tl.constexpr(1)
FLOAT32 = tl.constexpr(2)
LIFT = tl.constexpr(128.0)
_LIFT_EXPONENT = tl.constexpr(7)
_LEAST_BYTE = tl.constexpr(105)
_LAST_BYTE = tl.constexpr(127)


@triton.jit
def narrow(x, MODE: tl.constexpr):
    """Round float32 to the operands' type."""
    if MODE == 0:
        return x.to(tl.float16)
    elif MODE == 1:
        return x.to(tl.bfloat16)
    else:
        return x


@triton.jit
def coded_tile(
    data,
    scales,
    ok,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,
    NATIVE: tl.constexpr,
    ONCE: tl.constexpr,
):
    """Blocks FIRST .. FIRST + COUNT of e4m3 rows.

    Args:
        data: uint8 pointers [n] to the rows' codes.
        scales: uint8 pointers [n] to their scale bytes.
        ok: bool [n]; other rows are not read and give zeros.
        FIRST: first block.
        COUNT: blocks, a power of two.
        BLOCK: channels that share a scale.
        MODE: type of the result.
        NATIVE: convert by instructions.
        ONCE: decode once for products whose operands are registers (half the instructions of
            the loop; measured on an H200 it takes a quarter of the time off).

    Returns:
        [n, COUNT * BLOCK].
    """
    block = FIRST + tl.arange(0, COUNT)
    channel = block[None, :, None] * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    codes = tl.load(data[:, None, None] + channel, mask=ok[:, None, None], other=0)
    byte = tl.load(scales[:, None] + block[None, :], mask=ok[:, None], other=_LAST_BYTE)
    if MODE == 0:
        exponent = byte.to(tl.int32)
        exact = (exponent >= _LEAST_BYTE) & (exponent <= _LAST_BYTE)
        factor = ((exponent + _LIFT_EXPONENT) << 23).to(tl.float32, bitcast=True)
        factor = tl.where(exact, factor, float("nan"))
    else:
        factor = ue8m0_to_fp32(byte)
    if ONCE:
        # Not needed for the values, which are zeros there: a factor that does not come from memory
        # alone keeps the compiler from decoding once for each of the two products.
        factor = tl.where(ok[:, None], factor, 0.0)
    if MODE == 0:
        rows = e4m3_to_fp16(codes, NATIVE) * factor.to(tl.float16)[:, :, None]
    else:
        rows = narrow(e4m3_to_fp32(codes, NATIVE) * factor[:, :, None], MODE)
    return tl.reshape(rows, [data.shape[0], COUNT * BLOCK])


@triton.jit
def plain_tile(
    rows,
    ok,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    MODE: tl.constexpr,
):
    """Channels FIRST .. FIRST + WIDTH of plain rows at pointers [n]; zeros past CHANNELS."""
    channel = FIRST + tl.arange(0, WIDTH)
    inside = ok[:, None]
    if FIRST + WIDTH > CHANNELS:
        inside = inside & (channel < CHANNELS)[None, :]
    x = tl.load(rows[:, None] + channel[None, :], mask=inside, other=0.0)
    if MODE == 0:
        return (x.to(tl.float32) * LIFT).to(tl.float16)
    elif MODE == 1:
        return x.to(tl.bfloat16)
    else:
        return x.to(tl.float32)

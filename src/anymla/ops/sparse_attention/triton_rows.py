"""Rows of a cache as tiles of 128 and 64 channels, in the precision of the matrix products.

A V4 row is three tiles of two blocks of codes, one block of codes, and the bfloat16 tail:
448 + 64 channels = 128 + 128 + 128 + 64 + 64. A V3.2 row is four tiles of a block of codes and the
tail: 512 + 64. A plain row is tiles of 128 and what is left.

In float16 every row is multiplied by ``LIFT``; ``float16_range`` says which scales are exact then.
The tail is for magnitudes below 512, or any that float16 holds if it is part of the key alone: then
the query is multiplied instead. Whatever lies outside becomes NaN or infinite on purpose: the
caller sees it in the sums and computes again in bfloat16.

MODE is the precision of the products in kernels: 0 for float16, 1 for bfloat16, 2 for float32; the
order is that of ``tiles.MODES``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anymla.formats.triton_cast import e4m3_to_fp16, e4m3_to_fp32, ue8m0_to_fp32
from anymla.ops.sparse_attention import float16_range

_LIFT_EXPONENT = tl.constexpr(float16_range.LIFT)
LIFT = tl.constexpr(2.0**float16_range.LIFT)
_LEAST_BYTE = tl.constexpr(float16_range.exact_scale_bytes(float16_range.LIFT)[0])
_LAST_BYTE = tl.constexpr(float16_range.exact_scale_bytes(float16_range.LIFT)[1])
_LEAST_SCALE = tl.constexpr(2.0 ** float16_range.exact_scale_exponents(float16_range.LIFT)[0])
_LAST_SCALE = tl.constexpr(2.0 ** float16_range.exact_scale_exponents(float16_range.LIFT)[1])
# Writers give all-zero blocks scales down to the smallest float32; no code makes one of 2^-100 or
# less visible beside any other block.
_NOTHING = tl.constexpr(2.0**-100)
_FLOAT16_MAX = tl.constexpr(float16_range.FLOAT16_MAX)


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
def inline_tile(
    data,
    scales,
    ok,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,
    NATIVE: tl.constexpr,
    ONCE: tl.constexpr,
):
    """Block FIRST of e4m3 rows whose scales are float32 at pointers ``scales`` [n].

    Arguments as in ``coded_tile``; any scale is taken, and the value rounded to the result's type.

    Returns:
        [n, BLOCK].
    """
    channel = FIRST * BLOCK + tl.arange(0, BLOCK)
    codes = tl.load(data[:, None] + channel[None, :], mask=ok[:, None], other=0)
    factor = tl.load(scales + FIRST, mask=ok, other=1.0)
    if MODE == 0:
        size = tl.abs(factor)
        fits = ((size >= _LEAST_SCALE) & (size <= _LAST_SCALE)) | (size <= _NOTHING)
        factor = tl.where(fits, factor * LIFT, float("nan"))
    if ONCE:
        factor = tl.where(ok, factor, 0.0)
    if MODE == 0:
        return e4m3_to_fp16(codes, NATIVE) * factor.to(tl.float16)[:, None]
    else:
        return narrow(e4m3_to_fp32(codes, NATIVE) * factor[:, None], MODE)


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


@triton.jit
def tail_tile(rows, ok, WIDTH: tl.constexpr, MODE: tl.constexpr, KEY: tl.constexpr):
    """WIDTH bfloat16 channels at pointers [n]; with KEY they are no value, and not lifted."""
    if KEY and MODE == 0:
        channel = tl.arange(0, WIDTH)
        x = tl.load(rows[:, None] + channel[None, :], mask=ok[:, None], other=0.0).to(tl.float32)
        # An infinity could hide behind a probability of 0.
        return tl.where(tl.abs(x) <= _FLOAT16_MAX, x, float("nan")).to(tl.float16)
    else:
        return plain_tile(rows, ok, 0, WIDTH, WIDTH, MODE)

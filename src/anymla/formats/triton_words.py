"""Decoder of packed e2m1 weights inside Triton kernels, by int32 words of eight codes.

The bits of a code ``s ee m``, moved to the sign, the lowest exponent bits and the highest mantissa
bit of a wider float, are that code's value times a power of two, subnormals included:

    e4m3 s00eem00  value * 2^-6      float16 s000eem0...  value * 2^-14
                                     bfloat16 s00000ee m...  value * 2^-126

Shifts and masks move two codes at a time, or four for e4m3. The decoded values come in the order
that takes the least work, which is also the order in which the threads of a matrix instruction hold
them: thread t of four has word t of 32 channels. A sum over channels does not depend on the order
if its other operand has the same one, which ``channel_at`` gives.

A thread holds operands of 16 bits in runs of one or two pairs of neighbours (PAIRS): one where
warpgroups multiply. Where warps do (mma.sync), Triton gives threads two of them if operands were
made of int32, and any other order passes through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Factors that decoded values must be multiplied with.
E4M3_UNIT = tl.constexpr(2.0**6)
FLOAT16_UNIT = tl.constexpr(2.0**14)
BFLOAT16_UNIT = tl.constexpr(2.0**126)


@triton.jit
def channel_at(place, BYTES: tl.constexpr, PAIRS: tl.constexpr = 1):
    """Return the channel at a place among decoded values of BYTES bytes, in runs of PAIRS pairs.

    Both are counted from the same multiple of 32.
    """
    within = place % 32
    if BYTES == 1:
        channel = 8 * (within // 4 % 4) + 2 * (within % 4) + within // 16
    elif PAIRS == 2:
        channel = 8 * (within // 4 % 4) + 2 * (within // 16) + within // 2 % 2 + 4 * (within % 2)
    else:
        channel = 8 * (within // 2 % 4) + within // 8 + 4 * (within % 2)
    return place - within + channel


@triton.jit
def _bytes(words):
    """Split int32 words [...] into their four bytes in order, uint8 [..., 2, 2]."""
    even = tl.join((words & 255).to(tl.uint8), ((words >> 16) & 255).to(tl.uint8))
    odd = tl.join(((words >> 8) & 255).to(tl.uint8), ((words >> 24) & 255).to(tl.uint8))
    return tl.join(even, odd)


@triton.jit
def _halves(words):
    """Split int32 words [...] into both halves, uint16 [..., 2]."""
    return tl.join((words & 0xFFFF).to(tl.uint16), ((words >> 16) & 0xFFFF).to(tl.uint16))


@triton.jit
def words_to_e4m3(words):
    """Decode int32 [n, W], W a multiple of 4, to float8e4nv [n, 8 W]: value * 2^-6."""
    ROWS: tl.constexpr = words.shape[0]
    RUNS: tl.constexpr = words.shape[1] // 4
    lower = ((words << 4) & -0x7F7F7F80) | ((words << 2) & 0x1C1C1C1C)
    upper = (words & -0x7F7F7F80) | ((words >> 2) & 0x1C1C1C1C)
    codes = tl.reshape(_bytes(tl.join(lower, upper)), (ROWS, RUNS, 4, 2, 4))
    codes = tl.reshape(tl.permute(codes, (0, 1, 3, 2, 4)), (ROWS, RUNS * 32))
    return codes.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _wide(words, EXPONENT: tl.constexpr, PAIRS: tl.constexpr):
    """Decode to uint16 bits [n, 8 W], with the lowest bit of the exponent at EXPONENT."""
    ROWS: tl.constexpr = words.shape[0]
    RUNS: tl.constexpr = words.shape[1] // 4
    MASK: tl.constexpr = 7 << (EXPONENT - 1)
    BOTH: tl.constexpr = MASK << 16 | MASK
    DOWN: tl.constexpr = 13 - EXPONENT
    first, second, third = words << 12, words << 8, words << 4
    first = (first & -0x7FFF8000) | ((first >> DOWN) & BOTH)
    second = (second & -0x7FFF8000) | ((second >> DOWN) & BOTH)
    third = (third & -0x7FFF8000) | ((third >> DOWN) & BOTH)
    fourth = (words & -0x7FFF8000) | ((words >> DOWN) & BOTH)
    bits = _halves(tl.join(tl.join(first, third), tl.join(second, fourth)))
    bits = tl.reshape(bits, (ROWS, RUNS, 4, 4 // PAIRS, 2 * PAIRS))
    return tl.reshape(tl.permute(bits, (0, 1, 3, 2, 4)), (ROWS, RUNS * 32))


@triton.jit
def words_to_fp16(words, PAIRS: tl.constexpr = 1):
    """Decode int32 [n, W], W a multiple of 4, to float16 [n, 8 W]: value * 2^-14."""
    return _wide(words, 10, PAIRS).to(tl.float16, bitcast=True)


@triton.jit
def words_to_bf16(words):
    """Decode int32 [n, W], W a multiple of 4, to bfloat16 [n, 8 W]: value * 2^-126."""
    return _wide(words, 7, 1).to(tl.bfloat16, bitcast=True)


# Factor that the results of ``e4m3_words_to_fp16`` must be multiplied with.
E4M3_WORD_UNIT = tl.constexpr(2.0**8)


@triton.jit
def _float16_halves(words):
    lower = (words & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    upper = (words.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return lower, upper


@triton.jit
def e4m3_words_to_fp16(words):
    """Decode the four e4m3 codes of int32 words, in order, to float16 of value * 2^-8.

    Only codes of NaN, all ones without the sign, overflow into bit 7 when one is added. There it
    takes the place of the sign and becomes the highest bit of the exponent, whose others are set.
    """
    ones: tl.constexpr = 0x7F7F7F7F
    codes = (words & ones) | (((words & ones) + 0x01010101) & -0x7F7F7F80)
    even = ((words << 8) & -0x7FFF8000) | ((codes << 7) & 0x7F807F80)
    odd = (words & -0x7FFF8000) | ((codes >> 1) & 0x7F807F80)
    first, third = _float16_halves(even)
    second, fourth = _float16_halves(odd)
    return first, second, third, fourth

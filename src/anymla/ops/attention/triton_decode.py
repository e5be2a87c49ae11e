"""Decode attention in Triton, on any GPU: one token over a range of its listed rows.

The grid is one axis of tokens x blocks of heads x splits, where the splits of a token are adjacent.

A CTA walks over its split of the token's lists in blocks of ``BN`` columns, first those of one
cache, then those of the other. It keeps a running maximum, sums of probabilities and five
accumulators (128 + 128 + 128 + 64 + 64 channels for V4's rows), or four where the last tile is not
part of the value (V3.2's rows). Scores are summed over one product per tile. The slots of the next
block are read while this block is computed; with ``AHEAD`` its rows are as well, which wait in
registers as codes. With ``SPLIT`` the CTAs of a token store partials for ``triton_decode_combine``.

Products are heads x rows: scores are [heads, rows], accumulators [heads, channels].

Rows are read as tiles of 128 and 64 channels. A V4 row is three tiles of two blocks of codes, one
block of codes, and the bfloat16 tail: 448 + 64 channels = 128 + 128 + 128 + 64 + 64. V4.1's rows
have as many tiles and no tail. A V3.2 row is four tiles of one block of codes each, and the tail:
512 + 64. A plain row is tiles of 128 channels and a rest.

MODE is the operand type of the products: 0 for float16, 1 for bfloat16, 2 for float32, the order of
``config.MODES``. FP8 rows are computed in float16: every row is multiplied by ``LIFT``, and
``float16_range`` says which scales are exact then. A lifted tail may have magnitudes below 512; a
tail that only the key uses may have any that float16 holds, because the query is multiplied
instead. Whatever lies outside becomes NaN or infinite on purpose: it shows in the sums, and then
the CTA computes its range again in bfloat16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anymla.formats.nvfp4 import NVFP4_BLOCK
from anymla.formats.pages import PageLayout
from anymla.formats.records import InlineFp8Layout, RowNvfp4Layout, SplitFp8Layout
from anymla.formats.triton_cast import (
    e2m1_to_fp16,
    e2m1_to_fp32,
    e4m3_to_fp16,
    e4m3_to_fp32,
    exp2_int,
    ue8m0_to_fp32,
)
from anymla.formats.triton_words import E4M3_WORD_UNIT, e4m3_words_to_fp16
from anymla.ops.attention import float16_range
from anymla.ops.attention.decode_config import FP8_CODES, FP8_TAIL, INLINE, NVFP4, PLAIN
from anymla.ops.attention.triton_decode_combine import SUMS

# Channels that ``walk_rows`` keeps in one tile.
ROW = 512

LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_SUMS = tl.constexpr(SUMS)
_NO_MAXIMUM = tl.constexpr(-1e30)
_ROW = tl.constexpr(ROW)
_NO_SCORE = tl.constexpr(-3e38)
# float16 probabilities are at most 2^15, so that they keep their precision down to 2^-29.
_SHIFT = tl.constexpr(15.0)
_LIFT_EXPONENT = tl.constexpr(float16_range.LIFT)
LIFT = tl.constexpr(2.0**float16_range.LIFT)
_LEAST_BYTE = tl.constexpr(float16_range.exact_scale_bytes(float16_range.LIFT)[0])
_LAST_BYTE = tl.constexpr(float16_range.exact_scale_bytes(float16_range.LIFT)[1])
_LEAST_SCALE = tl.constexpr(2.0 ** float16_range.exact_scale_exponents(float16_range.LIFT)[0])
_LAST_SCALE = tl.constexpr(2.0 ** float16_range.exact_scale_exponents(float16_range.LIFT)[1])
# Writers give all-zero blocks scales down to the smallest float32. With a scale of 2^-100 or less,
# no code is visible beside any other block.
_NOTHING = tl.constexpr(2.0**-100)
_FLOAT16_MAX = tl.constexpr(float16_range.FLOAT16_MAX)
_LARGEST_NVFP4_SCALE = tl.constexpr(float16_range.largest_nvfp4_scale(float16_range.LIFT))


@triton.jit
def narrow(x, MODE: tl.constexpr):
    """Round float32 to the operand type of the products."""
    if MODE == 0:
        return x.to(tl.float16)
    elif MODE == 1:
        return x.to(tl.bfloat16)
    else:
        return x


@triton.jit
def load_tile(
    data, scales, ok, FIRST: tl.constexpr, WIDTH: tl.constexpr, CODED: tl.constexpr,
    BLOCK: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Load codes and scales of channels FIRST to FIRST + WIDTH of coded rows.

    Args:
        data: uint8 pointers [n] to the rows' codes.
        scales: pointers [n] to their scales: bytes, or float32 where CODED is 2.
        ok: bool [n]; rows where it is False are not read.
        FIRST: first channel to load.
        WIDTH: number of channels, a power of two.
        CODED: kind of the rows by the numbers of ``config``.
        BLOCK: channels that share a scale.
        WORDS: True to load e4m3 codes as int32 words of four, from addresses that are multiples
            of 4.

    Returns:
        Codes, e4m3 [n, blocks, BLOCK] (words [n, blocks, BLOCK / 4]) or two of e2m1 in a byte
        [n, WIDTH / 2]; and scales [n, blocks], of inline rows [n] float32.
    """
    if CODED == 4:
        byte = FIRST // 2 + tl.arange(0, WIDTH // 2)
        codes = tl.load(data[:, None] + byte[None, :], mask=ok[:, None], other=0)
        block = FIRST // BLOCK + tl.arange(0, WIDTH // BLOCK)
        scale = tl.load(scales[:, None] + block[None, :], mask=ok[:, None], other=0)
    elif CODED == 2:
        channel = FIRST + tl.arange(0, WIDTH)
        codes = tl.load(data[:, None] + channel[None, :], mask=ok[:, None], other=0)
        scale = tl.load(scales + FIRST // BLOCK, mask=ok, other=1.0)
    else:
        block = FIRST // BLOCK + tl.arange(0, WIDTH // BLOCK)
        if WORDS:
            data = data.to(tl.pointer_type(tl.int32))
            place = block[None, :, None] * (BLOCK // 4) + tl.arange(0, BLOCK // 4)[None, None, :]
        else:
            place = block[None, :, None] * BLOCK + tl.arange(0, BLOCK)[None, None, :]
        codes = tl.load(data[:, None, None] + place, mask=ok[:, None, None], other=0)
        scale = tl.load(scales[:, None] + block[None, :], mask=ok[:, None], other=_LAST_BYTE)
    return codes, scale


@triton.jit
def _decoded_words(words, factor, MODE: tl.constexpr):
    """Decode the four e4m3 codes of int32 words, in order, and multiply them by ``factor``.

    ``factor`` has the type that ``decode_tile`` gives it, float16 in MODE 0 and float32 elsewhere.
    """
    c0, c1, c2, c3 = e4m3_words_to_fp16(words)
    if MODE == 0:
        factor = factor * E4M3_WORD_UNIT
        c0, c1, c2, c3 = c0 * factor, c1 * factor, c2 * factor, c3 * factor
    else:
        # Apply unit and scale one at a time: the product of the unit and the largest scales is
        # infinite.
        c0 = narrow((c0 * E4M3_WORD_UNIT).to(tl.float32) * factor, MODE)
        c1 = narrow((c1 * E4M3_WORD_UNIT).to(tl.float32) * factor, MODE)
        c2 = narrow((c2 * E4M3_WORD_UNIT).to(tl.float32) * factor, MODE)
        c3 = narrow((c3 * E4M3_WORD_UNIT).to(tl.float32) * factor, MODE)
    return c0, c1, c2, c3


@triton.jit
def decode_tile(
    codes, scale, ok, CODED: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr,
    NATIVE: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Decode what ``load_tile`` returns, where rows that are not ``ok`` give zeros.

    Args:
        codes: codes of the rows.
        scale: scales of the rows.
        ok: bool [n], as given to ``load_tile``.
        CODED: kind of the rows by the numbers of ``config``.
        BLOCK: channels that share a scale.
        MODE: operand type of the result.
        NATIVE: True to convert by instructions.
        ONCE: True to decode once for both products, whose operands are registers. This halves the
            instructions of the loop and saves a quarter of its time on an H200.

    Returns:
        Decoded rows of the type of MODE, [n, WIDTH].
    """
    if CODED == 4:
        factor = e4m3_to_fp32(scale, NATIVE)
        if MODE == 0:
            fits = tl.abs(factor) <= _LARGEST_NVFP4_SCALE
            factor = tl.where(fits, factor * LIFT, float("nan"))
    elif CODED == 2:
        factor = scale
        if MODE == 0:
            size = tl.abs(factor)
            fits = ((size >= _LEAST_SCALE) & (size <= _LAST_SCALE)) | (size <= _NOTHING)
            factor = tl.where(fits, factor * LIFT, float("nan"))
    elif MODE == 0:
        exponent = scale.to(tl.int32)
        exact = (exponent >= _LEAST_BYTE) & (exponent <= _LAST_BYTE)
        factor = ((exponent + _LIFT_EXPONENT) << 23).to(tl.float32, bitcast=True)
        factor = tl.where(exact, factor, float("nan"))
    else:
        factor = ue8m0_to_fp32(scale)
    if ONCE:
        # The codes are zeros there anyway. But a factor that does not come from memory alone keeps
        # the compiler from decoding once for each of the two products.
        factor = tl.where(ok if CODED == 2 else ok[:, None], factor, 0.0)
    if MODE == 0:
        factor = factor.to(tl.float16)
    if CODED == 4:
        ROWS: tl.constexpr = codes.shape[0]
        WIDTH: tl.constexpr = codes.shape[1] * 2
        if MODE == 0:
            x = tl.join(e2m1_to_fp16(codes & 15), e2m1_to_fp16(codes >> 4))
        else:
            x = tl.join(e2m1_to_fp32(codes & 15), e2m1_to_fp32(codes >> 4))
        x = tl.reshape(x, [ROWS, WIDTH // BLOCK, BLOCK]) * factor[:, :, None]
        rows = narrow(tl.reshape(x, [ROWS, WIDTH]), MODE)
    elif codes.dtype == tl.int32:
        c0, c1, c2, c3 = _decoded_words(codes, factor[:, :, None], MODE)
        rows = tl.join(tl.join(c0, c2), tl.join(c1, c3))
        rows = tl.reshape(rows, [codes.shape[0], codes.shape[1] * BLOCK])
    else:
        factor = factor[:, None] if CODED == 2 else factor[:, :, None]
        if MODE == 0:
            rows = e4m3_to_fp16(codes, NATIVE) * factor
        else:
            rows = narrow(e4m3_to_fp32(codes, NATIVE) * factor, MODE)
        if CODED != 2:
            rows = tl.reshape(rows, [codes.shape[0], codes.shape[1] * BLOCK])
    return rows


@triton.jit
def scales_of(
    pages, data, entries, offset, CODED: tl.constexpr, DATA: tl.constexpr, SCALES: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Return pointers to rows' scales, in their page's own plane or right behind the codes."""
    if DATA == SCALES:
        return data + (CHANNELS // 2 if CODED == 4 else CHANNELS)
    else:
        return pages + entries.to(tl.int64) * DATA + offset.to(tl.int64) * SCALES


@triton.jit
def load_plain(
    rows, ok, FIRST: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """Load channels FIRST to FIRST + WIDTH of plain rows at pointers [n]; zeros past CHANNELS."""
    channel = FIRST + tl.arange(0, WIDTH)
    inside = ok[:, None]
    if FIRST + WIDTH > CHANNELS:
        inside = inside & (channel < CHANNELS)[None, :]
    return tl.load(rows[:, None] + channel[None, :], mask=inside, other=0.0)


@triton.jit
def plain_tile(x, MODE: tl.constexpr, KEY: tl.constexpr):
    """Round plain channels to the type of MODE; KEY channels are no value and not lifted."""
    if MODE == 0 and KEY:
        x = x.to(tl.float32)
        # NaN, because an infinity could hide behind a probability of 0.
        return tl.where(tl.abs(x) <= _FLOAT16_MAX, x, float("nan")).to(tl.float16)
    elif MODE == 0:
        return (x.to(tl.float32) * LIFT).to(tl.float16)
    elif MODE == 1:
        return x.to(tl.bfloat16)
    else:
        return x.to(tl.float32)


@triton.jit
def load_heads(
    q, stride, heads, H, FIRST: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """Load WIDTH channels of the queries as float32 [heads, WIDTH]."""
    channel = FIRST + tl.arange(0, WIDTH)
    at = heads[:, None] * stride + channel[None, :]
    inside = (heads < H)[:, None] & (channel < CHANNELS)[None, :]
    return tl.load(q + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def largest_of(x):
    """Return the largest magnitude in every head."""
    return tl.max(tl.abs(x), 1)


@triton.jit
def score(q, rows, scores):
    """Add the product of queries and one tile of the rows' channels to the scores."""
    return tl.dot(q, tl.trans(rows), scores, input_precision="ieee")


@triton.jit
def weigh(p, rows, sums, decay):
    """Multiply the sums by ``decay`` and add the products of probabilities p and rows."""
    return tl.dot(p, rows, sums * decay, input_precision="ieee")


@triton.jit
def store_heads(
    to, stride, heads, H, x, FIRST: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr
):  # fmt: skip
    """Store channels FIRST to FIRST + WIDTH of all heads, omitting those past VALUES."""
    channel = FIRST + tl.arange(0, WIDTH)
    at = heads[:, None] * stride + channel[None, :]
    inside = (heads < H)[:, None] & (channel < VALUES)[None, :]
    tl.store(to + at, x.to(to.dtype.element_ty), mask=inside)


@triton.jit
def _next_slots(block, blocks0, rows0, rows1, BN: tl.constexpr, TWO: tl.constexpr):
    """Load the slots of a block of columns, -1 where there is none; caches are as in ``walk``."""
    n0, list0, limit0 = rows0[0], rows0[1], rows0[2]
    if TWO:
        n1, list1, limit1 = rows1[0], rows1[1], rows1[2]
        here = block < blocks0
        column = tl.where(here, block, block - blocks0) * BN + tl.arange(0, BN)
        slots = tl.load(
            tl.where(here, list0, list1) + column, mask=column < tl.where(here, n0, n1), other=-1
        )
        limit = tl.where(here, limit0, limit1)
    else:
        column = block * BN + tl.arange(0, BN)
        slots = tl.load(list0 + column, mask=column < n0, other=-1)
        limit = limit0
    return tl.where((slots >= 0) & (slots < limit), slots, -1)


@triton.jit
def _places(slots, block, blocks0, rows0, rows1, TWO: tl.constexpr):
    """Locate the rows of a block's slots; caches are as in ``walk``.

    Returns:
        True where there is a row, its page, and its index there, all [n]; and the rows in a page.
    """
    kv0, page0, entries0 = rows0[3], rows0[4], rows0[5]
    kv1, page1, entries1 = rows1[3], rows1[4], rows1[5]
    ok = slots >= 0
    slots = tl.maximum(slots, 0)
    if TWO:
        here = block < blocks0
        kv = tl.where(here, kv0, kv1)
        entries = tl.where(here, entries0, entries1)
        page_stride = tl.where(here, page0, page1)
    else:
        kv = kv0
        entries = entries0
        page_stride = page0
    page = slots // entries
    offset = slots - page * entries
    pages = kv + page.to(tl.int64) * page_stride
    return ok, pages, offset, entries


@triton.jit
def _load_rows(
    slots, block, blocks0, rows0, rows1, row_stride, TWO: tl.constexpr, ROW: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Load the rows of a block's slots, in tiles of 128, 128, 128, W3 and W4 channels.

    Arguments are those of ``_places`` and ``walk``.

    Returns:
        A bool [n], True where there is a row; then values and scales of each tile in turn, as
        ``load_tile`` returns them. Tiles without codes have no scales; ``ok`` stands there.
    """
    CODED: tl.constexpr = ROW[0]
    BLOCK: tl.constexpr = ROW[1]
    DATA: tl.constexpr = ROW[2]
    SCALES: tl.constexpr = ROW[3]
    CHANNELS: tl.constexpr = ROW[4]
    W3: tl.constexpr = ROW[5]
    W4: tl.constexpr = ROW[6]
    T3: tl.constexpr = 384 + W3
    ok, pages, offset, entries = _places(slots, block, blocks0, rows0, rows1, TWO)
    if CODED == 0:
        rows = pages + offset.to(tl.int64) * row_stride
        v0, v1 = load_plain(rows, ok, 0, 128, CHANNELS), load_plain(rows, ok, 128, 128, CHANNELS)
        v2, v3 = load_plain(rows, ok, 256, 128, CHANNELS), load_plain(rows, ok, 384, W3, CHANNELS)
        v4 = load_plain(rows, ok, T3, W4, CHANNELS)
        f0, f1, f2, f3, f4 = ok, ok, ok, ok, ok
    else:
        data = pages + offset.to(tl.int64) * DATA
        if CODED == 2:
            scales = (data + (CHANNELS - W4)).to(tl.pointer_type(tl.float32))
        else:
            scales = scales_of(pages, data, entries, offset, CODED, DATA, SCALES, CHANNELS)
        v0, f0 = load_tile(data, scales, ok, 0, 128, CODED, BLOCK, WORDS)
        v1, f1 = load_tile(data, scales, ok, 128, 128, CODED, BLOCK, WORDS)
        v2, f2 = load_tile(data, scales, ok, 256, 128, CODED, BLOCK, WORDS)
        v3, f3 = load_tile(data, scales, ok, 384, W3, CODED, BLOCK, WORDS)
        if CODED <= 2:
            behind = CHANNELS - W4 + (SCALES if CODED == 2 else 0)
            tail = (data + behind).to(tl.pointer_type(tl.bfloat16))
            v4, f4 = load_plain(tail, ok, 0, W4, W4), ok
        else:
            v4, f4 = load_tile(data, scales, ok, T3, W4, CODED, BLOCK, WORDS)
    return ok, v0, f0, v1, f1, v2, f2, v3, f3, v4, f4


@triton.jit
def walk(
    queries, span, rows0, rows1, row_stride, TILE: tl.constexpr, ROW: tl.constexpr,
    KEY: tl.constexpr, MODE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Attend to the blocks of a span.

    Returns the highest score, its reference, the sum of p, and five sums of p times rows. Scores
    are in units of log 2; ``KEY`` leaves the last sum at 0.

    Args:
        queries: tuple of the pointer to the token's queries, stride of a head, heads [BH], H and
            softmax scale.
        span: tuple of first and last block of the walk, and the first block of the second cache.
        rows0: first cache, a tuple of listed rows, their slots, slots of the cache, pages, stride
            of a page, and rows in a page.
        rows1: second cache, a tuple like ``rows0``.
        row_stride: elements between plain rows.
        TILE: BH, BN, TWO, ONCE, AHEAD, WORDS of the kernel.
        ROW: CODED, BLOCK, DATA, SCALES, CHANNELS, W3, W4 of the kernel.
        KEY: True if the last tile of a row is not part of the value.
        MODE: operand type, defined at the top of the file.
        NATIVE: True to convert FP8 by instructions.
    """
    BH: tl.constexpr = TILE[0]
    BN: tl.constexpr = TILE[1]
    TWO: tl.constexpr = TILE[2]
    ONCE: tl.constexpr = TILE[3]
    AHEAD: tl.constexpr = TILE[4]
    WORDS: tl.constexpr = TILE[5]
    CODED: tl.constexpr = ROW[0]
    BLOCK: tl.constexpr = ROW[1]
    CHANNELS: tl.constexpr = ROW[4]
    W3: tl.constexpr = ROW[5]
    W4: tl.constexpr = ROW[6]
    q, q_stride, heads, H, scale = queries[0], queries[1], queries[2], queries[3], queries[4]
    first, last, blocks0 = span[0], span[1], span[2]
    T3: tl.constexpr = 384 + W3
    q0 = load_heads(q, q_stride, heads, H, 0, 128, CHANNELS)
    q1 = load_heads(q, q_stride, heads, H, 128, 128, CHANNELS)
    q2 = load_heads(q, q_stride, heads, H, 256, 128, CHANNELS)
    q3 = load_heads(q, q_stride, heads, H, 384, W3, CHANNELS)
    q4 = load_heads(q, q_stride, heads, H, T3, W4, CHANNELS)
    factor = tl.full([BH], 1.0, tl.float32) * (scale * LOG2E)
    if MODE == 0:
        # Scale each head by a power of two that brings its largest magnitude into [1, 2).
        largest = tl.maximum(largest_of(q0), largest_of(q1))
        largest = tl.maximum(largest, largest_of(q2))
        largest = tl.maximum(largest, largest_of(q3))
        largest = tl.maximum(largest, largest_of(q4))
        exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 127
        exponent = tl.minimum(tl.maximum(exponent, -126), 126)
        shrink = exp2_int(-exponent)[:, None]
        q0, q1, q2, q3, q4 = q0 * shrink, q1 * shrink, q2 * shrink, q3 * shrink, q4 * shrink
        factor = factor * exp2_int(exponent) * (1.0 / LIFT)
        if KEY and CODED <= 2:
            q4 = q4 * LIFT
    q0, q1, q2 = narrow(q0, MODE), narrow(q1, MODE), narrow(q2, MODE)
    q3, q4 = narrow(q3, MODE), narrow(q4, MODE)
    factor = factor[:, None]

    shift = _SHIFT if MODE == 0 else 0.0
    highest = tl.full([BH], _NO_MAXIMUM, tl.float32)
    total = tl.zeros([BH, BN], tl.float32)
    a0 = tl.zeros([BH, 128], tl.float32)
    a1 = tl.zeros([BH, 128], tl.float32)
    a2 = tl.zeros([BH, 128], tl.float32)
    a3 = tl.zeros([BH, W3], tl.float32)
    a4 = tl.zeros([BH, W4], tl.float32)
    upcoming = _next_slots(first, blocks0, rows0, rows1, BN, TWO)
    if AHEAD:
        ahead = _load_rows(upcoming, first, blocks0, rows0, rows1, row_stride, TWO, ROW, WORDS)
        upcoming = _next_slots(first + 1, blocks0, rows0, rows1, BN, TWO)
    for block in range(first, last):
        slots = upcoming
        if AHEAD:
            loaded = ahead
            ahead = _load_rows(slots, block + 1, blocks0, rows0, rows1, row_stride, TWO, ROW, WORDS)
            upcoming = _next_slots(block + 2, blocks0, rows0, rows1, BN, TWO)
        else:
            upcoming = _next_slots(block + 1, blocks0, rows0, rows1, BN, TWO)
            loaded = _load_rows(slots, block, blocks0, rows0, rows1, row_stride, TWO, ROW, WORDS)
        ok = loaded[0]
        if CODED == 0:
            k0, k1 = plain_tile(loaded[1], MODE, False), plain_tile(loaded[3], MODE, False)
            k2, k3 = plain_tile(loaded[5], MODE, False), plain_tile(loaded[7], MODE, False)
            k4 = plain_tile(loaded[9], MODE, False)
        else:
            k0 = decode_tile(loaded[1], loaded[2], ok, CODED, BLOCK, MODE, NATIVE, ONCE)
            k1 = decode_tile(loaded[3], loaded[4], ok, CODED, BLOCK, MODE, NATIVE, ONCE)
            k2 = decode_tile(loaded[5], loaded[6], ok, CODED, BLOCK, MODE, NATIVE, ONCE)
            k3 = decode_tile(loaded[7], loaded[8], ok, CODED, BLOCK, MODE, NATIVE, ONCE)
            if CODED <= 2:
                k4 = plain_tile(loaded[9], MODE, KEY)
            else:
                k4 = decode_tile(loaded[9], loaded[10], ok, CODED, BLOCK, MODE, NATIVE, ONCE)
        s = tl.zeros([BH, BN], tl.float32)
        s = score(q0, k0, s)
        s = score(q1, k1, s)
        s = score(q2, k2, s)
        s = score(q3, k3, s)
        s = score(q4, k4, s)
        s = tl.where(ok[None, :], s * factor, float("-inf"))
        peak = tl.maximum(highest, tl.max(s, 1))
        decay = tl.exp2(highest - peak)[:, None]
        highest = peak
        p = tl.exp2(s - (peak - shift)[:, None])
        total = total * decay + p
        p = narrow(p, MODE)
        a0 = weigh(p, k0, a0, decay)
        a1 = weigh(p, k1, a1, decay)
        a2 = weigh(p, k2, a2, decay)
        a3 = weigh(p, k3, a3, decay)
        if not KEY:
            a4 = weigh(p, k4, a4, decay)
    sums = tl.sum(total, 1)
    if MODE == 0:
        small = 1.0 / LIFT
        a0, a1, a2, a3, a4 = a0 * small, a1 * small, a2 * small, a3 * small, a4 * small
    return highest, highest - shift, sums, a0, a1, a2, a3, a4


@triton.jit
def _bf16_halves(words):
    """Reinterpret the lower and the upper half of 32 bits as two bfloat16."""
    lower = (words & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    upper = (words.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return lower, upper


@triton.jit
def _load_words(at, word, mask, ALIGNED: tl.constexpr):
    """Load int32 words behind uint8 pointers, by bytes unless ALIGNED; zeros where not ``mask``."""
    if ALIGNED:
        return tl.load(at.to(tl.pointer_type(tl.int32)) + word, mask=mask, other=0)
    else:
        value = tl.load(at + 4 * word, mask=mask, other=0).to(tl.int32)
        for byte in tl.static_range(1, 4):
            value |= tl.load(at + (4 * word + byte), mask=mask, other=0).to(tl.int32) << 8 * byte
        return value


@triton.jit
def coded_rows(
    data, scales, ok, CODED: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr,
    ALIGNED: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Load and decode channels 0 to 511 of FP8 rows, [n, 512]; rows that are not ``ok`` are zeros.

    Args:
        data: uint8 pointers [n] to the rows, which are CODES codes of e4m3 and bfloat16 behind
            them.
        scales: pointers [n] to their scales, which are bytes, or float32 where CODED is 2.
        ok: bool [n], True where a row is read.
        CODED: kind of the rows by the numbers of ``config``.
        BLOCK: channels that share a scale.
        CODES: channels that have codes, a multiple of BLOCK.
        ALIGNED: True if rows begin at multiples of 8 bytes.
        MODE: operand type of the result, bfloat16 or float32.
    """
    ROWS: tl.constexpr = data.shape[0]
    BLOCKS: tl.constexpr = _ROW // BLOCK
    block = tl.arange(0, BLOCKS)
    word = (block[:, None] * (BLOCK // 4) + tl.arange(0, BLOCK // 4)[None, :])[None, :, :]
    there = ok[:, None, None]
    coded = (block < CODES // BLOCK)[None, :]
    at = data[:, None, None]
    if CODES == _ROW:
        words = _load_words(at, word, there, ALIGNED)
    else:
        words = _load_words(at, word, there & coded[:, :, None], ALIGNED)
    at = scales[:, None] + block[None, :]
    if CODED == 2:
        factor = tl.load(at, mask=ok[:, None], other=0.0)
    else:
        factor = ue8m0_to_fp32(tl.load(at, mask=ok[:, None] & coded, other=127))
    c0, c1, c2, c3 = _decoded_words(words, factor[:, :, None], MODE)
    if CODES < _ROW:
        # Four channels of the tail take two words in the place of one word of codes.
        at = (data - CODES)[:, None, None]
        there &= ~coded[:, :, None]
        if ALIGNED:
            both = tl.load(at.to(tl.pointer_type(tl.int64)) + word, mask=there, other=0)
            t0, t1 = _bf16_halves(both.to(tl.int32))
            t2, t3 = _bf16_halves((both >> 32).to(tl.int32))
        else:
            t0, t1 = _bf16_halves(_load_words(at, 2 * word, there, ALIGNED))
            t2, t3 = _bf16_halves(_load_words(at, 2 * word + 1, there, ALIGNED))
        coded = coded[:, :, None]
        c0, c1 = tl.where(coded, c0, t0.to(c0.dtype)), tl.where(coded, c1, t1.to(c1.dtype))
        c2, c3 = tl.where(coded, c2, t2.to(c2.dtype)), tl.where(coded, c3, t3.to(c3.dtype))
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), (ROWS, _ROW))


@triton.jit
def plain_rows(rows, ok, CHANNELS: tl.constexpr, MODE: tl.constexpr):
    """Load channels 0 to 511 of plain rows at pointers [n], with zeros past CHANNELS."""
    channel = tl.arange(0, _ROW)
    inside = ok[:, None]
    if CHANNELS < _ROW:
        inside = inside & (channel < CHANNELS)[None, :]
    x = tl.load(rows[:, None] + channel[None, :], mask=inside, other=0.0)
    return narrow(x.to(tl.float32), MODE)


@triton.jit
def walk_rows(
    queries, span, rows0, rows1, row_stride, TILE, ROW, MODE: tl.constexpr,
):  # fmt: skip
    """Do what ``walk`` does, dividing the channels among the warps, with one sum of p times rows.

    Scores are summed over parts of the channels (split-K), one or two warps per part, and each warp
    has the output of its own channels. So a thread holds few of either: on Xe it has 16 KiB of
    registers. Up to 64 channels behind the first 512 are part of the key alone.

    Intel's compiler divides a product among warps by rows alone if it sees another product that it
    depends on in the same block of code. 16 heads are only two rows of its instruction, so all
    other warps would repeat the same work. Therefore each product stands in a block of its own,
    under a condition that always holds.

    Args:
        queries: tuple as in ``walk``.
        span: tuple as in ``walk``.
        rows0: first cache as in ``walk``.
        rows1: second cache as in ``walk``.
        row_stride: elements between plain rows.
        TILE: BH, BN, TWO, ROW_PARTS and ALIGNED of the kernel.
        ROW: CODED, BLOCK, DATA, SCALES and CHANNELS of the kernel.
        MODE: operand type 1 or 2, defined at the top of the file.
    """
    BH: tl.constexpr = TILE[0]
    BN: tl.constexpr = TILE[1]
    TWO: tl.constexpr = TILE[2]
    PARTS: tl.constexpr = TILE[3]
    ALIGNED: tl.constexpr = TILE[4]
    CODED: tl.constexpr = ROW[0]
    BLOCK: tl.constexpr = ROW[1]
    DATA: tl.constexpr = ROW[2]
    SCALES: tl.constexpr = ROW[3]
    CHANNELS: tl.constexpr = ROW[4]
    EACH: tl.constexpr = _ROW // PARTS
    KEY: tl.constexpr = CHANNELS > _ROW
    q, q_stride, heads, H, scale = queries[0], queries[1], queries[2], queries[3], queries[4]
    first, last, blocks0 = span[0], span[1], span[2]
    live = H > 0

    channel = (tl.arange(0, PARTS) * EACH)[:, None, None] + tl.arange(0, EACH)[None, None, :]
    inside = (heads < H)[None, :, None] & (channel < CHANNELS)
    at = q + (heads * q_stride)[None, :, None] + channel
    share = narrow(tl.load(at, mask=inside, other=0.0).to(tl.float32), MODE)
    if KEY:
        # Each part has four channels here, and twelve of padding because the instruction takes
        # sixteen.
        behind = (tl.arange(0, PARTS) * (64 // PARTS))[:, None, None] + tl.arange(0, 16)[
            None, None, :
        ]
        mine = (tl.arange(0, 16) < 64 // PARTS)[None, None, :] & (behind < CHANNELS - _ROW)
        at = q + _ROW + (heads * q_stride)[None, :, None] + behind
        rest = tl.load(at, mask=(heads < H)[None, :, None] & mine, other=0.0)
        rest = narrow(rest.to(tl.float32), MODE)

    highest = tl.full([BH], _NO_MAXIMUM, tl.float32)
    total = tl.zeros([BH, BN], tl.float32)
    sums = tl.zeros([BH, _ROW], tl.float32)
    upcoming = _next_slots(first, blocks0, rows0, rows1, BN, TWO)
    for block in range(first, last):
        slots = upcoming
        upcoming = _next_slots(block + 1, blocks0, rows0, rows1, BN, TWO)
        ok, pages, offset, entries = _places(slots, block, blocks0, rows0, rows1, TWO)
        if CODED == 0:
            data = pages + offset.to(tl.int64) * row_stride
            rows = plain_rows(data, ok, CHANNELS, MODE)
            tail = data + _ROW
        else:
            data = pages + offset.to(tl.int64) * DATA
            if CODED == 2:
                scales = (data + _ROW).to(tl.pointer_type(tl.float32))
                rows = coded_rows(data, scales, ok, CODED, BLOCK, _ROW, ALIGNED, MODE)
            else:
                scales = scales_of(pages, data, entries, offset, CODED, DATA, SCALES, CHANNELS)
                if CODED == 4:
                    codes, factors = load_tile(data, scales, ok, 0, _ROW, CODED, BLOCK, False)
                    rows = decode_tile(codes, factors, ok, CODED, BLOCK, MODE, False, False)
                else:
                    CODES: tl.constexpr = CHANNELS - 64 if CODED == 1 else _ROW
                    rows = coded_rows(data, scales, ok, CODED, BLOCK, CODES, ALIGNED, MODE)
            tail = (data + (_ROW + SCALES)).to(tl.pointer_type(tl.bfloat16))
        keys = tl.permute(tl.reshape(rows, (BN, PARTS, EACH)), (1, 2, 0))
        parts = tl.zeros([PARTS, BH, BN], tl.float32)
        if live:
            parts = tl.dot(share, keys, parts, input_precision="ieee")
        if KEY:
            more_keys = tl.load(
                tail[None, :, None] + behind, mask=ok[None, :, None] & mine, other=0.0
            )
            more_keys = narrow(more_keys.to(tl.float32), MODE)
            if live:
                parts = tl.dot(
                    rest, tl.permute(more_keys, (0, 2, 1)), parts, input_precision="ieee"
                )
        s = tl.sum(parts, 0)
        s = tl.where(ok[None, :], s * (scale * LOG2E), _NO_SCORE)
        peak = tl.maximum(highest, tl.max(s, 1))
        decay = tl.exp2(highest - peak)[:, None]
        highest = peak
        p = tl.exp2(s - peak[:, None])
        total = total * decay + p
        p = narrow(p, MODE)
        if live:
            sums = tl.dot(p, rows, sums * decay, input_precision="ieee")
    return highest, highest, tl.sum(total, 1), sums


# These are run-time numbers rather than constants, so that a call with lengths or a sink compiles
# nothing new.
COUNTS = ["H", "K0", "K1", "limit0", "limit1", "list_stride0", "list_stride1", "entries0",
          "entries1", "splits", "total", "at", "has_length0", "has_length1",
          "has_sink"]  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def decode_kernel(
    q_ptr, kv0_ptr, list0_ptr, length0_ptr, kv1_ptr, list1_ptr, length1_ptr, sink_ptr,
    out_ptr, lse_ptr, peak_ptr, part_ptr, sums_ptr,
    H, K0, K1, limit0, limit1, list_stride0, list_stride1, entries0, entries1,
    splits, total, at, has_length0, has_length1, has_sink, scale, empty,
    q_token, q_head, out_token, out_head, page0, page1, row_stride,
    BH: tl.constexpr, BN: tl.constexpr, TWO: tl.constexpr,
    PEAK: tl.constexpr, SPLIT: tl.constexpr,
    CODED: tl.constexpr, BLOCK: tl.constexpr, DATA: tl.constexpr, SCALES: tl.constexpr,
    CHANNELS: tl.constexpr, VALUES: tl.constexpr, W3: tl.constexpr, W4: tl.constexpr,
    MODE: tl.constexpr, NATIVE: tl.constexpr, ONCE: tl.constexpr, ROW_PARTS: tl.constexpr,
    ALIGNED: tl.constexpr, AHEAD: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Attend one token to a split of its lists, as the top of the file describes.

    Partials are ``part`` [T, total, H, VALUES] and ``sums`` [T, total, H, 3].
    """
    T3: tl.constexpr = 384 + W3
    KEY: tl.constexpr = VALUES <= T3
    program = tl.program_id(0).to(tl.int64)
    groups = tl.cdiv(H, BH)
    split = (program % splits).to(tl.int32)
    group = (program // splits % groups).to(tl.int32)
    token = program // splits // groups
    heads = group * BH + tl.arange(0, BH)
    none = tl.zeros([], tl.int32)
    # Without lengths or a sink, these pointers lead to unused numbers of the same type.
    n0 = tl.where(none < has_length0, tl.load(length0_ptr + token), K0)
    n1 = tl.where(none < has_length1, tl.load(length1_ptr + token), K1)
    n0 = tl.minimum(tl.maximum(n0, 0), none + K0)
    n1 = tl.minimum(tl.maximum(n1, 0), none + K1)
    list0 = list0_ptr + token * list_stride0
    list1 = list1_ptr + token * list_stride1
    blocks0 = tl.cdiv(n0, BN)
    blocks = blocks0
    if TWO:
        blocks += tl.cdiv(n1, BN)
    each = tl.cdiv(blocks, splits)
    first = split * each
    last = tl.minimum(first + each, blocks)
    q = q_ptr + token * q_token

    queries = (q, q_head, heads, H, scale)
    span = (first, last, blocks0)
    rows0 = (n0, list0, limit0, kv0_ptr, page0, entries0)
    rows1 = (n1, list1, limit1, kv1_ptr, page1, entries1)
    if ROW_PARTS > 0:
        peak, top, sums, row = walk_rows(
            queries, span, rows0, rows1, row_stride, (BH, BN, TWO, ROW_PARTS, ALIGNED),
            (CODED, BLOCK, DATA, SCALES, CHANNELS), MODE,
        )  # fmt: skip
    else:
        peak, top, sums, a0, a1, a2, a3, a4 = walk(
            queries, span, rows0, rows1, row_stride,
            (BH, BN, TWO, ONCE, AHEAD, WORDS),
            (CODED, BLOCK, DATA, SCALES, CHANNELS, W3, W4), KEY, MODE, NATIVE,
        )  # fmt: skip
        if MODE == 0:
            # x * 0 is NaN if x is not finite. Rows out of float16's range show in these two sums.
            seen = tl.sum(tl.where(heads < H, sums, 0.0) * 0.0)
            if not KEY:
                seen += tl.sum(tl.sum(a4 * 0.0, 1), 0)
            if seen != seen:
                # Rarely taken. Without splits, V4's rows are decoded for each product there: this
                # saves the registers that would spill beside the sink's.
                peak, top, sums, a0, a1, a2, a3, a4 = walk(
                    queries, span, rows0, rows1, row_stride,
                    (BH, BN, TWO, ONCE and ((SPLIT or not AHEAD) or CODED != 1),
                     AHEAD, WORDS),
                    (CODED, BLOCK, DATA, SCALES, CHANNELS, W3, W4), KEY, 1, NATIVE,
                )  # fmt: skip

    if SPLIT:
        first = (token * total + at + split) * H
        to = part_ptr + first * VALUES
        stride = VALUES
        left = sums_ptr + (first + heads) * _SUMS
        tl.store(left, top, mask=heads < H)
        tl.store(left + 1, sums, mask=heads < H)
        if PEAK:
            tl.store(left + 2, peak, mask=heads < H)
    else:
        sink = tl.load(sink_ptr + heads, mask=heads < H, other=0.0)
        sink = tl.where(none < has_sink, sink, float("-inf"))
        bottom = sums + tl.exp2(sink * LOG2E - top)
        share = tl.where(sums == 0, 0.0, 1.0 / bottom)[:, None]
        if ROW_PARTS > 0:
            row = row * share
        else:
            a0, a1, a2, a3, a4 = a0 * share, a1 * share, a2 * share, a3 * share, a4 * share
        lse = tl.where(sums == 0, empty, (top + tl.log2(sums)) * _LN2)
        tl.store(lse_ptr + token * H + heads, lse, mask=heads < H)
        if PEAK:
            peak = tl.where(sums == 0, float("-inf"), peak * _LN2)
            tl.store(peak_ptr + token * H + heads, peak, mask=heads < H)
        to = out_ptr + token * out_token
        stride = out_head
    if ROW_PARTS > 0:
        store_heads(to, stride, heads, H, row, 0, _ROW, VALUES)
    else:
        store_heads(to, stride, heads, H, a0, 0, 128, VALUES)
        store_heads(to, stride, heads, H, a1, 128, 128, VALUES)
        store_heads(to, stride, heads, H, a2, 256, 128, VALUES)
        store_heads(to, stride, heads, H, a3, 384, W3, VALUES)
        if not KEY:
            store_heads(to, stride, heads, H, a4, T3, W4, VALUES)


def row_constants(coded: PageLayout | None, channels: int) -> dict[str, int]:
    """Return the kernel's constants for rows of a coded layout, or for plain rows of ``channels``.

    DATA and SCALES are bytes from one entry's codes, or scales, to the next entry's in a page; they
    are the same where entries are interleaved.
    """
    wide = -(-max(channels, 512) // 64) * 64 - 512
    tiles = {"W3": 128 if wide else 64, "W4": 128 if wide > 64 else 64}
    if coded is None:
        return {"CODED": PLAIN, "BLOCK": 0, "SCALES": 0, "DATA": 0} | tiles
    apart = {"DATA": coded.data_bytes, "SCALES": coded.scale_bytes}
    if coded.interleaved:
        apart = dict.fromkeys(apart, coded.entry_bytes)
    if isinstance(coded, SplitFp8Layout):
        kind = FP8_TAIL if coded.nope < coded.channels else FP8_CODES
        return {"CODED": kind, "BLOCK": coded.block} | apart | tiles
    if isinstance(coded, RowNvfp4Layout):
        return {"CODED": NVFP4, "BLOCK": NVFP4_BLOCK} | apart | tiles
    assert isinstance(coded, InlineFp8Layout)
    assert (coded.nope, coded.block) == (512, 128)
    apart = {"DATA": coded.data_bytes, "SCALES": coded.rope_start - coded.nope}
    return {"CODED": INLINE, "BLOCK": coded.block} | apart | tiles

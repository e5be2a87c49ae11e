"""Decode attention over V4's FP8 rows for NVIDIA GPUs whose matrix instruction is ``mma.sync``.

A CTA attends HEADS heads of a token, 16, 32 or 64, to a split of its lists, in blocks of 32 rows.
Each block is copied as it lies in the cache (``cp.async``) while the blocks before it are computed,
is decoded once into shared memory, and is read there by both products.

A warp multiplies 16 heads by one part of the channels in both products: scores are partial sums,
which the warps of these heads add up through shared memory; the output needs no sum. So a warp
reads only its own channels of a row, and keeps its part of the queries in registers. 4 warps are
four parts of 16 heads or two of 32, 8 warps two parts of 64. Where shared memory holds two decoded
blocks (AHEAD), the next one is decoded beside the products of this one: 64 heads take the registers
of an SM, so that no other CTA has work there meanwhile.

A row is nine tiles of 64 bytes: seven blocks of codes, each with a scale byte, and the bfloat16
tail. A thread copies and decodes 16 bytes of a row's tile. Codes are stored times ``LIFT`` as
float16, the tail as it is (the query's tail is lifted instead). Splits with rows that float16 does
not hold are noticed, and computed again in bfloat16: MODE 0 is float16, MODE 1 bfloat16, as in
``triton_decode``.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.ops._gluon import view
from anymla.ops._gluon_epilogue import tail_order
from anymla.ops._gluon_ptx import (
    cvt_f16x2_bf16x2,
    cvt_f16x2_e4m3x4_mul,
    mul_f16x2,
    opaque,
    prmt_b32,
)
from anymla.ops.attention import float16_range
from anymla.ops.attention.triton_decode import COUNTS
from anymla.ops.attention.triton_decode_combine import SUMS

_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_LAYOUT = get_layout(MAIN_FP8)
_WORDS = gl.constexpr(_LAYOUT.data_bytes // 4)  # of a row
_SCALES = gl.constexpr(_LAYOUT.scale_bytes // 4)
_NOPE = gl.constexpr(_LAYOUT.nope)
_CHANNELS = gl.constexpr(_LAYOUT.channels)
_ROWS = gl.constexpr(32)
_CODED = gl.constexpr(7)  # tiles of a row that are codes
_TILES = gl.constexpr(8)
_TILE = gl.constexpr(16)  # words in a tile of a row
_SUMS = gl.constexpr(SUMS)
_LOG2E = gl.constexpr(1.4426950408889634)
_LN2 = gl.constexpr(0.6931471805599453)
_NO_MAXIMUM = gl.constexpr(-1e30)
# float16 probabilities are at most 2^15, so that they keep their precision down to 2^-29.
_SHIFT = gl.constexpr(15.0)
_LIFT = gl.constexpr(2.0**float16_range.LIFT)
_COUNTS = [*COUNTS, "shift0", "shift1", "step0", "step1"]
assert float16_range.exact_scale_bytes(float16_range.LIFT) == (105, 127)  # see ``_inexact``


@gluon.constexpr_function
def _rows_layout(words, warps):
    """Return the layout of tiles [8, 32, n] in which a thread has ``words`` adjacent numbers."""
    return gl.BlockedLayout([1, 1, words], [1, 8, 4], [warps // 4, 4, 1], [2, 1, 0])


@gluon.constexpr_function
def _parts(heads, warps):
    """Return the number of parts that a row's channels are cut into."""
    return warps * 16 // heads


@gluon.constexpr_function
def _mma_layout(heads, warps):
    """Return the layout of products [parts, heads, n], in which a warp has one part of 16 heads."""
    return gl.NVMMADistributedLayout([2, 0], [warps * 16 // heads, heads // 16, 1], [1, 16, 8])


@gluon.jit
def _load_slots(block, span, rows0, rows1, L: gl.constexpr, TWO: gl.constexpr):
    """Load the slots of a block of columns, -1 where there is no column.

    They are not used before the next block, so that nothing waits for them.
    """
    last, blocks0 = span[1], span[2]
    n, listed = rows0[0], rows0[1]
    column = block * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, L))
    if TWO:
        here = block < blocks0
        n = gl.where(here, n, rows1[0])
        listed = gl.where(here, listed, rows1[1])
        column = column - gl.where(here, 0, blocks0) * _ROWS
    return gl.load(listed + column, mask=(column < n) & (block < last), other=-1)


@gluon.jit
def _start_copy(slots, block, span, rows0, rows1, memory, TILES: gl.constexpr, TWO: gl.constexpr):
    """Start copying rows and scales of a block's slots, zeros where there is no row."""
    raw, rest, scales, valid = memory[0], memory[1], memory[2], memory[3]
    limit, base, shift, step = rows0[2], rows0[3], rows0[4], rows0[5]
    if TWO:
        here = block < span[2]
        limit = gl.where(here, limit, rows1[2])
        base = gl.where(here, base, rows1[3])
        shift = gl.where(here, shift, rows1[4])
        step = gl.where(here, step, rows1[5])
    ok = (slots >= 0) & (slots < limit)
    known = gl.where(ok, slots, 0)
    start = (known >> shift).to(gl.int64) * step * 4
    entry = known & ((1 << shift) - 1)
    plane = (1 << shift) * _WORDS  # words in front of a page's scales
    # All threads of a row have the same words of each tile, so no layout is changed below.
    L: gl.constexpr = gl.SliceLayout(0, TILES)
    S: gl.constexpr = gl.BlockedLayout([1, _SCALES], [8, 4], [gl.num_warps(), 1], [1, 0])
    word = gl.expand_dims(gl.arange(0, _TILE, layout=gl.SliceLayout(0, L)), 0)
    row = gl.expand_dims(start + entry * _WORDS, 1) + word
    there = gl.expand_dims(ok, 1) & (word >= 0)
    at = base + (gl.expand_dims(row, 0) + _tiles(TILES) * _TILE)
    _copy(raw, at, mask=gl.expand_dims(there, 0) & (_tiles(TILES) >= 0))
    _copy(rest, base + (row + _TILES * _TILE), mask=there)
    first = gl.convert_layout(start + (plane + entry * _SCALES), gl.SliceLayout(1, S))
    word = gl.expand_dims(gl.arange(0, _SCALES, layout=gl.SliceLayout(0, S)), 0)
    there = gl.expand_dims(gl.convert_layout(ok, gl.SliceLayout(1, S)), 1) & (word >= 0)
    _copy(scales, base + (gl.expand_dims(first, 1) + word), mask=there)
    async_copy.commit_group()
    valid.store(ok.to(gl.int32))


@gluon.jit
def _pair(words, SELECTOR: gl.constexpr):
    """Decode two e4m3 codes of int32 words to a pair of float16 times 2^-8; NaN becomes 480."""
    x = prmt_b32(words, 0, SELECTOR)
    return ((x >> 1) & 0x3F803F80) | (x & -0x7FFF8000)


@gluon.jit
def _bf16_pair(words, FIRST: gl.constexpr, scale):
    """Decode two e4m3 codes of int32 words to a pair of bfloat16, times a float32 scale."""
    pair = gl.zeros_like(words)
    for code in gl.static_range(2):
        byte = (words >> 8 * (FIRST + code)) & 0xFF
        size = byte & 0x7F
        x = (size << 20).to(gl.float32, bitcast=True) * 2.0**120
        x = gl.where(size == 0x7F, float("nan"), x) * scale
        bits = x.to(gl.int32, bitcast=True) | (byte & 0x80) << 24
        pair |= bits & -0x10000 if code else (bits >> 16) & 0xFFFF
    return pair


@gluon.jit
def _or(a, b):
    return a | b


@gluon.jit
def _decode(
    memory, buffer, PARTS: gl.constexpr, TILES: gl.constexpr, MODE: gl.constexpr,
    NATIVE: gl.constexpr,
):  # fmt: skip
    """Decode the copied block for both products, and store what masks its scores.

    Returns:
        int32 [32] with one of the highest bits of its bytes set if MODE 0 does not hold the row,
        and int32 [n, 32, 16] with one of them set if a code is NaN.
    """
    raw, rest, scales, valid, rows, bias = (
        memory[0], memory[1], memory[2], memory[3],
        memory[4].index(buffer), memory[5].index(buffer),
    )  # fmt: skip
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, TILES))
    S: gl.constexpr = gl.BlockedLayout([1, _SCALES], [8, 4], [gl.num_warps(), 1], [1, 0])
    PAIRS: gl.constexpr = _rows_layout(8, gl.num_warps())
    ok = valid.load(ROW) != 0
    bias.store(gl.where(ok, 0.0, float("-inf")))
    low, high = gl.split(scales.load(S))
    low = gl.where(ok, gl.convert_layout(low, ROW), 0x7F7F7F7F)
    high = gl.where(ok, gl.convert_layout(high, ROW) & 0xFFFFFF, 0x7F7F7F) | 0x7F000000
    # Bytes of 128 and more, or of less than 105.
    inexact = low | ~((low | -0x7F7F7F80) - 0x69696969)
    inexact |= high | ~((high | -0x7F7F7F80) - 0x69696969)

    tile = _tiles(TILES)
    low, high = (
        gl.expand_dims(gl.expand_dims(low, 1), 0),
        gl.expand_dims(gl.expand_dims(high, 1), 0),
    )
    byte = (gl.where(tile < 4, low, high) >> 8 * (tile % 4)) & 0xFF
    words = raw.load(TILES)
    spoiled = gl.where(tile < _CODED, (words & 0x7F7F7F7F) + 0x01010101, 0)
    WARPS: gl.constexpr = gl.num_warps() // 4  # that have a row's tiles in turn
    spoiled = gl.reshape(spoiled, [_TILES // WARPS, WARPS, _ROWS, _TILE])
    spoiled = gl.convert_layout(gl.reduce(spoiled, 0, _or), TILES)
    if MODE == 1:
        bits = gl.where(byte == 0, 0x00400000, gl.where(byte == 255, 0x7FC00000, byte << 23))
        scale = bits.to(gl.float32, bitcast=True)
        first, second = _bf16_pair(words, 0, scale), _bf16_pair(words, 2, scale)
    elif NATIVE:
        factor = gl.where(byte == 105, 0x02000200, (byte - 105) * 0x04000400)
        first, second = cvt_f16x2_e4m3x4_mul(words, factor)
    else:
        factor = (byte - 97) * 0x04000400
        first = mul_f16x2(_pair(words, 0x1404), factor)
        second = mul_f16x2(_pair(words, 0x3424), factor)
    pairs = gl.convert_layout(gl.reshape(gl.join(first, second), [_TILES, _ROWS, 2 * _TILE]), PAIRS)
    # A thread has two runs of 16 bytes of the tail, which are not adjacent; see ``tail_order``.
    words, tail = gl.broadcast(words, gl.expand_dims(rest.load(gl.SliceLayout(0, TILES)), 0))
    if MODE == 0:
        words, tail = cvt_f16x2_bf16x2(words), cvt_f16x2_bf16x2(tail)
    tail = gl.permute(gl.reshape(gl.join(words, tail), [_TILES, _ROWS, 4, 4, 2]), [0, 1, 2, 4, 3])
    tail = gl.convert_layout(gl.reshape(tail, [_TILES, _ROWS, 2 * _TILE]), PAIRS)
    pairs = gl.where(_tiles(PAIRS) < _CODED, pairs, tail)
    pairs = gl.reshape(pairs, [PARTS, _TILES // PARTS, _ROWS, 2 * _TILE])
    pairs = gl.permute(pairs, [0, 2, 1, 3])
    rows.store(gl.reshape(pairs, [PARTS, _ROWS, _CHANNELS // 2 // PARTS]))
    return inexact, spoiled


@gluon.jit
def _advance(
    state, block, buffer, span, rows0, rows1, memory, TILES: gl.constexpr, PARTS: gl.constexpr,
    TWO: gl.constexpr, MODE: gl.constexpr, NATIVE: gl.constexpr,
):  # fmt: skip
    """Decode the copied block, start copying ``block``, and load the slots of the one after it.

    ``state`` is the slots of ``block``, and what ``_decode`` returned of all blocks before.
    """
    bad, nan = _decode(memory, buffer, PARTS, TILES, MODE, NATIVE)
    inexact, spoiled = state[1] | bad, state[2] | nan
    _start_copy(state[0], block, span, rows0, rows1, memory, TILES, TWO)
    slots = _load_slots(block + 1, span, rows0, rows1, gl.SliceLayout(0, TILES), TWO)
    return slots, inexact, spoiled


@gluon.jit
def _load_queries(queries, memory, MMA: gl.constexpr, HEADS: gl.constexpr, MODE: gl.constexpr):
    """Load a CTA's queries as an operand [parts, HEADS, n], and the factor of each head's scores.

    They pass through the memory of decoded rows, 64 heads through that of scores as well.
    """
    q, stride, head0, H, scale = queries[0], queries[1], queries[2], queries[3], queries[4]
    L: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 2, 16], [1, gl.num_warps(), 1], [2, 1, 0])
    HEAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, L))
    SCORE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, MMA))
    PARTS: gl.constexpr = _parts(HEADS, gl.num_warps())
    channel = _channels(PARTS, L)
    head = head0 + gl.arange(0, HEADS, layout=HEAD)
    at = gl.expand_dims(gl.expand_dims(head.to(gl.int64) * stride, 0), 2) + channel
    there = gl.expand_dims(gl.expand_dims(head < H, 0), 2) & (channel >= 0)
    x = gl.load(q + at, mask=there, other=0.0).to(gl.float32)
    factor = gl.full([HEADS], 1.0, gl.float32, SCORE) * (scale * _LOG2E)
    if MODE == 0:
        # Scale each head by a power of two that brings its largest magnitude into [1, 2).
        largest = gl.max(gl.max(gl.abs(x), 2), 0)
        exponent = (largest.to(gl.int32, bitcast=True) >> 23) - 127
        exponent = gl.minimum(gl.maximum(exponent, -126), 126)
        shrink = ((127 - exponent) << 23).to(gl.float32, bitcast=True)
        shrink = gl.expand_dims(gl.expand_dims(shrink, 0), 2)
        x = x * shrink * gl.where(channel < _NOPE, 1.0, _LIFT)
        grow = ((127 + exponent) << 23).to(gl.float32, bitcast=True)
        factor = factor * gl.convert_layout(grow, SCORE) * (1.0 / _LIFT)
    DTYPE: gl.constexpr = gl.bfloat16 if MODE == 1 else gl.float16
    K: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[2, 1, 0])
    if HEADS <= _ROWS:
        rows = view(memory.index(0), DTYPE, [PARTS, _ROWS, _CHANNELS // PARTS], K)
        to = rows.slice(0, HEADS, dim=1)
    else:
        to = view(memory, DTYPE, [PARTS, HEADS, _CHANNELS // PARTS], K)
    to.store(x.to(DTYPE))
    return to.load(gl.DotOperandLayout(0, MMA, 2)), factor


@gluon.jit
def _tiles(L: gl.constexpr):
    """Return the numbers of a row's tiles, int32 [8, 1, 1]."""
    tile = gl.arange(0, _TILES, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
    return gl.expand_dims(gl.expand_dims(tile, 1), 2)


@gluon.jit
def _channels(PARTS: gl.constexpr, L: gl.constexpr):
    """Return the channels at the places of a row in shared memory, int32 [PARTS, 1, n]."""
    PART: gl.constexpr = _CHANNELS // PARTS
    part = gl.arange(0, PARTS, layout=gl.SliceLayout(1, gl.SliceLayout(2, L))) * PART
    within = gl.arange(0, PART, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    place = gl.expand_dims(gl.expand_dims(part, 1), 2) + gl.expand_dims(
        gl.expand_dims(within, 0), 1
    )
    channel = gl.where(place < _NOPE, place, _NOPE + tail_order(place - _NOPE, 8))
    return gl.max_contiguous(gl.multiple_of(channel, [1, 1, 8]), [1, 1, 8])


@gluon.jit
def _walk(
    queries, span, rows0, rows1, memory, HEADS: gl.constexpr, TWO: gl.constexpr,
    AHEAD: gl.constexpr, MODE: gl.constexpr, NATIVE: gl.constexpr,
):  # fmt: skip
    """Attend to the blocks of a span, as ``triton_decode.walk`` does.

    Returns the reference exponents, float32 [HEADS], the sums of p and those of p times rows,
    [parts, HEADS, n], and a number that is not 0 if MODE 0 does not hold a row.
    """
    both, bias, parts = memory[4], memory[5], memory[6]
    PARTS: gl.constexpr = _parts(HEADS, gl.num_warps())
    TILES: gl.constexpr = _rows_layout(4, gl.num_warps())
    L: gl.constexpr = gl.SliceLayout(0, TILES)
    MMA: gl.constexpr = _mma_layout(HEADS, gl.num_warps())
    SCORES: gl.constexpr = gl.SliceLayout(0, MMA)
    DTYPE: gl.constexpr = gl.bfloat16 if MODE == 1 else gl.float16
    K: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[2, 1, 0])
    P: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, order=[2, 1, 0])
    all_parts = view(parts, gl.float32, [PARTS, HEADS, _ROWS], P)
    first, last = span[0], span[1]

    slots = _load_slots(first, span, rows0, rows1, L, TWO)
    _start_copy(slots, first, span, rows0, rows1, memory, TILES, TWO)
    slots = _load_slots(first + 1, span, rows0, rows1, L, TWO)
    q, factor = _load_queries(queries, both, MMA, HEADS, MODE)
    SHIFT: gl.constexpr = _SHIFT if MODE == 0 else 0.0
    highest = gl.full([HEADS], _NO_MAXIMUM, gl.float32, gl.SliceLayout(1, SCORES))
    count = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, SCORES))
    sums = gl.zeros([PARTS, HEADS, _CHANNELS // PARTS], gl.float32, MMA)
    inexact = gl.zeros([_ROWS], gl.int32, gl.SliceLayout(1, L))
    spoiled = gl.zeros([gl.num_warps() // 4, _ROWS, _TILE], gl.int32, TILES)
    state = (slots, inexact, spoiled)
    if AHEAD:
        async_copy.wait_group(0)
        state = _advance(
            state, first + 1, 0, span, rows0, rows1, memory, TILES, PARTS, TWO, MODE, NATIVE
        )
    for block in range(first, last):
        here = (block - first) & 1 if AHEAD else 0
        rows = view(both.index(here), DTYPE, [PARTS, _ROWS, _CHANNELS // PARTS], K)
        async_copy.wait_group(0)
        if not AHEAD:
            state = _advance(
                state, block + 1, 0, span, rows0, rows1, memory, TILES, PARTS, TWO, MODE, NATIVE
            )
        keys = rows.permute([0, 2, 1]).load(gl.DotOperandLayout(1, MMA, 2))
        all_parts.store(mma_v2(q, keys, gl.zeros([PARTS, HEADS, _ROWS], gl.float32, MMA)))
        if AHEAD:
            state = _advance(
                state, block + 2, 1 - here, span, rows0, rows1, memory, TILES, PARTS, TWO, MODE,
                NATIVE,
            )  # fmt: skip
        s = parts.index(0).load(SCORES)
        for part in gl.static_range(1, PARTS):
            s += parts.index(part).load(SCORES)
        masked = gl.expand_dims(bias.index(here).load(gl.SliceLayout(0, SCORES)), 0)
        s = s * gl.expand_dims(factor, 1) + masked
        peak = gl.maximum(highest, gl.max(s, 1))
        decay = gl.exp2(highest - peak)
        highest = peak
        p = gl.exp2(s - gl.expand_dims(peak - SHIFT, 1))
        count = count * decay + gl.sum(p, 1)
        p, _ = gl.broadcast(
            gl.expand_dims(p.to(DTYPE), 0), gl.zeros([PARTS, HEADS, _ROWS], DTYPE, MMA)
        )
        p = gl.convert_layout(p, gl.DotOperandLayout(0, MMA, 2))
        sums = mma_v2(
            p,
            rows.load(gl.DotOperandLayout(1, MMA, 2)),
            sums * gl.expand_dims(gl.expand_dims(decay, 1), 0),
        )
    async_copy.wait_group(0)
    unseen = 0.0
    if MODE == 0:
        # x * 0 is NaN if x is not finite: what float16 does not hold shows in these.
        lost = gl.max(state[1] & -0x7F7F7F80 != 0, 0)
        lost |= gl.max(gl.max(gl.max(state[2] & -0x7F7F7F80 != 0, 2), 1), 0)
        unseen = gl.sum(count * 0.0, 0) + gl.sum(gl.sum(gl.sum(sums * 0.0, 2), 1), 0)
        unseen = gl.where(lost != 0, float("nan"), unseen)
        sums = sums * gl.where(_channels(PARTS, MMA) < _NOPE, 1.0 / _LIFT, 1.0)
    return highest - SHIFT, count, sums, unseen


@gluon.jit(do_not_specialize=_COUNTS)
def decode_mma_kernel(
    q_ptr, kv0_ptr, list0_ptr, length0_ptr, kv1_ptr, list1_ptr, length1_ptr, sink_ptr,
    out_ptr, lse_ptr, part_ptr, sums_ptr,
    H, K0, K1, limit0, limit1, list_stride0, list_stride1, shift0, shift1, step0, step1,
    splits, total, at,
    has_length0, has_length1, has_sink, scale, empty, q_token, q_head, out_token, out_head,
    HEADS: gl.constexpr, TWO: gl.constexpr, AHEAD: gl.constexpr, SPLIT: gl.constexpr,
    NATIVE: gl.constexpr,
):  # fmt: skip
    """Attend one token to a split of its lists; arguments are those of ``decode_kernel``.

    A page of a cache has 2^shift rows, and there are ``step`` times 16 bytes from page to page.
    """
    program = gl.program_id(0)
    groups = (H + HEADS - 1) // HEADS
    split = program % splits
    head0 = program // splits % groups * HEADS
    token = (program // splits // groups).to(gl.int64)
    none = head0 * 0
    # Without lengths or a sink, these pointers lead to unused numbers of the same type.
    n0 = gl.where(none < has_length0, gl.load(length0_ptr + token), K0)
    n0 = gl.minimum(gl.maximum(n0, 0), none + K0)
    blocks0 = (n0 + _ROWS - 1) // _ROWS
    blocks = blocks0
    rows0 = (n0, list0_ptr + token * list_stride0, limit0, kv0_ptr, shift0, step0)
    rows1 = rows0
    if TWO:
        n1 = gl.where(none < has_length1, gl.load(length1_ptr + token), K1)
        n1 = gl.minimum(gl.maximum(n1, 0), none + K1)
        blocks += (n1 + _ROWS - 1) // _ROWS
        rows1 = (n1, list1_ptr + token * list_stride1, limit1, kv1_ptr, shift1, step1)
    each = (blocks + splits - 1) // splits
    span = (split * each, gl.minimum(split * each + each, blocks), blocks0)
    queries = (q_ptr + token * q_token, q_head, head0, H, scale)

    TILE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    raw = gl.allocate_shared_memory(
        gl.int32, [_TILES, _ROWS, _TILE], gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    )
    rest = gl.allocate_shared_memory(gl.int32, [_ROWS, _TILE], TILE)
    scales = gl.allocate_shared_memory(gl.int32, [_ROWS, _SCALES], TILE)
    valid = gl.allocate_shared_memory(gl.int32, [_ROWS], LINE)
    BUFFERS: gl.constexpr = 2 if AHEAD else 1
    bias = gl.allocate_shared_memory(gl.float32, [BUFFERS, _ROWS], LINE)
    # Decoded rows, and scores of 64 heads behind them: queries of 64 heads need both.
    WHOLE: gl.constexpr = HEADS > _ROWS
    PARTS: gl.constexpr = _parts(HEADS, gl.num_warps())
    both = gl.allocate_shared_memory(
        gl.int32, [BUFFERS + WHOLE, PARTS, _ROWS, _CHANNELS // 2 // PARTS],
        gl.SwizzledSharedLayout(4, 1, 8, order=[2, 1, 0]),
    )  # fmt: skip
    S: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, order=[1, 0])
    if WHOLE:
        parts = view(both.index(BUFFERS), gl.float32, [PARTS, HEADS, _ROWS], S)
    else:
        parts = gl.allocate_shared_memory(gl.float32, [PARTS, HEADS, _ROWS], S)
    memory = (raw, rest, scales, valid, both, bias, parts)
    top, count, sums, unseen = _walk(
        queries, span, rows0, rows1, memory, HEADS, TWO, AHEAD, 0, NATIVE
    )
    if unseen != unseen:
        # Addresses are computed again: those of the first walk would be kept, and spill.
        again = (opaque(span[0]), span[1], span[2])
        top, count, sums, unseen = _walk(
            queries, again, rows0, rows1, memory, HEADS, TWO, AHEAD, 1, NATIVE
        )

    MMA: gl.constexpr = _mma_layout(HEADS, gl.num_warps())
    head = head0 + gl.arange(0, HEADS, layout=gl.SliceLayout(1, gl.SliceLayout(0, MMA)))
    channel = _channels(PARTS, MMA)
    if SPLIT:
        place = (token * total + at + split) * H
        left = sums_ptr + (place + head) * _SUMS
        gl.store(left, top, mask=head < H)
        gl.store(left + 1, count, mask=head < H)
        to, stride = part_ptr + place * _CHANNELS, _CHANNELS
    else:
        sink = gl.load(sink_ptr + head, mask=head < H, other=0.0)
        sink = gl.where(none < has_sink, sink, float("-inf"))
        bottom = count + gl.exp2(sink * _LOG2E - top)
        share = gl.where(count == 0, 0.0, 1.0 / bottom)
        sums = sums * gl.expand_dims(gl.expand_dims(share, 1), 0)
        lse = gl.where(count == 0, empty, (top + gl.log2(count)) * _LN2)
        gl.store(lse_ptr + token * H + head, lse, mask=head < H)
        to, stride = out_ptr + token * out_token, out_head
    at = gl.expand_dims(gl.expand_dims(head * stride, 1), 0) + channel
    there = gl.expand_dims(gl.expand_dims(head < H, 1), 0) & (channel >= 0)
    gl.store(to + at, sums.to(to.dtype.element_ty), mask=there)

"""Producer warpgroups that load coded KV rows and decode them to float16 in shared memory.

V4's rows have 448 codes, seven scale bytes in a plane of their own, and 64 bfloat16 (the tail). The
first 448 channels are stored times ``LIFT`` = 2^7, and the tail as it is, so that every value a
writer emits is exact. Scale bytes 105 to 127 are exact; any other sets the row's bias to NaN, which
turns the sums into NaN; see ``gluon_sm90_bf16_fallback``.

V3.2's rows (``produce_v32``) have 512 codes, four float32 scales, and 64 bfloat16 that are not part
of the value and have a buffer of their own. Four lanes share a row, and each reads all four scales
at once. A row's bias is set to NaN by a scale outside the range in which float16 is exact for
powers of two, or by a tail that float16 does not hold. Other scales are rounded to float16, and so
are the products.

V4.1's rows of 528 bytes have no tail, but 512 codes with a scale byte per 32 of them. All channels
are stored times ``LIFT``. Where a list has NVFP4 rows, another producer fills the buffers.

Four lanes share a row. A lane takes 16 codes of each 64, which become 32 adjacent bytes of float16
in shared memory. The four lanes read the tail as two times 64 bytes. This leaves its groups of
eight channels in ``tail_order``, to which q and the output are permuted as well.

All values on the way are packed int32, two float16 each, because a tensor of bytes takes a register
per byte.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from anymla.formats.page_layout import MAIN_FP8, V32_FP8, get_layout
from anymla.ops._gluon_ptx import (
    bar_warp_sync_after,
    cvt_f16x2_bf16x2,
    cvt_f16x2_e4m3x4_mul,
    cvt_f16x2_f32,
    gdc_wait,
    ld_global_v4_if,
    prefetch_global_l2_codes_if,
    prefetch_global_l2_row_if,
    prmt_b32,
)
from anymla.ops.attention import float16_range
from anymla.ops.attention.gluon_sm90_tile_scheduler import KEYS, split_at

NOPE = gl.constexpr(get_layout(MAIN_FP8).nope)
LIFT = gl.constexpr(2.0**float16_range.LIFT)
assert float16_range.exact_scale_bytes(float16_range.LIFT) == (105, 127)  # see ``_inexact_bytes``
MASKED = gl.constexpr(-1e30)
_ONES = gl.constexpr(0x7F7F7F7F7F7F7F7F)  # eight scale bytes of 1.0, for rows that are not listed

_V32 = get_layout(V32_FP8)
_V32_ROW = gl.constexpr(_V32.data_bytes)
V32_SCALES = gl.constexpr(_V32.nope)
V32_TAIL = gl.constexpr(_V32.rope_start)
_EXACT = float16_range.exact_scale_exponents(float16_range.LIFT)
# Bits of float32 scales, whose exponent field begins at bit 23.
_LEAST_SCALE = gl.constexpr(127 + _EXACT[0] << 23)
_LAST_SCALE = gl.constexpr(127 + _EXACT[1] << 23)
_NOTHING = gl.constexpr(127 - 100 << 23)
_LIFTED = gl.constexpr(float16_range.LIFT << 23)
_TOO_LARGE = gl.constexpr(0x4780)  # 2^16 as bits of bfloat16


@gluon.jit
def slots_of(block, split, lists, r):
    """Load a list's slots in columns ``r`` of a block, -1 where there is no column.

    The values must not be used here: a producer loads the list of a later block, and any use would
    wait for them.
    """
    if lists.TWO:
        here = block < split.blocks0
        column = gl.where(here, block, block - split.blocks0) * KEYS + r
        row0 = lists.slots[0].to(gl.int64) + split.token * lists.strides[0].to(gl.int64) * 4
        row1 = lists.slots[1].to(gl.int64) + split.token * lists.strides[1].to(gl.int64) * 4
        row = gl.where(here, row0, row1).to(gl.pointer_type(gl.int32))
        n = gl.where(here, split.n0, split.n1)
    else:
        column = block * KEYS + r
        row = lists.slots[0] + split.token * lists.strides[0].to(gl.int64)
        n = split.n0
    return gl.load(row + column, mask=(column < n) & (block < split.last), other=-1)


@gluon.constexpr_function
def _places(codec, page):
    """Return bytes from entry to entry, from page to first scales, and from scales to scales."""
    whole = codec.data_bytes + codec.scale_bytes
    if codec.interleaved:
        return whole, codec.data_bytes, whole
    return codec.data_bytes, page * codec.data_bytes, codec.scale_bytes


@gluon.jit
def address(slots, here, lists):
    """Return where there is a row, and the addresses of its data and of its scales.

    ``here`` is True for slots of the first list.
    """
    limit = lists.limits[0]
    if lists.TWO:
        limit = gl.where(here, limit, lists.limits[1])
    valid = (slots >= 0) & (slots < limit)
    slots = gl.where(valid, slots, 0).to(gl.uint32)
    PAGE0: gl.constexpr = lists.PAGE0
    PAGE1: gl.constexpr = lists.PAGE1
    STEP0: gl.constexpr = lists.STEP0
    STEP1: gl.constexpr = lists.STEP1
    pages = slots // PAGE0
    entries = PAGE0
    base = lists.rows[0].to(gl.int64)
    if lists.TWO:
        base = gl.where(here, base, lists.rows[1].to(gl.int64))
        if PAGE0 != PAGE1:
            pages = gl.where(here, pages, slots // PAGE1)
            entries = gl.where(here, PAGE0, PAGE1)
    if lists.TWO and STEP0 != STEP1:
        start = pages.to(gl.int64) * gl.where(here, STEP0, STEP1).to(gl.int64) + base
    else:
        start = pages.to(gl.int64) * STEP0 + base
    entry = (slots - pages * entries).to(gl.int32)
    A: gl.constexpr = _places(lists.CODEC0, PAGE0)
    if lists.TWO and lists.CODEC0 != lists.CODEC1:
        B: gl.constexpr = _places(lists.CODEC1, PAGE1)
        data = start + entry * gl.where(here, A[0], B[0])
        scales_at = gl.where(here, A[1], B[1]) + entry * gl.where(here, A[2], B[2])
        return valid, data, start + scales_at
    elif A[0] == A[2]:  # interleaved
        data = start + entry * A[0]
        return valid, data, data + A[1]
    else:
        return valid, start + entry * A[0], start + (entries * A[0] + entry * A[2])


@gluon.jit
def _last_load(at, there, lists, BETWEEN: gl.constexpr):
    """Load the last 64 channels, codes or a tail's two times 16 bytes, as eight int32."""
    if lists.TAIL:
        first = ld_global_v4_if(at + NOPE, there, not BETWEEN)
        return first + ld_global_v4_if(at + NOPE + 64, there, not BETWEEN)
    else:
        return ld_global_v4_if(at + 448, there, not BETWEEN)


@gluon.jit
def loads_before_here(BETWEEN: gl.constexpr, WARPS: gl.constexpr = 4):
    """Keep the compiler from moving earlier loads past this point, if BETWEEN.

    Otherwise it moves all of a block's loads to the end of the trip, so that none is under way
    while a block is decoded.
    """
    if BETWEEN:
        L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        bar_warp_sync_after(gl.arange(0, 32 * WARPS, layout=L))


@gluon.jit
def _into_l2(data, scales_at, valid, lane):
    """Prefetch rows, nine times 64 bytes, and their scales to the L2 cache.

    Four lanes share a row, and each prefetches three lines; the third of the second lane is the
    scales.
    """
    there = gl.expand_dims(valid, 1)
    data = gl.expand_dims(data, 1)
    third = gl.where(lane == 0, data + 512, gl.expand_dims(scales_at, 1) + lane * 0)
    prefetch_global_l2_row_if(
        data + lane * 4, there.to(gl.int32) + lane * 0, third, (there & (lane < 32)).to(gl.int32)
    )


@gluon.jit
def codes_into_l2(data, scales_at, valid, lane, fp8, lists):
    """Prefetch rows without a tail, eight or four times 64 bytes, and their scales to L2."""
    there = gl.expand_dims(valid, 1).to(gl.int32) + lane * 0
    more = there
    if not lists.FP8:
        more = there * 0
    elif lists.FP4:
        more = there * gl.where(fp8, 1, 0)
    scales_at = gl.expand_dims(scales_at, 1) + lane * 0
    first = there * (lane == 0).to(gl.int32)
    data = gl.expand_dims(data, 1) + lane * 4
    prefetch_global_l2_codes_if(data, there, more, scales_at, first)


@gluon.jit
def _factor(lifted, PLACE: gl.constexpr):
    """Convert byte PLACE of each int32 to 2^(byte - 127), as two float16."""
    if PLACE == 0:
        bits = lifted << 23
    elif PLACE == 1:
        bits = lifted << 15
    elif PLACE == 2:
        bits = lifted << 7
    else:
        bits = lifted >> 1
    bits = bits & 0x7F800000
    pair = cvt_f16x2_f32(bits)
    if len(pair.shape) == 1:
        pair = gl.expand_dims(pair, 1)
    return pair


@gluon.jit
def _inexact_bytes(low, high):
    """Return a non-zero int32 where one of the seven scale bytes is outside 105 to 127."""
    fine_low = ((low & 0x7F7F7F7F) + 0x17171717) & ~low
    fine_high = ((high & 0x7F7F7F7F) + 0x17171717) & ~high
    return (~fine_low & -0x7F7F7F80) | (~fine_high & 0x00808080)


@gluon.jit
def outside(word):
    """Return a non-zero int32 where one of four scale bytes is outside 105 to 127."""
    return ~(((word & 0x7F7F7F7F) + 0x17171717) & ~word) & -0x7F7F7F80


@gluon.jit
def _any_outside(a, b, c, d):
    return outside(a) | outside(b) | outside(c) | outside(d)


@gluon.jit
def _row_of_eight(a, b, c, d, e, f, g, h, ROWS: gl.constexpr):
    """Arrange pairs 0 to 7 of each lane side by side as [ROWS, 32]."""
    joined = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
    return gl.reshape(gl.permute(joined, (0, 1, 4, 3, 2)), [ROWS, 32])


@gluon.jit
def block_of_64(x, lifted, PLACE: gl.constexpr, ROWS: gl.constexpr):
    """Decode 64 channels of every row to [ROWS, 32] pairs."""
    factor = _factor(lifted, PLACE)
    a, b = cvt_f16x2_e4m3x4_mul(x[0], factor)
    c, d = cvt_f16x2_e4m3x4_mul(x[1], factor)
    e, f = cvt_f16x2_e4m3x4_mul(x[2], factor)
    g, h = cvt_f16x2_e4m3x4_mul(x[3], factor)
    return _row_of_eight(a, b, c, d, e, f, g, h, ROWS)


@gluon.jit
def _tail(x, ROWS: gl.constexpr):
    """Convert the bfloat16 channels of every row, in ``tail_order``, to [ROWS, 32] pairs."""
    return _row_of_eight(
        cvt_f16x2_bf16x2(x[0]), cvt_f16x2_bf16x2(x[1]),
        cvt_f16x2_bf16x2(x[2]), cvt_f16x2_bf16x2(x[3]),
        cvt_f16x2_bf16x2(x[4]), cvt_f16x2_bf16x2(x[5]),
        cvt_f16x2_bf16x2(x[6]), cvt_f16x2_bf16x2(x[7]), ROWS,
    )  # fmt: skip


@gluon.jit
def half_row(a, b, c, d, ROWS: gl.constexpr):
    """Arrange four blocks side by side as [ROWS, 128] pairs."""
    joined = gl.join(gl.join(a, b), gl.join(c, d))
    return gl.reshape(gl.permute(joined, (0, 3, 2, 1)), [ROWS, 128])


@gluon.jit
def _fp8_half(a, b, c, d, low, high, lane, ROWS: gl.constexpr):
    """Decode 256 channels of every e4m3 row to [ROWS, 128] pairs.

    ``low`` and ``high`` hold the bytes of their scales.
    """
    # 64 channels are two blocks, and a lane has 16 channels of one of them.
    lifted = prmt_b32(gl.expand_dims(low, 1), gl.expand_dims(high, 1), 0x6420 + lane // 32 * 0x1111)
    lifted = lifted + 0x07070707
    return half_row(
        block_of_64(a, lifted, 0, ROWS), block_of_64(b, lifted, 1, ROWS),
        block_of_64(c, lifted, 2, ROWS), block_of_64(d, lifted, 3, ROWS), ROWS,
    )  # fmt: skip


@gluon.jit
def put(buffer, x, ROWS: gl.constexpr, ROW0: gl.constexpr):
    """Store rows ROW0 .. ROW0 + ROWS of a buffer of 64."""
    if ROWS == KEYS:
        buffer.store(x)
    else:
        buffer.slice(ROW0, ROWS, dim=0).store(x)


@gluon.jit
def first_slots(block, split, lists, work, r, TURNS: gl.constexpr):
    """Load the slots of a split's first block, if it is known without waiting for the lengths."""
    if work.BY_WIDTH:
        width, column = lists.widths[0], block * KEYS + r
        row = lists.slots[0].to(gl.int64) + split.token * lists.strides[0].to(gl.int64) * 4
        n = split.n0
        if lists.TWO:
            here = block < split.blocks0
            second = lists.slots[1].to(gl.int64) + split.token * lists.strides[1].to(gl.int64) * 4
            row = gl.where(here, row, second)
            width = gl.where(here, width, lists.widths[1])
            column = gl.where(here, column, column - split.blocks0 * KEYS)
            n = gl.where(here, n, split.n1)
        row = row.to(gl.pointer_type(gl.int32))
        slots = gl.load(row + column, mask=column < width, other=-1)
        return gl.where((column < n) & (block < split.last), slots, -1)
    elif work.SPLIT or TURNS != 1:
        return slots_of(block, split, lists, r)
    else:
        row = lists.slots[0] + split.token * lists.strides[0].to(gl.int64)
        slots = gl.load(row + r, mask=r < lists.widths[0], other=-1)
        if lists.TWO:
            row = lists.slots[1] + split.token * lists.strides[1].to(gl.int64)
            second = gl.load(row + r, mask=r < lists.widths[1], other=-1)
            second = gl.where(r < split.n1, second, -1)
            return gl.where(split.blocks0 > 0, gl.where(r < split.n0, slots, -1), second)
        else:
            return gl.where(r < split.n0, slots, -1)


@gluon.jit
def produce(
    lists, work, shared, ready, free,
    ROWS: gl.constexpr, ROW0: gl.constexpr, BUFFERS: gl.constexpr,
    TURN: gl.constexpr = 0, TURNS: gl.constexpr = 1, BETWEEN: gl.constexpr = False,
):  # fmt: skip
    """Fill the buffers with the blocks of all splits of V4's rows, or of V4.1's e4m3 rows.

    Producers take either rows ROW0 .. ROW0 + ROWS of every block, or all rows of every TURNS-th
    block. Blocks are counted over all splits, so that no producer skips a buffer's turn: a barrier
    tells two neighbouring phases apart, but not the phase before from the one after.

    Args:
        lists: ``Lists`` of ``gluon_sm90_tile_scheduler``.
        work: ``WorkRange`` of ``gluon_sm90_tile_scheduler``.
        shared: shared memory of the kernel, of which ``left`` is int32 [BUFFERS, 64, 128], channels
            0 .. 255 as pairs of float16; ``right`` is int32 [BUFFERS, 64, 128], channels 256 ..
            511, with the tail in ``tail_order``; ``bias`` is float32 [BUFFERS, 64], 0, or MASKED
            where there is no row, or NaN where float16 is not exact.
        ready: barriers [BUFFERS], at which a producer arrives each time it has filled its rows.
        free: barriers [BUFFERS], completed each time the consumers are done with a buffer.
        ROWS: number of rows that this producer fills.
        ROW0: index of the first of these rows.
        BUFFERS: number of buffers.
        TURN: index of the first block that this producer fills.
        TURNS: number of producers that take blocks in turn.
        BETWEEN: True to load the next rows between the stores of a block, False to load them
            behind. This helps a producer of all rows of a block, and hurts where stores are waited
            for.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    r = ROW0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    lane = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, L)), 0) * 16
    # Prefetching does not pay for rows that two tiles read: they come from the L2 cache half of the
    # time anyway.
    NEAR: gl.constexpr = work.HEAD_TILES == 1 and not work.ONE_BLOCK
    gdc_wait(WARPGROUP=True)
    before = 0  # blocks in all previous splits
    for k in range(0, work.count):
        split = split_at(k, work, lists)
        own = split.first + (before + TURN) % TURNS
        slots = first_slots(own, split, lists, work, r, TURNS)
        upcoming = slots_of(own + TURNS, split, lists, r)
        valid, data, scales_at = address(slots, own < split.blocks0, lists)
        if lists.TAIL:
            scales = gl.load(scales_at.to(gl.pointer_type(gl.int64)), mask=valid, other=_ONES)
        else:
            scales = ld_global_v4_if(scales_at, valid.to(gl.int32), not BETWEEN)
        there = gl.expand_dims(valid, 1).to(gl.int32)
        at = gl.expand_dims(data, 1) + lane
        x0 = ld_global_v4_if(at, there, not BETWEEN)
        x1 = ld_global_v4_if(at + 64, there, not BETWEEN)
        x2 = ld_global_v4_if(at + 128, there, not BETWEEN)
        x3 = ld_global_v4_if(at + 192, there, not BETWEEN)
        x4 = ld_global_v4_if(at + 256, there, not BETWEEN)
        x5 = ld_global_v4_if(at + 320, there, not BETWEEN)
        x6 = ld_global_v4_if(at + 384, there, not BETWEEN)
        x7 = _last_load(at, there, lists, BETWEEN)
        for block in range(own, split.last, TURNS):
            place = before + block - split.first
            buffer = place % BUFFERS
            if NEAR:
                following = block + TURNS < split.blocks0
                next_valid, data, scales_at = address(upcoming, following, lists)
                if lists.TAIL:
                    _into_l2(data, scales_at, next_valid, lane)
                else:
                    codes_into_l2(data, scales_at, next_valid, lane, True, lists)
            mbarrier.wait(free.index(buffer), ((place // BUFFERS) & 1) ^ 1)
            if not NEAR:
                following = block + TURNS < split.blocks0
                next_valid, data, scales_at = address(upcoming, following, lists)
            if lists.TAIL:
                next_scales = gl.load(
                    scales_at.to(gl.pointer_type(gl.int64)), mask=next_valid, other=_ONES
                )
            there = gl.expand_dims(next_valid, 1).to(gl.int32)
            at = gl.expand_dims(data, 1) + lane
            # A row that float16 does not hold makes all scores NaN.
            if lists.TAIL:
                low = scales.to(gl.int32)
                high = (scales >> 32).to(gl.int32)
                row_bias = gl.where(_inexact_bytes(low, high) != 0, float("nan"), 0.0)
                low = low + 0x07070707
                high = high + 0x07070707
                half = half_row(
                    block_of_64(x0, low, 0, ROWS), block_of_64(x1, low, 1, ROWS),
                    block_of_64(x2, low, 2, ROWS), block_of_64(x3, low, 3, ROWS), ROWS,
                )  # fmt: skip
                put(shared.left.index(buffer), half, ROWS, ROW0)
            else:
                wrong = _any_outside(scales[0], scales[1], scales[2], scales[3])
                row_bias = gl.where(wrong != 0, float("nan"), 0.0)
                half = _fp8_half(x0, x1, x2, x3, scales[0], scales[1], lane, ROWS)
                put(shared.left.index(buffer), half, ROWS, ROW0)
            x0 = ld_global_v4_if(at, there, not BETWEEN)
            x1 = ld_global_v4_if(at + 64, there, not BETWEEN)
            x2 = ld_global_v4_if(at + 128, there, not BETWEEN)
            x3 = ld_global_v4_if(at + 192, there, not BETWEEN)
            loads_before_here(BETWEEN)
            if lists.TAIL:
                half = half_row(
                    block_of_64(x4, high, 0, ROWS), block_of_64(x5, high, 1, ROWS),
                    block_of_64(x6, high, 2, ROWS), _tail(x7, ROWS), ROWS,
                )  # fmt: skip
                put(shared.right.index(buffer), half, ROWS, ROW0)
            else:
                half = _fp8_half(x4, x5, x6, x7, scales[2], scales[3], lane, ROWS)
                put(shared.right.index(buffer), half, ROWS, ROW0)
            x4 = ld_global_v4_if(at + 256, there, not BETWEEN)
            x5 = ld_global_v4_if(at + 320, there, not BETWEEN)
            x6 = ld_global_v4_if(at + 384, there, not BETWEEN)
            x7 = _last_load(at, there, lists, BETWEEN)
            if lists.TAIL:
                scales = next_scales
            else:
                # Load the scales only now: registers do not suffice for both blocks' scales.
                scales = ld_global_v4_if(scales_at, next_valid.to(gl.int32), not BETWEEN)
            loads_before_here(BETWEEN)
            put(shared.bias.index(buffer), gl.where(valid, row_bias, MASKED), ROWS, ROW0)
            mbarrier.arrive(ready.index(buffer), count=1)
            valid = next_valid
            upcoming = slots_of(block + 2 * TURNS, split, lists, r)
        before += split.last - split.first


@gluon.jit
def v32_address(slots, lists):
    """Return where there is a row, and its address."""
    PAGE: gl.constexpr = lists.PAGE0
    STEP: gl.constexpr = lists.STEP0
    valid = (slots >= 0) & (slots < lists.limits[0])
    slots = gl.where(valid, slots, 0).to(gl.uint32)
    pages = slots // PAGE
    entry = (slots - pages * PAGE).to(gl.int32)
    return valid, lists.rows[0].to(gl.int64) + pages.to(gl.int64) * STEP + entry * _V32_ROW


@gluon.jit
def _inexact_scale(scale):
    """Return 1 where a scale's bits are outside the window and larger than nothing, else 0."""
    outside = (scale < _LEAST_SCALE) & (scale > _NOTHING)
    return (outside | (scale > _LAST_SCALE) | (scale < 0)).to(gl.int32)


@gluon.jit
def _scale_pair(scale):
    """Lift a scale given by its bits and return it as two float16."""
    return cvt_f16x2_f32(scale + _LIFTED)


@gluon.jit
def _v32_block(x, factor, ROWS: gl.constexpr):
    """Decode 64 channels of every row to [ROWS, 32] pairs."""
    a, b = cvt_f16x2_e4m3x4_mul(x[0], factor)
    c, d = cvt_f16x2_e4m3x4_mul(x[1], factor)
    e, f = cvt_f16x2_e4m3x4_mul(x[2], factor)
    g, h = cvt_f16x2_e4m3x4_mul(x[3], factor)
    return _row_of_eight(a, b, c, d, e, f, g, h, ROWS)


@gluon.jit
def _largest(x):
    """Return the bits of the largest magnitude of eight packed bfloat16."""
    a = gl.maximum(x[0] & 0x7FFF, (x[0] >> 16) & 0x7FFF)
    b = gl.maximum(x[1] & 0x7FFF, (x[1] >> 16) & 0x7FFF)
    c = gl.maximum(x[2] & 0x7FFF, (x[2] >> 16) & 0x7FFF)
    d = gl.maximum(x[3] & 0x7FFF, (x[3] >> 16) & 0x7FFF)
    return gl.maximum(gl.maximum(a, b), gl.maximum(c, d))


@gluon.jit
def produce_v32(
    lists, work, shared, ready, free,
    ROWS: gl.constexpr, ROW0: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Fill the buffers with rows ROW0 .. ROW0 + ROWS of each block of all splits of V3.2's rows.

    ``shared.tail`` is int32 [BUFFERS, 64, 32]; other arguments are those of ``produce``.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    r = ROW0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    lane = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, L)), 0) * 16
    gdc_wait(WARPGROUP=True)
    filled = 0
    for k in range(0, work.count):
        split = split_at(k, work, lists)
        slots = slots_of(split.first, split, lists, r)
        upcoming = slots_of(split.first + 1, split, lists, r)
        valid, data = v32_address(slots, lists)
        there = gl.expand_dims(valid, 1).to(gl.int32)
        at = gl.expand_dims(data, 1) + lane
        z = ld_global_v4_if(at - lane + V32_SCALES, there)
        x0 = ld_global_v4_if(at, there)
        x1 = ld_global_v4_if(at + 64, there)
        x2 = ld_global_v4_if(at + 128, there)
        x3 = ld_global_v4_if(at + 192, there)
        x4 = ld_global_v4_if(at + 256, there)
        x5 = ld_global_v4_if(at + 320, there)
        x6 = ld_global_v4_if(at + 384, there)
        x7 = ld_global_v4_if(at + 448, there)
        y0 = ld_global_v4_if(at + V32_TAIL, there)
        y1 = ld_global_v4_if(at + V32_TAIL + 64, there)
        for block in range(split.first, split.last):
            buffer = filled % BUFFERS
            mbarrier.wait(free.index(buffer), ((filled // BUFFERS) & 1) ^ 1)
            next_valid, data = v32_address(upcoming, lists)
            there = gl.expand_dims(next_valid, 1).to(gl.int32)
            at = gl.expand_dims(data, 1) + lane
            next_z = ld_global_v4_if(at - lane + V32_SCALES, there)
            a = _scale_pair(z[0])
            b = _scale_pair(z[1])
            half = half_row(
                _v32_block(x0, a, ROWS), _v32_block(x1, a, ROWS),
                _v32_block(x2, b, ROWS), _v32_block(x3, b, ROWS), ROWS,
            )  # fmt: skip
            put(shared.left.index(buffer), half, ROWS, ROW0)
            x0 = ld_global_v4_if(at, there)
            x1 = ld_global_v4_if(at + 64, there)
            x2 = ld_global_v4_if(at + 128, there)
            x3 = ld_global_v4_if(at + 192, there)
            a = _scale_pair(z[2])
            b = _scale_pair(z[3])
            half = half_row(
                _v32_block(x4, a, ROWS), _v32_block(x5, a, ROWS),
                _v32_block(x6, b, ROWS), _v32_block(x7, b, ROWS), ROWS,
            )  # fmt: skip
            put(shared.right.index(buffer), half, ROWS, ROW0)
            x4 = ld_global_v4_if(at + 256, there)
            x5 = ld_global_v4_if(at + 320, there)
            x6 = ld_global_v4_if(at + 384, there)
            x7 = ld_global_v4_if(at + 448, there)
            put(shared.tail.index(buffer), _tail(y0 + y1, ROWS), ROWS, ROW0)
            # A row that float16 does not hold makes all scores NaN.
            wrong = (
                _inexact_scale(z[0])
                | _inexact_scale(z[1])
                | _inexact_scale(z[2])
                | _inexact_scale(z[3])
            )
            wrong = wrong | (gl.maximum(_largest(y0), _largest(y1)) >= _TOO_LARGE).to(gl.int32)
            y0 = ld_global_v4_if(at + V32_TAIL, there)
            y1 = ld_global_v4_if(at + V32_TAIL + 64, there)
            row_bias = gl.where(gl.max(wrong, 1) != 0, float("nan"), 0.0)
            put(shared.bias.index(buffer), gl.where(valid, row_bias, MASKED), ROWS, ROW0)
            mbarrier.arrive(ready.index(buffer), count=1)
            filled += 1
            valid = next_valid
            z = next_z
            upcoming = slots_of(block + 2, split, lists, r)

"""KV producer for lists with NVFP4 rows, V4.1's 288-byte records, also beside its 528-byte ones.

NVFP4 rows are 512 codes of four bits, with an e4m3 scale per 16. All channels are stored times
``LIFT`` as float16. A scale above 80 does not fit, and sets the row's bias to NaN, as do scale
bytes of e4m3 rows outside 105 to 127. Rows of the two lists may differ: both kinds go through the
same loads, and a block is decoded as its list says. Decoding four-bit codes takes twice the
instructions of the e4m3 rows in the other KV producer.

Four lanes share a row. A lane loads NVFP4 codes 16 bytes at a time, 32 channels of each 128, in
four loads per row. Two more loads, the same in all four lanes, fetch the 32 scales. Of e4m3 rows a
lane takes 16 channels of each 64, as in the other producer; codes for which there are no registers
are loaded late.

Eight neighbouring lanes, which load and store 16 bytes each at a time, cover four rows and two
places in each. So they touch half of the lines that eight rows would have. They store without bank
conflicts, as the places differ in the upper bit of a bank group and the rows in the others.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from anymla.ops._gluon_ptx import (
    cvt_f16x2_e2m1x8_mul,
    cvt_f16x2_e4m3x2_prmt,
    gdc_wait,
    ld_global_v4_if,
    opaque,
    prmt_b32,
)
from anymla.ops.attention.gluon_sm90_decode_kv_producer import (
    MASKED,
    address,
    block_of_64,
    codes_into_l2,
    first_slots,
    half_row,
    loads_before_here,
    outside,
    put,
    slots_of,
)
from anymla.ops.attention.gluon_sm90_tile_scheduler import split_at


@gluon.constexpr_function
def _lanes(rows, warps):
    """Make the layout of [rows, 4] that the top of the file describes."""
    step, more = 8, []
    warp_bases = []
    while 8 * warps > step:
        warp_bases.append([step, 0])
        step *= 2
    while rows > step:
        more.append([step, 0])
        step *= 2
    lanes = [[1, 0], [2, 0], [0, 1], [0, 2], [4, 0]]
    return gl.DistributedLinearLayout(more, lanes, warp_bases, [], [rows, 4])


@gluon.constexpr_function
def _interleaved(first, second):
    return first.interleaved and second.interleaved


@gluon.jit
def _is_fp8(block, split, lists):
    """True if a block's rows are e4m3, where lists differ; else True if it is of the first list."""
    if lists.FP4 and lists.FP8 and not lists.FP8_FIRST:
        return block >= split.blocks0
    else:
        return block < split.blocks0


@gluon.jit
def _rows_at(slots, block, split, lists):
    """Return where there are rows, the addresses of codes and scales, and which rows are e4m3."""
    here = block < split.blocks0
    valid, data, scales_at = address(slots, here, lists)
    return valid, data, scales_at, _is_fp8(block, split, lists)


@gluon.jit
def _offset(lane, fp8, lists):
    """Return the bytes from a row's first codes to this lane's."""
    if not lists.FP8:
        return lane * 16
    else:
        swapped = (lane & 1) * 32 + (lane >> 1) * 16
        return gl.where(fp8, swapped, lane * 16)


@gluon.jit
def _codes_at(data, lane, fp8, lists):
    """Return the address of a lane's codes in its row."""
    return gl.expand_dims(data, 1) + _offset(lane, fp8, lists)


@gluon.jit
def _loads(data, scales_at, valid, lane, fp8, lists, HALF: gl.constexpr, HERE: gl.constexpr):
    """Load a lane's codes of half a row, two times 16 bytes, and 16 bytes of the row's scales.

    All lanes load the same scales. Of e4m3 rows the left half loads codes of channels 0 .. 127 and
    all scales, and the right half codes of channels 128 .. 255 and no scales. The other codes are
    loaded when the block is decoded, because such blocks are few and registers do not suffice.
    """
    at = _codes_at(data, lane, fp8, lists) + HALF * 128
    if _interleaved(lists.CODEC0, lists.CODEC1):
        if lists.FP8 and HALF == 0:
            scales_at = data + gl.where(fp8, 512, 256)
        else:
            scales_at = data + 256 + HALF * 16
    else:
        scales_at += HALF * 16
    has = valid.to(gl.int32)
    there = gl.expand_dims(has, 1)
    if lists.FP8 and HALF == 1:
        has = has * gl.where(fp8, 0, 1)
    scales = ld_global_v4_if(scales_at, has, not HERE, True)
    return (
        ld_global_v4_if(at, there, not HERE, True),
        ld_global_v4_if(at + 64, there, not HERE, True),
        scales,
    )


@gluon.jit
def _join_four(x):
    return gl.join(gl.join(x[0], x[1]), gl.join(x[2], x[3]))


@gluon.jit
def _span(x, low, high, lane):
    """Decode 128 channels of every row to pairs [ROWS, 4, 2, 2, 2, 2], lowest place bit first."""
    f, g = cvt_f16x2_e4m3x2_prmt(
        gl.expand_dims(low, 1), gl.expand_dims(high, 1), lane * 0x2222 + 0x1100
    )
    a = gl.join(
        _join_four(cvt_f16x2_e2m1x8_mul(x[0], f)), _join_four(cvt_f16x2_e2m1x8_mul(x[1], f))
    )
    b = gl.join(
        _join_four(cvt_f16x2_e2m1x8_mul(x[2], g)), _join_four(cvt_f16x2_e2m1x8_mul(x[3], g))
    )
    return gl.join(a, b)


@gluon.jit
def _put_nvfp4(buffer, x, lane, ROWS: gl.constexpr, ROW0: gl.constexpr):
    """Decode and store 256 channels of every NVFP4 row from its loads."""
    first = _span(x[0], x[2][0], x[2][1], lane)
    second = _span(x[1], x[2][2], x[2][3], lane)
    joined = gl.permute(gl.join(first, second), (0, 6, 1, 5, 4, 3, 2))
    put(buffer, gl.reshape(joined, [ROWS, 128]), ROWS, ROW0)


@gluon.jit
def _large(scales):
    """Set upper bits of bytes where one of 16 e4m3 scales is NaN or above 80 (0x6A)."""
    a = (scales[0] & 0x7F7F7F7F) + 0x15151515 | (scales[1] & 0x7F7F7F7F) + 0x15151515
    b = (scales[2] & 0x7F7F7F7F) + 0x15151515 | (scales[3] & 0x7F7F7F7F) + 0x15151515
    return a | b


@gluon.jit
def _put_e4m3(buffer, a, b, c, d, low, high, lane, ROWS: gl.constexpr, ROW0: gl.constexpr):
    """Decode and store 256 channels of every e4m3 row, whose lanes have other places.

    ``low`` and ``high`` are the scales of this half.
    """
    # 64 channels are two blocks, and a lane has 16 channels of one of them.
    lifted = prmt_b32(gl.expand_dims(low, 1), gl.expand_dims(high, 1), 0x6420 + (lane & 1) * 0x1111)
    lifted = lifted + 0x07070707
    half = half_row(
        block_of_64(a, lifted, 0, ROWS), block_of_64(b, lifted, 1, ROWS),
        block_of_64(c, lifted, 2, ROWS), block_of_64(d, lifted, 3, ROWS), ROWS,
    )  # fmt: skip
    half = gl.permute(gl.reshape(half, [ROWS, 4, 2, 2, 8]), (0, 1, 3, 2, 4))
    put(buffer, gl.reshape(half, [ROWS, 128]), ROWS, ROW0)


@gluon.jit
def _nvfp4_block(
    left, right, x, y, next_row, lane, lists,
    ROWS: gl.constexpr, ROW0: gl.constexpr, WARPS: gl.constexpr, BETWEEN: gl.constexpr,
):  # fmt: skip
    """Decode and store NVFP4 rows from their loads, with the next block's loads between if BETWEEN.

    Returns an int32 that is not 0 where float16 does not hold a row, and the next loads.
    """
    wrong = _large(x[2]) | _large(y[2])
    data, scales_at, valid, fp8 = next_row
    _put_nvfp4(left, x, lane, ROWS, ROW0)
    if BETWEEN:
        x = _loads(data, scales_at, valid, lane, fp8, lists, 0, True)
        loads_before_here(True, WARPS)
    _put_nvfp4(right, y, lane, ROWS, ROW0)
    if BETWEEN:
        y = _loads(data, scales_at, valid, lane, fp8, lists, 1, True)
    return wrong & -0x7F7F7F80, x, y


@gluon.jit
def _e4m3_block(
    left, right, x, y, row, next_row, lane, lists,
    ROWS: gl.constexpr, ROW0: gl.constexpr, BETWEEN: gl.constexpr,
):  # fmt: skip
    """Decode and store e4m3 rows as ``_nvfp4_block`` does, loading their last channels here."""
    there = gl.expand_dims(row[1], 1).to(gl.int32)
    at = _codes_at(row[0], lane, True, lists)
    z4 = ld_global_v4_if(at + 256, there, False, True)
    z5 = ld_global_v4_if(at + 320, there, False, True)
    z6 = ld_global_v4_if(at + 384, there, False, True)
    z7 = ld_global_v4_if(at + 448, there, False, True)
    a, b, c, d = x[2]
    _put_e4m3(left, x[0], x[1], y[0], y[1], a, b, lane, ROWS, ROW0)
    _put_e4m3(right, z4, z5, z6, z7, c, d, lane, ROWS, ROW0)
    data, scales_at, valid, fp8 = next_row
    if BETWEEN:
        x = _loads(data, scales_at, valid, lane, fp8, lists, 0, True)
        y = _loads(data, scales_at, valid, lane, fp8, lists, 1, True)
    return outside(a) | outside(b) | outside(c) | outside(d), x, y


@gluon.jit
def _block(
    left, right, x, y, row, next_row, lane, fp8, lists,
    ROWS: gl.constexpr, ROW0: gl.constexpr, WARPS: gl.constexpr, BETWEEN: gl.constexpr,
):  # fmt: skip
    if not lists.FP8:
        wrong, x, y = _nvfp4_block(
            left, right, x, y, next_row, lane, lists, ROWS, ROW0, WARPS, BETWEEN
        )
    elif fp8:
        wrong, x, y = _e4m3_block(
            left, right, x, y, row, next_row, lane, lists, ROWS, ROW0, BETWEEN
        )
    else:
        wrong, x, y = _nvfp4_block(
            left, right, x, y, next_row, lane, lists, ROWS, ROW0, WARPS, BETWEEN
        )
    return wrong, x, y


@gluon.jit
def produce_nvfp4(
    lists, work, shared, ready, free,
    ROWS: gl.constexpr, ROW0: gl.constexpr, BUFFERS: gl.constexpr, WARPS: gl.constexpr,
    BETWEEN: gl.constexpr,
):  # fmt: skip
    """Fill the buffers with the blocks of all splits, of which some have NVFP4 rows.

    The arguments are those of ``gluon_sm90_decode_kv_producer.produce``; WARPS is the number of
    warps in this partition.
    """
    L: gl.constexpr = _lanes(ROWS, WARPS)
    r = ROW0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    lane = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, L)), 0)
    NEAR: gl.constexpr = work.HEAD_TILES == 1 and not work.ONE_BLOCK
    gdc_wait()
    filled = 0
    for k in range(0, work.count):
        split = split_at(k, work, lists)
        slots = first_slots(split.first, split, lists, work, r, 1)
        upcoming = slots_of(split.first + 1, split, lists, r)
        valid, data, scales_at, fp8 = _rows_at(slots, split.first, split, lists)
        x = _loads(data, scales_at, valid, lane, fp8, lists, 0, BETWEEN)
        y = _loads(data, scales_at, valid, lane, fp8, lists, 1, BETWEEN)
        for block in range(split.first, split.last):
            buffer = filled % BUFFERS
            # Without this, values derived from ``lane`` are computed once before the loop and
            # spilled.
            lane = opaque(lane)
            next_valid, next_data, scales_at, next_fp8 = _rows_at(upcoming, block + 1, split, lists)
            if NEAR:
                codes_into_l2(next_data, scales_at, next_valid, lane * 16, next_fp8, lists)
            mbarrier.wait(free.index(buffer), ((filled // BUFFERS) & 1) ^ 1)
            wrong, x, y = _block(
                shared.left.index(buffer), shared.right.index(buffer), x, y, (data, valid),
                (next_data, scales_at, next_valid, next_fp8), lane, fp8, lists, ROWS, ROW0, WARPS,
                BETWEEN,
            )  # fmt: skip
            if not BETWEEN:
                # Without this, addresses are computed before the block and spilled.
                lane = opaque(lane)
                x = _loads(next_data, scales_at, next_valid, lane, next_fp8, lists, 0, False)
                y = _loads(next_data, scales_at, next_valid, lane, next_fp8, lists, 1, False)
            # A row that float16 does not hold makes all scores NaN.
            row_bias = gl.where(wrong != 0, float("nan"), 0.0)
            put(shared.bias.index(buffer), gl.where(valid, row_bias, MASKED), ROWS, ROW0)
            mbarrier.arrive(ready.index(buffer), count=1)
            filled += 1
            valid, data, fp8 = next_valid, next_data, next_fp8
            upcoming = slots_of(block + 2, split, lists, r)

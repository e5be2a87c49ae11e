"""Producer warpgroups: fetch FP8 rows, decode them to float16, and leave them in shared memory.

A row's channels are stored times ``LIFT`` = 2^7 (the first 448) and as they are (the bfloat16
tail), so that every value a writer emits is exact: scale bytes 105 to 127 are, and anything else
sets the row's bias to NaN, which turns the sums into NaN; see ``gluon_sm90_rescan``.

Four lanes share a row. A lane takes 16 bytes of each 64, so that 16 codes become 32 bytes of
float16 that are neighbours in shared memory. The tail is read as two pieces of 64 bytes for the
four lanes, which leaves its groups of eight channels in the order 0 4 1 5 2 6 3 7: ``tail_order``
gives q and the output the same order.

Everything is int32 on the way, two float16 to a word: a tensor of bytes takes a register for every
byte.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from anymla.ops.sparse_attention.float16_range import LIFT as LIFT_EXPONENT
from anymla.ops.sparse_attention.float16_range import exact_scale_bytes
from anymla.ops.sparse_attention.gluon_sm90_lists import KEYS, NOPE, address, slots_of
from anymla.ops.sparse_attention.gluon_sm90_shares import piece
from anymla.ops.sparse_attention.gluon_sm90_softmax import predecessors_done

LIFT = gl.constexpr(2.0**LIFT_EXPONENT)
assert exact_scale_bytes(LIFT_EXPONENT) == (105, 127)  # what ``_inexact`` looks for
MASKED = gl.constexpr(-1e30)
_ONES = gl.constexpr(0x7F7F7F7F7F7F7F7F)  # scale bytes of rows that are not there: 1
_LOAD_IF = (  # rows leave L2 first, not what the next call begins with
    "{ .reg .pred q; .reg .b64 p; createpolicy.fractional.L2::evict_first.b64 p, 1.0; "
    "setp.ne.s32 q, $5, 0; "
    "mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; "
    "@q ld.global%s.L1::evict_last.L2::cache_hint.L2::256B.v4.u32 {$0, $1, $2, $3}, [$4], p; }"
)
_LOAD = gl.constexpr(_LOAD_IF % ".nc")
_LOAD_HERE = gl.constexpr(_LOAD_IF % "")  # stays between barriers
_KEEP_ORDER = gl.constexpr("bar.warp.sync 0xffffffff; mov.u32 $0, 0;")
_INTO_L2 = gl.constexpr(
    "{ .reg .pred q; setp.ne.s32 q, $2, 0; @q prefetch.global.L2 [$1]; "
    "@q prefetch.global.L2 [$1 + 256]; setp.ne.s32 q, $4, 0; @q prefetch.global.L2 [$3]; "
    "mov.u32 $0, 0; }"
)
_DECODE = gl.constexpr(
    "{ .reg .b16 l, h; .reg .b32 a, b; mov.b32 {l, h}, $2; "
    "cvt.rn.f16x2.e4m3x2 a, l; cvt.rn.f16x2.e4m3x2 b, h; "
    "mul.rn.f16x2 $0, a, $3; mul.rn.f16x2 $1, b, $3; }"
)
_HALVES = gl.constexpr(
    "{ .reg .b32 a, b; shl.b32 a, $1, 16; and.b32 b, $1, 0xffff0000; cvt.rn.f16x2.f32 $0, b, a; }"
)


@gluon.jit
def halves(words):
    """Two bfloat16 of each word as two float16."""
    return gl.inline_asm_elementwise(_HALVES, "=r,r", [words], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _load(address, there, PDL: gl.constexpr = False):
    """16 bytes at each address, as four words; zeros where there is no row."""
    return gl.inline_asm_elementwise(
        _LOAD_HERE if PDL else _LOAD, "=&r,=&r,=&r,=&r,l,r", [address, there],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _loads_before_here(PDL: gl.constexpr):
    """If PDL, the compiler leaves loads before this where they are.

    It moves all of a block's loads to the end of the trip otherwise, so that nothing is on its way
    while a block is decoded.
    """
    if PDL:
        L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        gl.inline_asm_elementwise(
            _KEEP_ORDER, "=r,r", [gl.arange(0, 128, layout=L)],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def _into_l2(data, marks, valid, lane):
    """Ask for rows up to the L2 cache: nine pieces of 64 bytes, and their scales.

    Four lanes share a row, and each asks for three: the third of the second lane is the scales.
    """
    there = gl.expand_dims(valid, 1)
    data = gl.expand_dims(data, 1)
    third = gl.where(lane == 0, data + 512, gl.expand_dims(marks, 1) + lane * 0)
    gl.inline_asm_elementwise(
        _INTO_L2, "=r,l,r,l,r",
        [data + lane * 4, there.to(gl.int32) + lane * 0, third, (there & (lane < 32)).to(gl.int32)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _decode(codes, factor):
    """Four codes of each word times the factor, as two words of float16."""
    return gl.inline_asm_elementwise(
        _DECODE, "=r,=r,r,r", [codes, factor], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )


@gluon.jit
def _factor(lifted, PLACE: gl.constexpr):
    """2^(byte - 127) of byte PLACE of each word, as two float16."""
    if PLACE == 0:
        bits = lifted << 23
    elif PLACE == 1:
        bits = lifted << 15
    elif PLACE == 2:
        bits = lifted << 7
    else:
        bits = lifted >> 1
    bits = bits & 0x7F800000
    pair = gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,r", [bits], dtype=gl.int32, is_pure=True, pack=1
    )
    return gl.expand_dims(pair, 1)


@gluon.jit
def _inexact(low, high):
    """Where one of the seven scale bytes is outside 105 .. 127, as a non-zero word."""
    fine_low = ((low & 0x7F7F7F7F) + 0x17171717) & ~low
    fine_high = ((high & 0x7F7F7F7F) + 0x17171717) & ~high
    return (~fine_low & -0x7F7F7F80) | (~fine_high & 0x00808080)


@gluon.jit
def _row_of_eight(a, b, c, d, e, f, g, h, ROWS: gl.constexpr):
    """Words 0 .. 7 of each lane side by side: [ROWS, 32]."""
    joined = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
    return gl.reshape(gl.permute(joined, (0, 1, 4, 3, 2)), [ROWS, 32])


@gluon.jit
def _block(x, lifted, PLACE: gl.constexpr, ROWS: gl.constexpr):
    """64 channels of every row: [ROWS, 32] words."""
    factor = _factor(lifted, PLACE)
    a, b = _decode(x[0], factor)
    c, d = _decode(x[1], factor)
    e, f = _decode(x[2], factor)
    g, h = _decode(x[3], factor)
    return _row_of_eight(a, b, c, d, e, f, g, h, ROWS)


@gluon.jit
def _tail(x, y, ROWS: gl.constexpr):
    """The bfloat16 channels of every row, in ``tail_order``: [ROWS, 32] words."""
    return _row_of_eight(
        halves(x[0]), halves(x[1]), halves(x[2]), halves(x[3]),
        halves(y[0]), halves(y[1]), halves(y[2]), halves(y[3]), ROWS,
    )  # fmt: skip


@gluon.jit
def _half_row(a, b, c, d, ROWS: gl.constexpr):
    """Four blocks side by side: [ROWS, 128] words."""
    joined = gl.join(gl.join(a, b), gl.join(c, d))
    return gl.reshape(gl.permute(joined, (0, 3, 2, 1)), [ROWS, 128])


@gluon.jit
def _put(buffer, x, ROWS: gl.constexpr, ROW0: gl.constexpr):
    if ROWS == KEYS:
        buffer.store(x)
    else:
        buffer.slice(ROW0, ROWS, dim=0).store(x)


@gluon.jit
def _first_slots(
    block, last, token, n0, n1, blocks0, lists, share, r, TURNS: gl.constexpr
):  # fmt: skip
    """Slots of a piece's first block; if it is known, without waiting for the lengths."""
    if share.WIDTHS:
        width, column = lists.width0, block * KEYS + r
        row = lists.list0.to(gl.int64) + token * lists.stride0.to(gl.int64) * 4
        n = n0
        if lists.TWO:
            here = block < blocks0
            second = lists.list1.to(gl.int64) + token * lists.stride1.to(gl.int64) * 4
            row = gl.where(here, row, second)
            width = gl.where(here, width, lists.width1)
            column = gl.where(here, column, column - blocks0 * KEYS)
            n = gl.where(here, n, n1)
        row = row.to(gl.pointer_type(gl.int32))
        slots = gl.load(row + column, mask=column < width, other=-1)
        return gl.where((column < n) & (block < last), slots, -1)
    elif share.SPLIT or TURNS != 1:
        return slots_of(block, last, token, n0, n1, blocks0, lists, r)
    else:
        row = lists.list0 + token * lists.stride0.to(gl.int64)
        slots = gl.load(row + r, mask=r < lists.width0, other=-1)
        if lists.TWO:
            row = lists.list1 + token * lists.stride1.to(gl.int64)
            second = gl.load(row + r, mask=r < lists.width1, other=-1)
            second = gl.where(r < n1, second, -1)
            return gl.where(blocks0 > 0, gl.where(r < n0, slots, -1), second)
        else:
            return gl.where(r < n0, slots, -1)


@gluon.jit
def produce(
    lists, share, left, right, bias, ready, free,
    ROWS: gl.constexpr, ROW0: gl.constexpr, BUFFERS: gl.constexpr,
    TURN: gl.constexpr = 0, TURNS: gl.constexpr = 1, PDL: gl.constexpr = False,
):  # fmt: skip
    """Fill the buffers with the blocks of all pieces.

    Producers either take rows ROW0 .. ROW0 + ROWS of every block, or all rows of every TURNS-th
    block. These are counted over all pieces, so that no producer skips a buffer's turn: a barrier
    tells two neighbouring phases apart, but not the one before from the one after.

    Args:
        lists: see ``gluon_sm90_lists``.
        share: likewise.
        left: int32 [BUFFERS, 64, 128], channels 0 .. 255 as pairs of float16.
        right: int32 [BUFFERS, 64, 128], channels 256 .. 511, the tail in ``tail_order``.
        bias: float32 [BUFFERS, 64]: 0, MASKED where there is no row, NaN where float16 is not
            exact.
        ready: barriers [BUFFERS], an arrival each time a producer has filled its rows.
        free: barriers [BUFFERS], completed each time the consumers are done with a buffer.
        ROWS: rows that this producer fills.
        ROW0: the first of them.
        BUFFERS: number of buffers.
        TURN: see above.
        TURNS: see above.
        PDL: ask for the next rows between the stores of a block, not behind them. That helps
            where a producer has all rows of a block, and hurts where stores are waited for.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    r = ROW0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    lane = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, L)), 0) * 16
    # Rows that two tiles read come from the L2 cache half of the time anyway.
    NEAR: gl.constexpr = share.TILES == 1 and not share.SINGLE
    predecessors_done()
    before = 0  # blocks of the pieces before
    for k in range(0, share.count):
        token, _, n0, n1, blocks0, first, last, _, _, _ = piece(k, share, lists)
        own = first + (before + TURN) % TURNS
        slots = _first_slots(own, last, token, n0, n1, blocks0, lists, share, r, TURNS)
        upcoming = slots_of(own + TURNS, last, token, n0, n1, blocks0, lists, r)
        valid, data, marks = address(slots, own < blocks0, lists)
        scales = gl.load(marks.to(gl.pointer_type(gl.int64)), mask=valid, other=_ONES)
        there = gl.expand_dims(valid, 1).to(gl.int32)
        at = gl.expand_dims(data, 1) + lane
        x0 = _load(at, there, PDL)
        x1 = _load(at + 64, there, PDL)
        x2 = _load(at + 128, there, PDL)
        x3 = _load(at + 192, there, PDL)
        x4 = _load(at + 256, there, PDL)
        x5 = _load(at + 320, there, PDL)
        x6 = _load(at + 384, there, PDL)
        y0 = _load(at + NOPE, there, PDL)
        y1 = _load(at + NOPE + 64, there, PDL)
        for block in range(own, last, TURNS):
            place = before + block - first
            buffer = place % BUFFERS
            if NEAR:
                next_valid, data, marks = address(upcoming, block + TURNS < blocks0, lists)
                _into_l2(data, marks, next_valid, lane)
            mbarrier.wait(free.index(buffer), ((place // BUFFERS) & 1) ^ 1)
            if not NEAR:
                next_valid, data, marks = address(upcoming, block + TURNS < blocks0, lists)
            next_scales = gl.load(marks.to(gl.pointer_type(gl.int64)), mask=next_valid, other=_ONES)
            there = gl.expand_dims(next_valid, 1).to(gl.int32)
            at = gl.expand_dims(data, 1) + lane
            low = scales.to(gl.int32)
            high = (scales >> 32).to(gl.int32)
            # A row that float16 does not hold makes all scores NaN.
            mark = gl.where(_inexact(low, high) != 0, float("nan"), 0.0)
            low = low + 0x07070707
            high = high + 0x07070707
            half = _half_row(
                _block(x0, low, 0, ROWS), _block(x1, low, 1, ROWS),
                _block(x2, low, 2, ROWS), _block(x3, low, 3, ROWS), ROWS,
            )  # fmt: skip
            _put(left.index(buffer), half, ROWS, ROW0)
            x0 = _load(at, there, PDL)
            x1 = _load(at + 64, there, PDL)
            x2 = _load(at + 128, there, PDL)
            x3 = _load(at + 192, there, PDL)
            _loads_before_here(PDL)
            half = _half_row(
                _block(x4, high, 0, ROWS), _block(x5, high, 1, ROWS),
                _block(x6, high, 2, ROWS), _tail(y0, y1, ROWS), ROWS,
            )  # fmt: skip
            _put(right.index(buffer), half, ROWS, ROW0)
            x4 = _load(at + 256, there, PDL)
            x5 = _load(at + 320, there, PDL)
            x6 = _load(at + 384, there, PDL)
            y0 = _load(at + NOPE, there, PDL)
            y1 = _load(at + NOPE + 64, there, PDL)
            _loads_before_here(PDL)
            _put(bias.index(buffer), gl.where(valid, mark, MASKED), ROWS, ROW0)
            mbarrier.arrive(ready.index(buffer), count=1)
            valid = next_valid
            scales = next_scales
            upcoming = slots_of(block + 2 * TURNS, last, token, n0, n1, blocks0, lists, r)
        before += last - first

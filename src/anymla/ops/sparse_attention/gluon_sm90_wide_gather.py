"""Producer warpgroups for DeepSeek-V3.2's rows: 512 codes, four float32 scales, 64 bfloat16.

As in ``gluon_sm90_gather``: codes are stored times ``LIFT``, the tail as it is and in
``tail_order``, in a buffer of its own because it is no value. Four lanes share a row, and each
reads all four scales at once. A scale outside the range in which float16 is exact for powers of
two, or a tail that float16 does not hold, sets the row's bias to NaN; other scales are rounded to
float16, and so are the products.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from anymla.formats.page_layout import V32_FP8, get_layout
from anymla.ops.sparse_attention import float16_range
from anymla.ops.sparse_attention.gluon_sm90_gather import (
    MASKED,
    _decode,
    _half_row,
    _load,
    _put,
    _row_of_eight,
    _tail,
)
from anymla.ops.sparse_attention.gluon_sm90_lists import slots_of
from anymla.ops.sparse_attention.gluon_sm90_shares import piece
from anymla.ops.sparse_attention.gluon_sm90_softmax import predecessors_done

_LAYOUT = get_layout(V32_FP8)
ROW = gl.constexpr(_LAYOUT.data_bytes)
CODES = gl.constexpr(_LAYOUT.nope)
TAIL = gl.constexpr(_LAYOUT.rope_start)
# Bits of float32: the exponent field.
_LEAST = gl.constexpr(127 + float16_range.exact_scale_exponents(float16_range.LIFT)[0] << 23)
_LAST = gl.constexpr(127 + float16_range.exact_scale_exponents(float16_range.LIFT)[1] << 23)
_NOTHING = gl.constexpr(127 - 100 << 23)
_LIFTED = gl.constexpr(float16_range.LIFT << 23)
_TOO_LARGE = gl.constexpr(0x4780)  # 2^16 as bits of bfloat16


@gluon.jit
def row_address(slots, lists):
    """Whether there is a row, and its address."""
    PAGE: gl.constexpr = lists.PAGE0
    STEP: gl.constexpr = lists.STEP0
    valid = (slots >= 0) & (slots < lists.limit0)
    slots = gl.where(valid, slots, 0).to(gl.uint32)
    pages = slots // PAGE
    entry = (slots - pages * PAGE).to(gl.int32)
    return valid, lists.rows0.to(gl.int64) + pages.to(gl.int64) * STEP + entry * ROW


@gluon.jit
def _inexact(scale):
    """Whether a scale's bits are outside the window, and not nothing, as 0 or 1."""
    outside = (scale < _LEAST) & (scale > _NOTHING)
    return (outside | (scale > _LAST) | (scale < 0)).to(gl.int32)


@gluon.jit
def _pair(scale):
    """A scale's bits, lifted, as two float16."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,r", [scale + _LIFTED],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _block(x, factor, ROWS: gl.constexpr):
    """64 channels of every row: [ROWS, 32] words."""
    a, b = _decode(x[0], factor)
    c, d = _decode(x[1], factor)
    e, f = _decode(x[2], factor)
    g, h = _decode(x[3], factor)
    return _row_of_eight(a, b, c, d, e, f, g, h, ROWS)


@gluon.jit
def _largest(x):
    """Largest magnitude of eight bfloat16 in four words, as its bits."""
    a = gl.maximum(x[0] & 0x7FFF, (x[0] >> 16) & 0x7FFF)
    b = gl.maximum(x[1] & 0x7FFF, (x[1] >> 16) & 0x7FFF)
    c = gl.maximum(x[2] & 0x7FFF, (x[2] >> 16) & 0x7FFF)
    d = gl.maximum(x[3] & 0x7FFF, (x[3] >> 16) & 0x7FFF)
    return gl.maximum(gl.maximum(a, b), gl.maximum(c, d))


@gluon.jit
def produce_wide(
    lists, share, left, right, tail, bias, ready, free,
    ROWS: gl.constexpr, ROW0: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Fill the buffers with the blocks of all pieces: rows ROW0 .. ROW0 + ROWS of each block.

    ``tail`` is int32 [BUFFERS, 64, 32]; the others are those of ``gluon_sm90_gather.produce``.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    r = ROW0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    lane = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, L)), 0) * 16
    predecessors_done()
    filled = 0
    for k in range(0, share.count):
        token, _, n0, n1, blocks0, first, last, _, _, _ = piece(k, share, lists)
        slots = slots_of(first, last, token, n0, n1, blocks0, lists, r)
        upcoming = slots_of(first + 1, last, token, n0, n1, blocks0, lists, r)
        valid, data = row_address(slots, lists)
        there = gl.expand_dims(valid, 1).to(gl.int32)
        at = gl.expand_dims(data, 1) + lane
        z = _load(at - lane + CODES, there)
        x0 = _load(at, there)
        x1 = _load(at + 64, there)
        x2 = _load(at + 128, there)
        x3 = _load(at + 192, there)
        x4 = _load(at + 256, there)
        x5 = _load(at + 320, there)
        x6 = _load(at + 384, there)
        x7 = _load(at + 448, there)
        y0 = _load(at + TAIL, there)
        y1 = _load(at + TAIL + 64, there)
        for block in range(first, last):
            buffer = filled % BUFFERS
            mbarrier.wait(free.index(buffer), ((filled // BUFFERS) & 1) ^ 1)
            next_valid, data = row_address(upcoming, lists)
            there = gl.expand_dims(next_valid, 1).to(gl.int32)
            at = gl.expand_dims(data, 1) + lane
            next_z = _load(at - lane + CODES, there)
            a = _pair(z[0])
            b = _pair(z[1])
            half = _half_row(
                _block(x0, a, ROWS), _block(x1, a, ROWS), _block(x2, b, ROWS), _block(x3, b, ROWS),
                ROWS,
            )  # fmt: skip
            _put(left.index(buffer), half, ROWS, ROW0)
            x0 = _load(at, there)
            x1 = _load(at + 64, there)
            x2 = _load(at + 128, there)
            x3 = _load(at + 192, there)
            a = _pair(z[2])
            b = _pair(z[3])
            half = _half_row(
                _block(x4, a, ROWS), _block(x5, a, ROWS), _block(x6, b, ROWS), _block(x7, b, ROWS),
                ROWS,
            )  # fmt: skip
            _put(right.index(buffer), half, ROWS, ROW0)
            x4 = _load(at + 256, there)
            x5 = _load(at + 320, there)
            x6 = _load(at + 384, there)
            x7 = _load(at + 448, there)
            _put(tail.index(buffer), _tail(y0, y1, ROWS), ROWS, ROW0)
            # A row that float16 does not hold makes all scores NaN.
            wrong = _inexact(z[0]) | _inexact(z[1]) | _inexact(z[2]) | _inexact(z[3])
            wrong = wrong | (gl.maximum(_largest(y0), _largest(y1)) >= _TOO_LARGE).to(gl.int32)
            y0 = _load(at + TAIL, there)
            y1 = _load(at + TAIL + 64, there)
            mark = gl.where(gl.max(wrong, 1) != 0, float("nan"), 0.0)
            _put(bias.index(buffer), gl.where(valid, mark, MASKED), ROWS, ROW0)
            mbarrier.arrive(ready.index(buffer), count=1)
            filled += 1
            valid = next_valid
            z = next_z
            upcoming = slots_of(block + 2, last, token, n0, n1, blocks0, lists, r)

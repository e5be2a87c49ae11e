"""Stores for Gluon attention kernels that rotate heads back and quantise them to FP8.

The bytes equal those of ``inverse_rope_quantize_kernel`` run after attention: heads are rounded to
the queries' dtype, their last channels rotate back by the angles of the query's position, and every
quant block of 128 channels gets a power of two as its scale.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anymla.formats.fp8_block import FP8_BLOCK, HEAD_AMAX_FLOOR
from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.ops._gluon import aggregate
from anymla.ops._gluon_ptx import cvt_e4m3x2_f32, prefetch_global_l1

CHANNELS = gl.constexpr(get_layout(MAIN_FP8).channels)
_BLOCK = gl.constexpr(FP8_BLOCK)
_PAIRS = gl.constexpr(FP8_BLOCK // 2)
_FLOOR = gl.constexpr(HEAD_AMAX_FLOOR)
_TAIL_PAIRS = gl.constexpr(32)


@gluon.jit
def tail_order(position, GROUP: gl.constexpr):
    """Return the channel of the tail (the rotated channels) that is stored at a position of it.

    Producers that read 16 bytes per lane leave its groups of eight channels in the order 0 4 1 5 2
    6 3 7. GROUP is 8 for channels and 4 for packed pairs. The compiler can see that the result is
    contiguous and aligned in groups of GROUP.
    """
    group = position // GROUP
    return ((group % 2) * 4 + group // 2) * GROUP + position % GROUP


@aggregate
class Output:
    """Pointers to an attention kernel's output, and the parameters of its quantisation.

    Attributes:
        heads: pointer to heads [T, H, 512] of TYPE, or to pairs of e4m3 codes, int16 [T, H, 256].
        scales: pointer to float32 scales [T, H, 4]; unused like the next three if ROPE_DIM is 0.
        positions: pointer to the queries' positions, int64 [T].
        table: pointer to cosines then sines by position, float32 [angles, ROPE_DIM].
        angles: number of rows of the table.
        ROPE_DIM: number of trailing channels that rotate, 64; 0 to store heads without quantising.
        TYPE: dtype of queries and heads.
    """

    heads: gl.tensor
    scales: gl.tensor
    positions: gl.tensor
    table: gl.tensor
    angles: gl.tensor
    ROPE_DIM: gl.constexpr
    TYPE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, heads, scales, positions, table, angles, ROPE_DIM, TYPE):
        self.heads = heads
        self.scales = scales
        self.positions = positions
        self.table = table
        self.angles = angles
        self.ROPE_DIM = gl.constexpr(ROPE_DIM)
        self.TYPE = gl.constexpr(TYPE)


@gluon.jit
def angles_of(to, token):
    """Return a pointer to the cosines of a token's position."""
    position = gl.load(to.positions + token)
    position = gl.minimum(gl.maximum(position, 0), to.angles - 1)
    return to.table + position * to.ROPE_DIM


@gluon.jit
def prefetch_angles(to, token):
    """Return ``angles_of`` a token and prefetch the angles, long before they are needed."""
    angles = angles_of(to, token)
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    words = gl.arange(0, 128, layout=L) % to.ROPE_DIM
    prefetch_global_l1(angles + words)
    return angles


@gluon.jit
def rotate_back(a, b, angles, pair, rotates):
    """Rotate pairs of channels back where ``rotates``; ``pair`` counts those that do."""
    cos = gl.load(angles + pair, mask=rotates, other=1.0)
    sin = gl.load(angles + (_TAIL_PAIRS + pair), mask=rotates, other=0.0)
    return a * cos + b * sin, b * cos - a * sin


@gluon.jit
def exponent_of(largest):
    """Return the exponent of a quant block's scale."""
    ratio = gl.maximum(largest, _FLOOR) * (1.0 / 448.0)
    bits = ratio.to(gl.int32, bitcast=True)
    return (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).to(gl.int32)


@gluon.jit
def power_of(exponent):
    """Return 2^exponent as float32, for exponents from -126 to 127."""
    return ((exponent + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def codes_of(a, b, exponent):
    """Quantise a and b to two codes per int32, a's in the low byte."""
    inverse = power_of(gl.where(exponent > 126, -126, -exponent))
    return cvt_e4m3x2_f32(a * inverse, b * inverse)


@gluon.jit
def _stored_pair(pair):
    """Return the pair of channels that is stored at a place of the last quant block."""
    tail = pair >= _PAIRS - _TAIL_PAIRS
    order = _PAIRS - _TAIL_PAIRS + tail_order(pair - (_PAIRS - _TAIL_PAIRS), 4)
    return gl.where(tail, order, pair)


@gluon.jit
def _blocks(
    y, to, token, ROWS: gl.constexpr, PART: gl.constexpr, ORDERED: gl.constexpr = True
):  # fmt: skip
    """Quantise both quant blocks of half a head to codes [ROWS, 2, 64] and exponents [ROWS, 2].

    Codes are in pairs. ORDERED is True if the tail is in ``tail_order``.
    """
    y = y.to(to.TYPE).to(gl.float32)
    a, b = gl.split(gl.reshape(y, [ROWS, 2, _PAIRS, 2]))
    if PART == 1:
        L: gl.constexpr = a.type.layout
        block = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
        last = gl.expand_dims(gl.expand_dims(block, 0), 2) == 1
        place = gl.arange(0, _PAIRS, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
        if ORDERED:
            place = _stored_pair(place)
        pair = gl.expand_dims(gl.expand_dims(place - (_PAIRS - _TAIL_PAIRS), 0), 1)
        c, d = rotate_back(a, b, angles_of(to, token), pair, last & (pair >= 0))
        a = gl.where(last, c, a)
        b = gl.where(last, d, b)
    exponent = exponent_of(gl.max(gl.maximum(gl.abs(a), gl.abs(b)), 2))
    return codes_of(a, b, gl.expand_dims(exponent, 2)), exponent


@gluon.jit
def _store_scales(exponent, to, row, valid, ROWS: gl.constexpr, PART: gl.constexpr):
    L: gl.constexpr = exponent.type.layout
    r = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, L)), 1)
    c = gl.expand_dims(gl.arange(0, 2, layout=gl.SliceLayout(0, L)), 0)
    at = to.scales + row * (CHANNELS // _BLOCK) + (r * (CHANNELS // _BLOCK) + c + PART * 2)
    gl.store(at, power_of(exponent), mask=(r < valid) & (c >= 0))


@gluon.jit
def store_quantized_rows(
    x, to, token, H, head, ROWS: gl.constexpr, PART: gl.constexpr, ORDERED: gl.constexpr = True
):
    """Store half the channels of heads from ``head`` on, [ROWS, 256], eight channels to a thread.

    ORDERED is True if the tail is in ``tail_order``.
    """
    codes, exponent = _blocks(x, to, token, ROWS, PART, ORDERED)
    row = token.to(gl.int64) * H + head
    L: gl.constexpr = codes.type.layout
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
    block = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    place = gl.arange(0, _PAIRS, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    r = gl.expand_dims(gl.expand_dims(r, 1), 2)
    block = gl.expand_dims(gl.expand_dims(block, 0), 2)
    pair = gl.expand_dims(gl.expand_dims(place, 0), 1)
    if PART == 1 and ORDERED:
        order = gl.expand_dims(gl.expand_dims(_stored_pair(place), 0), 1)
        pair = gl.where(block == 1, order, pair)
    at = to.heads + row * (CHANNELS // 2) + (r * (CHANNELS // 2) + PART * (2 * _PAIRS))
    gl.store(at + (block * _PAIRS + pair), codes.to(gl.int16), mask=(r < H - head) & (pair >= 0))
    _store_scales(exponent, to, row, H - head, ROWS, PART)


@gluon.jit
def store_quantized_block(
    low, high, to, angles, row, there, quarter, TAIL: gl.constexpr, ORDERED: gl.constexpr
):
    """Store a quant block of 64 heads, given as two tiles [64, 64].

    Args:
        low: first 64 channels of the block.
        high: last 64 channels of the block.
        to: destination of the heads, an ``Output``.
        angles: pointer to the token's angles from ``angles_of``.
        row: index of the first head among all heads of all tokens, int64.
        there: bool [64], True where a head exists.
        quarter: index of the quant block in a head.
        TAIL: True if it may be the last quant block.
        ORDERED: True if the tail, which is the last tile, is in ``tail_order``.
    """
    a, b = gl.split(gl.reshape(low.to(to.TYPE).to(gl.float32), [64, _PAIRS // 2, 2]))
    c, d = gl.split(gl.reshape(high.to(to.TYPE).to(gl.float32), [64, _PAIRS // 2, 2]))
    P: gl.constexpr = a.type.layout
    place = gl.arange(0, _PAIRS // 2, layout=gl.SliceLayout(0, P))
    beyond = gl.expand_dims(place, 0)
    if TAIL:
        last = quarter == CHANNELS // _BLOCK - 1
        if ORDERED:
            beyond = gl.expand_dims(gl.where(last, tail_order(place, 4), place), 0)
        e, f = rotate_back(c, d, angles, beyond, (beyond >= 0) & last)
        c = gl.where(last, e, c)
        d = gl.where(last, f, d)
        # Do as a rotation by no angle does, which may lose a zero's sign.
        e, f = a + b * 0.0, b - a * 0.0
        a = gl.where(last, e, a)
        b = gl.where(last, f, b)
    largest = gl.maximum(gl.maximum(gl.abs(a), gl.abs(b)), gl.maximum(gl.abs(c), gl.abs(d)))
    exponent = exponent_of(gl.max(largest, 1))
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, P))
    there = gl.convert_layout(there.to(gl.int32), gl.SliceLayout(1, P)) != 0
    at = to.heads + row * (CHANNELS // 2) + quarter * _PAIRS
    at = at + gl.expand_dims(r, 1) * (CHANNELS // 2)
    mask = gl.expand_dims(there, 1) & (beyond >= 0)
    wide = gl.expand_dims(exponent, 1)
    gl.store(at + gl.expand_dims(place, 0), codes_of(a, b, wide).to(gl.int16), mask=mask)
    gl.store(at + (beyond + _PAIRS // 2), codes_of(c, d, wide).to(gl.int16), mask=mask)
    scales = to.scales + row * (CHANNELS // _BLOCK) + quarter
    gl.store(scales + r * (CHANNELS // _BLOCK), power_of(exponent), mask=there)


@gluon.jit
def store_quantized_chunks(
    chunks, first, to, angles, token, head, H, PART: gl.constexpr, ORDERED: gl.constexpr
):
    """Store half the channels of heads ``head`` .. ``head`` + 63 of a token from shared memory.

    Args:
        chunks: shared memory [.., 64, 64] of ``to.TYPE``.
        first: index of the first of four chunks, 64 channels each.
        to: destination of the heads, an ``Output``.
        angles: pointer to the token's angles; used if PART is 1.
        token: index of the token.
        head: index of the first of the heads.
        H: number of heads.
        PART: 0 for channels 0 .. 255, 1 for the others.
        ORDERED: True if the tail is in ``tail_order``.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = token.to(gl.int64) * H + head
    there = gl.arange(0, 64, layout=gl.SliceLayout(1, L)) < H - head
    for block in range(0, 2):
        low = chunks.index(first + block * 2).load(L)
        high = chunks.index(first + block * 2 + 1).load(L)
        store_quantized_block(
            low, high, to, angles, row, there, PART * 2 + block, PART == 1, ORDERED
        )

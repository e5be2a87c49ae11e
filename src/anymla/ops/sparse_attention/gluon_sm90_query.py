"""Queries as float16 in shared memory, and the order of channels there.

The tail of a key is stored as it is, its other channels times ``LIFT``; so the tail of a query is
stored times ``LIFT``, and scores are ``LIFT`` times what they should be throughout.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anymla.ops.sparse_attention.gluon_sm90_gather import LIFT, halves, tail_order
from anymla.ops.sparse_attention.gluon_sm90_lists import NOPE

HALF = gl.constexpr(256)
_TAIL = gl.constexpr(NOPE.value - HALF.value)  # first column of the tail in the right half
# Magnitudes as bits of bfloat16: 2^16, which float16 does not hold, and 2^-8, below which the
# largest of a head's must not be, or the small ones lose what they have. Times LIFT is plus 7 in
# the exponent.
_TOO_LARGE = gl.constexpr(0x4780)
_TOO_SMALL = gl.constexpr(0x3B80)
_LIFTED = gl.constexpr(0x380)
_TOO_LARGE_HALF = gl.constexpr(0x6000)  # 2^9 as bits of float16
_LIFT_HALVES = gl.constexpr("mul.rn.f16x2 $0, $1, $2;")
_LIFTED_HALVES = gl.constexpr(
    "{ .reg .f32 a, b; .reg .b32 c, d; shl.b32 c, $1, 16; and.b32 d, $1, 0xffff0000; "
    "mov.b32 a, c; mov.b32 b, d; mul.f32 a, a, $2; mul.f32 b, b, $2; cvt.rn.f16x2.f32 $0, b, a; }"
)


@gluon.jit
def stored(column, WORD: gl.constexpr):
    """Channel, less 256, that a column of the right half holds; in words of WORD channels."""
    TAIL: gl.constexpr = _TAIL // WORD
    return gl.where(column < TAIL, column, TAIL + tail_order(column - TAIL, 8 // WORD))


@gluon.jit
def load_query(
    q_ptr, token, tile, H, token_stride, to,
    HEADS: gl.constexpr, HEAD: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Half the channels of a tile of heads, into shared memory.

    Args:
        q_ptr: bfloat16 or float16.
        token: of which token.
        tile: which HEADS heads; those from H on are zeros.
        H: number of heads.
        token_stride: in words of 32 bits.
        to: int32 [HEADS, 128] in shared memory.
        HEADS: heads of a tile.
        HEAD: stride of a head, in words.
        PART: 0 for channels 0 .. 255, 1 for the others.

    Returns:
        What was read, for ``misfit``.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    row = gl.arange(0, HEADS, layout=gl.SliceLayout(1, L))
    word = gl.arange(0, HALF // 2, layout=gl.SliceLayout(0, L))
    if PART == 1:
        word = stored(word, 2)
    start = token.to(gl.int64) * token_stride + tile * (HEADS * HEAD) + PART * (HALF // 2)
    at = gl.expand_dims(row * HEAD, 1) + gl.expand_dims(word, 0)
    inside = gl.expand_dims(tile * HEADS + row < H, 1)
    words = gl.load(q_ptr.to(gl.pointer_type(gl.int32)) + start + at, mask=inside, other=0)
    tail = gl.expand_dims(word, 0) >= _TAIL // 2
    if q_ptr.dtype.element_ty == gl.float16:
        if PART == 1:
            # 128 and 1 as two float16.
            factor = gl.where(tail, 0x58005800, 0x3C003C00)
            to.store(
                gl.inline_asm_elementwise(
                    _LIFT_HALVES, "=r,r,r", [words, factor], dtype=gl.int32, is_pure=True, pack=1
                )
            )
        else:
            to.store(words)
    else:
        if PART == 1:
            factor = gl.where(tail, LIFT, 1.0)
            to.store(
                gl.inline_asm_elementwise(
                    _LIFTED_HALVES, "=r,r,f", [words, factor], dtype=gl.int32, is_pure=True, pack=1
                )
            )
        else:
            to.store(halves(words))
    return words


@gluon.jit
def misfit(words, HALVES: gl.constexpr, PART: gl.constexpr):
    """1 if float16 does not hold what ``load_query`` has read (HALVES: as float16), else 0."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    word = gl.arange(0, HALF // 2, layout=gl.SliceLayout(0, L))
    tail = gl.expand_dims(word, 0) >= _TAIL // 2
    magnitude = gl.maximum(words & 0x7FFF, (words >> 16) & 0x7FFF)
    if HALVES:
        large = (magnitude >= _TOO_LARGE_HALF) & tail
        wrong = gl.max(large.to(gl.int32), 1) * PART
    else:
        if PART == 1:
            magnitude = magnitude + gl.where(tail & (magnitude > 0), _LIFTED, 0)
        largest = gl.max(magnitude, 1)
        small = (largest > 0) & (largest < _TOO_SMALL)
        wrong = ((largest >= _TOO_LARGE) | small).to(gl.int32)
    return gl.max(wrong, 0)

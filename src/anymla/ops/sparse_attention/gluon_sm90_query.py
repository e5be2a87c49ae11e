"""Queries as float16 in shared memory, and the order of channels there.

The tail of a key is stored as it is, its other channels times ``LIFT``; so the tail of a query is
stored times ``LIFT``, and scores are ``LIFT`` times what they should be throughout.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anymla.ops.sparse_attention.gluon_sm90_gather import halves, tail_order
from anymla.ops.sparse_attention.gluon_sm90_lists import NOPE, anew

HALF = gl.constexpr(256)
_TAIL = gl.constexpr(NOPE.value - HALF.value)  # first column of the tail in the right half
# Added to the magnitude's bits of two numbers, these set the bits above where one is 2^16 or more,
# or 2^9 (the tail); bfloat16 and float16.
_REACH = gl.constexpr(0x38803880)
_REACH_TAIL = gl.constexpr(0x3C003C00)
_REACH_TAIL_HALF = gl.constexpr(0x20002000)
# LIFT in the exponents of two bfloat16.
_LIFTED = gl.constexpr(0x03800380)
_LIFT_HALVES = gl.constexpr("mul.rn.f16x2 $0, $1, $2;")


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
    zero = anew(tile * 0)
    row = gl.arange(0, HEADS, layout=gl.SliceLayout(1, L)) + zero
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
    elif PART == 1:
        to.store(halves(words + gl.where(tail, _LIFTED, 0)))
    else:
        to.store(halves(words))
    return words


@gluon.jit
def misfit(words, HALVES: gl.constexpr, PART: gl.constexpr):
    """Not 0 if float16 does not hold what ``load_query`` has read (HALVES: as float16).

    That is numbers that are too large. What is too small is off by 2^-25 at most, and a score by no
    more than a thousandth for the scales that the kernels take.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    if HALVES and PART == 0:
        return gl.max(gl.max(words * 0, 1), 0)
    else:
        reach = _REACH
        if PART == 1:
            word = gl.arange(0, HALF // 2, layout=gl.SliceLayout(0, L))
            tail = gl.expand_dims(word, 0) >= _TAIL // 2
            reach = gl.where(
                tail, _REACH_TAIL_HALF if HALVES else _REACH_TAIL, 0 if HALVES else _REACH
            )
        found = (((words & 0x7FFF7FFF) + reach) >> 1) & 0x40004000
        return gl.max(gl.max(found, 1), 0)

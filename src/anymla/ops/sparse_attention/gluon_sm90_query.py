"""Queries as float16 in shared memory, and the order of channels there.

The tail of a key is stored as it is, its other channels times ``LIFT``; so the tail of a query is
stored times ``LIFT``, and scores are ``LIFT`` times what they should be throughout.

What float16 does not hold becomes NaN, so that the scores, and with them the sums, are NaN; see
``gluon_sm90_rescan``. That is numbers that are too large. What is too small is off by 2^-25 at
most, and a score by no more than a thousandth for the scales that the kernels take.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from anymla.ops._gluon import opaque
from anymla.ops._gluon_epilogue import tail_order
from anymla.ops.sparse_attention.gluon_sm90_gather import halves
from anymla.ops.sparse_attention.gluon_sm90_lists import NOPE

_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
HALF = gl.constexpr(256)
_TAIL = gl.constexpr(NOPE.value - HALF.value)  # first column of the tail in the right half
_LIFT_HALVES = gl.constexpr("mul.rn.f16x2 $0, $1, $2;")
_LIFTED = gl.constexpr(0x58005800)  # LIFT as two float16
_ONES = gl.constexpr(0x3C003C00)
# x 0 + x: an infinity becomes NaN.
_NO_INFINITY = gl.constexpr("{ .reg .b32 z; mov.b32 z, 0; fma.rn.f16x2 $0, $1, z, $1; }")
# Words of 64 channels, which a row of a tile in shared memory holds, and chunks of half a head.
CHUNK = gl.constexpr(32)
CHUNKS = gl.constexpr(HALF.value // 64)


@gluon.jit
def _factored(words, tail, HALVES: gl.constexpr, TAIL: gl.constexpr):
    """Words of a query as float16 that keys are multiplied with."""
    if not HALVES:
        words = halves(words)
    if TAIL:
        words = gl.inline_asm_elementwise(
            _LIFT_HALVES, "=r,r,r", [words, gl.where(tail, _LIFTED, _ONES)],
            dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return gl.inline_asm_elementwise(
        _NO_INFINITY, "=r,r", [words], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def stored(column, WORD: gl.constexpr):
    """Channel, less 256, that a column of the right half holds; in words of WORD channels."""
    TAIL: gl.constexpr = _TAIL // WORD
    return gl.where(column < TAIL, column, TAIL + tail_order(column - TAIL, 8 // WORD))


@gluon.jit
def load_query(
    q_ptr, token, tile, H, token_stride, to,
    HEADS: gl.constexpr, HEAD: gl.constexpr, PART: gl.constexpr, TAIL: gl.constexpr,
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
        PART: 0 for channels 0 .. 255, 1 for 256 .. 511.
        TAIL: the last 64 of these are the tail.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    zero = opaque(tile * 0)
    row = gl.arange(0, HEADS, layout=gl.SliceLayout(1, L)) + zero
    word = gl.arange(0, HALF // 2, layout=gl.SliceLayout(0, L))
    if TAIL:
        word = stored(word, 2)
    start = token.to(gl.int64) * token_stride + tile * (HEADS * HEAD) + PART * (HALF // 2)
    at = gl.expand_dims(row * HEAD, 1) + gl.expand_dims(word, 0)
    inside = gl.expand_dims(tile * HEADS + row < H, 1)
    words = gl.load(q_ptr.to(gl.pointer_type(gl.int32)) + start + at, mask=inside, other=0)
    tail = gl.expand_dims(word, 0) >= _TAIL // 2
    to.store(_factored(words, tail, q_ptr.dtype.element_ty == gl.float16, TAIL))


@gluon.jit
def load_tail(q_ptr, token, tile, H, token_stride, to, HEADS: gl.constexpr, HEAD: gl.constexpr):
    """The last 64 of 576 channels of a tile of heads, to int32 [HEADS, CHUNK] in shared memory."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, HEADS, layout=gl.SliceLayout(1, L)) + opaque(tile * 0)
    word = tail_order(gl.arange(0, CHUNK, layout=gl.SliceLayout(0, L)), 4)
    start = token.to(gl.int64) * token_stride + tile * (HEADS * HEAD) + 2 * CHUNKS * CHUNK
    at = gl.expand_dims(row * HEAD, 1) + gl.expand_dims(word, 0)
    inside = gl.expand_dims(tile * HEADS + row < H, 1)
    words = gl.load(q_ptr.to(gl.pointer_type(gl.int32)) + start + at, mask=inside, other=0)
    to.store(_factored(words, words == words, q_ptr.dtype.element_ty == gl.float16, True))


@gluon.jit
def ask_query(
    q_ptr, token, tile, H, token_stride, chunks,
    HEADS: gl.constexpr, HEAD: gl.constexpr, FIRST: gl.constexpr, COUNT: gl.constexpr,
    TAIL: gl.constexpr,
):  # fmt: skip
    """Start what ``load_query`` does; ``take_query`` ends it.

    In loops: every trip does the same, but code that runs once a task is paid for by fetching it.
    They are slower than the code without, once that is there.

    Args:
        q_ptr: bfloat16 or float16.
        token: of which token.
        tile: which HEADS heads; those from H on are zeros.
        H: number of heads.
        token_stride: in words of 32 bits.
        chunks: int32 [2 CHUNKS, HEADS, CHUNK] in shared memory.
        HEADS: heads of a tile.
        HEAD: stride of a head, in words.
        FIRST: first chunk.
        COUNT: how many.
        TAIL: the last of all is the tail, and among these.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, HEADS, layout=gl.SliceLayout(1, L))
    word = gl.expand_dims(gl.arange(0, CHUNK, layout=gl.SliceLayout(0, L)), 0)
    base = q_ptr.to(gl.pointer_type(gl.int32)) + token.to(gl.int64) * token_stride
    there = gl.expand_dims(tile * HEADS + row < H, 1) & (word >= 0)
    for chunk in range(FIRST, FIRST + COUNT):
        source = word
        if TAIL:
            source = gl.where(chunk == 2 * CHUNKS - 1, tail_order(word, 4), word)
        at = base + (gl.expand_dims((tile * HEADS + row) * HEAD, 1) + source + chunk * CHUNK)
        _copy(chunks.index(chunk), at, mask=there)
    async_copy.commit_group()


@gluon.jit
def take_query(
    chunks, HEADS: gl.constexpr, FIRST: gl.constexpr, COUNT: gl.constexpr, HALVES: gl.constexpr,
    TAIL: gl.constexpr,
):  # fmt: skip
    """Wait for what this partition asked for, and make it what keys are multiplied with.

    HALVES: queries are float16. Other arguments are those of ``ask_query``.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    async_copy.wait_group(0)
    for chunk in range(FIRST, FIRST + COUNT):
        here = chunks.index(chunk)
        tail = chunk == 2 * CHUNKS - 1
        here.store(_factored(here.load(L), tail, HALVES, TAIL))


@gluon.jit
def take_copied(
    chunks, HEADS: gl.constexpr, FIRST: gl.constexpr, COUNT: gl.constexpr, HALVES: gl.constexpr,
    TAIL: gl.constexpr,
):  # fmt: skip
    """Make what the copy engine has left what keys are multiplied with; see ``take_query``."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    for chunk in range(FIRST, FIRST + COUNT - TAIL):
        here = chunks.index(chunk)
        here.store(_factored(here.load(L), False, HALVES, False))
    if TAIL:
        here = chunks.index(FIRST + COUNT - 1)
        words = _factored(here.load(L), True, HALVES, True)
        # Into ``tail_order``.
        words = gl.permute(gl.reshape(words, [HEADS, 2, 4, 4]), (0, 2, 1, 3))
        here.store(gl.reshape(words, [HEADS, CHUNK]))

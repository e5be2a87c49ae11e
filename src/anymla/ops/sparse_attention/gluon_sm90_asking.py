"""How the warpgroups of ``gluon_sm90_parts`` come by the queries of their pieces."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from anymla.ops._gluon import warpgroup_barrier
from anymla.ops.sparse_attention.gluon_sm90_ends import HALF, HEADS, boxes
from anymla.ops.sparse_attention.gluon_sm90_query import (
    CHUNKS,
    ask_query,
    load_query,
    take_copied,
    take_query,
)

_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def clear(q_words, q_copy):
    """Zeros where the copy engine does not bring heads."""
    if q_copy.block_shape[0] < HEADS:
        L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
        for part in gl.static_range(2):
            q_words.index(part).store(gl.zeros([HEADS, HALF // 2], gl.int32, L))
        fence_async_shared()
        warpgroup_barrier()


@gluon.jit
def call(there, q_copy, token, tile, H, q_words, q_here, TYPE: gl.constexpr):
    """Let the copy engine bring the queries of a piece, if there is one; for ``come``."""
    if there:
        BOX: gl.constexpr = q_copy.block_shape[0]
        WIDTH: gl.constexpr = q_copy.block_shape[1]
        COUNT: gl.constexpr = HALF // WIDTH
        to = boxes(q_words, TYPE, BOX, WIDTH)
        # All warps have read the queries that were here.
        warpgroup_barrier()
        for part in gl.static_range(2):
            here = q_here.index(part)
            mbarrier.expect(here, BOX * HALF * 2)
            for i in gl.static_range(COUNT):
                at = [token * H + tile * HEADS, part * HALF + i * WIDTH]
                _copy(q_copy, at, here, to.index((part * COUNT + i) * (HEADS // BOX)))


@gluon.jit
def come(q_chunks, q_here, k, HALVES: gl.constexpr, PART: gl.constexpr, TAIL: gl.constexpr):
    """Take half of the queries of piece k."""
    mbarrier.wait(q_here.index(PART), k & 1)
    take_copied(q_chunks, HEADS, PART * CHUNKS, CHUNKS, HALVES, TAIL)


@gluon.jit
def load(
    q_ptr, token, tile, H, q_token, q_words, q_chunks, share,
    Q_HEAD: gl.constexpr, PART: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Half of the queries of a piece, now."""
    if share.SPLIT and not share.STREAM:
        load_query(q_ptr, token, tile, H, q_token, q_words.index(PART), HEADS, Q_HEAD, PART, TAIL)
    else:
        HALVES: gl.constexpr = q_ptr.dtype.element_ty == gl.float16
        FIRST: gl.constexpr = PART * CHUNKS
        ask_query(q_ptr, token, tile, H, q_token, q_chunks, HEADS, Q_HEAD, FIRST, CHUNKS, TAIL)
        take_query(q_chunks, HEADS, FIRST, CHUNKS, HALVES, TAIL)


@gluon.jit
def give_back(q_free, last):
    """After main's last scores of a piece."""
    if last:
        mbarrier.arrive(q_free, count=1)

"""Where the halves of a result go that ``gluon_sm90_parts`` computes: out, or a piece's sums."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from anymla.ops.sparse_attention.gluon_sm90_gather import tail_order
from anymla.ops.sparse_attention.gluon_sm90_lists import CHANNELS, anew
from anymla.ops.sparse_attention.gluon_sm90_query import CHUNK, CHUNKS, stored
from anymla.ops.sparse_attention.gluon_sm90_softmax import log_sum
from anymla.ops.sparse_attention.gluon_sm90_turned import store_chunks

HEADS = gl.constexpr(64)
HALF = gl.constexpr(256)


@gluon.jit
def store_out(
    y, stage, chunks, buffer, out, token, tile, H, token_stride,
    HEAD: gl.constexpr, PART: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Write half a result [64, 256] through shared memory.

    stage: [2, 64, 256], both buffers. chunks: the same memory as [2 CHUNKS, 64, 64]. TAIL: the last
    64 channels are a tail's, in ``tail_order``.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    WIDTH: gl.constexpr = 2 * CHUNK
    stage.index(buffer).store(y.to(out.TYPE))
    row = gl.arange(0, HEADS, layout=gl.SliceLayout(1, L)) + anew(tile * 0)
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L))
    start = token.to(gl.int64) * token_stride + tile * (HEADS * HEAD) + PART * HALF
    there = gl.expand_dims(tile * HEADS + row < H, 1) & (gl.expand_dims(column, 0) >= 0)
    for chunk in range(0, CHUNKS):
        channel = column
        if TAIL:
            channel = gl.where(chunk == CHUNKS - 1, tail_order(column, 8), column)
        at = gl.expand_dims(row * HEAD, 1) + gl.expand_dims(channel + chunk * WIDTH, 0)
        result = chunks.index(buffer * CHUNKS + chunk).load(L)
        gl.store(out.heads + start + at, result, mask=there)


@gluon.jit
def store_part(y, part_ptr, slot, tile, H, L: gl.constexpr, PART: gl.constexpr, TAIL: gl.constexpr):
    """Leave half of a piece's sums [64, 256] in part [slots, 64, 512]."""
    row = gl.arange(0, HEADS, layout=gl.SliceLayout(1, L)) + anew(tile * 0)
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, L))
    if TAIL:
        column = stored(column, 1)
    at = part_ptr + slot.to(gl.int64) * (HEADS * CHANNELS) + PART * HALF
    at = at + gl.expand_dims(row, 1) * CHANNELS + gl.expand_dims(column, 0)
    gl.store(at, y, mask=gl.expand_dims(tile * HEADS + row < H, 1))


@gluon.jit
def finish_right(
    y, stage, chunks, buffer, free, out, angles, token, tile, H, out_token, OUT_HEAD: gl.constexpr,
    TAIL: gl.constexpr,
):  # fmt: skip
    """The right half of a whole task; its buffer is free then."""
    if out.TURNED > 0:
        stage.index(buffer).store(y.to(out.TYPE))
        store_chunks(chunks, buffer * CHUNKS, out, angles, token, tile * HEADS, H, 1)
    else:
        store_out(y, stage, chunks, buffer, out, token, tile, H, out_token, OUT_HEAD, 1, TAIL)
    fence_async_shared()
    mbarrier.arrive(free.index(buffer), count=1)


@gluon.jit
def leave_right(y, free, part_ptr, slot, tile, H, L: gl.constexpr, TAIL: gl.constexpr):
    """The right half of a piece."""
    mbarrier.arrive(free, count=1)
    store_part(y, part_ptr, slot, tile, H, L, 1, TAIL)


@gluon.jit
def finish_main(
    y, sums, top, empty, stage, chunks, buffer, free, out, lse_ptr, token, tile, head, H, out_token,
    OUT_HEAD: gl.constexpr,
):  # fmt: skip
    """The left half of a whole task, and its lse."""
    if out.TURNED > 0:
        stage.index(buffer).store(y.to(out.TYPE))
        store_chunks(chunks, buffer * CHUNKS, out, out.table, token, tile * HEADS, H, 0)
    else:
        store_out(y, stage, chunks, buffer, out, token, tile, H, out_token, OUT_HEAD, 0, False)
    fence_async_shared()
    mbarrier.arrive(free.index(buffer), count=1)
    gl.store(lse_ptr + token.to(gl.int64) * H + head, log_sum(sums, top, empty), mask=head < H)


@gluon.jit
def leave_main(y, sums, top, free, part_ptr, sums_ptr, slot, tile, head, H, L: gl.constexpr):
    """The left half of a piece, and what its sums refer to."""
    mbarrier.arrive(free, count=1)
    store_part(y, part_ptr, slot, tile, H, L, 0, False)
    at = sums_ptr + (slot.to(gl.int64) * HEADS + (head - tile * HEADS)) * 2
    gl.store(at, top, mask=head < H)
    gl.store(at + 1, sums, mask=head < H)

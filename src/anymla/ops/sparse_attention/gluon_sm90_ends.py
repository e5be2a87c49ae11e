"""Where the halves of a result go that ``gluon_sm90_parts`` computes: out, or a piece's part."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
)

from anymla.ops.sparse_attention.gluon_sm90_gather import LIFT, tail_order
from anymla.ops.sparse_attention.gluon_sm90_lists import (
    CHANNELS,
    anew,
)
from anymla.ops.sparse_attention.gluon_sm90_query import (
    CHUNK,
    CHUNKS,
)
from anymla.ops.sparse_attention.gluon_sm90_softmax import (
    SUMS,
    log_sum,
    view,
)
from anymla.ops.sparse_attention.gluon_sm90_turned import store_chunks

HEADS = gl.constexpr(64)
HALF = gl.constexpr(256)


@gluon.jit
def _stage(y, words, buffer, TYPE: gl.constexpr):
    """Put half a result [64, 256] as TYPE into a buffer of ``words``, int32 [2, 64, 128]."""
    HALVES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    view(words, TYPE, [2, HEADS, HALF], HALVES).index(buffer).store(y.to(TYPE))


@gluon.jit
def _chunks(words, TYPE: gl.constexpr):
    HALVES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    return view(words, TYPE, [2 * CHUNKS, HEADS, 2 * CHUNK], HALVES)


@gluon.jit
def _send_half(
    words, to, buffer, tile, H,
    TYPE: gl.constexpr, HEAD: gl.constexpr, PART: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Write half of a tile's heads [64, 256] to memory.

    to: the first head's first channel. HEAD: stride of to. TAIL: the last 64 channels are a tail's,
    in ``tail_order``.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    WIDTH: gl.constexpr = 2 * CHUNK
    chunks = _chunks(words, TYPE)
    row = gl.arange(0, HEADS, layout=gl.SliceLayout(1, L)) + anew(tile * 0)
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L))
    there = gl.expand_dims(tile * HEADS + row < H, 1) & (gl.expand_dims(column, 0) >= 0)
    for chunk in range(0, CHUNKS):
        channel = column
        if TAIL:
            channel = gl.where(chunk == CHUNKS - 1, tail_order(column, 8), column)
        at = gl.expand_dims(row * HEAD, 1) + gl.expand_dims(channel + chunk * WIDTH, 0)
        gl.store(to + PART * HALF + at, chunks.index(buffer * CHUNKS + chunk).load(L), mask=there)


@gluon.jit
def _send_out(
    words, buffer, out, angles, token, tile, H, token_stride,
    HEAD: gl.constexpr, PART: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    if out.TURNED > 0:
        chunks = _chunks(words, out.TYPE)
        store_chunks(chunks, buffer * CHUNKS, out, angles, token, tile * HEADS, H, PART)
    else:
        to = out.heads + token.to(gl.int64) * token_stride + tile * (HEADS * HEAD)
        _send_half(words, to, buffer, tile, H, out.TYPE, HEAD, PART, TAIL)


@gluon.jit
def _send_part(words, buffer, part_ptr, slot, tile, H, PART: gl.constexpr, TAIL: gl.constexpr):
    to = part_ptr + slot.to(gl.int64) * (HEADS * CHANNELS)
    _send_half(words, to, buffer, tile, H, gl.float16, CHANNELS, PART, TAIL)


@gluon.jit
def stage(y, words, buffer, out, share, direct):
    """Put half of a piece, a whole task's result if ``direct``, into the buffer it left last."""
    if not share.SPLIT:
        _stage(y, words, buffer, out.TYPE)
    elif share.STREAM:
        if direct:
            _stage(y, words, buffer, out.TYPE)
        else:
            _stage(y, words, buffer, gl.float16)
    else:
        _stage(y, words, buffer, gl.float16)


@gluon.jit
def send(
    words, buffer, free, out, angles, part_ptr, share, direct, slot, token, tile, H, out_token,
    OUT_HEAD: gl.constexpr, PART: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Write it to where it belongs, and give the buffer back."""
    if not share.SPLIT:
        _send_out(words, buffer, out, angles, token, tile, H, out_token, OUT_HEAD, PART, TAIL)
    elif share.STREAM:
        if direct:
            _send_out(words, buffer, out, angles, token, tile, H, out_token, OUT_HEAD, PART, TAIL)
        else:
            _send_part(words, buffer, part_ptr, slot, tile, H, PART, TAIL)
    else:
        _send_part(words, buffer, part_ptr, slot, tile, H, PART, TAIL)
    # No fence: the buffer will be overwritten as it was read, and its next reader fences.
    mbarrier.arrive(free.index(buffer), count=1)


@gluon.jit
def unlift(direct, share):
    """What brings the channels before the tail to their size; a merge does it for parts."""
    if not share.SPLIT:
        return 1.0 / LIFT
    elif share.STREAM:
        return gl.where(direct, 1.0 / LIFT, 1.0)
    else:
        return 1.0


@gluon.jit
def store_sums(sums_ptr, slot, head, tile, H, top, sums):
    """Leave a piece's reference exponents and sums."""
    at = sums_ptr + (slot.to(gl.int64) * HEADS + (head - tile * HEADS)) * SUMS
    gl.store(at, top, mask=head < H)
    gl.store(at + 1, sums, mask=head < H)
    gl.store(at + 2, sums * 0.0 + 1.0, mask=head < H)


@gluon.jit
def store_lse(lse_ptr, token, head, H, sums, top, empty):
    """Write the lse of a whole task."""
    gl.store(lse_ptr + token.to(gl.int64) * H + head, log_sum(sums, top, empty), mask=head < H)

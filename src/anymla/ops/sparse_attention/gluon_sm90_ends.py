"""Where the halves of a result go that ``gluon_sm90_parts`` computes: out, or a piece's part."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from anymla.ops._gluon import opaque, view
from anymla.ops._gluon_epilogue import store_quantized_chunks
from anymla.ops.sparse_attention.gluon_sm90_gather import LIFT
from anymla.ops.sparse_attention.gluon_sm90_query import CHUNK, CHUNKS
from anymla.ops.sparse_attention.gluon_sm90_softmax import SUMS, log_sum

_copy = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
HEADS = gl.constexpr(64)
HALF = gl.constexpr(256)


@gluon.jit
def _natural(y):
    """Columns of the right half, whose last 64 are in ``tail_order``, in their own order."""
    L: gl.constexpr = y.type.layout
    column = gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(0, L)), 0)
    # Every other eight channels are those of the tail's second half.
    turned = gl.permute(gl.reshape(y, [HEADS, CHUNKS, 4, 2, 8]), (0, 1, 3, 2, 4))
    turned = gl.convert_layout(gl.reshape(turned, [HEADS, HALF]), L, assert_trivial=True)
    return gl.where(column >= HALF - 2 * CHUNK, turned, y)


@gluon.jit
def _stage(y, words, buffer, TYPE: gl.constexpr, TAIL: gl.constexpr):
    """Put half a result [64, 256] as TYPE into a buffer of ``words``, int32 [2, 64, 128].

    TAIL: the last 64 channels are a tail's, in ``tail_order``, and leave it.
    """
    if TAIL:
        y = _natural(y)
    _halves(words, buffer, TYPE).store(y.to(TYPE))


@gluon.jit
def _halves(words, buffer, TYPE: gl.constexpr):
    HALVES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    return view(words, TYPE, [2, HEADS, HALF], HALVES).index(buffer)


@gluon.jit
def _chunks(words, TYPE: gl.constexpr):
    HALVES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    return view(words, TYPE, [2 * CHUNKS, HEADS, 2 * CHUNK], HALVES)


@gluon.jit
def _send_half(
    words, to, buffer, tile, H, TYPE: gl.constexpr, HEAD: gl.constexpr, PART: gl.constexpr
):
    """Write half of a tile's heads [64, 256] to memory.

    to: the first head's first channel. HEAD: stride of to.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    WIDTH: gl.constexpr = 2 * CHUNK
    chunks = _chunks(words, TYPE)
    row = gl.arange(0, HEADS, layout=gl.SliceLayout(1, L)) + opaque(tile * 0)
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L))
    there = gl.expand_dims(tile * HEADS + row < H, 1) & (gl.expand_dims(column, 0) >= 0)
    for chunk in range(0, CHUNKS):
        at = gl.expand_dims(row * HEAD, 1) + gl.expand_dims(column + chunk * WIDTH, 0)
        gl.store(to + PART * HALF + at, chunks.index(buffer * CHUNKS + chunk).load(L), mask=there)


@gluon.jit
def boxes(words, TYPE: gl.constexpr, BOX: gl.constexpr, WIDTH: gl.constexpr):
    """WIDTH channels of BOX heads each, as the copy engine moves them."""
    HALVES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    COUNT: gl.constexpr = 2 * (HALF // WIDTH) * (HEADS // BOX)
    return view(words, TYPE, [COUNT, BOX, WIDTH], HALVES)


@gluon.jit
def _copy_half(words, to, row, buffer, TYPE: gl.constexpr, PART: gl.constexpr):
    """Let the copy engine do the same, to rows of a descriptor."""
    BOX: gl.constexpr = to.block_shape[0]
    WIDTH: gl.constexpr = to.block_shape[1]
    COUNT: gl.constexpr = HALF // WIDTH
    all_boxes = boxes(words, TYPE, BOX, WIDTH)
    fence_async_shared()
    for i in gl.static_range(COUNT):
        box = all_boxes.index((buffer * COUNT + i) * (HEADS // BOX))
        _copy(to, [row, PART * HALF + i * WIDTH], box)


@gluon.jit
def _send_out(
    words, buffer, out, angles, copies, token, tile, H, token_stride,
    HEAD: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    if out.ROPE_DIM > 0:
        chunks = _chunks(words, out.TYPE)
        store_quantized_chunks(chunks, buffer * CHUNKS, out, angles, token, tile * HEADS, H, PART)
    elif copies[0] is not None:
        _copy_half(words, copies[0], token * H + tile * HEADS, buffer, out.TYPE, PART)
    else:
        to = out.heads + token.to(gl.int64) * token_stride + tile * (HEADS * HEAD)
        _send_half(words, to, buffer, tile, H, out.TYPE, HEAD, PART)


@gluon.jit
def stage(y, words, buffer, out, share, direct, TAIL: gl.constexpr):
    """Put half of a piece, a whole task's result if ``direct``, into the buffer it left last."""
    if not share.SPLIT:
        _stage(y, words, buffer, out.TYPE, TAIL and out.ROPE_DIM == 0)
    elif share.STREAM:
        if direct:
            _stage(y, words, buffer, out.TYPE, TAIL and out.ROPE_DIM == 0)
        else:
            _stage(y, words, buffer, gl.float16, TAIL)
    else:
        _stage(y, words, buffer, gl.float16, TAIL)


@gluon.jit
def send(
    words, buffer, free, out, angles, copies, share, direct, slot, token, tile, H, out_token,
    OUT_HEAD: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Write it to where it belongs, and give the buffer back.

    copies: descriptors of the result's heads, or None, and of parts.
    """
    if not share.SPLIT:
        _send_out(words, buffer, out, angles, copies, token, tile, H, out_token, OUT_HEAD, PART)
    elif share.STREAM:
        if direct:
            _send_out(words, buffer, out, angles, copies, token, tile, H, out_token, OUT_HEAD, PART)
        else:
            _copy_half(words, copies[1], slot * HEADS, buffer, gl.float16, PART)
    else:
        _copy_half(words, copies[1], slot * HEADS, buffer, gl.float16, PART)
    # What the copy engine has taken has been read. No fence: the buffer will be overwritten as it
    # was read, and its next reader fences.
    tma.store_wait(0)
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


@gluon.jit
def sent():
    """Wait until what the copy engine took has arrived, so that it may be written again."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r,r",
        [gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip

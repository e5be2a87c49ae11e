"""Epilogues of Hopper's decode kernels: a split's result leaves as output, or as a partial.

A split that is a whole work tile writes heads, rounded or rotated back and quantised (see
``_gluon_epilogue``), and the lse. Any other stores its partial: float16 heads, each divided by its
sum, and ``SUMS`` numbers a head for the combine.

Tiles of 64 heads (m64) leave in halves of 256 channels by way of the shared memory of the last
block, which is given back to the producers afterwards. In swap_ab rows of results are channels;
they leave as rows of heads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from anymla.ops._gluon import opaque, view
from anymla.ops._gluon_epilogue import CHANNELS, store_quantized_chunks, store_quantized_rows
from anymla.ops.sparse_attention.gluon_sm90_kv_producer import LIFT
from anymla.ops.sparse_attention.gluon_sm90_query import CHUNK, CHUNKS, HALF, HEADS, boxes, stored

_tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
NO_MAXIMUM = gl.constexpr(-1e29)
# float16 probabilities are at most 2^15, so that they keep their precision down to 2^-29.
SHIFT = gl.constexpr(15.0)
# Numbers a head that a partial has beside its result: reference exponent, sum, factor of the
# result, and padding.
SUMS = gl.constexpr(4)


@gluon.jit
def load_sink(sink_ptr, heads, H, SINK: gl.constexpr):
    """The sink of each head in units of log 2, or -inf; loaded long before it is needed."""
    if SINK:
        return gl.load(sink_ptr + heads, mask=heads < H, other=0.0) * LOG2E
    else:
        return heads * 0.0 - float("inf")


@gluon.jit
def denominator(sums, top, sink):
    """Denominator: the sums and the sink."""
    return sums + gl.exp2(sink - top)


@gluon.jit
def log_sum(sums, top, empty):
    """Natural logarithm of the sum of the rows' exponentials; ``empty`` without rows."""
    return gl.where(sums == 0, empty, (top + gl.log2(sums)) * LN2)


@gluon.jit
def _natural(y):
    """Columns of the right half, whose last 64 are in ``tail_order``, in their own order."""
    L: gl.constexpr = y.type.layout
    column = gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(0, L)), 0)
    # Every other eight channels are those of the tail's second half.
    natural = gl.permute(gl.reshape(y, [HEADS, CHUNKS, 4, 2, 8]), (0, 1, 3, 2, 4))
    natural = gl.convert_layout(gl.reshape(natural, [HEADS, HALF]), L, assert_trivial=True)
    return gl.where(column >= HALF - 2 * CHUNK, natural, y)


@gluon.jit
def _stage(y, packed, buffer, TYPE: gl.constexpr, TAIL: gl.constexpr):
    """Put half a result [64, 256] as TYPE into a buffer of ``packed``, int32 [2, 64, 128].

    TAIL: the last 64 channels are a tail's, in ``tail_order``, and leave it.
    """
    if TAIL:
        y = _natural(y)
    _halves(packed, buffer, TYPE).store(y.to(TYPE))


@gluon.jit
def _halves(packed, buffer, TYPE: gl.constexpr):
    HALVES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    return view(packed, TYPE, [2, HEADS, HALF], HALVES).index(buffer)


@gluon.jit
def _chunks(packed, TYPE: gl.constexpr):
    HALVES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    return view(packed, TYPE, [2 * CHUNKS, HEADS, 2 * CHUNK], HALVES)


@gluon.jit
def _store_half(
    packed, to, buffer, tile, H, TYPE: gl.constexpr, HEAD: gl.constexpr, PART: gl.constexpr
):
    """Write half of a tile's heads [64, 256] to memory.

    to: the first head's first channel. HEAD: stride of to.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    WIDTH: gl.constexpr = 2 * CHUNK
    chunks = _chunks(packed, TYPE)
    row = gl.arange(0, HEADS, layout=gl.SliceLayout(1, L)) + opaque(tile * 0)
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L))
    there = gl.expand_dims(tile * HEADS + row < H, 1) & (gl.expand_dims(column, 0) >= 0)
    for chunk in range(0, CHUNKS):
        at = gl.expand_dims(row * HEAD, 1) + gl.expand_dims(column + chunk * WIDTH, 0)
        gl.store(to + PART * HALF + at, chunks.index(buffer * CHUNKS + chunk).load(L), mask=there)


@gluon.jit
def _tma_store_half(packed, to, row, buffer, TYPE: gl.constexpr, PART: gl.constexpr):
    """Let TMA do the same, to rows of a descriptor."""
    BOX: gl.constexpr = to.block_shape[0]
    WIDTH: gl.constexpr = to.block_shape[1]
    COUNT: gl.constexpr = HALF // WIDTH
    all_boxes = boxes(packed, TYPE, BOX, WIDTH)
    fence_async_shared()
    for i in gl.static_range(COUNT):
        box = all_boxes.index((buffer * COUNT + i) * (HEADS // BOX))
        _tma_store(to, [row, PART * HALF + i * WIDTH], box)


@gluon.jit
def _store_out(
    packed, buffer, out, angles, descs, token, tile, H, token_stride,
    HEAD: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    if out.ROPE_DIM > 0:
        chunks = _chunks(packed, out.TYPE)
        store_quantized_chunks(chunks, buffer * CHUNKS, out, angles, token, tile * HEADS, H, PART)
    elif descs[0] is not None:
        _tma_store_half(packed, descs[0], token * H + tile * HEADS, buffer, out.TYPE, PART)
    else:
        to = out.heads + token.to(gl.int64) * token_stride + tile * (HEADS * HEAD)
        _store_half(packed, to, buffer, tile, H, out.TYPE, HEAD, PART)


@gluon.jit
def stage(y, packed, buffer, out, work, whole, TAIL: gl.constexpr):
    """Put half of a split, the output if it is ``whole``, into the buffer of its last block."""
    if not work.SPLIT:
        _stage(y, packed, buffer, out.TYPE, TAIL and out.ROPE_DIM == 0)
    elif work.PARTLY:
        if whole:
            _stage(y, packed, buffer, out.TYPE, TAIL and out.ROPE_DIM == 0)
        else:
            _stage(y, packed, buffer, gl.float16, TAIL)
    else:
        _stage(y, packed, buffer, gl.float16, TAIL)


@gluon.jit
def store_half_split(
    packed, buffer, free, out, angles, descs, work, whole, slot, token, tile, H, out_token,
    OUT_HEAD: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Store what ``stage`` has put there as output or partial, and give the buffer back.

    descs: TMA descriptors of the output's heads, or None, and of partials.
    """
    if not work.SPLIT:
        _store_out(packed, buffer, out, angles, descs, token, tile, H, out_token, OUT_HEAD, PART)
    elif work.PARTLY:
        if whole:
            _store_out(
                packed, buffer, out, angles, descs, token, tile, H, out_token, OUT_HEAD, PART
            )
        else:
            _tma_store_half(packed, descs[1], slot * HEADS, buffer, gl.float16, PART)
    else:
        _tma_store_half(packed, descs[1], slot * HEADS, buffer, gl.float16, PART)
    # What TMA has taken has been read. No fence: the buffer will be overwritten as it was read, and
    # its next reader fences.
    tma.store_wait(0)
    mbarrier.arrive(free.index(buffer), count=1)


@gluon.jit
def unlift(whole, work):
    """What brings the channels before the tail to their size; the combine does it for partials."""
    if not work.SPLIT:
        return 1.0 / LIFT
    elif work.PARTLY:
        return gl.where(whole, 1.0 / LIFT, 1.0)
    else:
        return 1.0


@gluon.jit
def store_partial_sums(sums_ptr, slot, head, tile, H, top, sums):
    """Store the reference exponents and sums of a partial."""
    at = sums_ptr + (slot.to(gl.int64) * HEADS + (head - tile * HEADS)) * SUMS
    gl.store(at, top, mask=head < H)
    gl.store(at + 1, sums, mask=head < H)
    gl.store(at + 2, sums * 0.0 + 1.0, mask=head < H)


@gluon.jit
def store_lse(lse_ptr, token, head, H, sums, top, empty):
    """Store the lse of a whole work tile."""
    gl.store(lse_ptr + token.to(gl.int64) * H + head, log_sum(sums, top, empty), mask=head < H)


@gluon.jit
def stores_done():
    """Wait until what TMA took has arrived, so that it may be written again."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r,r",
        [gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _transposed(y, packed, TYPE: gl.constexpr, PART: gl.constexpr, HEADS: gl.constexpr):
    """Y [256, HEADS] as rows of heads, by way of shared memory: int32 [2, HEADS, 128]."""
    HALVES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    stage = view(packed, TYPE, [2, HEADS, HALF], HALVES).index(PART)
    stage.permute((1, 0)).store(y.to(TYPE))
    return stage.load(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))


@gluon.jit
def _store_heads(rows, to, H, HEAD: gl.constexpr, PART: gl.constexpr, HEADS: gl.constexpr):
    """Write half of all heads; HEAD: stride of ``to``."""
    L: gl.constexpr = rows.type.layout
    head = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, L)), 1)
    channel = gl.arange(0, HALF, layout=gl.SliceLayout(0, L))
    if PART == 1:
        channel = stored(channel, 1)
    at = to + (head * HEAD + gl.expand_dims(channel, 0) + PART * HALF)
    gl.store(at, rows, mask=head < H)


@gluon.jit
def _store_rows(
    y, packed, out, token, H, head0, token_stride,
    HEAD: gl.constexpr, PART: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    rows = _transposed(y, packed, out.TYPE, PART, HEADS)
    if out.ROPE_DIM > 0:
        store_quantized_rows(rows, out, token, H, head0, HEADS, PART)
    else:
        to = out.heads + token.to(gl.int64) * token_stride + head0 * HEAD
        _store_heads(rows, to, H - head0, HEAD, PART, HEADS)


@gluon.jit
def store_output(
    left, right, low, sums, top, empty, packed, out, lse_ptr, sink, token, H, head0, out_token,
    OUT_HEAD: gl.constexpr, HEADS: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Store the output of a whole work tile, heads from head0 on.

    low: whether a row of right is before the tail.
    """
    head = head0 + gl.arange(0, HEADS, layout=gl.SliceLayout(0, L))
    bottom = denominator(sums, top, sink)
    work = gl.expand_dims(gl.where(sums > 0, 1.0 / bottom, 0.0), 0)
    small = work * (1.0 / LIFT)
    _store_rows(left * small, packed, out, token, H, head0, out_token, OUT_HEAD, 0, HEADS)
    right = right * gl.where(low, small, work)
    _store_rows(right, packed, out, token, H, head0, out_token, OUT_HEAD, 1, HEADS)
    gl.store(lse_ptr + token.to(gl.int64) * H + head, log_sum(sums, top, empty), mask=head < H)


@gluon.jit
def store_partial(
    left,
    right,
    sums,
    top,
    packed,
    part_ptr,
    sums_ptr,
    slot,
    H,
    HEADS: gl.constexpr,
    L: gl.constexpr,
):
    """Store the partial of a split."""
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(0, L))
    to = part_ptr + slot.to(gl.int64) * (HEADS * CHANNELS)
    work = gl.expand_dims(gl.where(sums > 0, 1.0 / sums, 0.0), 0)
    rows = _transposed(left * work, packed, gl.float16, 0, HEADS)
    _store_heads(rows, to, H, CHANNELS, 0, HEADS)
    rows = _transposed(right * work, packed, gl.float16, 1, HEADS)
    _store_heads(rows, to, H, CHANNELS, 1, HEADS)
    at = sums_ptr + (slot.to(gl.int64) * HEADS + head) * SUMS
    gl.store(at, top, mask=head < H)
    gl.store(at + 1, sums, mask=head < H)
    gl.store(at + 2, sums * 0.0 + 1.0, mask=head < H)

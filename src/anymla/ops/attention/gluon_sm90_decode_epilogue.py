"""Epilogues of Hopper's decode kernels, which store a split's result as output or as a partial.

A split that is a whole work tile writes the lse and its heads, which are rounded, or rotated back
and quantised (see ``_gluon_epilogue``). Any other split stores its partial: float16 heads, each
divided by its sum, and ``SUMS`` numbers per head for the combine.

Tiles of 64 heads (m64) are stored in halves of 256 channels through the shared memory of the last
block, which then goes back to the producers. In swap_ab the rows of results are channels; they are
transposed to rows of heads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from anymla.ops._gluon import aggregate, field, view
from anymla.ops._gluon_epilogue import CHANNELS, store_quantized_chunks, store_quantized_rows
from anymla.ops._gluon_ptx import cp_async_bulk_wait_group_0, opaque
from anymla.ops.attention.gluon_sm90_decode_kv_producer import LIFT
from anymla.ops.attention.gluon_sm90_decode_query import (
    CHUNK,
    CHUNKS,
    HALF,
    HEADS,
    box_at,
    boxes,
    stored,
)

_tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
NO_MAXIMUM = gl.constexpr(-1e29)
# float16 probabilities are at most 2^15, so that they keep their precision down to 2^-29.
SHIFT = gl.constexpr(15.0)
# Numbers per head stored beside a partial's result: reference exponent, sum, factor of the result,
# and padding.
SUMS = gl.constexpr(4)


@aggregate
class Partials:
    """Destination of a launch's partials and of its notes about splits.

    Attributes:
        desc: TMA descriptor of ``heads`` in boxes of 64 heads; None where threads store them.
        flags: float32 [splits, heads of a tile], overflow flags of ``gluon_sm90_bf16_fallback``.
        heads: results of the splits, float16 [slots, heads of a tile, 512].
        sums: numbers of each head, float32 [slots, heads of a tile, SUMS].
        spans: int32 table that ``gluon_sm90_tile_scheduler`` defines.
    """

    desc: object
    flags: gl.tensor
    heads: gl.tensor
    sums: gl.tensor
    spans: gl.tensor

    @gluon.constexpr_function
    def __init__(self, desc, flags, heads, sums, spans):
        self.desc, self.flags = field(desc), flags
        self.heads, self.sums, self.spans = heads, sums, spans


@aggregate
class Params:
    """Arguments of a launch besides its lists.

    Attributes:
        q: queries of bfloat16 or float16, [T, H, channels].
        out: output, a ``_gluon_epilogue.Output``.
        out_desc: TMA descriptor of the output's heads, or None.
        partials: destination of partials, a ``Partials``.
        q_desc: TMA descriptor of queries; None where threads load them.
        H: number of heads.
        q_token: int32 words from one token's queries to the next.
        out_token: elements from one token of ``out`` to the next.
        lse: log-sum-exp to be written, float32 [T, H].
        sink: float32 [H], read if SINK.
        scale: factor of the scores before the softmax.
        empty: lse of a token without rows.
        SINK: True if heads have sinks.
        Q_HEAD: int32 words from one head of the queries to the next.
        OUT_HEAD: elements from one head of ``out`` to the next.
    """

    q: gl.tensor
    out: object
    out_desc: object
    partials: object
    q_desc: object
    H: gl.tensor
    q_token: gl.tensor
    out_token: gl.tensor
    lse: gl.tensor
    sink: gl.tensor
    scale: gl.tensor
    empty: gl.tensor
    SINK: gl.constexpr
    Q_HEAD: gl.constexpr
    OUT_HEAD: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, q, out, out_desc, partials, q_desc, H, q_token, out_token, lse, sink, scale, empty,
        SINK, Q_HEAD, OUT_HEAD,
    ):  # fmt: skip
        self.q, self.out, self.out_desc = q, out, field(out_desc)
        self.partials, self.q_desc = partials, field(q_desc)
        self.H, self.q_token, self.out_token = H, q_token, out_token
        self.lse, self.sink, self.scale, self.empty = lse, sink, scale, empty
        self.SINK = gl.constexpr(SINK)
        self.Q_HEAD = gl.constexpr(Q_HEAD)
        self.OUT_HEAD = gl.constexpr(OUT_HEAD)


@gluon.jit
def load_sink(params, heads):
    """Load each head's sink in units of log 2, or -inf; called long before the value is needed."""
    if params.SINK:
        return gl.load(params.sink + heads, mask=heads < params.H, other=0.0) * LOG2E
    else:
        return heads * 0.0 - float("inf")


@gluon.jit
def denominator(sums, top, sink):
    """Return the softmax denominator: the sums of the rows and the sink."""
    return sums + gl.exp2(sink - top)


@gluon.jit
def log_sum(sums, top, empty):
    """Return the natural logarithm of the sum of the rows' exponentials; ``empty`` without rows."""
    return gl.where(sums == 0, empty, (top + gl.log2(sums)) * LN2)


@gluon.jit
def _natural(y):
    """Put columns of the right half, whose last 64 are in ``tail_order``, into their own order."""
    L: gl.constexpr = y.type.layout
    column = gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(0, L)), 0)
    # Every other eight channels are those of the tail's second half.
    natural = gl.permute(gl.reshape(y, [HEADS, CHUNKS, 4, 2, 8]), (0, 1, 3, 2, 4))
    natural = gl.convert_layout(gl.reshape(natural, [HEADS, HALF]), L, assert_trivial=True)
    return gl.where(column >= HALF - 2 * CHUNK, natural, y)


@gluon.jit
def _stage(y, packed, buffer, TYPE: gl.constexpr, TAIL: gl.constexpr):
    """Put half a result [64, 256] as TYPE into a buffer of ``packed``, int32 [2, 64, 128].

    With TAIL, the last 64 channels come in ``tail_order`` and are put into their own order.
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
    """Write half of a tile's heads [64, 256] to memory by threads.

    ``to`` points to the first head's first channel, and HEAD is its stride between heads.
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
def _tma_store_half(packed, to, token, head, H, buffer, TYPE: gl.constexpr, PART: gl.constexpr):
    """Store half of a tile's heads by TMA, which leaves out heads past the last."""
    BOX: gl.constexpr = to.block_shape[-2]
    WIDTH: gl.constexpr = to.block_shape[-1]
    COUNT: gl.constexpr = HALF // WIDTH
    all_boxes = boxes(packed, TYPE, to)
    fence_async_shared()
    for i in gl.static_range(COUNT):
        box = all_boxes.index((buffer * COUNT + i) * (HEADS // BOX))
        _tma_store(to, box_at(to, token, head, H, PART * HALF + i * WIDTH), box)


@gluon.jit
def _store_out(packed, buffer, params, angles, split, PART: gl.constexpr, TAIL: gl.constexpr):
    out = params.out
    token, tile = split.token, split.tile
    if out.ROPE_DIM > 0:
        chunks = _chunks(packed, out.TYPE)
        head = tile * HEADS
        store_quantized_chunks(
            chunks, buffer * CHUNKS, out, angles, token, head, params.H, PART, TAIL
        )
    elif params.out_desc is not None:
        head = tile * HEADS
        _tma_store_half(packed, params.out_desc, token, head, params.H, buffer, out.TYPE, PART)
    else:
        to = out.heads + token.to(gl.int64) * params.out_token + tile * (HEADS * params.OUT_HEAD)
        _store_half(packed, to, buffer, tile, params.H, out.TYPE, params.OUT_HEAD, PART)


@gluon.jit
def stage(y, packed, buffer, out, work, whole, TAIL: gl.constexpr):
    """Put half of a split's result, the output if ``whole``, into the buffer of its last block."""
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
def _store_part(packed, buffer, params, split, PART: gl.constexpr):
    desc, slot = params.partials.desc, split.slot
    _tma_store_half(packed, desc, slot, slot * 0, HEADS, buffer, gl.float16, PART)


@gluon.jit
def store_half_split(
    packed, buffer, free, params, angles, work, split, PART: gl.constexpr, TAIL: gl.constexpr
):
    """Store the staged half as output or partial, and give its buffer back to the producers.

    TAIL is True if rows have a tail, so that quantised output is staged in ``tail_order``.
    """
    if not work.SPLIT:
        _store_out(packed, buffer, params, angles, split, PART, TAIL)
    elif work.PARTLY:
        if split.whole:
            _store_out(packed, buffer, params, angles, split, PART, TAIL)
        else:
            _store_part(packed, buffer, params, split, PART)
    else:
        _store_part(packed, buffer, params, split, PART)
    # After this wait TMA has read the buffer. It needs no fence: the buffer will be overwritten
    # through the proxy that read it, and its next reader fences.
    tma.store_wait(0)
    mbarrier.arrive(free.index(buffer), count=1)


@gluon.jit
def unlift(whole, work):
    """Return the factor that removes ``LIFT`` before the tail; partials leave it to the combine."""
    if not work.SPLIT:
        return 1.0 / LIFT
    elif work.PARTLY:
        return gl.where(whole, 1.0 / LIFT, 1.0)
    else:
        return 1.0


@gluon.jit
def store_partial_sums(params, split, head, top, sums):
    """Store the reference exponents and sums of a partial."""
    row = split.slot.to(gl.int64) * HEADS + (head - split.tile * HEADS)
    at = params.partials.sums + row * SUMS
    gl.store(at, top, mask=head < params.H)
    gl.store(at + 1, sums, mask=head < params.H)
    gl.store(at + 2, sums * 0.0 + 1.0, mask=head < params.H)


@gluon.jit
def store_lse(params, split, head, top, sums):
    """Store the lse of a whole work tile."""
    gl.store(
        params.lse + split.token.to(gl.int64) * params.H + head,
        log_sum(sums, top, params.empty),
        mask=head < params.H,
    )


@gluon.jit
def stores_done():
    """Wait until TMA's stores are complete, so that their destination may be written again."""
    cp_async_bulk_wait_group_0()


@gluon.jit
def _transposed(y, packed, TYPE: gl.constexpr, PART: gl.constexpr, HEADS: gl.constexpr):
    """Transpose y [256, HEADS] to rows of heads through shared memory, int32 [2, HEADS, 128]."""
    HALVES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    stage = view(packed, TYPE, [2, HEADS, HALF], HALVES).index(PART)
    stage.permute((1, 0)).store(y.to(TYPE))
    return stage.load(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))


@gluon.jit
def _store_heads(
    rows, to, H, HEAD: gl.constexpr, PART: gl.constexpr, TAIL: gl.constexpr, HEADS: gl.constexpr
):
    """Write half of all heads, HEAD elements apart; TAIL is that of ``store_half_split``."""
    L: gl.constexpr = rows.type.layout
    head = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, L)), 1)
    channel = gl.arange(0, HALF, layout=gl.SliceLayout(0, L))
    if PART == 1 and TAIL:
        channel = stored(channel, 1)
    at = to + (head * HEAD + gl.expand_dims(channel, 0) + PART * HALF)
    gl.store(at, rows, mask=head < H)


@gluon.jit
def _store_rows(
    y, packed, params, token, head0, PART: gl.constexpr, TAIL: gl.constexpr, HEADS: gl.constexpr
):
    out = params.out
    rows = _transposed(y, packed, out.TYPE, PART, HEADS)
    if out.ROPE_DIM > 0:
        store_quantized_rows(rows, out, token, params.H, head0, HEADS, PART, TAIL)
    else:
        to = out.heads + token.to(gl.int64) * params.out_token + head0 * params.OUT_HEAD
        _store_heads(rows, to, params.H - head0, params.OUT_HEAD, PART, TAIL, HEADS)


@gluon.jit
def store_output(
    left, right, low, sums, top, packed, params, sink, split,
    TAIL: gl.constexpr, HEADS: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Store the output of a whole work tile.

    ``low`` is True for rows of ``right`` before the tail, and TAIL is True if there is one.
    """
    head0 = split.tile * HEADS
    head = head0 + gl.arange(0, HEADS, layout=gl.SliceLayout(0, L))
    bottom = denominator(sums, top, sink)
    work = gl.expand_dims(gl.where(sums > 0, 1.0 / bottom, 0.0), 0)
    small = work * (1.0 / LIFT)
    _store_rows(left * small, packed, params, split.token, head0, 0, TAIL, HEADS)
    right = right * gl.where(low, small, work)
    _store_rows(right, packed, params, split.token, head0, 1, TAIL, HEADS)
    store_lse(params, split, head, top, sums)


@gluon.jit
def store_partial(
    left, right, sums, top, packed, params, split,
    TAIL: gl.constexpr, HEADS: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Store the partial of a split; TAIL is True if rows have a tail."""
    partials, slot = params.partials, split.slot
    H = params.H
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(0, L))
    to = partials.heads + slot.to(gl.int64) * (HEADS * CHANNELS)
    work = gl.expand_dims(gl.where(sums > 0, 1.0 / sums, 0.0), 0)
    rows = _transposed(left * work, packed, gl.float16, 0, HEADS)
    _store_heads(rows, to, H, CHANNELS, 0, TAIL, HEADS)
    rows = _transposed(right * work, packed, gl.float16, 1, HEADS)
    _store_heads(rows, to, H, CHANNELS, 1, TAIL, HEADS)
    at = partials.sums + (slot.to(gl.int64) * HEADS + head) * SUMS
    gl.store(at, top, mask=head < H)
    gl.store(at + 1, sums, mask=head < H)
    gl.store(at + 2, sums * 0.0 + 1.0, mask=head < H)

"""Queries as float16 in shared memory, and the order of channels there.

The tail of a key is stored as it is, and its other channels times ``LIFT``. Therefore the tail of a
query is stored times ``LIFT``, and all scores are ``LIFT`` times their true value.

Numbers too large for float16 become NaN, so that the scores, and with them the sums, are NaN; see
``gluon_sm90_bf16_fallback``. Numbers too small are off by at most 2^-25, and a score by no more
than a thousandth for the scales that the kernels take.

Queries of tiles of 64 heads are loaded by TMA (``q_load_issue``, ``q_load_wait``) or by threads
(``q_load``), as the launcher decides. They pass through registers to become float16 in place.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from anymla.ops._gluon import view, warpgroup_barrier
from anymla.ops._gluon_epilogue import tail_order
from anymla.ops._gluon_ptx import cvt_f16x2_bf16x2, fma_f16x2_zero, mul_f16x2, opaque
from anymla.ops.attention.decode_config import M64
from anymla.ops.attention.gluon_sm90_decode_kv_producer import NOPE

_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
HEADS = gl.constexpr(M64)  # heads in a tile of the m64 kernel
HALF = gl.constexpr(256)
_TAIL_COLUMN = gl.constexpr(NOPE.value - HALF.value)  # first column of the tail in the right half
_LIFT_F16X2 = gl.constexpr(0x58005800)  # LIFT as two float16
_ONE_F16X2 = gl.constexpr(0x3C003C00)
# CHUNK is the pairs in 64 channels, the width of a tile's row in shared memory; CHUNKS is the
# number of such chunks in half a head.
CHUNK = gl.constexpr(32)
CHUNKS = gl.constexpr(HALF.value // 64)


@gluon.jit
def _factored(packed, tail, FLOAT16: gl.constexpr, TAIL: gl.constexpr):
    """Convert packed pairs of a query to the float16 that keys are multiplied with."""
    if not FLOAT16:
        packed = cvt_f16x2_bf16x2(packed)
    if TAIL:
        packed = mul_f16x2(packed, gl.where(tail, _LIFT_F16X2, _ONE_F16X2))
    return fma_f16x2_zero(packed)


@gluon.jit
def stored(column, WORD: gl.constexpr):
    """Return the channel, less 256, in a column of the right half, in groups of WORD channels."""
    TAIL: gl.constexpr = _TAIL_COLUMN // WORD
    return gl.where(column < TAIL, column, TAIL + tail_order(column - TAIL, 8 // WORD))


@gluon.jit
def load_query(params, split, to, HEADS: gl.constexpr, PART: gl.constexpr, TAIL: gl.constexpr):
    """Load half the channels of a split's heads into shared memory, with zeros past the last head.

    Args:
        params: ``Params`` of ``gluon_sm90_decode_epilogue``.
        split: ``Split`` of ``gluon_sm90_tile_scheduler``.
        to: int32 [HEADS, 128] in shared memory.
        HEADS: heads in a tile.
        PART: 0 for channels 0 to 255, 1 for 256 to 511.
        TAIL: True if the last 64 of these are the tail.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    zero = opaque(split.tile * 0)
    row = gl.arange(0, HEADS, layout=gl.SliceLayout(1, L)) + zero
    word = gl.arange(0, HALF // 2, layout=gl.SliceLayout(0, L))
    if TAIL:
        word = stored(word, 2)
    start = split.token.to(gl.int64) * params.q_token + split.tile * (HEADS * params.Q_HEAD)
    start = start + PART * (HALF // 2)
    at = gl.expand_dims(row * params.Q_HEAD, 1) + gl.expand_dims(word, 0)
    inside = gl.expand_dims(split.tile * HEADS + row < params.H, 1)
    packed = gl.load(params.q.to(gl.pointer_type(gl.int32)) + start + at, mask=inside, other=0)
    tail = gl.expand_dims(word, 0) >= _TAIL_COLUMN // 2
    to.store(_factored(packed, tail, params.q.dtype.element_ty == gl.float16, TAIL))


@gluon.jit
def load_tail(params, split, to, HEADS: gl.constexpr):
    """Load the last 64 of 576 channels of a split's heads to shared int32 [HEADS, CHUNK]."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, HEADS, layout=gl.SliceLayout(1, L)) + opaque(split.tile * 0)
    word = tail_order(gl.arange(0, CHUNK, layout=gl.SliceLayout(0, L)), 4)
    start = split.token.to(gl.int64) * params.q_token + split.tile * (HEADS * params.Q_HEAD)
    start = start + 2 * CHUNKS * CHUNK
    at = gl.expand_dims(row * params.Q_HEAD, 1) + gl.expand_dims(word, 0)
    inside = gl.expand_dims(split.tile * HEADS + row < params.H, 1)
    packed = gl.load(params.q.to(gl.pointer_type(gl.int32)) + start + at, mask=inside, other=0)
    to.store(_factored(packed, packed == packed, params.q.dtype.element_ty == gl.float16, True))


@gluon.jit
def issue_query(
    params, split, chunks,
    HEADS: gl.constexpr, FIRST: gl.constexpr, COUNT: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Start loading queries as ``load_query`` does; ``finish_query`` ends it.

    The loops are not unrolled although every trip does the same: code that runs once per work tile
    costs the time to fetch it, which outweighs the loops' own cost.

    Args:
        params: ``Params`` as in ``load_query``.
        split: ``Split`` as in ``load_query``.
        chunks: int32 [2 CHUNKS, HEADS, CHUNK] in shared memory.
        HEADS: heads in a tile.
        FIRST: index of the first chunk.
        COUNT: number of chunks.
        TAIL: True if the last chunk of all is the tail and among these.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, HEADS, layout=gl.SliceLayout(1, L))
    word = gl.expand_dims(gl.arange(0, CHUNK, layout=gl.SliceLayout(0, L)), 0)
    base = params.q.to(gl.pointer_type(gl.int32)) + split.token.to(gl.int64) * params.q_token
    there = gl.expand_dims(split.tile * HEADS + row < params.H, 1) & (word >= 0)
    for chunk in range(FIRST, FIRST + COUNT):
        source = word
        if TAIL:
            source = gl.where(chunk == 2 * CHUNKS - 1, tail_order(word, 4), word)
        start = gl.expand_dims((split.tile * HEADS + row) * params.Q_HEAD, 1)
        at = base + (start + source + chunk * CHUNK)
        _copy(chunks.index(chunk), at, mask=there)
    async_copy.commit_group()


@gluon.jit
def finish_query(
    chunks, FIRST: gl.constexpr, COUNT: gl.constexpr, FLOAT16: gl.constexpr,
    TAIL: gl.constexpr,
):  # fmt: skip
    """Wait for the loads that this partition issued, and convert them to the form for the products.

    FLOAT16 is True if queries are float16. Other arguments are those of ``issue_query``.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    async_copy.wait_group(0)
    for chunk in range(FIRST, FIRST + COUNT):
        here = chunks.index(chunk)
        tail = chunk == 2 * CHUNKS - 1
        here.store(_factored(here.load(L), tail, FLOAT16, TAIL))


@gluon.jit
def finish_query_tma(
    chunks, HEADS: gl.constexpr, FIRST: gl.constexpr, COUNT: gl.constexpr, FLOAT16: gl.constexpr,
    TAIL: gl.constexpr,
):  # fmt: skip
    """Convert queries that TMA has loaded to the form for the products; see ``finish_query``."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    for chunk in range(FIRST, FIRST + COUNT - TAIL):
        here = chunks.index(chunk)
        here.store(_factored(here.load(L), False, FLOAT16, False))
    if TAIL:
        here = chunks.index(FIRST + COUNT - 1)
        packed = _factored(here.load(L), True, FLOAT16, True)
        # Reorder the channels to ``tail_order``.
        packed = gl.permute(gl.reshape(packed, [HEADS, 2, 4, 4]), (0, 2, 1, 3))
        here.store(gl.reshape(packed, [HEADS, CHUNK]))


@gluon.jit
def boxes(packed, TYPE: gl.constexpr, desc):
    """View shared memory as the boxes of a TMA descriptor, each some channels of some heads.

    ``packed`` is int32 [2, HEADS, 128].
    """
    BOX: gl.constexpr = desc.block_shape[-2]
    WIDTH: gl.constexpr = desc.block_shape[-1]
    RANK: gl.constexpr = len(desc.block_shape)
    HALVES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=RANK)
    COUNT: gl.constexpr = 2 * (HALF // WIDTH) * (HEADS // BOX)
    if RANK == 3:
        return view(packed, TYPE, [COUNT, 1, BOX, WIDTH], HALVES)
    else:
        return view(packed, TYPE, [COUNT, BOX, WIDTH], HALVES)


@gluon.jit
def box_at(desc, token, head, H, channel):
    """Return where a box begins; a descriptor has rows for all heads or for each token's own."""
    if len(desc.block_shape) == 3:
        return [token, head, channel]
    else:
        return [token * H + head, channel]


@gluon.jit
def clear_query(q_packed, q_desc):
    """Write zeros to the heads that TMA does not load."""
    if q_desc.block_shape[-2] < HEADS:
        L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
        for part in gl.static_range(2):
            q_packed.index(part).store(gl.zeros([HEADS, HALF // 2], gl.int32, L))
        fence_async_shared()
        warpgroup_barrier()


@gluon.jit
def q_load_issue(there, params, split, q_packed, q_full):
    """Start TMA's load of the queries of a split, if ``there``; ``q_load_wait`` waits for it."""
    if there:
        q_desc = params.q_desc
        BOX: gl.constexpr = q_desc.block_shape[-2]
        WIDTH: gl.constexpr = q_desc.block_shape[-1]
        COUNT: gl.constexpr = HALF // WIDTH
        to = boxes(q_packed, params.q.dtype.element_ty, q_desc)
        # After this barrier all warps have read the previous queries.
        warpgroup_barrier()
        for part in gl.static_range(2):
            here = q_full.index(part)
            # TMA fills heads past the last with zeros, whose bytes count.
            mbarrier.expect(here, BOX * HALF * 2)
            for i in gl.static_range(COUNT):
                channel = part * HALF + i * WIDTH
                at = box_at(q_desc, split.token, split.tile * HEADS, params.H, channel)
                _tma_load(q_desc, at, here, to.index((part * COUNT + i) * (HEADS // BOX)))


@gluon.jit
def q_load_wait(q_chunks, q_full, k, FLOAT16: gl.constexpr, PART: gl.constexpr, TAIL: gl.constexpr):
    """Wait for half of the queries of split k, and round them to float16."""
    mbarrier.wait(q_full.index(PART), k & 1)
    finish_query_tma(q_chunks, HEADS, PART * CHUNKS, CHUNKS, FLOAT16, TAIL)


@gluon.jit
def q_load(params, split, shared, work, PART: gl.constexpr, TAIL: gl.constexpr):
    """Load half of the queries of a split by threads, and wait for them."""
    if work.SPLIT and not work.PARTLY:
        load_query(params, split, shared.q_packed.index(PART), HEADS, PART, TAIL)
    else:
        FLOAT16: gl.constexpr = params.q.dtype.element_ty == gl.float16
        FIRST: gl.constexpr = PART * CHUNKS
        issue_query(params, split, shared.q_chunks, HEADS, FIRST, CHUNKS, TAIL)
        finish_query(shared.q_chunks, FIRST, CHUNKS, FLOAT16, TAIL)


@gluon.jit
def q_release(q_free, last):
    """Give the queries' memory back after consumer 0's last scores of a split."""
    if last:
        mbarrier.arrive(q_free, count=1)

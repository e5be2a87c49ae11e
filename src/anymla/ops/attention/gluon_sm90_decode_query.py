"""Queries as float16 in shared memory, and the order of channels there.

The tail of a key is stored as it is, its other channels times ``LIFT``; so the tail of a query is
stored times ``LIFT``, and scores are ``LIFT`` times what they should be throughout.

What float16 does not hold becomes NaN, so that the scores, and with them the sums, are NaN; see
``gluon_sm90_bf16_fallback``. That is numbers that are too large. What is too small is off by 2^-25
at most, and a score by no more than a thousandth for the scales that the kernels take.

TMA brings the queries of a tile of 64 heads (``q_load_issue``, ``q_load_wait``), or threads load
them (``q_load``); see the launcher. On the way through registers they become float16, in
place.
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
HEADS = gl.constexpr(M64)  # of a tile whose rows are heads
HALF = gl.constexpr(256)
_TAIL = gl.constexpr(NOPE.value - HALF.value)  # first column of the tail in the right half
_LIFTED = gl.constexpr(0x58005800)  # LIFT as two float16
_ONES = gl.constexpr(0x3C003C00)
# Pairs of 64 channels, which a row of a tile in shared memory holds, and chunks of half a head.
CHUNK = gl.constexpr(32)
CHUNKS = gl.constexpr(HALF.value // 64)


@gluon.jit
def _factored(packed, tail, FLOAT16: gl.constexpr, TAIL: gl.constexpr):
    """Packed pairs of a query as the float16 that keys are multiplied with."""
    if not FLOAT16:
        packed = cvt_f16x2_bf16x2(packed)
    if TAIL:
        packed = mul_f16x2(packed, gl.where(tail, _LIFTED, _ONES))
    return fma_f16x2_zero(packed)


@gluon.jit
def stored(column, WORD: gl.constexpr):
    """Channel, less 256, that a column of the right half holds; in groups of WORD channels."""
    TAIL: gl.constexpr = _TAIL // WORD
    return gl.where(column < TAIL, column, TAIL + tail_order(column - TAIL, 8 // WORD))


@gluon.jit
def load_query(params, split, to, HEADS: gl.constexpr, PART: gl.constexpr, TAIL: gl.constexpr):
    """Half the channels of a split's heads, into shared memory; zeros past the last head.

    Args:
        params: see ``gluon_sm90_epilogue.Params``.
        split: see ``gluon_sm90_tile_scheduler.Split``.
        to: int32 [HEADS, 128] in shared memory.
        HEADS: heads of a tile.
        PART: 0 for channels 0 .. 255, 1 for 256 .. 511.
        TAIL: the last 64 of these are the tail.
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
    tail = gl.expand_dims(word, 0) >= _TAIL // 2
    to.store(_factored(packed, tail, params.q.dtype.element_ty == gl.float16, TAIL))


@gluon.jit
def load_tail(params, split, to, HEADS: gl.constexpr):
    """The last 64 of 576 channels of a split's heads, to int32 [HEADS, CHUNK] in shared memory."""
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
    """Start what ``load_query`` does; ``finish_query`` ends it.

    In loops: every trip does the same, but code that runs once a work tile is paid for by fetching
    it. They are slower than the code without, once that is there.

    Args:
        params: see ``load_query``, as the next and HEADS.
        split: see there.
        chunks: int32 [2 CHUNKS, HEADS, CHUNK] in shared memory.
        HEADS: see there.
        FIRST: first chunk.
        COUNT: how many.
        TAIL: the last of all is the tail, and among these.
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
    """Wait for what this partition issued, and make it what keys are multiplied with.

    FLOAT16: queries are float16. Other arguments are those of ``issue_query``.
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
    """Make what TMA has brought what keys are multiplied with; see ``finish_query``."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    for chunk in range(FIRST, FIRST + COUNT - TAIL):
        here = chunks.index(chunk)
        here.store(_factored(here.load(L), False, FLOAT16, False))
    if TAIL:
        here = chunks.index(FIRST + COUNT - 1)
        packed = _factored(here.load(L), True, FLOAT16, True)
        # Into ``tail_order``.
        packed = gl.permute(gl.reshape(packed, [HEADS, 2, 4, 4]), (0, 2, 1, 3))
        here.store(gl.reshape(packed, [HEADS, CHUNK]))


@gluon.jit
def boxes(packed, TYPE: gl.constexpr, desc):
    """Shared memory in the boxes that TMA moves by a descriptor: some channels of some heads.

    packed: int32 [2, HEADS, 128].
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
    """Where a box begins: rows are heads of all tokens, or each token's own."""
    if len(desc.block_shape) == 3:
        return [token, head, channel]
    else:
        return [token * H + head, channel]


@gluon.jit
def clear_query(q_packed, q_desc):
    """Write zeros where TMA does not bring heads."""
    if q_desc.block_shape[-2] < HEADS:
        L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
        for part in gl.static_range(2):
            q_packed.index(part).store(gl.zeros([HEADS, HALF // 2], gl.int32, L))
        fence_async_shared()
        warpgroup_barrier()


@gluon.jit
def q_load_issue(there, params, split, q_packed, q_full):
    """Let TMA bring the queries of a split, if there is one; for ``q_load_wait``."""
    if there:
        q_desc = params.q_desc
        BOX: gl.constexpr = q_desc.block_shape[-2]
        WIDTH: gl.constexpr = q_desc.block_shape[-1]
        COUNT: gl.constexpr = HALF // WIDTH
        to = boxes(q_packed, params.q.dtype.element_ty, q_desc)
        # All warps have read the queries that were here.
        warpgroup_barrier()
        for part in gl.static_range(2):
            here = q_full.index(part)
            # Heads that there are not come as zeros, which count.
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
    """Load half of the queries of a split by threads, now."""
    if work.SPLIT and not work.PARTLY:
        load_query(params, split, shared.q_packed.index(PART), HEADS, PART, TAIL)
    else:
        FLOAT16: gl.constexpr = params.q.dtype.element_ty == gl.float16
        FIRST: gl.constexpr = PART * CHUNKS
        issue_query(params, split, shared.q_chunks, HEADS, FIRST, CHUNKS, TAIL)
        finish_query(shared.q_chunks, FIRST, CHUNKS, FLOAT16, TAIL)


@gluon.jit
def q_release(q_free, last):
    """Give the queries' memory back, after consumer 0's last scores of a split."""
    if last:
        mbarrier.arrive(q_free, count=1)

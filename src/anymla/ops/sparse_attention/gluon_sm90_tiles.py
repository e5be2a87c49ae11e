"""Attention over FP8 rows for tiles of 64 heads on Hopper.

Grid: at most one program a multiprocessor; each walks the pieces of ``gluon_sm90_shares``.

    main       QK, softmax, P V of channels 0 .. 255        208 registers
    right      P V of channels 256 .. 511                   160
    producers  rows 0 .. 31 and 32 .. 63 of each block       72 each

A block is 64 listed rows in float16, its halves of 256 channels in two allocations, double
buffered. Keys and values are the same memory. main hands P, and by how much the sums decay, to
right through shared memory; after the last block of what may be a whole task it hands over the
factor of the result. Both write their half of the result through the buffer that the last block
left, which they hold back from the producers.

Barriers: ready[b] producers -> main (right learns through p_ready); free[b] main and right ->
producers; p_ready[s] main -> right; p_free[s] right -> main; q_ready right -> main (q's right
half); q_free main -> right.

The proxy fence between the producers' stores and the matrix instructions stands on the reading
side, behind the wait on ``ready``: in the producers it would wait for the loads of the next block.
"""

from collections.abc import Iterator

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anymla.ops._triton import Build, Target
from anymla.ops.sparse_attention.gluon_sm90_gather import LIFT, produce, tail_order
from anymla.ops.sparse_attention.gluon_sm90_lists import (
    ARGUMENT_TYPES,
    BUILT,
    CHANNELS,
    COUNTS,
    KEYS,
    NOPE,
    Lists,
    anew,
)
from anymla.ops.sparse_attention.gluon_sm90_query import (
    CHUNK,
    CHUNKS,
    fetch_query,
    load_query,
    stored,
)
from anymla.ops.sparse_attention.gluon_sm90_rescan import any_marked, rescan
from anymla.ops.sparse_attention.gluon_sm90_shares import piece, share_of
from anymla.ops.sparse_attention.gluon_sm90_softmax import (
    LOG2E,
    NO_MAXIMUM,
    SHIFT,
    bottom_of,
    dependents_may_start,
    load_sink,
    log_sum,
    predecessors_done,
    record_cut,
    record_span,
    view,
    warps_meet,
)
from anymla.ops.sparse_attention.gluon_sm90_turned import Output, ask_for_angles, store_chunks
from anymla.ops.sparse_attention.schedule import Stream

HEADS = gl.constexpr(64)
HALF = gl.constexpr(256)
# Spill instructions at the ends of pieces and in the rescan; three in the producers' loop, none in
# the others.
_SPILLS = 700


@gluon.jit
def _store_out(
    y, stage, chunks, buffer, out, token, tile, H, token_stride,
    HEAD: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Write half a result [64, 256] through shared memory.

    stage: [2, 64, 256], both buffers. chunks: the same memory as [2 CHUNKS, 64, 64].
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
        if PART == 1:
            channel = gl.where(chunk == CHUNKS - 1, tail_order(column, 8), column)
        at = gl.expand_dims(row * HEAD, 1) + gl.expand_dims(channel + chunk * WIDTH, 0)
        result = chunks.index(buffer * CHUNKS + chunk).load(L)
        gl.store(out.heads + start + at, result, mask=there)


@gluon.jit
def _store_part(y, part_ptr, slot, tile, H, L: gl.constexpr, PART: gl.constexpr):
    """Leave half of a piece's sums [64, 256] in part [slots, 64, 512]."""
    row = gl.arange(0, HEADS, layout=gl.SliceLayout(1, L)) + anew(tile * 0)
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, L))
    if PART == 1:
        column = stored(column, 1)
    at = part_ptr + slot.to(gl.int64) * (HEADS * CHANNELS) + PART * HALF
    at = at + gl.expand_dims(row, 1) * CHANNELS + gl.expand_dims(column, 0)
    gl.store(at, y, mask=gl.expand_dims(tile * HEADS + row < H, 1))


@gluon.jit
def _finish_right(
    y, stage, chunks, buffer, free, out, angles, token, tile, H, out_token, OUT_HEAD: gl.constexpr
):
    if out.TURNED > 0:
        stage.index(buffer).store(y.to(out.TYPE))
        store_chunks(chunks, buffer * CHUNKS, out, angles, token, tile * HEADS, H, 1)
    else:
        _store_out(y, stage, chunks, buffer, out, token, tile, H, out_token, OUT_HEAD, 1)
    fence_async_shared()
    mbarrier.arrive(free.index(buffer), count=1)


@gluon.jit
def _leave_right(y, free, part_ptr, slot, tile, H, L: gl.constexpr):
    mbarrier.arrive(free, count=1)
    _store_part(y, part_ptr, slot, tile, H, L, 1)


@gluon.jit
def _finish_main(
    y, sums, top, empty, stage, chunks, buffer, free, out, lse_ptr, token, tile, head, H, out_token,
    OUT_HEAD: gl.constexpr,
):  # fmt: skip
    if out.TURNED > 0:
        stage.index(buffer).store(y.to(out.TYPE))
        store_chunks(chunks, buffer * CHUNKS, out, out.table, token, tile * HEADS, H, 0)
    else:
        _store_out(y, stage, chunks, buffer, out, token, tile, H, out_token, OUT_HEAD, 0)
    fence_async_shared()
    mbarrier.arrive(free.index(buffer), count=1)
    gl.store(lse_ptr + token.to(gl.int64) * H + head, log_sum(sums, top, empty), mask=head < H)


@gluon.jit
def _leave_main(y, sums, top, free, part_ptr, sums_ptr, slot, tile, head, H, L: gl.constexpr):
    mbarrier.arrive(free, count=1)
    _store_part(y, part_ptr, slot, tile, H, L, 0)
    at = sums_ptr + (slot.to(gl.int64) * HEADS + (head - tile * HEADS)) * 2
    gl.store(at, top, mask=head < H)
    gl.store(at + 1, sums, mask=head < H)


@gluon.jit
def right_part(
    lists, share, q_ptr, out, part_ptr, marks_ptr, H, q_token, out_token, q_words, q_chunks,
    k_right, stage, chunks, p_s, decay_s, noticed, free, p_ready, p_free, q_ready, q_free,
    Q_HEAD: gl.constexpr, OUT_HEAD: gl.constexpr,
):  # fmt: skip
    """The warpgroup of P V, channels 256 .. 511."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    R: gl.constexpr = gl.SliceLayout(1, L)
    done = 0
    handed = 0
    found = gl.zeros([HEADS], gl.float32, R)
    for k in range(0, share.count):
        token, tile, _, _, _, first, last, direct, slot, mark = piece(k, share, lists)
        mbarrier.wait(q_free, (k & 1) ^ 1)
        if share.SPLIT and not share.STREAM:
            load_query(q_ptr, token, tile, H, q_token, q_words.index(1), HEADS, Q_HEAD, 1)
        else:
            fetch_query(q_ptr, token, tile, H, q_token, q_chunks, HEADS, Q_HEAD, CHUNKS, CHUNKS)
        fence_async_shared()
        mbarrier.arrive(q_ready, count=1)
        angles = out.table
        if out.TURNED > 0:
            angles = ask_for_angles(out, token)
        acc = gl.zeros([HEADS, HALF], gl.float32, L)
        for block in range(first, last):
            buffer = done % 2
            s = handed % 2
            mbarrier.wait(p_ready.index(s), (handed // 2) & 1)
            fence_async_shared()
            if not share.SINGLE:
                acc = acc * gl.expand_dims(decay_s.index(s).load(R), 1)
            acc = warpgroup_mma(
                p_s.index(s), k_right.index(buffer), acc, use_acc=not share.SINGLE, is_async=True
            )
            acc = warpgroup_mma_wait(0, deps=[acc])
            if block + 1 < last:
                mbarrier.arrive(free.index(buffer), count=1)
            mbarrier.arrive(p_free.index(s), count=1)
            done += 1
            handed += 1
        if share.SPLIT and not share.STREAM:
            factor = gl.full([HEADS], 1.0, gl.float32, R)
        else:
            s = handed % 2
            mbarrier.wait(p_ready.index(s), (handed // 2) & 1)
            factor = decay_s.index(s).load(R)
            mbarrier.arrive(p_free.index(s), count=1)
            handed += 1
        column = gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(0, L)), 0)
        # NaN of the sums is in all channels; infinities of the tail do not always reach the sums.
        wrong = gl.sum(gl.where(column < NOPE - HALF, 0.0, acc * 0.0), 1)
        found += wrong
        gl.store(marks_ptr + mark * HEADS + gl.arange(0, HEADS, layout=R), wrong)
        low = gl.expand_dims(factor * (1.0 / LIFT), 1)
        y = acc * gl.where(column < NOPE - HALF, low, gl.expand_dims(factor, 1))
        buffer = (done + 1) % 2
        if not share.SPLIT:
            _finish_right(
                y, stage, chunks, buffer, free, out, angles, token, tile, H, out_token, OUT_HEAD
            )
        elif share.STREAM:
            if direct:
                _finish_right(
                    y, stage, chunks, buffer, free, out, angles, token, tile, H, out_token, OUT_HEAD
                )
            else:
                _leave_right(y, free.index(buffer), part_ptr, slot, tile, H, L)
        else:
            _leave_right(y, free.index(buffer), part_ptr, slot, tile, H, L)
    noticed.store(found)


@gluon.jit
def main_part(
    lists, share, q_ptr, out, lse_ptr, part_ptr, sums_ptr, spans_ptr, sink_ptr,
    H, q_token, out_token, scale, empty, q_words, q_chunks, q_s, k_left, k_right, stage, chunks,
    p_s, decay_s, bias_s, ready, free, p_ready, p_free, q_ready, q_free,
    SINK: gl.constexpr, Q_HEAD: gl.constexpr, OUT_HEAD: gl.constexpr,
):  # fmt: skip
    """The warpgroup of Q K, the softmax, and P V of channels 0 .. 255."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=L, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    R: gl.constexpr = gl.SliceLayout(1, L)
    factor = scale * (LOG2E / LIFT)
    record_cut(spans_ptr, share)
    done = 0
    handed = 0
    for k in range(0, share.count):
        token, tile, _, _, _, first, last, direct, slot, _ = piece(k, share, lists)
        if share.SPLIT and not share.STREAM:
            load_query(q_ptr, token, tile, H, q_token, q_words.index(0), HEADS, Q_HEAD, 0)
        else:
            fetch_query(q_ptr, token, tile, H, q_token, q_chunks, HEADS, Q_HEAD, 0, CHUNKS)
        fence_async_shared()
        warps_meet()  # here, or the compiler puts one into the loop
        head = tile * HEADS + gl.arange(0, HEADS, layout=ROW)
        sink = load_sink(sink_ptr, head, H, SINK)
        mbarrier.wait(q_ready, k & 1)
        acc = gl.zeros([HEADS, HALF], gl.float32, L)
        highest = gl.full([HEADS], NO_MAXIMUM, gl.float32, ROW)
        sums = gl.zeros([HEADS], gl.float32, ROW)
        for block in range(first, last):
            buffer = done % 2
            s = handed % 2
            mbarrier.wait(ready.index(buffer), (done // 2) & 1)
            fence_async_shared()
            scores = gl.zeros([HEADS, KEYS], gl.float32, S)
            bias = bias_s.index(buffer).load(gl.SliceLayout(0, S))
            scores = warpgroup_mma(
                q_s.index(0), k_left.index(buffer).permute((1, 0)), scores,
                use_acc=False, is_async=True,
            )  # fmt: skip
            scores = warpgroup_mma(
                q_s.index(1), k_right.index(buffer).permute((1, 0)), scores, is_async=True
            )
            scores = warpgroup_mma_wait(0, deps=[scores])
            if block + 1 == last:
                mbarrier.arrive(q_free, count=1)
            scores = scores + gl.expand_dims(bias, 0)
            peak = gl.maximum(highest, gl.max(scores, 1))
            decay = gl.exp2((highest - peak) * factor)
            p = gl.exp2(scores * factor - gl.expand_dims(peak * factor - SHIFT, 1))
            sums = sums * decay + gl.sum(p, 1)
            highest = peak
            p = p.to(gl.float16)
            mbarrier.wait(p_free.index(s), ((handed // 2) & 1) ^ 1)
            p_s.index(s).store(p)
            decay_s.index(s).store(decay)
            if not share.SINGLE:
                acc = acc * gl.expand_dims(gl.convert_layout(decay, R), 1)
            own = gl.convert_layout(p, A, assert_trivial=True)
            acc = warpgroup_mma(
                own, k_left.index(buffer), acc, use_acc=not share.SINGLE, is_async=True
            )
            # What only right needs is done while main's product runs.
            fence_async_shared()
            mbarrier.arrive(p_ready.index(s), count=1)
            acc = warpgroup_mma_wait(0, deps=[acc])
            if block + 1 < last:
                mbarrier.arrive(free.index(buffer), count=1)
            done += 1
            handed += 1
        head = tile * HEADS + gl.arange(0, HEADS, layout=ROW) + anew(tile * 0)
        top = highest * factor - SHIFT
        bottom = bottom_of(sums, top, sink)
        scaled = gl.where(sums > 0, 1.0 / bottom, 0.0)
        if share.SPLIT and not share.STREAM:
            scaled = gl.full([HEADS], 1.0, gl.float32, ROW)
        else:
            if share.SPLIT:
                scaled = gl.where(direct, scaled, 1.0)
            s = handed % 2
            mbarrier.wait(p_free.index(s), ((handed // 2) & 1) ^ 1)
            decay_s.index(s).store(scaled)
            mbarrier.arrive(p_ready.index(s), count=1)
            handed += 1
        y = acc * gl.expand_dims(gl.convert_layout(scaled, R) * (1.0 / LIFT), 1)
        buffer = (done + 1) % 2
        if not share.SPLIT:
            _finish_main(
                y, sums, top, empty, stage, chunks, buffer, free, out, lse_ptr,
                token, tile, head, H, out_token, OUT_HEAD,
            )  # fmt: skip
        elif share.STREAM:
            if direct:
                _finish_main(
                    y, sums, top, empty, stage, chunks, buffer, free, out, lse_ptr,
                    token, tile, head, H, out_token, OUT_HEAD,
                )  # fmt: skip
            else:
                _leave_main(
                    y, sums, top, free.index(buffer), part_ptr, sums_ptr, slot, tile, head, H, L
                )
            if not share.MIXED:
                record_span(spans_ptr, token * share.TILES + tile, first, last, token, lists, share)
        else:
            _leave_main(
                y, sums, top, free.index(buffer), part_ptr, sums_ptr, slot, tile, head, H, L
            )


@gluon.jit
def _low_rows(lists, share, left, right, bias, ready, free):
    produce(lists, share, left, right, bias, ready, free, 32, 0, 2)


@gluon.jit
def _high_rows(lists, share, left, right, bias, ready, free):
    produce(lists, share, left, right, bias, ready, free, 32, 32, 2)


@gluon.jit(do_not_specialize=COUNTS)
def tiles_kernel(
    q_ptr, rows0_ptr, rows1_ptr, list0_ptr, list1_ptr, length0_ptr, length1_ptr, sink_ptr,
    out_ptr, lse_ptr, part_ptr, sums_ptr, spans_ptr, marks_ptr,
    T, H, width0, width1, limit0, limit1, stride0, stride1, splits,
    q_token, out_token, scale, empty, scales_ptr, positions_ptr, table_ptr, angles,
    TILES: gl.constexpr, SPLIT: gl.constexpr, STREAM: gl.constexpr, COST: gl.constexpr,
    SIZE: gl.constexpr, TWO: gl.constexpr, LENGTH0: gl.constexpr, LENGTH1: gl.constexpr,
    PAGE0: gl.constexpr, PAGE1: gl.constexpr, STEP0: gl.constexpr, STEP1: gl.constexpr,
    SINK: gl.constexpr, Q_HEAD: gl.constexpr, OUT_HEAD: gl.constexpr,
    RIGHT_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, TURNED: gl.constexpr,
):  # fmt: skip
    """See the file.

    SPLIT and STREAM are ``cut`` and ``stream`` of the schedule; q_token and Q_HEAD count int32
    words, limit0 and limit1 rows, STEP0 and STEP1 bytes. What comes after ``empty``, and TURNED, is
    as in ``gluon_sm90_turned.Output``.
    """
    predecessors_done()
    dependents_may_start()
    lists = Lists(
        rows0_ptr, rows1_ptr, list0_ptr, list1_ptr, length0_ptr, length1_ptr, width0, width1,
        limit0, limit1, stride0, stride1, TWO, LENGTH0, LENGTH1, PAGE0, PAGE1, STEP0, STEP1,
    )  # fmt: skip
    share = share_of(lists, T, splits, spans_ptr, TILES, SPLIT, STREAM, COST, SIZE)

    HALVES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    q_words = gl.allocate_shared_memory(gl.int32, [2, HEADS, HALF // 2], WORDS)
    left = gl.allocate_shared_memory(gl.int32, [2, KEYS, HALF // 2], WORDS)
    right = gl.allocate_shared_memory(gl.int32, [2, KEYS, HALF // 2], WORDS)
    q_s = view(q_words, gl.float16, [2, HEADS, HALF], HALVES)
    q_chunks = view(q_words, gl.int32, [2 * CHUNKS, HEADS, CHUNK], WORDS)
    k_left = view(left, gl.float16, [2, KEYS, HALF], HALVES)
    k_right = view(right, gl.float16, [2, KEYS, HALF], HALVES)
    TYPE: gl.constexpr = q_ptr.dtype.element_ty
    out = Output(out_ptr, scales_ptr, positions_ptr, table_ptr, angles, TURNED, TYPE)
    out_left = view(left, TYPE, [2, HEADS, HALF], HALVES)
    out_right = view(right, TYPE, [2, HEADS, HALF], HALVES)
    left_chunks = view(left, TYPE, [2 * CHUNKS, HEADS, 2 * CHUNK], HALVES)
    right_chunks = view(right, TYPE, [2 * CHUNKS, HEADS, 2 * CHUNK], HALVES)
    p_s = gl.allocate_shared_memory(gl.float16, [2, HEADS, KEYS], HALVES)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    decay_s = gl.allocate_shared_memory(gl.float32, [2, HEADS], FLAT)
    bias_s = gl.allocate_shared_memory(gl.float32, [2, KEYS], FLAT)
    noticed = gl.allocate_shared_memory(gl.float32, [HEADS], FLAT)
    B: gl.constexpr = mbarrier.MBarrierLayout()
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], B)
    free = gl.allocate_shared_memory(gl.int64, [2, 1], B)
    p_ready = gl.allocate_shared_memory(gl.int64, [2, 1], B)
    p_free = gl.allocate_shared_memory(gl.int64, [2, 1], B)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], B)
    q_free = gl.allocate_shared_memory(gl.int64, [1], B)
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=2)
        mbarrier.init(free.index(i), count=2)
        mbarrier.init(p_ready.index(i), count=1)
        mbarrier.init(p_free.index(i), count=1)
    mbarrier.init(q_ready, count=1)
    mbarrier.init(q_free, count=1)
    gl.warp_specialize(
        [
            (main_part, (
                lists, share, q_ptr, out, lse_ptr, part_ptr, sums_ptr, spans_ptr, sink_ptr, H,
                q_token, out_token, scale, empty, q_words, q_chunks, q_s, k_left, k_right, out_left,
                left_chunks, p_s, decay_s, bias_s, ready, free, p_ready, p_free, q_ready, q_free,
                SINK, Q_HEAD, OUT_HEAD,
            )),
            (right_part, (
                lists, share, q_ptr, out, part_ptr, marks_ptr, H, q_token, out_token, q_words,
                q_chunks, k_right, out_right, right_chunks, p_s, decay_s, noticed, free, p_ready,
                p_free, q_ready, q_free, Q_HEAD, OUT_HEAD,
            )),
            (_low_rows, (lists, share, left, right, bias_s, ready, free)),
            (_high_rows, (lists, share, left, right, bias_s, ready, free)),
        ],
        [4, 4, 4],
        [RIGHT_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
    if any_marked(noticed, HEADS):
        rescan(
            lists, share, q_ptr, out, lse_ptr, part_ptr, sums_ptr, marks_ptr, sink_ptr, H,
            q_token * 2, Q_HEAD * 2, out_token, OUT_HEAD, scale, empty, q_words, left, p_s,
            HEADS, SINK,
        )  # fmt: skip


def build(label: str, **constants: object) -> Build:
    """One specialisation, with pages of 64 rows unless ``constants`` says otherwise."""
    return Build(
        label,
        tiles_kernel,
        ARGUMENT_TYPES | ({"out_ptr": "*i16"} if "TURNED" in constants else {}),
        {"TILES": 1, "RIGHT_REGISTERS": 160, "PRODUCER_REGISTERS": 72} | BUILT | constants,
        divisible=("q_token", "out_token"),
        matrix=True,
        spills=_SPILLS,
    )


def builds(target: Target) -> Iterator[Build]:
    """Every way of handing out pieces, and other pages and numbers of heads."""
    if target.name != "sm_90":
        return
    yield build("whole")
    yield build("aligned", SPLIT=True)
    yield build("stream", SPLIT=True, STREAM=True, SIZE=256)
    yield build("stream, 128 heads, pages of 2", SPLIT=True, STREAM=True, TILES=2,
                PAGE1=2, STEP1=1728)  # fmt: skip
    yield build("quantised", TURNED=64)
    yield build("quantised, stream", TURNED=64, SPLIT=True, STREAM=True, SIZE=256)
    yield build("planned", SPLIT=True, STREAM=int(Stream.PLANNED))
    yield build("one list, no lengths, pages of 53", TWO=False, LENGTH0=False, LENGTH1=False,
                SINK=False, PAGE0=53, STEP0=31104)  # fmt: skip

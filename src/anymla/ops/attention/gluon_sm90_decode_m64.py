"""Decode attention over coded rows on Hopper, 64 heads as the rows of matrices (M = 64).

The grid has at most one CTA per SM; each walks its splits of ``gluon_sm90_tile_scheduler``.

    consumer 0   Q K, softmax, P V of channels 0 .. 255      208 registers
    consumer 1   P V of channels 256 .. 511                  160
    producers    rows 0 .. 31 and 32 .. 63 of each block      72 each

A block is 64 listed rows in float16, its halves of 256 channels in two allocations, double
buffered. Keys and values are the same memory. Consumer 0 hands P, and the factors by which sums
decay, to consumer 1 through shared memory; after the last block of a split it passes on the factor
of the result. Both write their half of the result through the buffer of the last block, which they
withhold from the producers until then.

TMA loads the queries, issued by consumer 0 after the last scores of the previous split, and stores
outputs and partials. Where there are no descriptors, threads move queries and outputs.

Barriers: ready[b] producers -> consumer 0 (consumer 1 learns through p_ready); free[b] both
consumers -> producers; p_ready[s] consumer 0 -> 1; p_free[s] consumer 1 -> 0; q_full[half] TMA ->
both consumers; q_ready consumer 1 -> 0 (its half is rounded); q_free consumer 0 -> 1, where threads
load queries.

A barrier that a specialisation does not use must not be made: once it is initialised the compiler
gives its memory to something else, and the initialisation, by another unit, may overwrite that.

The proxy fence between the producers' stores and the matrix instructions stands on the reading
side, behind the wait on ``ready``: in the producers it would wait for the loads of the next block.

V32 selects V3.2's rows, keys of 576 channels of which 512 are the value. Keys and queries then have
a third part, the tail, which only scores read, and all channels of the halves are alike. There is
one buffer of P instead of two, for lack of space, and one list of one cache.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anymla.ops._gluon import aggregate, field, view, warpgroup_barrier
from anymla.ops._gluon_epilogue import Output, prefetch_angles
from anymla.ops._gluon_ptx import gdc_launch_dependents, gdc_wait, opaque
from anymla.ops.attention.gluon_sm90_bf16_fallback import any_overflow, bf16_fallback
from anymla.ops.attention.gluon_sm90_decode_epilogue import (
    LOG2E,
    NO_MAXIMUM,
    SHIFT,
    Params,
    Partials,
    denominator,
    load_sink,
    stage,
    store_half_split,
    store_lse,
    store_partial_sums,
    stores_done,
    unlift,
)
from anymla.ops.attention.gluon_sm90_decode_kv_producer import LIFT, NOPE, produce, produce_v32
from anymla.ops.attention.gluon_sm90_decode_nvfp4_producer import produce_nvfp4
from anymla.ops.attention.gluon_sm90_decode_query import (
    CHUNK,
    CHUNKS,
    HALF,
    HEADS,
    clear_query,
    load_tail,
    q_load,
    q_load_issue,
    q_load_wait,
    q_release,
)
from anymla.ops.attention.gluon_sm90_tile_scheduler import (
    COUNTS,
    KEYS,
    Lists,
    record_begin,
    record_span,
    split_at,
    work_range,
)


@aggregate
class Barriers:
    """Barriers of a CTA, explained at the top of the file; ``q_free`` or ``q_full`` is None."""

    ready: object
    free: object
    p_ready: object
    p_free: object
    q_ready: object
    q_free: object
    q_full: object

    @gluon.constexpr_function
    def __init__(self, ready, free, p_ready, p_free, q_ready, q_free, q_full):
        self.ready, self.free = ready, free
        self.p_ready, self.p_free = p_ready, p_free
        self.q_ready, self.q_free, self.q_full = q_ready, field(q_free), field(q_full)


@aggregate
class Shared:
    """Shared memory of a CTA; HEADS is 64.

    Attributes:
        q_packed: int32 [2, HEADS, 128], halves of the queries.
        q_chunks: view of ``q_packed`` as int32 [8, HEADS, 32].
        q: view of ``q_packed`` as float16 [2, HEADS, 256].
        k_left: view of ``left`` as float16.
        left: int32 [2, 64, 128], channels 0 .. 255 of two blocks of rows; then a finished result.
        k_right: view of ``right`` as float16.
        right: int32 [2, 64, 128], channels 256 .. 511 of the same; then a finished result.
        p: probabilities of a block, float16 [P, HEADS, 64].
        decay: float32 [2, HEADS], factors by which sums decay; then the factor of the result.
        overflowed: float32 [HEADS], the sum of all overflow flags.
        tail: int32 [2, 64, 32], tails of the rows; None without V32.
        tails: None without V32, else three views: tails of the queries as int32 [HEADS, 32] and as
            float16, and ``tail`` as float16.
        bias: float32 [2, 64], addend to the scores of each row.
        barriers: barriers between the warpgroups, a ``Barriers``.
    """

    q_packed: object
    q_chunks: object
    q: object
    k_left: object
    left: object
    k_right: object
    right: object
    p: object
    decay: object
    overflowed: object
    tail: object
    tails: object
    bias: object
    barriers: object

    @gluon.constexpr_function
    def __init__(
        self, q_packed, q_chunks, q, k_left, left, k_right, right, p, decay, overflowed,
        tail, tails, bias, barriers,
    ):  # fmt: skip
        self.q_packed, self.q_chunks, self.q = q_packed, q_chunks, q
        self.k_left, self.left, self.k_right, self.right = k_left, left, k_right, right
        self.p, self.decay, self.overflowed = p, decay, overflowed
        self.tail, self.tails = field(tail), field(tails)
        self.bias, self.barriers = bias, barriers


@gluon.jit
def consumer1(lists, work, params, shared, V32: gl.constexpr):
    """Run consumer warpgroup 1: P V of channels 256 .. 511."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    R: gl.constexpr = gl.SliceLayout(1, L)
    TMA: gl.constexpr = params.q_desc is not None
    FLOAT16: gl.constexpr = params.q.dtype.element_ty == gl.float16
    out, barriers = params.out, shared.barriers
    gdc_wait(WARPGROUP=True)
    P: gl.constexpr = 1 if V32 else 2
    done = 0
    p_count = 0
    found = gl.zeros([HEADS], gl.float32, R)
    for k in range(0, work.count):
        split = split_at(k, work, lists)
        if TMA:
            q_load_wait(shared.q_chunks, barriers.q_full, k, FLOAT16, 1, lists.TAIL)
        else:
            mbarrier.wait(barriers.q_free, (k & 1) ^ 1)
            q_load(params, split, shared, work, 1, lists.TAIL)
        fence_async_shared()
        mbarrier.arrive(barriers.q_ready, count=1)
        angles = out.table
        if out.ROPE_DIM > 0:
            angles = prefetch_angles(out, split.token)
        acc = gl.zeros([HEADS, HALF], gl.float32, L)
        count = split.last - split.first
        for block in range(0, count):
            buffer = done % 2
            s = p_count % P
            mbarrier.wait(barriers.p_ready.index(s), (p_count // P) & 1)
            fence_async_shared()
            if not work.ONE_BLOCK:
                acc = acc * gl.expand_dims(shared.decay.index(s).load(R), 1)
            acc = warpgroup_mma(
                shared.p.index(s), shared.k_right.index(buffer), acc,
                use_acc=not work.ONE_BLOCK, is_async=True,
            )  # fmt: skip
            acc = warpgroup_mma_wait(0, deps=[acc])
            if block + 1 < count:
                mbarrier.arrive(barriers.free.index(buffer), count=1)
            mbarrier.arrive(barriers.p_free.index(s), count=1)
            done += 1
            p_count += 1
        s = p_count % P
        mbarrier.wait(barriers.p_ready.index(s), (p_count // P) & 1)
        factor = shared.decay.index(s).load(R)
        mbarrier.arrive(barriers.p_free.index(s), count=1)
        p_count += 1
        column = gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(0, L)), 0)
        # A NaN of the sums is in all channels, but infinities of the tail do not always reach the
        # sums.
        wrong = gl.sum(gl.where(column < NOPE - HALF, 0.0, acc * 0.0), 1)
        found += wrong
        flags = params.partials.flags + split.number * HEADS
        gl.store(flags + gl.arange(0, HEADS, layout=R), wrong)
        low = gl.expand_dims(factor * unlift(split.whole, work), 1)
        if lists.TAIL:
            y = acc * gl.where(column < NOPE - HALF, low, gl.expand_dims(factor, 1))
        else:
            y = acc * low
        last_buffer = (done + 1) % 2
        stage(y, shared.right, last_buffer, out, work, split.whole, lists.TAIL)
        store_half_split(
            shared.right, last_buffer, barriers.free, params, angles, work, split, 1, lists.TAIL
        )
    shared.overflowed.store(found)
    stores_done()


@gluon.jit
def consumer0(lists, work, params, shared, V32: gl.constexpr):
    """Run consumer warpgroup 0: Q K, the softmax, and P V of channels 0 .. 255."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=L, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    R: gl.constexpr = gl.SliceLayout(1, L)
    factor = params.scale * (LOG2E / LIFT)
    out, barriers = params.out, shared.barriers
    gdc_wait(WARPGROUP=True)
    # Trigger PDL only after our own wait: a dependent kernel may then assume that our predecessor
    # has finished.
    gdc_launch_dependents(WARPGROUP=True)
    record_begin(params.partials.spans, work)
    TMA: gl.constexpr = params.q_desc is not None
    FLOAT16: gl.constexpr = params.q.dtype.element_ty == gl.float16
    P: gl.constexpr = 1 if V32 else 2
    done = 0
    p_count = 0
    for k in range(0, work.count):
        split = split_at(k, work, lists)
        if TMA:
            if k == 0:
                clear_query(shared.q_packed, params.q_desc)
                q_load_issue(work.count > 0, params, split, shared.q_packed, barriers.q_full)
            q_load_wait(shared.q_chunks, barriers.q_full, k, FLOAT16, 0, False)
        else:
            q_load(params, split, shared, work, 0, False)
        if V32:
            load_tail(params, split, shared.tails[0], HEADS)
        fence_async_shared()
        warpgroup_barrier()  # without this one the compiler puts one into the loop
        head = split.tile * HEADS + gl.arange(0, HEADS, layout=ROW)
        sink = load_sink(params, head)
        mbarrier.wait(barriers.q_ready, k & 1)
        acc = gl.zeros([HEADS, HALF], gl.float32, L)
        highest = gl.full([HEADS], NO_MAXIMUM, gl.float32, ROW)
        sums = gl.zeros([HEADS], gl.float32, ROW)
        count = split.last - split.first
        for block in range(0, count):
            buffer = done % 2
            s = p_count % P
            mbarrier.wait(barriers.ready.index(buffer), (done // 2) & 1)
            fence_async_shared()
            scores = gl.zeros([HEADS, KEYS], gl.float32, S)
            bias = shared.bias.index(buffer).load(gl.SliceLayout(0, S))
            if V32:
                scores = warpgroup_mma(
                    shared.tails[1], shared.tails[2].index(buffer).permute((1, 0)), scores,
                    use_acc=False, is_async=True,
                )  # fmt: skip
            scores = warpgroup_mma(
                shared.q.index(0), shared.k_left.index(buffer).permute((1, 0)), scores,
                use_acc=V32, is_async=True,
            )  # fmt: skip
            scores = warpgroup_mma(
                shared.q.index(1), shared.k_right.index(buffer).permute((1, 0)), scores,
                is_async=True,
            )  # fmt: skip
            scores = warpgroup_mma_wait(0, deps=[scores])
            if not TMA:
                q_release(barriers.q_free, block + 1 == count)
            scores = scores + gl.expand_dims(bias, 0)
            peak = gl.maximum(highest, gl.max(scores, 1))
            decay = gl.exp2((highest - peak) * factor)
            p = gl.exp2(scores * factor - gl.expand_dims(peak * factor - SHIFT, 1))
            sums = sums * decay + gl.sum(p, 1)
            highest = peak
            p = p.to(gl.float16)
            mbarrier.wait(barriers.p_free.index(s), ((p_count // P) & 1) ^ 1)
            shared.p.index(s).store(p)
            shared.decay.index(s).store(decay)
            if not work.ONE_BLOCK:
                acc = acc * gl.expand_dims(gl.convert_layout(decay, R), 1)
            own = gl.convert_layout(p, A, assert_trivial=True)
            acc = warpgroup_mma(
                own, shared.k_left.index(buffer), acc, use_acc=not work.ONE_BLOCK, is_async=True
            )
            # Signal consumer 1 while this product runs.
            fence_async_shared()
            mbarrier.arrive(barriers.p_ready.index(s), count=1)
            acc = warpgroup_mma_wait(0, deps=[acc])
            if block + 1 < count:
                mbarrier.arrive(barriers.free.index(buffer), count=1)
            done += 1
            p_count += 1
        if TMA:
            ahead = split_at(gl.minimum(k + 1, work.count - 1), work, lists)
            more = k + 1 < work.count
            q_load_issue(more, params, ahead, shared.q_packed, barriers.q_full)
        head = split.tile * HEADS + gl.arange(0, HEADS, layout=ROW) + opaque(split.tile * 0)
        top = highest * factor - SHIFT
        bottom = sums
        if not work.SPLIT or work.PARTLY:
            bottom = denominator(sums, top, sink)
            if work.SPLIT:
                bottom = gl.where(split.whole, bottom, sums)
        scaled = gl.where(sums > 0, 1.0 / bottom, 0.0)
        s = p_count % P
        mbarrier.wait(barriers.p_free.index(s), ((p_count // P) & 1) ^ 1)
        shared.decay.index(s).store(scaled)
        mbarrier.arrive(barriers.p_ready.index(s), count=1)
        p_count += 1
        y = acc * gl.expand_dims(gl.convert_layout(scaled, R) * unlift(split.whole, work), 1)
        last_buffer = (done + 1) % 2
        stage(y, shared.left, last_buffer, out, work, split.whole, False)
        store_half_split(
            shared.left, last_buffer, barriers.free, params, out.table, work, split, 0, lists.TAIL
        )
        if not work.SPLIT:
            store_lse(params, split, head, top, sums)
        elif work.PARTLY:
            if split.whole:
                store_lse(params, split, head, top, sums)
            else:
                store_partial_sums(params, split, head, top, sums)
            if not work.TAIL:
                work_tile = split.token * work.HEAD_TILES + split.tile
                record_span(params.partials.spans, work_tile, split, lists, work)
        else:
            store_partial_sums(params, split, head, top, sums)
    stores_done()


@gluon.jit
def _producer(lists, work, shared, ROW0: gl.constexpr, V32: gl.constexpr):
    ready, free = shared.barriers.ready, shared.barriers.free
    if V32:
        produce_v32(lists, work, shared, ready, free, 32, ROW0, 2)
    elif lists.FP4:
        produce_nvfp4(lists, work, shared, ready, free, 32, ROW0, 2, 4, False)
    else:
        produce(lists, work, shared, ready, free, 32, ROW0, 2)


@gluon.jit(do_not_specialize=COUNTS)
def decode_m64_kernel(
    q_ptr, rows0_ptr, rows1_ptr, list0_ptr, list1_ptr, length0_ptr, length1_ptr, sink_ptr,
    out_ptr, lse_ptr, part_ptr, sums_ptr, spans_ptr, flags_ptr,
    T, H, width0, width1, limit0, limit1, stride0, stride1, splits,
    q_token, out_token, scale, empty, scales_ptr, positions_ptr, table_ptr, angles,
    out_desc, part_desc, q_desc,
    HEAD_TILES: gl.constexpr, CUT: gl.constexpr, LONGEST_FIRST: gl.constexpr,
    PLANNED: gl.constexpr, BY_WIDTH: gl.constexpr, ONE_BLOCK: gl.constexpr, COST: gl.constexpr,
    SIZE: gl.constexpr, TWO: gl.constexpr, LENGTH0: gl.constexpr, LENGTH1: gl.constexpr,
    PAGE0: gl.constexpr, PAGE1: gl.constexpr, STEP0: gl.constexpr, STEP1: gl.constexpr,
    SINK: gl.constexpr, Q_HEAD: gl.constexpr, OUT_HEAD: gl.constexpr,
    CONSUMER1_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, ROPE_DIM: gl.constexpr,
    V32: gl.constexpr, CODEC0: gl.constexpr, CODEC1: gl.constexpr,
):  # fmt: skip
    """Attend to the lists of all tokens as the top of the file describes.

    The constants from CUT to ONE_BLOCK are those of ``config.Schedule``. q_token and Q_HEAD count
    int32 words, limit0 and limit1 rows, STEP0 and STEP1 bytes; CODEC0 and CODEC1 are those of
    ``Lists``. The arguments after ``empty``, and ROPE_DIM, are those of ``_gluon_epilogue.Output``.
    The descriptors are None where threads move heads.
    """
    lists = Lists(
        (rows0_ptr, rows1_ptr), (list0_ptr, list1_ptr), (length0_ptr, length1_ptr),
        (width0, width1), (limit0, limit1), (stride0, stride1),
        TWO, LENGTH0, LENGTH1, PAGE0, PAGE1, STEP0, STEP1, CODEC0, CODEC1,
    )  # fmt: skip
    work = work_range(
        lists, T, splits, spans_ptr, HEAD_TILES, CUT, LONGEST_FIRST, PLANNED, BY_WIDTH, ONE_BLOCK,
        COST, SIZE,
    )  # fmt: skip

    HALVES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    q_packed = gl.allocate_shared_memory(gl.int32, [2, HEADS, HALF // 2], WORDS)
    left = gl.allocate_shared_memory(gl.int32, [2, KEYS, HALF // 2], WORDS)
    right = gl.allocate_shared_memory(gl.int32, [2, KEYS, HALF // 2], WORDS)
    q_s = view(q_packed, gl.float16, [2, HEADS, HALF], HALVES)
    q_chunks = view(q_packed, gl.int32, [2 * CHUNKS, HEADS, CHUNK], WORDS)
    k_left = view(left, gl.float16, [2, KEYS, HALF], HALVES)
    k_right = view(right, gl.float16, [2, KEYS, HALF], HALVES)
    TYPE: gl.constexpr = q_ptr.dtype.element_ty
    out = Output(out_ptr, scales_ptr, positions_ptr, table_ptr, angles, ROPE_DIM, TYPE)
    # There is no space for two buffers of P beside V3.2's tails.
    P: gl.constexpr = 1 if V32 else 2
    p_s = gl.allocate_shared_memory(gl.float16, [P, HEADS, KEYS], HALVES)
    if V32:
        q_tail = gl.allocate_shared_memory(gl.int32, [1, HEADS, CHUNK], WORDS)
        tail = gl.allocate_shared_memory(gl.int32, [2, KEYS, CHUNK], WORDS)
        tails = (
            q_tail.index(0),
            view(q_tail, gl.float16, [1, HEADS, 2 * CHUNK], HALVES).index(0),
            view(tail, gl.float16, [2, KEYS, 2 * CHUNK], HALVES),
        )
    else:
        q_tail, tail, tails = None, None, None
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    decay_s = gl.allocate_shared_memory(gl.float32, [2, HEADS], FLAT)
    bias_s = gl.allocate_shared_memory(gl.float32, [2, KEYS], FLAT)
    overflowed = gl.allocate_shared_memory(gl.float32, [HEADS], FLAT)
    B: gl.constexpr = mbarrier.MBarrierLayout()
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], B)
    free = gl.allocate_shared_memory(gl.int64, [2, 1], B)
    p_ready = gl.allocate_shared_memory(gl.int64, [P, 1], B)
    p_free = gl.allocate_shared_memory(gl.int64, [P, 1], B)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], B)
    q_full, q_free = None, None
    if q_desc is None:
        q_free = gl.allocate_shared_memory(gl.int64, [1], B)
        mbarrier.init(q_free, count=1)
    else:
        q_full = gl.allocate_shared_memory(gl.int64, [2, 1], B)
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=2)
        mbarrier.init(free.index(i), count=2)
        if q_desc is not None:
            mbarrier.init(q_full.index(i), count=1)
        if i < P:
            mbarrier.init(p_ready.index(i), count=1)
            mbarrier.init(p_free.index(i), count=1)
    mbarrier.init(q_ready, count=1)
    params = Params(
        q_ptr, out, out_desc, Partials(part_desc, flags_ptr, part_ptr, sums_ptr, spans_ptr),
        q_desc, H, q_token, out_token, lse_ptr, sink_ptr, scale, empty, SINK, Q_HEAD, OUT_HEAD,
    )  # fmt: skip
    shared = Shared(
        q_packed, q_chunks, q_s, k_left, left, k_right, right, p_s, decay_s, overflowed,
        tail, tails, bias_s, Barriers(ready, free, p_ready, p_free, q_ready, q_free, q_full),
    )  # fmt: skip
    gl.warp_specialize(
        [
            (consumer0, (lists, work, params, shared, V32)),
            (consumer1, (lists, work, params, shared, V32)),
            (_producer, (lists, work, shared, 0, V32)),
            (_producer, (lists, work, shared, 32, V32)),
        ],
        [4, 4, 4],
        [CONSUMER1_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
    if any_overflow(overflowed, HEADS):
        bf16_fallback(lists, work, params, q_packed, left, p_s, HEADS, q_tail, tail, V32)

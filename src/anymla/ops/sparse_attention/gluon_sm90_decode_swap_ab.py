"""Decode attention over FP8 rows on Hopper for at most 32 heads: keys are the rows (swap AB).

Grid: at most one CTA an SM; each walks its splits of ``gluon_sm90_tile_scheduler``.

    consumer   S^T = K Q^T, softmax, O^T = V^T P^T    heads are the columns, 16 or 32
    producers  the blocks of a split in turn, so that two blocks are being loaded

A matrix instruction takes 64 rows, which 64 keys or 64 channels fill, however few the heads. The
softmax runs over rows, that is across the warps: the maximum is exchanged once a block through
shared memory, the sums stay with the threads until the split ends.

Barriers: ready[b] producers -> consumer, free[b] consumer -> producers; BUFFERS blocks of 64 rows.
The proxy fence stands on the reading side, as in ``gluon_sm90_decode_m64``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anymla.ops._gluon import view, warpgroup_barrier
from anymla.ops._gluon_epilogue import Output
from anymla.ops.sparse_attention.gluon_sm90_bf16_fallback import any_overflow, bf16_fallback
from anymla.ops.sparse_attention.gluon_sm90_epilogue import (
    LOG2E,
    NO_MAXIMUM,
    SHIFT,
    load_sink,
    store_output,
    store_partial,
)
from anymla.ops.sparse_attention.gluon_sm90_kv_producer import LIFT, NOPE, produce
from anymla.ops.sparse_attention.gluon_sm90_query import HALF, load_query
from anymla.ops.sparse_attention.gluon_sm90_tile_scheduler import (
    COUNTS,
    KEYS,
    Lists,
    gdc_launch_dependents,
    gdc_wait,
    record_begin,
    record_span,
    split_at,
    work_range,
)


@gluon.jit
def _largest(scores, exchange, HEADS: gl.constexpr, ROW: gl.constexpr):
    """Maximum of each column of scores [64, HEADS], of which every warp has 16 rows."""
    inside = gl.max(gl.reshape(scores, [4, 16, HEADS]), 1)
    exchange.store(inside)
    warpgroup_barrier()
    # Every thread reads the four maxima of the columns that it holds.
    STEPS: gl.constexpr = [[0, 1], [1, 0], [2, 0], [0, 8]]
    if HEADS == 32:
        BASES: gl.constexpr = [[0, 1], [1, 0], [2, 0], [0, 8], [0, 16]]
    else:
        BASES: gl.constexpr = STEPS
    L: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=BASES, lane_bases=[[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]],
        warp_bases=[[0, 0], [0, 0]], block_bases=[], shape=[4, HEADS],
    )  # fmt: skip
    return gl.convert_layout(gl.max(exchange.load(L), 0), ROW, assert_trivial=True)


@gluon.jit
def _scores(
    q_s, k_left, k_right, ready, number,
    HEADS: gl.constexpr, BUFFERS: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Wait for the block with this number and start its scores [64, HEADS]."""
    buffer = number % BUFFERS
    mbarrier.wait(ready.index(buffer), (number // BUFFERS) & 1)
    fence_async_shared()
    scores = gl.zeros([KEYS, HEADS], gl.float32, L)
    scores = warpgroup_mma(
        k_left.index(buffer), q_s.index(0).permute((1, 0)), scores, use_acc=False, is_async=True
    )
    return warpgroup_mma(k_right.index(buffer), q_s.index(1).permute((1, 0)), scores, is_async=True)


@gluon.jit
def _weights(
    scores, bias, highest, factor, p_s, exchange, HEADS: gl.constexpr, L: gl.constexpr
):  # fmt: skip
    """Probabilities, also in shared memory, the decay of what was summed before, the maximum."""
    scores = scores + gl.expand_dims(bias.load(gl.SliceLayout(1, L)), 1)
    peak = gl.maximum(highest, _largest(scores, exchange, HEADS, gl.SliceLayout(0, L)))
    decay = gl.expand_dims(gl.exp2((highest - peak) * factor), 0)
    p = gl.exp2(scores * factor - gl.expand_dims(peak * factor - SHIFT, 0))
    p_s.store(p.to(gl.float16))
    fence_async_shared()
    warpgroup_barrier()
    return p, decay, peak


@gluon.jit
def _weigh(k_left, k_right, p_s, left, right):
    """Start adding the block's values, weighed."""
    left = warpgroup_mma(k_left.permute((1, 0)), p_s, left, is_async=True)
    right = warpgroup_mma(k_right.permute((1, 0)), p_s, right, is_async=True)
    return left, right


@gluon.jit
def consumer(
    lists, work, q_ptr, out, lse_ptr, part_ptr, sums_ptr, spans_ptr, flags_ptr, sink_ptr,
    H, q_token, out_token, scale, empty, q_packed, q_s, k_left, k_right, p_s, bias_s,
    exchange, overflowed, ready, free,
    SINK: gl.constexpr, Q_HEAD: gl.constexpr, OUT_HEAD: gl.constexpr, HEADS: gl.constexpr,
    BUFFERS: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup: both products and the softmax."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(0, L)
    factor = scale * (LOG2E / LIFT)
    gdc_wait()
    gdc_launch_dependents()
    record_begin(spans_ptr, work)
    found = gl.zeros([HEADS], gl.float32, COLUMN)
    done = 0
    for k in range(0, work.count):
        token, tile, _, _, _, first, last, whole, slot, number = split_at(k, work, lists)
        load_query(q_ptr, token, tile, H, q_token, q_packed.index(0), HEADS, Q_HEAD, 0, False)
        load_query(q_ptr, token, tile, H, q_token, q_packed.index(1), HEADS, Q_HEAD, 1, True)
        fence_async_shared()
        warpgroup_barrier()
        head = tile * HEADS + gl.arange(0, HEADS, layout=COLUMN)
        sink = load_sink(sink_ptr, head, H, SINK)
        highest = gl.full([HEADS], NO_MAXIMUM, gl.float32, COLUMN)
        total = gl.zeros([KEYS, HEADS], gl.float32, L)
        left = gl.zeros([HALF, HEADS], gl.float32, L)
        right = gl.zeros([HALF, HEADS], gl.float32, L)
        for _ in range(first, last):
            scores = _scores(q_s, k_left, k_right, ready, done, HEADS, BUFFERS, L)
            scores = warpgroup_mma_wait(0, deps=[scores])
            buffer = done % BUFFERS
            p, decay, highest = _weights(
                scores, bias_s.index(buffer), highest, factor, p_s, exchange, HEADS, L
            )
            total = total * decay + p
            left, right = _weigh(
                k_left.index(buffer), k_right.index(buffer), p_s, left * decay, right * decay
            )
            left, right = warpgroup_mma_wait(0, deps=[left, right])
            mbarrier.arrive(free.index(buffer), count=1)
            done += 1
        channel = gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(1, L)), 1)
        # Infinities of the tail do not always reach the sums by themselves.
        tail = gl.where(channel < NOPE - HALF, 0.0, right * 0.0)
        tail = gl.sum(gl.reshape(tail, [HALF // KEYS, KEYS, HEADS]), 0)
        sums = gl.sum(total + gl.convert_layout(tail, L, assert_trivial=True), 0)
        wrong = sums * 0.0
        found += wrong
        gl.store(flags_ptr + number * HEADS + gl.arange(0, HEADS, layout=COLUMN), wrong)
        top = highest * factor - SHIFT
        low = channel < NOPE - HALF
        if not work.SPLIT:
            store_output(
                left, right, low, sums, top, empty, q_packed, out, lse_ptr, sink, token, H,
                tile * HEADS, out_token, OUT_HEAD, HEADS, L,
            )  # fmt: skip
        elif work.PARTLY:
            if whole:
                store_output(
                    left, right, low, sums, top, empty, q_packed, out, lse_ptr, sink, token, H,
                    tile * HEADS, out_token, OUT_HEAD, HEADS, L,
                )  # fmt: skip
            else:
                store_partial(
                    left, right, sums, top, q_packed, part_ptr, sums_ptr, slot, H, HEADS, L
                )
            if not work.TAIL:
                record_span(spans_ptr, token, first, last, token, lists, work)
        else:
            store_partial(left, right, sums, top, q_packed, part_ptr, sums_ptr, slot, H, HEADS, L)
    overflowed.store(found)


@gluon.jit
def _even_blocks(lists, work, left, right, bias, ready, free, BUFFERS: gl.constexpr):
    produce(lists, work, left, right, bias, ready, free, 64, 0, BUFFERS, 0, 2, BETWEEN=True)


@gluon.jit
def _odd_blocks(lists, work, left, right, bias, ready, free, BUFFERS: gl.constexpr):
    produce(lists, work, left, right, bias, ready, free, 64, 0, BUFFERS, 1, 2, BETWEEN=True)


@gluon.jit(do_not_specialize=COUNTS)
def decode_swap_ab_kernel(
    q_ptr, rows0_ptr, rows1_ptr, list0_ptr, list1_ptr, length0_ptr, length1_ptr, sink_ptr,
    out_ptr, lse_ptr, part_ptr, sums_ptr, spans_ptr, flags_ptr,
    T, H, width0, width1, limit0, limit1, stride0, stride1, splits,
    q_token, out_token, scale, empty, scales_ptr, positions_ptr, table_ptr, angles,
    CUT: gl.constexpr, LONGEST_FIRST: gl.constexpr, PLANNED: gl.constexpr,
    BY_WIDTH: gl.constexpr, ONE_BLOCK: gl.constexpr, COST: gl.constexpr, SIZE: gl.constexpr,
    TWO: gl.constexpr, LENGTH0: gl.constexpr, LENGTH1: gl.constexpr,
    PAGE0: gl.constexpr, PAGE1: gl.constexpr, STEP0: gl.constexpr, STEP1: gl.constexpr,
    SINK: gl.constexpr, Q_HEAD: gl.constexpr, OUT_HEAD: gl.constexpr,
    HEADS: gl.constexpr, BUFFERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    ROPE_DIM: gl.constexpr, HEAD_TILES: gl.constexpr,
):  # fmt: skip
    """As ``decode_m64_kernel``; HEADS is 16 or 32, and with HEAD_TILES > 1 work tiles are whole."""
    lists = Lists(
        rows0_ptr, rows1_ptr, list0_ptr, list1_ptr, length0_ptr, length1_ptr, width0, width1,
        limit0, limit1, stride0, stride1, TWO, LENGTH0, LENGTH1, PAGE0, PAGE1, STEP0, STEP1,
    )  # fmt: skip
    work = work_range(
        lists, T, splits, spans_ptr, HEAD_TILES, CUT, LONGEST_FIRST, PLANNED, BY_WIDTH, ONE_BLOCK,
        COST, SIZE,
    )  # fmt: skip

    HALVES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    q_packed = gl.allocate_shared_memory(gl.int32, [2, HEADS, HALF // 2], WORDS)
    left = gl.allocate_shared_memory(gl.int32, [BUFFERS, KEYS, HALF // 2], WORDS)
    right = gl.allocate_shared_memory(gl.int32, [BUFFERS, KEYS, HALF // 2], WORDS)
    q_s = view(q_packed, gl.float16, [2, HEADS, HALF], HALVES)
    TYPE: gl.constexpr = q_ptr.dtype.element_ty
    out = Output(out_ptr, scales_ptr, positions_ptr, table_ptr, angles, ROPE_DIM, TYPE)
    k_left = view(left, gl.float16, [BUFFERS, KEYS, HALF], HALVES)
    k_right = view(right, gl.float16, [BUFFERS, KEYS, HALF], HALVES)
    p_s = gl.allocate_shared_memory(
        gl.float16, [KEYS, HEADS], gl.NVMMASharedLayout(2 * HEADS, 16, rank=2)
    )
    bias_s = gl.allocate_shared_memory(gl.float32, [BUFFERS, KEYS], FLAT)
    exchange = gl.allocate_shared_memory(gl.float32, [4, HEADS], PLAIN)
    overflowed = gl.allocate_shared_memory(gl.float32, [HEADS], FLAT)
    B: gl.constexpr = mbarrier.MBarrierLayout()
    ready = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], B)
    free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], B)
    for i in gl.static_range(BUFFERS):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    gl.warp_specialize(
        [
            (consumer, (
                lists, work, q_ptr, out, lse_ptr, part_ptr, sums_ptr, spans_ptr, flags_ptr,
                sink_ptr, H, q_token, out_token, scale, empty, q_packed, q_s, k_left,
                k_right, p_s, bias_s, exchange, overflowed, ready, free, SINK, Q_HEAD, OUT_HEAD,
                HEADS, BUFFERS,
            )),
            (_even_blocks, (lists, work, left, right, bias_s, ready, free, BUFFERS)),
            (_odd_blocks, (lists, work, left, right, bias_s, ready, free, BUFFERS)),
        ],
        [4, 4],
        [PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
    if any_overflow(overflowed, HEADS):
        bf16_fallback(
            lists, work, q_ptr, out, lse_ptr, part_ptr, sums_ptr, flags_ptr, sink_ptr, H,
            q_token * 2, Q_HEAD * 2, out_token, OUT_HEAD, scale, empty, right, left, q_packed,
            HEADS, SINK,
        )  # fmt: skip

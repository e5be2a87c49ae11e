"""Decode attention over coded rows on Hopper for at most 32 heads: keys are the rows (swap AB).

The grid has at most one CTA per SM; each walks its splits of ``gluon_sm90_tile_scheduler``.

    consumer   S^T = K Q^T, softmax, O^T = V^T P^T    heads are the columns, 16 or 32
    producers  the blocks of a split in turn, so that two blocks are being loaded

A matrix instruction takes 64 rows, which 64 keys or 64 channels fill, however few the heads. The
softmax runs over rows, that is across the warps. The maximum is exchanged once per block through
shared memory, while each thread keeps its own sums until the split ends.

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

from anymla.ops._gluon import aggregate, view, warpgroup_barrier
from anymla.ops._gluon_epilogue import Output
from anymla.ops._gluon_ptx import gdc_launch_dependents, gdc_wait
from anymla.ops.attention.gluon_sm90_bf16_fallback import any_overflow, bf16_fallback
from anymla.ops.attention.gluon_sm90_decode_epilogue import (
    LOG2E,
    NO_MAXIMUM,
    SHIFT,
    Params,
    Partials,
    load_sink,
    store_output,
    store_partial,
)
from anymla.ops.attention.gluon_sm90_decode_kv_producer import LIFT, NOPE, produce
from anymla.ops.attention.gluon_sm90_decode_nvfp4_producer import produce_nvfp4
from anymla.ops.attention.gluon_sm90_decode_query import HALF, load_query
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
class Shared:
    """Shared memory of a CTA.

    Attributes:
        q_packed: int32 [2, HEADS, 128], halves of the queries; then a finished result.
        q: view of ``q_packed`` as float16.
        left: int32 [BUFFERS, 64, 128], channels 0 .. 255 of rows.
        right: int32 [BUFFERS, 64, 128], channels 256 .. 511 of the same rows.
        k_left: view of ``left`` as float16.
        k_right: view of ``right`` as float16.
        p: probabilities of a block, float16 [64, HEADS].
        bias: float32 [BUFFERS, 64], addend to the scores of each row.
        exchange: float32 [4, HEADS], maxima of the four warps.
        overflowed: float32 [HEADS], the sum of all overflow flags.
        ready: barriers of filled buffers, explained at the top of the file.
        free: barriers of emptied buffers, explained at the top of the file.
    """

    q_packed: object
    q: object
    left: object
    right: object
    k_left: object
    k_right: object
    p: object
    bias: object
    exchange: object
    overflowed: object
    ready: object
    free: object

    @gluon.constexpr_function
    def __init__(
        self, q_packed, q, left, right, k_left, k_right, p, bias, exchange, overflowed, ready, free
    ):
        self.q_packed, self.q = q_packed, q
        self.left, self.right, self.k_left, self.k_right = left, right, k_left, k_right
        self.p, self.bias, self.exchange, self.overflowed = p, bias, exchange, overflowed
        self.ready, self.free = ready, free


@gluon.jit
def _largest(scores, exchange, HEADS: gl.constexpr, ROW: gl.constexpr):
    """Return the maximum of each column of scores [64, HEADS], of which every warp has 16 rows."""
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
def _scores(shared, number, HEADS: gl.constexpr, BUFFERS: gl.constexpr, L: gl.constexpr):
    """Wait for the block with this number and start its scores [64, HEADS]."""
    buffer = number % BUFFERS
    mbarrier.wait(shared.ready.index(buffer), (number // BUFFERS) & 1)
    fence_async_shared()
    scores = gl.zeros([KEYS, HEADS], gl.float32, L)
    scores = warpgroup_mma(
        shared.k_left.index(buffer), shared.q.index(0).permute((1, 0)), scores,
        use_acc=False, is_async=True,
    )  # fmt: skip
    return warpgroup_mma(
        shared.k_right.index(buffer), shared.q.index(1).permute((1, 0)), scores, is_async=True
    )


@gluon.jit
def _weights(
    scores, bias, highest, factor, p_s, exchange, HEADS: gl.constexpr, L: gl.constexpr
):  # fmt: skip
    """Return the probabilities, the decay of earlier sums, and the new maximum.

    Probabilities are also stored in shared memory.
    """
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
    """Start adding the block's values, weighed by their probabilities."""
    left = warpgroup_mma(k_left.permute((1, 0)), p_s, left, is_async=True)
    right = warpgroup_mma(k_right.permute((1, 0)), p_s, right, is_async=True)
    return left, right


@gluon.jit
def consumer(lists, work, params, shared, HEADS: gl.constexpr, BUFFERS: gl.constexpr):
    """Run the consumer warpgroup: both products and the softmax."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(0, L)
    factor = params.scale * (LOG2E / LIFT)
    gdc_wait(WARPGROUP=True)
    gdc_launch_dependents(WARPGROUP=True)
    record_begin(params.partials.spans, work)
    found = gl.zeros([HEADS], gl.float32, COLUMN)
    done = 0
    for k in range(0, work.count):
        split = split_at(k, work, lists)
        load_query(params, split, shared.q_packed.index(0), HEADS, 0, False)
        load_query(params, split, shared.q_packed.index(1), HEADS, 1, lists.TAIL)
        fence_async_shared()
        warpgroup_barrier()
        head = split.tile * HEADS + gl.arange(0, HEADS, layout=COLUMN)
        sink = load_sink(params, head)
        highest = gl.full([HEADS], NO_MAXIMUM, gl.float32, COLUMN)
        total = gl.zeros([KEYS, HEADS], gl.float32, L)
        left = gl.zeros([HALF, HEADS], gl.float32, L)
        right = gl.zeros([HALF, HEADS], gl.float32, L)
        for _ in range(split.first, split.last):
            scores = _scores(shared, done, HEADS, BUFFERS, L)
            scores = warpgroup_mma_wait(0, deps=[scores])
            buffer = done % BUFFERS
            p, decay, highest = _weights(
                scores, shared.bias.index(buffer), highest, factor, shared.p, shared.exchange,
                HEADS, L,
            )  # fmt: skip
            total = total * decay + p
            left, right = _weigh(
                shared.k_left.index(buffer), shared.k_right.index(buffer), shared.p,
                left * decay, right * decay,
            )  # fmt: skip
            left, right = warpgroup_mma_wait(0, deps=[left, right])
            mbarrier.arrive(shared.free.index(buffer), count=1)
            done += 1
        channel = gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(1, L)), 1)
        # Infinities of the tail do not always reach the sums by themselves.
        tail = gl.where(channel < NOPE - HALF, 0.0, right * 0.0)
        tail = gl.sum(gl.reshape(tail, [HALF // KEYS, KEYS, HEADS]), 0)
        sums = gl.sum(total + gl.convert_layout(tail, L, assert_trivial=True), 0)
        wrong = sums * 0.0
        found += wrong
        flags = params.partials.flags + split.number * HEADS
        gl.store(flags + gl.arange(0, HEADS, layout=COLUMN), wrong)
        top = highest * factor - SHIFT
        low = channel < (NOPE - HALF if lists.TAIL else HALF)
        packed = shared.q_packed
        TAIL: gl.constexpr = lists.TAIL
        if not work.SPLIT:
            store_output(left, right, low, sums, top, packed, params, sink, split, TAIL, HEADS, L)
        elif work.PARTLY:
            if split.whole:
                store_output(
                    left, right, low, sums, top, packed, params, sink, split, TAIL, HEADS, L
                )
            else:
                store_partial(left, right, sums, top, packed, params, split, TAIL, HEADS, L)
            if not work.TAIL:
                work_tile = split.token * work.HEAD_TILES + split.tile
                record_span(params.partials.spans, work_tile, split, lists, work)
        else:
            store_partial(left, right, sums, top, packed, params, split, TAIL, HEADS, L)
    shared.overflowed.store(found)


@gluon.jit
def _even_blocks(lists, work, shared, BUFFERS: gl.constexpr):
    ready, free = shared.ready, shared.free
    produce(lists, work, shared, ready, free, 64, 0, BUFFERS, 0, 2, BETWEEN=True)


@gluon.jit
def _odd_blocks(lists, work, shared, BUFFERS: gl.constexpr):
    ready, free = shared.ready, shared.free
    produce(lists, work, shared, ready, free, 64, 0, BUFFERS, 1, 2, BETWEEN=True)


@gluon.jit
def _nvfp4_blocks(lists, work, shared, BUFFERS: gl.constexpr):
    produce_nvfp4(lists, work, shared, shared.ready, shared.free, KEYS, 0, BUFFERS, 8, True)


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
    CODEC0: gl.constexpr, CODEC1: gl.constexpr,
):  # fmt: skip
    """Attend to the lists of all tokens; arguments are those of ``decode_m64_kernel``.

    HEADS is 16 or 32.
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
    params = Params(
        q_ptr, out, None, Partials(None, flags_ptr, part_ptr, sums_ptr, spans_ptr), None, H,
        q_token, out_token, lse_ptr, sink_ptr, scale, empty, SINK, Q_HEAD, OUT_HEAD,
    )  # fmt: skip
    shared = Shared(
        q_packed, q_s, left, right, k_left, k_right, p_s, bias_s, exchange, overflowed, ready, free
    )
    if lists.FP4:
        gl.warp_specialize(
            [
                (consumer, (lists, work, params, shared, HEADS, BUFFERS)),
                (_nvfp4_blocks, (lists, work, shared, BUFFERS)),
            ],
            [8],
            [PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (lists, work, params, shared, HEADS, BUFFERS)),
                (_even_blocks, (lists, work, shared, BUFFERS)),
                (_odd_blocks, (lists, work, shared, BUFFERS)),
            ],
            [4, 4],
            [PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )
    if any_overflow(overflowed, HEADS):
        bf16_fallback(lists, work, params, right, left, q_packed, HEADS)

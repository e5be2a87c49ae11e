"""Attention over FP8 rows for at most 32 heads on Hopper: rows of matrices are keys.

Grid: at most one program a multiprocessor; each walks the pieces of ``gluon_sm90_shares``.

    main       S^T = K Q^T, softmax, O^T = V^T P^T    heads are the columns, 16 or 32
    producers  the blocks of a piece in turn, so that two blocks are on their way

A matrix instruction takes 64 rows, which 64 keys or 64 channels fill, however few the heads. The
softmax runs over rows, that is across the warps: the maximum is exchanged once a block through
shared memory, the sums stay with the threads until the piece ends.

Barriers: ready[b] producers -> main, free[b] main -> producers; BUFFERS blocks of 64 rows. The
proxy fence stands on the reading side, as in ``gluon_sm90_tiles``.
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

from anymla.ops._build import Build
from anymla.ops._gluon import view, warpgroup_barrier
from anymla.ops._gluon_epilogue import Output
from anymla.ops.device import Target
from anymla.ops.sparse_attention.gluon_sm90_column_ends import HALF, finish, leave
from anymla.ops.sparse_attention.gluon_sm90_gather import LIFT, produce
from anymla.ops.sparse_attention.gluon_sm90_lists import (
    ARGUMENT_TYPES,
    BUILT,
    COUNTS,
    KEYS,
    NOPE,
    Lists,
)
from anymla.ops.sparse_attention.gluon_sm90_query import load_query
from anymla.ops.sparse_attention.gluon_sm90_rescan import any_marked, rescan
from anymla.ops.sparse_attention.gluon_sm90_shares import piece, share_of
from anymla.ops.sparse_attention.gluon_sm90_softmax import (
    LOG2E,
    NO_MAXIMUM,
    SHIFT,
    dependents_may_start,
    load_sink,
    predecessors_done,
    record_cut,
    record_span,
)

# Around the loop, with 32 heads; none in it.
_SPILLS = 280
_FOUR = {"ROPE_DIM": 64, "TILES": 4}


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
def _ask(
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
def main_part(
    lists, share, q_ptr, out, lse_ptr, part_ptr, sums_ptr, spans_ptr, marks_ptr, sink_ptr,
    H, q_token, out_token, scale, empty, q_words, q_s, k_left, k_right, p_s, bias_s,
    exchange, noticed, ready, free,
    SINK: gl.constexpr, Q_HEAD: gl.constexpr, OUT_HEAD: gl.constexpr, HEADS: gl.constexpr,
    BUFFERS: gl.constexpr,
):  # fmt: skip
    """The warpgroup of both products and of the softmax."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(0, L)
    factor = scale * (LOG2E / LIFT)
    predecessors_done()
    dependents_may_start()
    record_cut(spans_ptr, share)
    found = gl.zeros([HEADS], gl.float32, COLUMN)
    done = 0
    for k in range(0, share.count):
        token, tile, _, _, _, first, last, direct, slot, mark = piece(k, share, lists)
        load_query(q_ptr, token, tile, H, q_token, q_words.index(0), HEADS, Q_HEAD, 0, False)
        load_query(q_ptr, token, tile, H, q_token, q_words.index(1), HEADS, Q_HEAD, 1, True)
        fence_async_shared()
        warpgroup_barrier()
        head = tile * HEADS + gl.arange(0, HEADS, layout=COLUMN)
        sink = load_sink(sink_ptr, head, H, SINK)
        highest = gl.full([HEADS], NO_MAXIMUM, gl.float32, COLUMN)
        total = gl.zeros([KEYS, HEADS], gl.float32, L)
        left = gl.zeros([HALF, HEADS], gl.float32, L)
        right = gl.zeros([HALF, HEADS], gl.float32, L)
        for _ in range(first, last):
            scores = _ask(q_s, k_left, k_right, ready, done, HEADS, BUFFERS, L)
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
        gl.store(marks_ptr + mark * HEADS + gl.arange(0, HEADS, layout=COLUMN), wrong)
        top = highest * factor - SHIFT
        low = channel < NOPE - HALF
        if not share.SPLIT:
            finish(
                left, right, low, sums, top, empty, q_words, out, lse_ptr, sink, token, H,
                tile * HEADS, out_token, OUT_HEAD, HEADS, L,
            )  # fmt: skip
        elif share.STREAM:
            if direct:
                finish(
                    left, right, low, sums, top, empty, q_words, out, lse_ptr, sink, token, H,
                    tile * HEADS, out_token, OUT_HEAD, HEADS, L,
                )  # fmt: skip
            else:
                leave(left, right, sums, top, q_words, part_ptr, sums_ptr, slot, H, HEADS, L)
            if not share.MIXED:
                record_span(spans_ptr, token, first, last, token, lists, share)
        else:
            leave(left, right, sums, top, q_words, part_ptr, sums_ptr, slot, H, HEADS, L)
    noticed.store(found)


@gluon.jit
def _even_blocks(lists, share, left, right, bias, ready, free, BUFFERS: gl.constexpr):
    produce(lists, share, left, right, bias, ready, free, 64, 0, BUFFERS, 0, 2, PDL=True)


@gluon.jit
def _odd_blocks(lists, share, left, right, bias, ready, free, BUFFERS: gl.constexpr):
    produce(lists, share, left, right, bias, ready, free, 64, 0, BUFFERS, 1, 2, PDL=True)


@gluon.jit(do_not_specialize=COUNTS)
def columns_kernel(
    q_ptr, rows0_ptr, rows1_ptr, list0_ptr, list1_ptr, length0_ptr, length1_ptr, sink_ptr,
    out_ptr, lse_ptr, part_ptr, sums_ptr, spans_ptr, marks_ptr,
    T, H, width0, width1, limit0, limit1, stride0, stride1, splits,
    q_token, out_token, scale, empty, scales_ptr, positions_ptr, table_ptr, angles,
    SPLIT: gl.constexpr, STREAM: gl.constexpr, COST: gl.constexpr, SIZE: gl.constexpr,
    TWO: gl.constexpr, LENGTH0: gl.constexpr, LENGTH1: gl.constexpr,
    PAGE0: gl.constexpr, PAGE1: gl.constexpr, STEP0: gl.constexpr, STEP1: gl.constexpr,
    SINK: gl.constexpr, Q_HEAD: gl.constexpr, OUT_HEAD: gl.constexpr,
    HEADS: gl.constexpr, BUFFERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    ROPE_DIM: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """As ``tiles_kernel``; HEADS is 16 or 32, and with TILES > 1 tasks are whole."""
    lists = Lists(
        rows0_ptr, rows1_ptr, list0_ptr, list1_ptr, length0_ptr, length1_ptr, width0, width1,
        limit0, limit1, stride0, stride1, TWO, LENGTH0, LENGTH1, PAGE0, PAGE1, STEP0, STEP1,
    )  # fmt: skip
    share = share_of(lists, T, splits, spans_ptr, TILES, SPLIT, STREAM, COST, SIZE)

    HALVES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    q_words = gl.allocate_shared_memory(gl.int32, [2, HEADS, HALF // 2], WORDS)
    left = gl.allocate_shared_memory(gl.int32, [BUFFERS, KEYS, HALF // 2], WORDS)
    right = gl.allocate_shared_memory(gl.int32, [BUFFERS, KEYS, HALF // 2], WORDS)
    q_s = view(q_words, gl.float16, [2, HEADS, HALF], HALVES)
    TYPE: gl.constexpr = q_ptr.dtype.element_ty
    out = Output(out_ptr, scales_ptr, positions_ptr, table_ptr, angles, ROPE_DIM, TYPE)
    k_left = view(left, gl.float16, [BUFFERS, KEYS, HALF], HALVES)
    k_right = view(right, gl.float16, [BUFFERS, KEYS, HALF], HALVES)
    p_s = gl.allocate_shared_memory(
        gl.float16, [KEYS, HEADS], gl.NVMMASharedLayout(2 * HEADS, 16, rank=2)
    )
    bias_s = gl.allocate_shared_memory(gl.float32, [BUFFERS, KEYS], FLAT)
    exchange = gl.allocate_shared_memory(gl.float32, [4, HEADS], PLAIN)
    noticed = gl.allocate_shared_memory(gl.float32, [HEADS], FLAT)
    B: gl.constexpr = mbarrier.MBarrierLayout()
    ready = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], B)
    free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], B)
    for i in gl.static_range(BUFFERS):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    gl.warp_specialize(
        [
            (main_part, (
                lists, share, q_ptr, out, lse_ptr, part_ptr, sums_ptr, spans_ptr, marks_ptr,
                sink_ptr, H, q_token, out_token, scale, empty, q_words, q_s, k_left,
                k_right, p_s, bias_s, exchange, noticed, ready, free, SINK, Q_HEAD, OUT_HEAD,
                HEADS, BUFFERS,
            )),
            (_even_blocks, (lists, share, left, right, bias_s, ready, free, BUFFERS)),
            (_odd_blocks, (lists, share, left, right, bias_s, ready, free, BUFFERS)),
        ],
        [4, 4],
        [PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
    if any_marked(noticed, HEADS):
        rescan(
            lists, share, q_ptr, out, lse_ptr, part_ptr, sums_ptr, marks_ptr, sink_ptr, H,
            q_token * 2, Q_HEAD * 2, out_token, OUT_HEAD, scale, empty, right, left, q_words, HEADS,
            SINK,
        )  # fmt: skip


def builds(target: Target) -> Iterator[Build]:
    """Both sizes, and every way of handing out pieces."""
    if target.name != "sm_90":
        return
    for heads, buffers in ((16, 3), (32, 2)):
        for way in ({}, {"SPLIT": True}, {"SPLIT": True, "STREAM": True}, {"ROPE_DIM": 64}, _FOUR):
            if way is _FOUR and heads > 16:
                continue
            form = {"HEADS": heads, "BUFFERS": buffers, "PRODUCER_REGISTERS": 136, "TILES": 1}
            yield Build(
                f"{heads} heads {' '.join(way)}".strip(),
                columns_kernel,
                ARGUMENT_TYPES | ({"out_ptr": "*i16"} if "ROPE_DIM" in way else {}),
                form | BUILT | way,
                divisible=("q_token", "out_token"),
                matrix=True,
                spills=_SPILLS,
            )

"""The two warpgroups of ``gluon_sm90_tiles`` that compute.

WIDE is for V3.2's rows: keys and queries have a third part, the tail, that only scores read,
and all channels of the halves are alike.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anymla.ops._gluon import opaque, warpgroup_barrier
from anymla.ops._gluon_epilogue import prefetch_angles
from anymla.ops.sparse_attention.gluon_sm90_asking import call, clear, come, give_back, load
from anymla.ops.sparse_attention.gluon_sm90_ends import (
    HALF,
    HEADS,
    send,
    sent,
    stage,
    store_lse,
    store_sums,
    unlift,
)
from anymla.ops.sparse_attention.gluon_sm90_gather import LIFT
from anymla.ops.sparse_attention.gluon_sm90_lists import KEYS, NOPE
from anymla.ops.sparse_attention.gluon_sm90_query import load_tail
from anymla.ops.sparse_attention.gluon_sm90_shares import piece
from anymla.ops.sparse_attention.gluon_sm90_softmax import (
    LOG2E,
    NO_MAXIMUM,
    SHIFT,
    bottom_of,
    dependents_may_start,
    load_sink,
    predecessors_done,
    record_cut,
    record_span,
)


@gluon.jit
def right_part(
    lists, share, q_ptr, out, copies, marks_ptr, H, q_token, out_token, q_words, q_chunks,
    k_right, words, p_s, decay_s, noticed, free, p_ready, p_free, q_ready, q_free, q_here,
    Q_HEAD: gl.constexpr, OUT_HEAD: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """The warpgroup of P V, channels 256 .. 511."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    R: gl.constexpr = gl.SliceLayout(1, L)
    COPIED: gl.constexpr = copies[2] is not None
    HALVES: gl.constexpr = q_ptr.dtype.element_ty == gl.float16
    predecessors_done()
    P: gl.constexpr = 1 if WIDE else 2
    done = 0
    handed = 0
    found = gl.zeros([HEADS], gl.float32, R)
    for k in range(0, share.count):
        token, tile, _, _, _, first, last, direct, slot, mark = piece(k, share, lists)
        if COPIED:
            come(q_chunks, q_here, k, HALVES, 1, not WIDE)
        else:
            mbarrier.wait(q_free, (k & 1) ^ 1)
            load(q_ptr, token, tile, H, q_token, q_words, q_chunks, share, Q_HEAD, 1, not WIDE)
        fence_async_shared()
        mbarrier.arrive(q_ready, count=1)
        angles = out.table
        if out.ROPE_DIM > 0:
            angles = prefetch_angles(out, token)
        acc = gl.zeros([HEADS, HALF], gl.float32, L)
        count = last - first
        for block in range(0, count):
            buffer = done % 2
            s = handed % P
            mbarrier.wait(p_ready.index(s), (handed // P) & 1)
            fence_async_shared()
            if not share.SINGLE:
                acc = acc * gl.expand_dims(decay_s.index(s).load(R), 1)
            acc = warpgroup_mma(
                p_s.index(s), k_right.index(buffer), acc, use_acc=not share.SINGLE, is_async=True
            )
            acc = warpgroup_mma_wait(0, deps=[acc])
            if block + 1 < count:
                mbarrier.arrive(free.index(buffer), count=1)
            mbarrier.arrive(p_free.index(s), count=1)
            done += 1
            handed += 1
        s = handed % P
        mbarrier.wait(p_ready.index(s), (handed // P) & 1)
        factor = decay_s.index(s).load(R)
        mbarrier.arrive(p_free.index(s), count=1)
        handed += 1
        column = gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(0, L)), 0)
        # NaN of the sums is in all channels; infinities of the tail do not always reach the sums.
        wrong = gl.sum(gl.where(column < NOPE - HALF, 0.0, acc * 0.0), 1)
        found += wrong
        gl.store(marks_ptr + mark * HEADS + gl.arange(0, HEADS, layout=R), wrong)
        low = gl.expand_dims(factor * unlift(direct, share), 1)
        if WIDE:
            y = acc * low
        else:
            y = acc * gl.where(column < NOPE - HALF, low, gl.expand_dims(factor, 1))
        last_buffer = (done + 1) % 2
        stage(y, words, last_buffer, out, share, direct, not WIDE)
        send(
            words, last_buffer, free, out, angles, copies, share, direct, slot, token, tile, H,
            out_token, OUT_HEAD, 1,
        )  # fmt: skip
    noticed.store(found)
    sent()


@gluon.jit
def main_part(
    lists, share, q_ptr, out, copies, lse_ptr, sums_ptr, spans_ptr, sink_ptr,
    H, q_token, out_token, scale, empty, q_words, q_chunks, q_s, k_left, k_right, tails, words,
    p_s, decay_s, bias_s, ready, free, p_ready, p_free, q_ready, q_free, q_here,
    SINK: gl.constexpr, Q_HEAD: gl.constexpr, OUT_HEAD: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """The warpgroup of Q K, the softmax, and P V of channels 0 .. 255."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=L, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    R: gl.constexpr = gl.SliceLayout(1, L)
    factor = scale * (LOG2E / LIFT)
    predecessors_done()
    # Not before, so that what was launched two kernels ago has ended when a kernel starts.
    dependents_may_start()
    record_cut(spans_ptr, share)
    TYPE: gl.constexpr = q_ptr.dtype.element_ty
    COPIED: gl.constexpr = copies[2] is not None
    HALVES: gl.constexpr = q_ptr.dtype.element_ty == gl.float16
    P: gl.constexpr = 1 if WIDE else 2
    done = 0
    handed = 0
    for k in range(0, share.count):
        token, tile, _, _, _, first, last, direct, slot, _ = piece(k, share, lists)
        if COPIED:
            if k == 0:
                clear(q_words, copies[2])
                call(share.count > 0, copies[2], token, tile, H, q_words, q_here, TYPE)
            come(q_chunks, q_here, k, HALVES, 0, False)
        else:
            load(q_ptr, token, tile, H, q_token, q_words, q_chunks, share, Q_HEAD, 0, False)
        if WIDE:
            load_tail(q_ptr, token, tile, H, q_token, tails[0], HEADS, Q_HEAD)
        fence_async_shared()
        warpgroup_barrier()  # here, or the compiler puts one into the loop
        head = tile * HEADS + gl.arange(0, HEADS, layout=ROW)
        sink = load_sink(sink_ptr, head, H, SINK)
        mbarrier.wait(q_ready, k & 1)
        acc = gl.zeros([HEADS, HALF], gl.float32, L)
        highest = gl.full([HEADS], NO_MAXIMUM, gl.float32, ROW)
        sums = gl.zeros([HEADS], gl.float32, ROW)
        count = last - first
        for block in range(0, count):
            buffer = done % 2
            s = handed % P
            mbarrier.wait(ready.index(buffer), (done // 2) & 1)
            fence_async_shared()
            scores = gl.zeros([HEADS, KEYS], gl.float32, S)
            bias = bias_s.index(buffer).load(gl.SliceLayout(0, S))
            if WIDE:
                scores = warpgroup_mma(
                    tails[1], tails[2].index(buffer).permute((1, 0)), scores,
                    use_acc=False, is_async=True,
                )  # fmt: skip
            scores = warpgroup_mma(
                q_s.index(0), k_left.index(buffer).permute((1, 0)), scores,
                use_acc=WIDE, is_async=True,
            )  # fmt: skip
            scores = warpgroup_mma(
                q_s.index(1), k_right.index(buffer).permute((1, 0)), scores, is_async=True
            )
            scores = warpgroup_mma_wait(0, deps=[scores])
            if not COPIED:
                give_back(q_free, block + 1 == count)
            scores = scores + gl.expand_dims(bias, 0)
            peak = gl.maximum(highest, gl.max(scores, 1))
            decay = gl.exp2((highest - peak) * factor)
            p = gl.exp2(scores * factor - gl.expand_dims(peak * factor - SHIFT, 1))
            sums = sums * decay + gl.sum(p, 1)
            highest = peak
            p = p.to(gl.float16)
            mbarrier.wait(p_free.index(s), ((handed // P) & 1) ^ 1)
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
            if block + 1 < count:
                mbarrier.arrive(free.index(buffer), count=1)
            done += 1
            handed += 1
        if COPIED:
            ahead, ahead_tile, _, _, _, _, _, _, _, _ = piece(
                gl.minimum(k + 1, share.count - 1), share, lists
            )
            more = k + 1 < share.count
            call(more, copies[2], ahead, ahead_tile, H, q_words, q_here, TYPE)
        head = tile * HEADS + gl.arange(0, HEADS, layout=ROW) + opaque(tile * 0)
        top = highest * factor - SHIFT
        bottom = sums
        if not share.SPLIT or share.STREAM:
            bottom = bottom_of(sums, top, sink)
            if share.SPLIT:
                bottom = gl.where(direct, bottom, sums)
        scaled = gl.where(sums > 0, 1.0 / bottom, 0.0)
        s = handed % P
        mbarrier.wait(p_free.index(s), ((handed // P) & 1) ^ 1)
        decay_s.index(s).store(scaled)
        mbarrier.arrive(p_ready.index(s), count=1)
        handed += 1
        y = acc * gl.expand_dims(gl.convert_layout(scaled, R) * unlift(direct, share), 1)
        last_buffer = (done + 1) % 2
        stage(y, words, last_buffer, out, share, direct, False)
        send(
            words, last_buffer, free, out, out.table, copies, share, direct, slot, token, tile, H,
            out_token, OUT_HEAD, 0,
        )  # fmt: skip
        if not share.SPLIT:
            store_lse(lse_ptr, token, head, H, sums, top, empty)
        elif share.STREAM:
            if direct:
                store_lse(lse_ptr, token, head, H, sums, top, empty)
            else:
                store_sums(sums_ptr, slot, head, tile, H, top, sums)
            if not share.MIXED:
                task = token * share.TILES + tile
                record_span(spans_ptr, task, first, last, token, lists, share)
        else:
            store_sums(sums_ptr, slot, head, tile, H, top, sums)
    sent()

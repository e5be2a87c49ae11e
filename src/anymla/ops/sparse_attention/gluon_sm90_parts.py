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

from anymla.ops.sparse_attention.gluon_sm90_ends import (
    HALF,
    HEADS,
    finish_main,
    finish_right,
    leave_main,
    leave_right,
)
from anymla.ops.sparse_attention.gluon_sm90_gather import LIFT
from anymla.ops.sparse_attention.gluon_sm90_lists import KEYS, NOPE, anew
from anymla.ops.sparse_attention.gluon_sm90_query import (
    CHUNKS,
    fetch_query,
    load_query,
    load_tail,
)
from anymla.ops.sparse_attention.gluon_sm90_shares import piece
from anymla.ops.sparse_attention.gluon_sm90_softmax import (
    LOG2E,
    NO_MAXIMUM,
    SHIFT,
    bottom_of,
    load_sink,
    record_cut,
    record_span,
    warps_meet,
)
from anymla.ops.sparse_attention.gluon_sm90_turned import ask_for_angles


@gluon.jit
def right_part(
    lists, share, q_ptr, out, part_ptr, marks_ptr, H, q_token, out_token, q_words, q_chunks,
    k_right, stage, chunks, p_s, decay_s, noticed, free, p_ready, p_free, q_ready, q_free,
    Q_HEAD: gl.constexpr, OUT_HEAD: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """The warpgroup of P V, channels 256 .. 511."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    R: gl.constexpr = gl.SliceLayout(1, L)
    P: gl.constexpr = 1 if WIDE else 2
    done = 0
    handed = 0
    found = gl.zeros([HEADS], gl.float32, R)
    for k in range(0, share.count):
        token, tile, _, _, _, first, last, direct, slot, mark = piece(k, share, lists)
        mbarrier.wait(q_free, (k & 1) ^ 1)
        if share.SPLIT and not share.STREAM:
            load_query(q_ptr, token, tile, H, q_token, q_words.index(1), HEADS, Q_HEAD, 1, not WIDE)
        else:
            fetch_query(
                q_ptr, token, tile, H, q_token, q_chunks, HEADS, Q_HEAD, CHUNKS, CHUNKS, not WIDE
            )
        fence_async_shared()
        mbarrier.arrive(q_ready, count=1)
        angles = out.table
        if out.TURNED > 0:
            angles = ask_for_angles(out, token)
        acc = gl.zeros([HEADS, HALF], gl.float32, L)
        for block in range(first, last):
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
            if block + 1 < last:
                mbarrier.arrive(free.index(buffer), count=1)
            mbarrier.arrive(p_free.index(s), count=1)
            done += 1
            handed += 1
        if share.SPLIT and not share.STREAM:
            factor = gl.full([HEADS], 1.0, gl.float32, R)
        else:
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
        low = gl.expand_dims(factor * (1.0 / LIFT), 1)
        if WIDE:
            y = acc * low
        else:
            y = acc * gl.where(column < NOPE - HALF, low, gl.expand_dims(factor, 1))
        buffer = (done + 1) % 2
        if not share.SPLIT:
            finish_right(
                y, stage, chunks, buffer, free, out, angles, token, tile, H, out_token, OUT_HEAD,
                not WIDE,
            )  # fmt: skip
        elif share.STREAM:
            if direct:
                finish_right(
                    y, stage, chunks, buffer, free, out, angles, token, tile, H, out_token,
                    OUT_HEAD, not WIDE,
                )  # fmt: skip
            else:
                leave_right(y, free.index(buffer), part_ptr, slot, tile, H, L, not WIDE)
        else:
            leave_right(y, free.index(buffer), part_ptr, slot, tile, H, L, not WIDE)
    noticed.store(found)


@gluon.jit
def main_part(
    lists, share, q_ptr, out, lse_ptr, part_ptr, sums_ptr, spans_ptr, sink_ptr,
    H, q_token, out_token, scale, empty, q_words, q_chunks, q_s, k_left, k_right, tails, stage,
    chunks, p_s, decay_s, bias_s, ready, free, p_ready, p_free, q_ready, q_free,
    SINK: gl.constexpr, Q_HEAD: gl.constexpr, OUT_HEAD: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """The warpgroup of Q K, the softmax, and P V of channels 0 .. 255."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=L, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    R: gl.constexpr = gl.SliceLayout(1, L)
    factor = scale * (LOG2E / LIFT)
    record_cut(spans_ptr, share)
    P: gl.constexpr = 1 if WIDE else 2
    done = 0
    handed = 0
    for k in range(0, share.count):
        token, tile, _, _, _, first, last, direct, slot, _ = piece(k, share, lists)
        if share.SPLIT and not share.STREAM:
            load_query(q_ptr, token, tile, H, q_token, q_words.index(0), HEADS, Q_HEAD, 0, False)
        else:
            fetch_query(q_ptr, token, tile, H, q_token, q_chunks, HEADS, Q_HEAD, 0, CHUNKS, False)
        if WIDE:
            load_tail(q_ptr, token, tile, H, q_token, tails[0], HEADS, Q_HEAD)
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
            if block + 1 == last:
                mbarrier.arrive(q_free, count=1)
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
            s = handed % P
            mbarrier.wait(p_free.index(s), ((handed // P) & 1) ^ 1)
            decay_s.index(s).store(scaled)
            mbarrier.arrive(p_ready.index(s), count=1)
            handed += 1
        y = acc * gl.expand_dims(gl.convert_layout(scaled, R) * (1.0 / LIFT), 1)
        buffer = (done + 1) % 2
        if not share.SPLIT:
            finish_main(
                y, sums, top, empty, stage, chunks, buffer, free, out, lse_ptr,
                token, tile, head, H, out_token, OUT_HEAD,
            )  # fmt: skip
        elif share.STREAM:
            if direct:
                finish_main(
                    y, sums, top, empty, stage, chunks, buffer, free, out, lse_ptr,
                    token, tile, head, H, out_token, OUT_HEAD,
                )  # fmt: skip
            else:
                leave_main(
                    y, sums, top, free.index(buffer), part_ptr, sums_ptr, slot, tile, head, H, L
                )
            if not share.MIXED:
                record_span(spans_ptr, token * share.TILES + tile, first, last, token, lists, share)
        else:
            leave_main(y, sums, top, free.index(buffer), part_ptr, sums_ptr, slot, tile, head, H, L)

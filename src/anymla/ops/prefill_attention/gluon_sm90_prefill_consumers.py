"""The two warpgroups of the prefill kernel that multiply.

left      S = Q K^T, softmax, O[:, :256] += P K[:, :256]
right     O[:, 256:] += P K[:, 256:]
"""

# mypy: ignore-errors
# ruff: noqa: SIM102, SIM113
# Device code is not ordinary Python: no enumerate, and constants decide on a branch alone.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anymla.ops.prefill_attention.gluon_sm90_prefill_counts import get
from anymla.ops.prefill_attention.gluon_sm90_prefill_ends import (
    angles_of,
    store_half,
    store_half_quantised,
)
from anymla.ops.prefill_attention.gluon_sm90_prefill_softmax import rescale, scores, softmax
from anymla.ops.prefill_attention.gluon_sm90_prefill_words import (
    FREE_L,
    FREE_R,
    GO,
    LAST,
    P_RDY,
    Q_FREE,
    arrive,
    wait,
)

# Triton 3.9 renamed it.
_store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

_LOG2E = gl.constexpr(1.4426950408889634)
_LN2 = gl.constexpr(0.6931471805599453)
# Above every masked score, so that a block without rows weighs nothing.
_LOWEST = gl.constexpr(-1e29)


@gluon.jit
def left(
    sink,
    to,
    shared,
    scale,
    empty,
    tasks,
    heads,
    HEAD_BLOCKS: gl.constexpr,
    LISTED: gl.constexpr,
    SINK: gl.constexpr,
    WHOLE: gl.constexpr,
    QUANTISED: gl.constexpr,
    TURNED: gl.constexpr,
    COPIED: gl.constexpr,
    LATE: gl.constexpr,
    PEAKS: gl.constexpr,
):
    """Scores, softmax and the left half of the values."""
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    AL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    SR: gl.constexpr = gl.SliceLayout(1, SL)
    AR: gl.constexpr = gl.SliceLayout(1, AL)
    DT: gl.constexpr = shared.p.dtype
    r = gl.arange(0, 64, layout=SR)
    done = 0
    number = 0
    for task in range(gl.program_id(0), tasks, gl.num_programs(0)):
        token = task // HEAD_BLOCKS
        head = (task % HEAD_BLOCKS) * 64
        if SINK:
            logit = gl.load(sink + head + r, mask=head + r < heads, other=0.0) * _LOG2E
        mbarrier.wait(shared.q_rdy.index(0), number & 1)
        blocks = get(shared.blocks.index(number % 2))
        acc = gl.zeros([64, 256], gl.float32, AL)
        m = gl.full([64], _LOWEST, gl.float32, SR)
        peak = m
        b = done % 2
        phase = (done // 2) & 1
        S, masked = scores(shared, number, b, phase, SL, LISTED, True)
        if COPIED:
            if number > 0:
                tma.store_wait(0)
                arrive(shared.words, FREE_L + 1 - b)
        S = warpgroup_mma_wait(0, deps=[S])
        P, past, m, peak, sums, acc = softmax(
            S, m, peak, m, acc, masked, shared, b, scale, SL, AL, True, LATE, PEAKS
        )
        Ph = P.to(DT)
        for i in range(1, blocks):
            b = done % 2
            phase = ((done + 1) // 2) & 1
            acc = warpgroup_mma(gl.convert_layout(Ph, PL), shared.k_l.index(b), acc, is_async=True)
            shared.p.index(b).store(Ph)
            shared.past.index(b).store(past)
            arrive(shared.words, P_RDY + b)
            S, masked = scores(
                shared,
                number,
                1 - b,
                phase,
                SL,
                LISTED,
                False,
            )
            acc, S = warpgroup_mma_wait(2, deps=[acc, S])
            arrive(shared.words, FREE_L + b)
            S = warpgroup_mma_wait(1, deps=[S])
            if i + 1 == blocks:
                arrive(shared.words, Q_FREE)
            S = warpgroup_mma_wait(0, deps=[S])
            # The right half of the previous block runs during this block's softmax.
            arrive(shared.words, GO + b)
            done += 1
            b = done % 2
            if i + 1 == blocks:
                arrive(shared.words, Q_FREE + 1)
            P, past, m, peak, sums, acc = softmax(
                S, m, peak, sums, acc, masked, shared, b, scale, SL, AL, False, LATE, PEAKS
            )
            Ph = P.to(DT)
        b = done % 2
        arrive(shared.words, GO + b)
        acc = warpgroup_mma(gl.convert_layout(Ph, PL), shared.k_l.index(b), acc, is_async=True)
        shared.p.index(b).store(Ph)
        shared.past.index(b).store(past)
        arrive(shared.words, P_RDY + b)
        sums = gl.convert_layout(gl.sum(sums, 1), SR)
        total = sums
        if SINK:
            total = sums + gl.exp2(logit - m * scale)
        factor = gl.where(total > 0, 1.0 / total, 0.0)
        shared.factor.index(number % 2).store(factor)
        arrive(shared.words, LAST + number % 2)
        natural = (m * scale + gl.log2(sums)) * _LN2
        natural = gl.where(sums == 0, empty, natural)
        at = token.to(gl.int64) * heads + head + r
        gl.store(to.lse + at, natural, mask=head + r < heads)
        if PEAKS:
            peak = gl.where(sums == 0, float("-inf"), peak * scale * _LN2)
            gl.store(to.peaks + at, peak, mask=head + r < heads)
        acc = warpgroup_mma_wait(0, deps=[acc])
        if not COPIED:
            arrive(shared.words, FREE_L + b)
        done += 1
        acc = acc * gl.expand_dims(gl.convert_layout(factor, AR), 1)
        if COPIED:
            # The output leaves through the buffer of the last block, which is freed when the next
            # task's first product is under way.
            shared.k_l.index(b).store(acc.to(DT))
            fence_async_shared()
            _store_tile(to.desc, [token * heads + head, 0], shared.k_l.index(b))
        elif QUANTISED:
            store_half_quantised(
                acc, to.out, to.scales, to.scales, token * heads + head, heads - head, 0, TURNED
            )
        else:
            store_half(acc, to.out, token * heads + head, heads - head, 0, WHOLE)
        number += 1
    if COPIED:
        tma.store_wait(0)


@gluon.jit
def right(
    to,
    shared,
    tasks,
    heads,
    HEAD_BLOCKS: gl.constexpr,
    WHOLE: gl.constexpr,
    QUANTISED: gl.constexpr,
    TURNED: gl.constexpr,
    COPIED: gl.constexpr,
):
    """The right half of the values."""
    AL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    AR: gl.constexpr = gl.SliceLayout(1, AL)
    done = 0
    number = 0
    for task in range(gl.program_id(0), tasks, gl.num_programs(0)):
        token = task // HEAD_BLOCKS
        head = (task % HEAD_BLOCKS) * 64
        acc = gl.zeros([64, 256], gl.float32, AL)
        wait(shared.words, P_RDY + done % 2, (done // 2) & 1)
        # Read here, not carried from task to task: Triton 3.6 freezes a value that a loop carries
        # for the bound of an inner loop alone.
        blocks = get(shared.blocks.index(number % 2))
        for i in range(blocks):
            b = done % 2
            phase = (done // 2) & 1
            wait(shared.words, P_RDY + b, phase)
            P = shared.p.index(b).load(PL)
            acc = rescale(acc, shared.past.index(b).load(AR))
            wait(shared.words, GO + b, phase)
            acc = warpgroup_mma(P, shared.k_r.index(b), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            if COPIED:
                if i + 1 < blocks:
                    arrive(shared.words, FREE_R + b)
            else:
                arrive(shared.words, FREE_R + b)
            done += 1
        wait(shared.words, LAST + number % 2, (number // 2) & 1)
        factor = shared.factor.index(number % 2).load(AR)
        acc = acc * gl.expand_dims(factor, 1)
        if COPIED:
            b = (done - 1) % 2
            shared.k_r.index(b).store(acc.to(shared.k_r.dtype))
            fence_async_shared()
            _store_tile(to.desc, [token * heads + head, 256], shared.k_r.index(b))
            tma.store_wait(0)
            arrive(shared.words, FREE_R + b)
        elif QUANTISED:
            angles = angles_of(to, token, TURNED)
            store_half_quantised(
                acc, to.out, to.scales, angles, token * heads + head, heads - head, 1, TURNED
            )
        else:
            store_half(acc, to.out, token * heads + head, heads - head, 256, WHOLE)
        number += 1

"""Prefill attention on Hopper: the persistent kernel, its two consumer warpgroups, the softmax.

64 heads of one query attend to tiles of 64 rows. The grid has one CTA per SM. CTA p takes work
tiles p, p + CTAs, ...; a work tile is a query and a block of 64 heads. Three warpgroups share it:

    producer    Q, then every tile of rows: whole ones by TMA, the rest row by row with cp.async
    consumer0   S = Q K^T, softmax, O[:, :256] += P K[:, :256]
    consumer1   O[:, 256:] += P K[:, 256:]

    K buffers (2)  | rows x channels 0..255 | rows x channels 256..511 |   each with mbarriers

docs/performance/prefill.md explains the barriers.
"""

# mypy: ignore-errors
# ruff: noqa: SIM102, SIM108, SIM113
# Device code is not ordinary Python: it has no enumerate, and a branch may depend on constants
# alone.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anymla.ops._gluon_ptx import mul_f32_unless_one
from anymla.ops.attention.gluon_sm90_prefill_epilogue import (
    Results,
    angles_of,
    store_half,
    store_half_quantized,
)
from anymla.ops.attention.gluon_sm90_prefill_kv_producer import producer
from anymla.ops.attention.gluon_sm90_prefill_shared import (
    EMPTY_L,
    EMPTY_R,
    P_FULL,
    Q_EMPTY,
    S_DONE,
    SUM_FULL,
    Shared,
    arrive,
    get,
    get_any,
    init_mbarriers,
    wait,
)

# Triton 3.9 renamed the function.
_store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

_LOG2E = gl.constexpr(1.4426950408889634)
_LN2 = gl.constexpr(0.6931471805599453)
# This initial maximum is above every masked score, so that a block without rows weighs nothing.
_LOWEST = gl.constexpr(-1e29)
_MASKED = gl.constexpr(-1e30)
# A maximum that grows by less than 2^8 does not replace the old one. Weights then stay below 2^8,
# which 16-bit types hold as accurately as ones below 1, and the sums need no rescaling.
_RESCALE_THRESHOLD = gl.constexpr(8.0)


@gluon.jit
def _fence(masked, LISTED: gl.constexpr):
    """Order rows that cp.async wrote before wgmma reads them through the async proxy."""
    if LISTED:
        fence_async_shared()
    else:
        if masked != 0:
            fence_async_shared()


@gluon.jit
def scores(
    shared,
    number,
    b,
    phase,
    SL: gl.constexpr,
    LISTED: gl.constexpr,
    FIRST: gl.constexpr,
):
    """Start S = Q K^T of buffer ``b``; return S, and non-zero if some of its rows do not count."""
    S = gl.zeros([64, 64], gl.float32, SL)
    mbarrier.wait(shared.full_l.index(b), phase)
    masked = get_any(shared.masked.index(b))
    _fence(masked, LISTED)
    rows = shared.k_l.index(b).permute((1, 0))
    S = warpgroup_mma(shared.q.index(0), rows, S, use_acc=False, is_async=True)
    if FIRST:
        mbarrier.wait(shared.q_full.index(1), number & 1)
    mbarrier.wait(shared.full_r.index(b), phase)
    _fence(masked, LISTED)
    rows = shared.k_r.index(b).permute((1, 0))
    S = warpgroup_mma(shared.q.index(1), rows, S, is_async=True)
    return S, masked


@gluon.jit
def _row_maxima(S, SR: gl.constexpr):
    """Return the largest of each row of [64, 64]; a tree in each thread is faster than a chain."""
    a, b = gl.split(gl.reshape(S, [64, 32, 2]))
    x = gl.maximum(a, b)
    a, b = gl.split(gl.permute(gl.reshape(x, [64, 2, 16]), (0, 2, 1)))
    x = gl.maximum(a, b)
    a, b = gl.split(gl.permute(gl.reshape(x, [64, 2, 8]), (0, 2, 1)))
    x = gl.maximum(a, b)
    a, b = gl.split(gl.permute(gl.reshape(x, [64, 2, 4]), (0, 2, 1)))
    x = gl.maximum(a, b)
    return gl.convert_layout(gl.max(x, 1), SR)


@gluon.jit
def rescale(acc, factor):
    """Multiply the rows of an accumulator by ``factor``, unless all factors of a warp are 1."""
    return mul_f32_unless_one(acc, gl.expand_dims(factor, 1))


@gluon.jit
def _lane_sums(x):
    """Sum the values that each thread holds in each row of [64, 64], giving [64, 4]."""
    return gl.sum(gl.sum(gl.reshape(x, [64, 8, 4, 2]), 3), 1)


@gluon.jit
def softmax(
    S,
    m,
    max_logit,
    sums,
    acc,
    masked,
    shared,
    b,
    scale,
    SL: gl.constexpr,
    AL: gl.constexpr,
    FIRST: gl.constexpr,
    LAZY_RESCALE: gl.constexpr,
    MAX_LOGITS: gl.constexpr,
):
    """Do one step of the online softmax.

    Returns weights, rescaling factor, new maxima, sums, and the rescaled accumulator. ``sums`` are
    [64, 4] as ``_lane_sums`` makes them, because threads exchange them only once per query. With
    FIRST the given sums are not read.
    """
    if masked != 0:
        valid = shared.valid.index(b).load(gl.SliceLayout(0, SL))
        S = gl.where(gl.expand_dims(valid != 0, 0), S, _MASKED)
    highest = _row_maxima(S, gl.SliceLayout(1, SL))
    top = gl.maximum(m, highest)
    if MAX_LOGITS:
        max_logit = gl.maximum(max_logit, highest)
    if LAZY_RESCALE and not FIRST:
        top = gl.where((top - m) * scale > _RESCALE_THRESHOLD, top, m)
    rescale_factor = gl.exp2((m - top) * scale)
    if not FIRST:
        factor = gl.convert_layout(rescale_factor, gl.SliceLayout(1, AL))
        if LAZY_RESCALE:
            acc = rescale(acc, factor)
        else:
            acc = acc * gl.expand_dims(factor, 1)
    shift = top * scale
    if not FIRST:
        # This adds nothing unless the factor is NaN. It makes the factor known before the powers
        # below, whose latency the compiler then fills with the products above.
        shift += rescale_factor * 0.0
    P = gl.exp2(S * scale - gl.expand_dims(shift, 1))
    fresh = _lane_sums(P)
    if FIRST:
        sums = fresh
    else:
        PART: gl.constexpr = gl.SliceLayout(1, fresh.type.layout)
        sums = sums * gl.expand_dims(gl.convert_layout(rescale_factor, PART), 1) + fresh
    return P, rescale_factor, top, max_logit, sums, acc


@gluon.jit
def consumer0(
    sink,
    to,
    shared,
    scale,
    empty,
    tiles,
    heads,
    HEAD_BLOCKS: gl.constexpr,
    LISTED: gl.constexpr,
    SINK: gl.constexpr,
    WHOLE: gl.constexpr,
    QUANTIZED: gl.constexpr,
    ROPE_DIM: gl.constexpr,
    TMA_STORE: gl.constexpr,
    LAZY_RESCALE: gl.constexpr,
    MAX_LOGITS: gl.constexpr,
):
    """Run consumer warpgroup 0: scores, softmax, O[:, :256] += P K[:, :256]."""
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    AL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    SR: gl.constexpr = gl.SliceLayout(1, SL)
    AR: gl.constexpr = gl.SliceLayout(1, AL)
    DT: gl.constexpr = shared.p.dtype
    r = gl.arange(0, 64, layout=SR)
    done = 0
    number = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        token = tile // HEAD_BLOCKS
        head = (tile % HEAD_BLOCKS) * 64
        if SINK:
            logit = gl.load(sink + head + r, mask=head + r < heads, other=0.0) * _LOG2E
        mbarrier.wait(shared.q_full.index(0), number & 1)
        blocks = get(shared.blocks.index(number % 2))
        acc = gl.zeros([64, 256], gl.float32, AL)
        m = gl.full([64], _LOWEST, gl.float32, SR)
        max_logit = m
        b = done % 2
        phase = (done // 2) & 1
        S, masked = scores(shared, number, b, phase, SL, LISTED, True)
        if TMA_STORE:
            if number > 0:
                tma.store_wait(0)
                arrive(shared.mbarriers, EMPTY_L + 1 - b)
        S = warpgroup_mma_wait(0, deps=[S])
        P, rescale_factor, m, max_logit, sums, acc = softmax(
            S,
            m,
            max_logit,
            m,
            acc,
            masked,
            shared,
            b,
            scale,
            SL,
            AL,
            True,
            LAZY_RESCALE,
            MAX_LOGITS,
        )
        Ph = P.to(DT)
        for i in range(1, blocks):
            b = done % 2
            phase = ((done + 1) // 2) & 1
            acc = warpgroup_mma(gl.convert_layout(Ph, PL), shared.k_l.index(b), acc, is_async=True)
            shared.p.index(b).store(Ph)
            shared.rescale_factor.index(b).store(rescale_factor)
            arrive(shared.mbarriers, P_FULL + b)
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
            arrive(shared.mbarriers, EMPTY_L + b)
            S = warpgroup_mma_wait(1, deps=[S])
            if i + 1 == blocks:
                arrive(shared.mbarriers, Q_EMPTY)
            S = warpgroup_mma_wait(0, deps=[S])
            # The product of consumer 1 with the previous block runs during this block's softmax.
            arrive(shared.mbarriers, S_DONE + b)
            done += 1
            b = done % 2
            if i + 1 == blocks:
                arrive(shared.mbarriers, Q_EMPTY + 1)
            P, rescale_factor, m, max_logit, sums, acc = softmax(
                S,
                m,
                max_logit,
                sums,
                acc,
                masked,
                shared,
                b,
                scale,
                SL,
                AL,
                False,
                LAZY_RESCALE,
                MAX_LOGITS,
            )
            Ph = P.to(DT)
        b = done % 2
        arrive(shared.mbarriers, S_DONE + b)
        acc = warpgroup_mma(gl.convert_layout(Ph, PL), shared.k_l.index(b), acc, is_async=True)
        shared.p.index(b).store(Ph)
        shared.rescale_factor.index(b).store(rescale_factor)
        arrive(shared.mbarriers, P_FULL + b)
        sums = gl.convert_layout(gl.sum(sums, 1), SR)
        total = sums
        if SINK:
            total = sums + gl.exp2(logit - m * scale)
        factor = gl.where(total > 0, 1.0 / total, 0.0)
        shared.factor.index(number % 2).store(factor)
        arrive(shared.mbarriers, SUM_FULL + number % 2)
        natural = (m * scale + gl.log2(sums)) * _LN2
        natural = gl.where(sums == 0, empty, natural)
        at = token.to(gl.int64) * heads + head + r
        gl.store(to.lse + at, natural, mask=head + r < heads)
        if MAX_LOGITS:
            max_logit = gl.where(sums == 0, float("-inf"), max_logit * scale * _LN2)
            gl.store(to.max_logits + at, max_logit, mask=head + r < heads)
        acc = warpgroup_mma_wait(0, deps=[acc])
        if not TMA_STORE:
            arrive(shared.mbarriers, EMPTY_L + b)
        done += 1
        acc = acc * gl.expand_dims(gl.convert_layout(factor, AR), 1)
        if TMA_STORE:
            # Store the output through the buffer of the last block, which is released when the next
            # tile's first product has been issued.
            shared.k_l.index(b).store(acc.to(DT))
            fence_async_shared()
            _store_tile(to.desc, [token * heads + head, 0], shared.k_l.index(b))
        elif QUANTIZED:
            store_half_quantized(
                acc, to.out, to.scales, to.scales, token * heads + head, heads - head, 0, ROPE_DIM
            )
        else:
            store_half(acc, to.out, token * heads + head, heads - head, 0, WHOLE)
        number += 1
    if TMA_STORE:
        tma.store_wait(0)


@gluon.jit
def consumer1(
    to,
    shared,
    tiles,
    heads,
    HEAD_BLOCKS: gl.constexpr,
    WHOLE: gl.constexpr,
    QUANTIZED: gl.constexpr,
    ROPE_DIM: gl.constexpr,
    TMA_STORE: gl.constexpr,
):
    """Run consumer warpgroup 1: O[:, 256:] += P K[:, 256:]."""
    AL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    AR: gl.constexpr = gl.SliceLayout(1, AL)
    done = 0
    number = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        token = tile // HEAD_BLOCKS
        head = (tile % HEAD_BLOCKS) * 64
        acc = gl.zeros([64, 256], gl.float32, AL)
        wait(shared.mbarriers, P_FULL + done % 2, (done // 2) & 1)
        # Read the number here rather than carry it from tile to tile: Triton 3.6 freezes a value
        # that a loop carries only for the bound of an inner loop.
        blocks = get(shared.blocks.index(number % 2))
        for i in range(blocks):
            b = done % 2
            phase = (done // 2) & 1
            wait(shared.mbarriers, P_FULL + b, phase)
            P = shared.p.index(b).load(PL)
            acc = rescale(acc, shared.rescale_factor.index(b).load(AR))
            wait(shared.mbarriers, S_DONE + b, phase)
            acc = warpgroup_mma(P, shared.k_r.index(b), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            if TMA_STORE:
                if i + 1 < blocks:
                    arrive(shared.mbarriers, EMPTY_R + b)
            else:
                arrive(shared.mbarriers, EMPTY_R + b)
            done += 1
        wait(shared.mbarriers, SUM_FULL + number % 2, (number // 2) & 1)
        factor = shared.factor.index(number % 2).load(AR)
        acc = acc * gl.expand_dims(factor, 1)
        if TMA_STORE:
            b = (done - 1) % 2
            shared.k_r.index(b).store(acc.to(shared.k_r.dtype))
            fence_async_shared()
            _store_tile(to.desc, [token * heads + head, 256], shared.k_r.index(b))
            tma.store_wait(0)
            arrive(shared.mbarriers, EMPTY_R + b)
        elif QUANTIZED:
            angles = angles_of(to, token, ROPE_DIM)
            store_half_quantized(
                acc, to.out, to.scales, angles, token * heads + head, heads - head, 1, ROPE_DIM
            )
        else:
            store_half(acc, to.out, token * heads + head, heads - head, 256, WHOLE)
        number += 1


@gluon.jit(do_not_specialize=["length", "stride", "window", "width", "rows", "tiles", "heads"])
def prefill_kernel(
    q,
    qdesc,
    kdesc,
    odesc,
    kv,
    ranges,
    lists,
    sink,
    out,
    scales,
    positions,
    table,
    length,
    lse,
    max_logits,
    scale,
    empty,
    stride,
    window,
    width,
    rows,
    tiles,
    heads,
    HEAD_BLOCKS: gl.constexpr,
    LISTED: gl.constexpr,
    LISTS_ONLY: gl.constexpr,
    SINK: gl.constexpr,
    WHOLE: gl.constexpr,
    QUANTIZED: gl.constexpr,
    ROPE_DIM: gl.constexpr,
    TMA_STORE: gl.constexpr,
    LAZY_RESCALE: gl.constexpr,
    MAX_LOGITS: gl.constexpr,
    CONSUMER0_REGISTERS: gl.constexpr,
    CONSUMER1_REGISTERS: gl.constexpr,
):
    """Attend to the rows of ``tiles`` = queries x blocks of heads.

    Args:
        q: queries, [T, H, 512] of float16 or bfloat16.
        qdesc: descriptor of q as [T * H, 512], boxes of 64 x 256.
        kdesc: descriptor of the rows [N, 512], boxes of 64 x 256.
        odesc: descriptor of ``out`` as [T * H, 512], boxes of 64 x 256; used if TMA_STORE.
        kv: pointer to the rows.
        ranges: int32 [T, 4], start and length of each query's window and of its second scope.
        lists: int32 [T, width], ``stride`` apart; used if LISTED.
        sink: sinks of the heads, float32 [H]; used if SINK.
        out: output [T, H, 512]; if QUANTIZED int16 [T, H, 256], two e4m3 codes each.
        scales: float32 [T, H, 4]; used if QUANTIZED, as are the next three.
        positions: position of each query, int64 [T].
        table: float32 [length, ROPE_DIM], cosines then sines.
        length: number of rows in ``table``.
        lse: log-sum-exp to be written, float32 [T, H].
        max_logits: float32 [T, H], the largest scores; used if MAX_LOGITS.
        scale: factor of the scores before the softmax, times log2(e).
        empty: lse of a query without rows.
        stride: elements from one list to the next.
        window: largest number of rows in a window.
        width: columns of ``lists``, or the largest number of entries.
        rows: number of rows N.
        tiles: number of work tiles, T * HEAD_BLOCKS.
        heads: number of heads H.
        HEAD_BLOCKS: blocks of 64 heads per query, ceil(H / 64).
        LISTED: True if the second scope is listed, False if it is a row range.
        LISTS_ONLY: True if there is nothing but lists; ``ranges`` are then their lengths, int32
            [T].
        SINK: True if heads have sinks.
        WHOLE: True if H is a multiple of 64.
        QUANTIZED: True to rotate heads back and quantise them.
        ROPE_DIM: channels of a head that rotate with the position.
        TMA_STORE: True to store the output, which has the rows' type, by TMA; requires WHOLE.
        LAZY_RESCALE: True to rescale accumulators only when a maximum has grown a lot; the largest
            weight is then no longer 1, and is rounded.
        MAX_LOGITS: True to store the largest scores.
        CONSUMER0_REGISTERS: registers per thread of ``consumer0``.
        CONSUMER1_REGISTERS: registers per thread of ``consumer1``.
    """
    DT: gl.constexpr = kv.dtype.element_ty
    KL: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    V: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ML: gl.constexpr = mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(DT, [2, 64, 256], KL)
    k_l = gl.allocate_shared_memory(DT, [2, 64, 256], KL)
    k_r = gl.allocate_shared_memory(DT, [2, 64, 256], KL)
    p_s = gl.allocate_shared_memory(DT, [2, 64, 64], KL)
    past_s = gl.allocate_shared_memory(gl.float32, [2, 64], V)
    factor_s = gl.allocate_shared_memory(gl.float32, [2, 64], V)
    valid_s = gl.allocate_shared_memory(gl.int32, [2, 64], V)
    masked_s = gl.allocate_shared_memory(gl.int32, [2, 4], V)
    blocks_s = gl.allocate_shared_memory(gl.int32, [2, 1], V)
    full_l = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    full_r = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    for i in gl.static_range(2):
        mbarrier.init(full_l.index(i), count=129)
        mbarrier.init(full_r.index(i), count=128)
        mbarrier.init(q_full.index(i), count=2 - i)
    shared = Shared(
        q_s, k_l, k_r, p_s, past_s, factor_s, valid_s, masked_s, blocks_s,
        full_l, full_r, q_full, init_mbarriers(),
    )  # fmt: skip
    to = Results(odesc, out, scales, positions, table, length, lse, max_logits)
    gl.warp_specialize(
        [
            (
                producer,
                (
                    q, kv, kdesc, qdesc, ranges, lists, stride, window, width, rows, tiles, heads,
                    shared, HEAD_BLOCKS, LISTED, LISTS_ONLY,
                ),
            ),
            (
                consumer0,
                (
                    sink, to, shared, scale, empty, tiles, heads,
                    HEAD_BLOCKS, LISTED, SINK, WHOLE, QUANTIZED, ROPE_DIM, TMA_STORE,
                    LAZY_RESCALE, MAX_LOGITS,
                ),
            ),
            (
                consumer1,
                (to, shared, tiles, heads, HEAD_BLOCKS, WHOLE, QUANTIZED, ROPE_DIM, TMA_STORE),
            ),
        ],
        [4, 4],
        [CONSUMER0_REGISTERS, CONSUMER1_REGISTERS],
    )  # fmt: skip

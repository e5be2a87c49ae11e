"""The prefill kernel for Hopper: 64 heads of one query against tiles of 64 rows.

Grid: as many programs as multiprocessors; program p takes tasks p, p + programs, ...; a task is a
query and a block of 64 heads. Three warpgroups share a task:

    producer  Q, then every block of rows: whole runs by the tensor copy engine, the rest row by row
    left      S = Q K^T, softmax, O[:, :256] += P K[:, :256]
    right     O[:, 256:] += P K[:, 256:]

    K buffers (2)  | rows x left 256 | rows x right 256 |   each half has its own pair of barriers

``prefill_protocol`` holds the barriers' protocol as a model that is run under every interleaving.
Every count that more than one warpgroup needs is computed once, by the producer.
"""

# mypy: ignore-errors
# ruff: noqa: SIM102, SIM113
# Device code is not ordinary Python: no enumerate, and constants decide on a branch alone.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Triton 3.9 renamed all three.
_load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_load_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

_LOG2E = gl.constexpr(1.4426950408889634)
_LN2 = gl.constexpr(0.6931471805599453)
_MASKED = gl.constexpr(-1e30)
# Above every masked score, so that a block without rows weighs nothing.
_LOWEST = gl.constexpr(-1e29)
_HALF_BYTES = gl.constexpr(64 * 256 * 2)
# A maximum that grows by less than 2^8 is left behind: weights stay below 2^8, which 16-bit types
# hold as well as ones below 1, and what has been added up needs no rescaling.
_LAZY = gl.constexpr(8.0)
# Multiplies 32 neighbouring values of a thread, rows r and r + 8 in turns of two, unless all
# factors of the warp are 1.
_RESCALE = gl.constexpr(
    "{ .reg .pred one, all; setp.eq.f32 one, $64, 0f3F800000; "
    "setp.eq.and.f32 one, $66, 0f3F800000, one; vote.sync.all.pred all, one, 0xffffffff; "
    + " ".join(f"mov.f32 ${i}, ${i + 32};" for i in range(32))
    + " @all bra.uni DONE; "
    + " ".join(f"mul.f32 ${i}, ${i + 32}, ${i + 64};" for i in range(32))
    + " DONE: }"
)
_RESCALE_OPERANDS = gl.constexpr(",".join(["=&f"] * 32 + ["f"] * 64))


@gluon.jit
def _put(slot, value):
    """Store one int32 in shared memory."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    slot.store(gl.full([1], 0, gl.int32, ONE) + value)


@gluon.jit
def _get(slot):
    """Load one int32 from shared memory."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(slot.load(ONE), 0)


@gluon.jit
def _inside(start, length, rows):
    """The part of a run that lies in [0, rows)."""
    start = gl.maximum(start, -(1 << 30))
    skipped = gl.maximum(-start, 0)
    start += skipped
    return start, gl.maximum(gl.minimum(length - skipped, rows - start), 0)


@gluon.jit
def _load_queries(qdesc, row, blocks, number, q_s, blocks_s, q_rdy, q_free):
    """Load Q, each half as soon as its last reader is through, and say how many blocks follow."""
    phase = (number & 1) ^ 1
    mbarrier.wait(q_free.index(0), phase)
    _put(blocks_s.index(number % 2), blocks)
    mbarrier.expect(q_rdy.index(0), _HALF_BYTES)
    mbarrier.arrive(q_rdy.index(0), count=1)
    _load_tile(qdesc, [row, 0], q_rdy.index(0), q_s.index(0))
    mbarrier.wait(q_free.index(1), phase)
    mbarrier.expect(q_rdy.index(1), _HALF_BYTES)
    _load_tile(qdesc, [row, 256], q_rdy.index(1), q_s.index(1))


@gluon.jit
def producer(
    kv,
    kdesc,
    qdesc,
    runs,
    lists,
    stride,
    window,
    width,
    rows,
    tasks,
    heads,
    q_s,
    k_l,
    k_r,
    valid_s,
    masked_s,
    blocks_s,
    rdy_l,
    rdy_r,
    free_l,
    free_r,
    q_rdy,
    q_free,
    HEAD_BLOCKS: gl.constexpr,
    LISTED: gl.constexpr,
):
    """Fill Q and the K buffers, task after task."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    c = gl.expand_dims(gl.arange(0, 256, layout=gl.SliceLayout(0, L)), 0)
    done = 0
    number = 0
    for task in range(gl.program_id(0), tasks, gl.num_programs(0)):
        token = task // HEAD_BLOCKS
        run = runs + token * 4
        start0, count0 = _inside(gl.load(run), gl.minimum(gl.load(run + 1), window), rows)
        start1 = gl.load(run + 2)
        count1 = gl.minimum(gl.load(run + 3), width)
        if LISTED:
            count1 = gl.maximum(count1, 0)
        else:
            start1, count1 = _inside(start1, count1, rows)
        blocks0 = (count0 + 63) // 64
        blocks = blocks0 + gl.maximum((count1 + 63) // 64, 2 - blocks0)
        list_ = lists + token.to(gl.int64) * stride
        if LISTED:
            place = r - blocks0 * 64
            slot = gl.load(list_ + place, mask=(place >= 0) & (place < count1), other=-1)
        row = token * heads + (task % HEAD_BLOCKS) * 64

        for i in range(blocks):
            b = done % 2
            phase = ((done // 2) & 1) ^ 1
            first = i < blocks0
            left = gl.where(first, count0 - i * 64, count1 - (i - blocks0) * 64)
            at = gl.where(first, start0 + i * 64, start1 + (i - blocks0) * 64)
            whole = left >= 64
            if LISTED:
                whole = whole & first
                place = (i + 1 - blocks0) * 64 + r
                following = gl.load(list_ + place, mask=(place >= 0) & (place < count1), other=-1)
            if whole:
                mbarrier.wait(free_l.index(b), phase)
                _put(masked_s.index(b), 0)
                mbarrier.expect(rdy_l.index(b), _HALF_BYTES)
                mbarrier.arrive(rdy_l.index(b), count=128)
                _load_tile(kdesc, [at, 0], rdy_l.index(b), k_l.index(b))
                if i == 0:
                    _load_queries(qdesc, row, blocks, number, q_s, blocks_s, q_rdy, q_free)
                mbarrier.wait(free_r.index(b), phase)
                mbarrier.expect(rdy_r.index(b), _HALF_BYTES)
                mbarrier.arrive(rdy_r.index(b), count=127)
                _load_tile(kdesc, [at, 256], rdy_r.index(b), k_r.index(b))
            else:
                if LISTED:
                    source = gl.where(first, at + r, start1 + slot)
                    ok = gl.where(first, r < left, slot >= 0) & (source >= 0) & (source < rows)
                else:
                    source = at + r
                    ok = r < left
                masked = 1 - gl.min(ok.to(gl.int32), 0)
                p = gl.expand_dims(kv + gl.where(ok, source, 0).to(gl.int64) * 512, 1) + c
                mask = gl.expand_dims(ok, 1)
                mbarrier.wait(free_l.index(b), phase)
                _load_rows(k_l.index(b), p, mask=mask)
                async_copy.mbarrier_arrive(rdy_l.index(b), increment_count=False)
                _put(masked_s.index(b), masked)
                valid_s.index(b).store(ok.to(gl.int32))
                mbarrier.arrive(rdy_l.index(b), count=1)
                if i == 0:
                    _load_queries(qdesc, row, blocks, number, q_s, blocks_s, q_rdy, q_free)
                mbarrier.wait(free_r.index(b), phase)
                _load_rows(k_r.index(b), p + 256, mask=mask)
                async_copy.mbarrier_arrive(rdy_r.index(b), increment_count=False)
            if LISTED:
                slot = following
            done += 1
        number += 1


@gluon.jit
def _scores(
    q_s,
    k_l,
    k_r,
    masked_s,
    rdy_l,
    rdy_r,
    q_rdy,
    number,
    b,
    phase,
    SL: gl.constexpr,
    LISTED: gl.constexpr,
    FIRST: gl.constexpr,
):
    """Start S = Q K^T of buffer ``b``; whether some of its rows do not count."""
    S = gl.zeros([64, 64], gl.float32, SL)
    mbarrier.wait(rdy_l.index(b), phase)
    masked = _get(masked_s.index(b))
    # Rows copied by threads reach the tensor cores through another proxy.
    if LISTED:
        fence_async_shared()
    else:
        if masked != 0:
            fence_async_shared()
    S = warpgroup_mma(q_s.index(0), k_l.index(b).permute((1, 0)), S, use_acc=False, is_async=True)
    if FIRST:
        mbarrier.wait(q_rdy.index(1), number & 1)
    mbarrier.wait(rdy_r.index(b), phase)
    if LISTED:
        fence_async_shared()
    else:
        if masked != 0:
            fence_async_shared()
    S = warpgroup_mma(q_s.index(1), k_r.index(b).permute((1, 0)), S, is_async=True)
    return S, masked


@gluon.jit
def _rescale(acc, factor, LAZY: gl.constexpr):
    """Multiply the rows of an accumulator."""
    if LAZY > 0:
        acc = gl.inline_asm_elementwise(
            _RESCALE,
            _RESCALE_OPERANDS,
            [acc, gl.expand_dims(factor, 1)],
            dtype=gl.float32,
            is_pure=True,
            pack=32,
        )
        return acc
    else:
        return acc * gl.expand_dims(factor, 1)


@gluon.jit
def _softmax(
    S,
    m,
    peak,
    sums,
    acc,
    masked,
    valid_s,
    b,
    scale,
    SL: gl.constexpr,
    AL: gl.constexpr,
    FIRST: gl.constexpr,
    LAZY: gl.constexpr,
    PEAKS: gl.constexpr,
):
    """One step of the online softmax: weights, factor of the past, new maximum and sums."""
    if masked != 0:
        valid = valid_s.index(b).load(gl.SliceLayout(0, SL))
        S = gl.where(gl.expand_dims(valid != 0, 0), S, _MASKED)
    highest = gl.max(S, 1)
    top = gl.maximum(m, highest)
    if PEAKS:
        peak = gl.maximum(peak, highest)
    if LAZY == 2 and not FIRST:
        top = gl.where((top - m) * scale > _LAZY, top, m)
    past = gl.exp2((m - top) * scale)
    if not FIRST:
        acc = _rescale(acc, gl.convert_layout(past, gl.SliceLayout(1, AL)), LAZY)
    P = gl.exp2(S * scale - gl.expand_dims(top * scale, 1))
    sums = sums * past + gl.sum(P, 1)
    return P, past, top, peak, sums, acc


@gluon.jit
def _store_half(y, out, row, valid, COLUMN: gl.constexpr, WHOLE: gl.constexpr):
    """Store [64, 256] rounded, in full 32-byte sectors, exchanging values within a warp."""
    OL: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64], [0, 128]],
        [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 256],
    )
    o = gl.convert_layout(y.to(out.dtype.element_ty), OL)
    r = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, OL)), 1)
    c = gl.expand_dims(gl.arange(0, 256, layout=gl.SliceLayout(0, OL)), 0)
    at = out + row.to(gl.int64) * 512 + (r * 512 + c + COLUMN)
    if WHOLE:
        gl.store(at, o)
    else:
        gl.store(at, o, mask=(r < valid) & (c >= 0))


@gluon.jit
def _exp2_int(exponent):
    """2^exponent as float32 for int32 exponents from -126 to 127."""
    return gl.cast((exponent + 127) << 23, gl.float32, bitcast=True)


@gluon.jit
def _code_pair(a, b):
    """The e4m3 codes of two float32, a's in the low byte of int32; saturating, NaN to 0x7F."""
    pair = gl.inline_asm_elementwise(
        "{ .reg .b16 pair; cvt.rn.satfinite.e4m3x2.f32 pair, $2, $1; cvt.u32.u16 $0, pair; }",
        "=r,f,f",
        [a, b],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    return pair


@gluon.jit
def _store_half_quantised(
    y, out, scales, angles, row, valid, HALF: gl.constexpr, TURNED: gl.constexpr
):
    """Rotate back the last TURNED channels of a head and quantise [64, 256] in runs of 128.

    ``out`` takes two codes at a time, ``scales`` four a head. ``angles`` points to the TURNED / 2
    cosines and as many sines of the query's position.
    """
    a, b = gl.split(gl.reshape(y, [64, 2, 64, 2]))
    L: gl.constexpr = a.type.layout
    if HALF == 1:
        # Pairs of the head's last run; elsewhere the choice folds away, register by register.
        run = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
        run = gl.expand_dims(gl.expand_dims(run, 0), 2)
        pair = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
        pair = gl.expand_dims(gl.expand_dims(pair, 0), 1)
        turns = (run == 1) & (pair >= 64 - TURNED // 2)
        at = angles + (pair + (run * 0 - 64 + TURNED // 2))
        cos = gl.load(at, mask=turns, other=1.0)
        sin = gl.load(at + TURNED // 2, mask=turns, other=0.0)
        turned = gl.where(turns, a * cos + b * sin, a)
        b = gl.where(turns, b * cos - a * sin, b)
        a = turned
    largest = gl.max(gl.maximum(gl.abs(a), gl.abs(b)), 2)
    ratio = gl.maximum(largest, 1e-10) * (1.0 / 448.0)
    bits = gl.cast(ratio, gl.int32, bitcast=True)
    exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).to(gl.int32)
    inverse = gl.expand_dims(_exp2_int(gl.maximum(-exponent, -126)), 2)
    both = _code_pair(a * inverse, b * inverse)
    low, high = gl.split(gl.permute(both, (0, 2, 1)))
    OL: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
    words = gl.convert_layout(low | (high << 16), OL)
    r = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, OL)), 1)
    c = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, OL)), 0)
    mask = (r < valid) & (c >= 0)
    to = out + row.to(gl.int64) * 256 + (r * 256 + c + HALF * 128)
    gl.store(to, (words & 0xFFFF).to(gl.int16), mask=mask)
    gl.store(to + 64, ((words >> 16) & 0xFFFF).to(gl.int16), mask=mask)
    SL: gl.constexpr = exponent.type.layout
    r = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, SL)), 1)
    c = gl.expand_dims(gl.arange(0, 2, layout=gl.SliceLayout(0, SL)), 0)
    to = scales + row.to(gl.int64) * 4 + (r * 4 + c + HALF * 2)
    gl.store(to, _exp2_int(exponent), mask=(r < valid) & (c >= 0))


@gluon.jit
def _angles(table, positions, token, length, TURNED: gl.constexpr):
    """Where the cosines of a token's position begin."""
    position = gl.minimum(gl.maximum(gl.load(positions + token), 0), length - 1)
    return table + position * TURNED


@gluon.jit
def left(
    sink,
    odesc,
    out,
    scales,
    lse,
    peaks,
    q_s,
    k_l,
    k_r,
    p_s,
    past_s,
    factor_s,
    valid_s,
    masked_s,
    blocks_s,
    rdy_l,
    rdy_r,
    free_l,
    p_rdy,
    go,
    last,
    q_rdy,
    q_free,
    scale,
    tasks,
    heads,
    HEAD_BLOCKS: gl.constexpr,
    LISTED: gl.constexpr,
    SINK: gl.constexpr,
    WHOLE: gl.constexpr,
    QUANTISED: gl.constexpr,
    TURNED: gl.constexpr,
    COPIED: gl.constexpr,
    LAZY: gl.constexpr,
    PEAKS: gl.constexpr,
):
    """Scores, softmax and the left half of the values."""
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    AL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    SR: gl.constexpr = gl.SliceLayout(1, SL)
    AR: gl.constexpr = gl.SliceLayout(1, AL)
    DT: gl.constexpr = p_s.dtype
    r = gl.arange(0, 64, layout=SR)
    done = 0
    number = 0
    for task in range(gl.program_id(0), tasks, gl.num_programs(0)):
        token = task // HEAD_BLOCKS
        head = (task % HEAD_BLOCKS) * 64
        if SINK:
            logit = gl.load(sink + head + r, mask=head + r < heads, other=0.0) * _LOG2E
        mbarrier.wait(q_rdy.index(0), number & 1)
        blocks = _get(blocks_s.index(number % 2))
        acc = gl.zeros([64, 256], gl.float32, AL)
        m = gl.full([64], _LOWEST, gl.float32, SR)
        peak = m
        sums = gl.zeros([64], gl.float32, SR)
        b = done % 2
        phase = (done // 2) & 1
        S, masked = _scores(
            q_s, k_l, k_r, masked_s, rdy_l, rdy_r, q_rdy, number, b, phase, SL, LISTED, True
        )
        if COPIED:
            if number > 0:
                tma.store_wait(0)
                mbarrier.arrive(free_l.index(1 - b), count=1)
        S = warpgroup_mma_wait(0, deps=[S])
        P, past, m, peak, sums, acc = _softmax(
            S, m, peak, sums, acc, masked, valid_s, b, scale, SL, AL, True, LAZY, PEAKS
        )
        Ph = P.to(DT)
        for i in range(1, blocks):
            b = done % 2
            acc = warpgroup_mma(gl.convert_layout(Ph, PL), k_l.index(b), acc, is_async=True)
            p_s.index(b).store(Ph)
            past_s.index(b).store(past)
            fence_async_shared()
            mbarrier.arrive(p_rdy.index(b), count=1)
            phase = ((done + 1) // 2) & 1
            S, masked = _scores(
                q_s,
                k_l,
                k_r,
                masked_s,
                rdy_l,
                rdy_r,
                q_rdy,
                number,
                1 - b,
                phase,
                SL,
                LISTED,
                False,
            )
            acc, S = warpgroup_mma_wait(2, deps=[acc, S])
            mbarrier.arrive(free_l.index(b), count=1)
            S = warpgroup_mma_wait(1, deps=[S])
            if i + 1 == blocks:
                mbarrier.arrive(q_free.index(0), count=1)
            S = warpgroup_mma_wait(0, deps=[S])
            # The right half of the previous block runs during this block's softmax.
            mbarrier.arrive(go.index(b), count=1)
            done += 1
            b = done % 2
            if i + 1 == blocks:
                mbarrier.arrive(q_free.index(1), count=1)
            P, past, m, peak, sums, acc = _softmax(
                S, m, peak, sums, acc, masked, valid_s, b, scale, SL, AL, False, LAZY, PEAKS
            )
            Ph = P.to(DT)
        b = done % 2
        mbarrier.arrive(go.index(b), count=1)
        acc = warpgroup_mma(gl.convert_layout(Ph, PL), k_l.index(b), acc, is_async=True)
        p_s.index(b).store(Ph)
        past_s.index(b).store(past)
        fence_async_shared()
        mbarrier.arrive(p_rdy.index(b), count=1)
        total = sums
        if SINK:
            total = sums + gl.exp2(logit - m * scale)
        factor = gl.where(total > 0, 1.0 / total, 0.0)
        factor_s.index(number % 2).store(factor)
        mbarrier.arrive(last.index(number % 2), count=1)
        natural = (m * scale + gl.log2(sums)) * _LN2
        natural = gl.where(sums == 0, float("-inf"), natural)
        at = token.to(gl.int64) * heads + head + r
        gl.store(lse + at, natural, mask=head + r < heads)
        if PEAKS:
            peak = gl.where(sums == 0, float("-inf"), peak * scale * _LN2)
            gl.store(peaks + at, peak, mask=head + r < heads)
        acc = warpgroup_mma_wait(0, deps=[acc])
        if not COPIED:
            mbarrier.arrive(free_l.index(b), count=1)
        done += 1
        acc = acc * gl.expand_dims(gl.convert_layout(factor, AR), 1)
        if COPIED:
            # The output leaves through the buffer of the last block, which is freed when the next
            # task's first product is under way.
            k_l.index(b).store(acc.to(DT))
            fence_async_shared()
            _store_tile(odesc, [token * heads + head, 0], k_l.index(b))
        elif QUANTISED:
            _store_half_quantised(
                acc, out, scales, scales, token * heads + head, heads - head, 0, TURNED
            )
        else:
            _store_half(acc, out, token * heads + head, heads - head, 0, WHOLE)
        number += 1
    if COPIED:
        tma.store_wait(0)


@gluon.jit
def right(
    odesc,
    out,
    scales,
    positions,
    table,
    length,
    k_r,
    p_s,
    past_s,
    factor_s,
    blocks_s,
    free_r,
    p_rdy,
    go,
    last,
    tasks,
    heads,
    HEAD_BLOCKS: gl.constexpr,
    WHOLE: gl.constexpr,
    QUANTISED: gl.constexpr,
    TURNED: gl.constexpr,
    COPIED: gl.constexpr,
    LAZY: gl.constexpr,
):
    """The right half of the values."""
    AL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    AR: gl.constexpr = gl.SliceLayout(1, AL)
    done = 0
    number = 0
    for task in range(gl.program_id(0), tasks, gl.num_programs(0)):
        token = task // HEAD_BLOCKS
        head = (task % HEAD_BLOCKS) * 64
        acc = gl.zeros([64, 256], gl.float32, AL)
        mbarrier.wait(p_rdy.index(done % 2), (done // 2) & 1)
        # Read here, not carried from task to task: Triton 3.6 freezes a value that a loop carries
        # for the bound of an inner loop alone.
        blocks = _get(blocks_s.index(number % 2))
        for i in range(blocks):
            b = done % 2
            phase = (done // 2) & 1
            mbarrier.wait(p_rdy.index(b), phase)
            acc = _rescale(acc, past_s.index(b).load(AR), LAZY)
            mbarrier.wait(go.index(b), phase)
            acc = warpgroup_mma(p_s.index(b), k_r.index(b), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            if COPIED:
                if i + 1 < blocks:
                    mbarrier.arrive(free_r.index(b), count=1)
            else:
                mbarrier.arrive(free_r.index(b), count=1)
            done += 1
        mbarrier.wait(last.index(number % 2), (number // 2) & 1)
        factor = factor_s.index(number % 2).load(AR)
        acc = acc * gl.expand_dims(factor, 1)
        if COPIED:
            b = (done - 1) % 2
            k_r.index(b).store(acc.to(k_r.dtype))
            fence_async_shared()
            _store_tile(odesc, [token * heads + head, 256], k_r.index(b))
            tma.store_wait(0)
            mbarrier.arrive(free_r.index(b), count=1)
        elif QUANTISED:
            angles = _angles(table, positions, token, length, TURNED)
            _store_half_quantised(
                acc, out, scales, angles, token * heads + head, heads - head, 1, TURNED
            )
        else:
            _store_half(acc, out, token * heads + head, heads - head, 256, WHOLE)
        number += 1


@gluon.jit(do_not_specialize=["length", "stride", "window", "width", "rows", "tasks", "heads"])
def prefill_kernel(
    qdesc,
    kdesc,
    odesc,
    kv,
    runs,
    lists,
    sink,
    out,
    scales,
    positions,
    table,
    length,
    lse,
    peaks,
    scale,
    stride,
    window,
    width,
    rows,
    tasks,
    heads,
    HEAD_BLOCKS: gl.constexpr,
    LISTED: gl.constexpr,
    SINK: gl.constexpr,
    WHOLE: gl.constexpr,
    QUANTISED: gl.constexpr,
    TURNED: gl.constexpr,
    COPIED: gl.constexpr,
    LAZY: gl.constexpr,
    PEAKS: gl.constexpr,
    LEFT_REGISTERS: gl.constexpr,
    RIGHT_REGISTERS: gl.constexpr,
):
    """Attention of ``tasks`` = queries x blocks of heads.

    Args:
        qdesc: of q as [T * H, 512], boxes of 64 x 256.
        kdesc: of the rows [N, 512], boxes of 64 x 256.
        odesc: of ``out`` as [T * H, 512], boxes of 64 x 256; used if COPIED.
        kv: pointer to the rows.
        runs: int32 [T, 4].
        lists: int32 [T, .], ``stride`` apart; used if LISTED.
        sink: float32 [H]; used if SINK.
        out: [T, H, 512]; if QUANTISED int16 [T, H, 256], two e4m3 codes each.
        scales: float32 [T, H, 4]; used if QUANTISED, as are the next three.
        positions: int64 [T].
        table: float32 [length, TURNED], cosines then sines.
        length: rows of ``table``.
        lse: float32 [T, H].
        peaks: float32 [T, H], the largest scores; used if PEAKS.
        scale: of the scores, times log2(e).
        stride: of ``lists``.
        window: the most rows of a window.
        width: columns of ``lists``, or the most entries.
        rows: N.
        tasks: T * HEAD_BLOCKS.
        heads: H.
        HEAD_BLOCKS: ceil(H / 64).
        LISTED: the second scope is listed, not a run.
        SINK: there is a sink.
        WHOLE: H is a multiple of 64.
        QUANTISED: heads are rotated back and quantised.
        TURNED: channels of a head that turn with the position.
        COPIED: the output has the rows' type and leaves by the tensor copy engine; with WHOLE only.
        LAZY: 1: accumulators are rescaled only when a maximum has grown; 2: only when it has
            grown a lot, after which the largest weight is no longer 1, and rounded.
        PEAKS: the largest scores are wanted.
        LEFT_REGISTERS: of a thread of ``left``.
        RIGHT_REGISTERS: of a thread of ``right``.
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
    masked_s = gl.allocate_shared_memory(gl.int32, [2, 1], V)
    blocks_s = gl.allocate_shared_memory(gl.int32, [2, 1], V)
    rdy_l = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    rdy_r = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    free_l = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    free_r = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    p_rdy = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    go = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    last = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    q_rdy = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    for i in gl.static_range(2):
        mbarrier.init(rdy_l.index(i), count=129)
        mbarrier.init(rdy_r.index(i), count=128)
        mbarrier.init(free_l.index(i), count=1)
        mbarrier.init(free_r.index(i), count=1)
        mbarrier.init(p_rdy.index(i), count=1)
        mbarrier.init(go.index(i), count=1)
        mbarrier.init(last.index(i), count=1)
        mbarrier.init(q_rdy.index(i), count=2 - i)
        mbarrier.init(q_free.index(i), count=1)
    gl.warp_specialize(
        [
            (
                producer,
                (
                    kv, kdesc, qdesc, runs, lists, stride, window, width, rows, tasks, heads,
                    q_s, k_l, k_r, valid_s, masked_s, blocks_s,
                    rdy_l, rdy_r, free_l, free_r, q_rdy, q_free, HEAD_BLOCKS, LISTED,
                ),
            ),
            (
                left,
                (
                    sink, odesc, out, scales, lse, peaks,
                    q_s, k_l, k_r, p_s, past_s, factor_s, valid_s, masked_s, blocks_s,
                    rdy_l, rdy_r, free_l, p_rdy, go, last, q_rdy, q_free,
                    scale, tasks, heads,
                    HEAD_BLOCKS, LISTED, SINK, WHOLE, QUANTISED, TURNED, COPIED, LAZY, PEAKS,
                ),
            ),
            (
                right,
                (
                    odesc, out, scales, positions, table, length,
                    k_r, p_s, past_s, factor_s, blocks_s, free_r, p_rdy, go, last,
                    tasks, heads, HEAD_BLOCKS, WHOLE, QUANTISED, TURNED, COPIED, LAZY,
                ),
            ),
        ],
        [4, 4],
        [LEFT_REGISTERS, RIGHT_REGISTERS],
    )  # fmt: skip

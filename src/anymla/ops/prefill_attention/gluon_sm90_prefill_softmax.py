"""Scores of a block of rows and the online softmax over them, as the prefill kernel has them."""

# mypy: ignore-errors
# ruff: noqa: SIM108
# Device code is not ordinary Python: constants decide on a branch alone.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

from anymla.ops.prefill_attention.gluon_sm90_prefill_counts import get_any

_MASKED = gl.constexpr(-1e30)
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
def _fence(masked, LISTED: gl.constexpr):
    """Rows copied by threads reach the tensor cores through another proxy."""
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
    """Start S = Q K^T of buffer ``b``; whether some of its rows do not count."""
    S = gl.zeros([64, 64], gl.float32, SL)
    mbarrier.wait(shared.rdy_l.index(b), phase)
    masked = get_any(shared.masked.index(b))
    _fence(masked, LISTED)
    rows = shared.k_l.index(b).permute((1, 0))
    S = warpgroup_mma(shared.q.index(0), rows, S, use_acc=False, is_async=True)
    if FIRST:
        mbarrier.wait(shared.q_rdy.index(1), number & 1)
    mbarrier.wait(shared.rdy_r.index(b), phase)
    _fence(masked, LISTED)
    rows = shared.k_r.index(b).permute((1, 0))
    S = warpgroup_mma(shared.q.index(1), rows, S, is_async=True)
    return S, masked


@gluon.jit
def _row_maxima(S, SR: gl.constexpr):
    """The largest of each row of [64, 64], in a thread by halves: a chain would take its time."""
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
    """Multiply the rows of an accumulator, unless all factors of a warp are 1."""
    acc = gl.inline_asm_elementwise(
        _RESCALE,
        _RESCALE_OPERANDS,
        [acc, gl.expand_dims(factor, 1)],
        dtype=gl.float32,
        is_pure=True,
        pack=32,
    )
    return acc


@gluon.jit
def _lane_sums(x):
    """What each thread has of the rows of [64, 64], added up: [64, 4]."""
    return gl.sum(gl.sum(gl.reshape(x, [64, 8, 4, 2]), 3), 1)


@gluon.jit
def softmax(
    S,
    m,
    peak,
    sums,
    acc,
    masked,
    shared,
    b,
    scale,
    SL: gl.constexpr,
    AL: gl.constexpr,
    FIRST: gl.constexpr,
    LATE: gl.constexpr,
    PEAKS: gl.constexpr,
):
    """One step of the online softmax: weights, factor of the past, new maximum and sums.

    ``sums`` are [64, 4], as ``_lane_sums`` makes them: threads exchange them once a query. If FIRST
    they are not looked at.
    """
    if masked != 0:
        valid = shared.valid.index(b).load(gl.SliceLayout(0, SL))
        S = gl.where(gl.expand_dims(valid != 0, 0), S, _MASKED)
    highest = _row_maxima(S, gl.SliceLayout(1, SL))
    top = gl.maximum(m, highest)
    if PEAKS:
        peak = gl.maximum(peak, highest)
    if LATE and not FIRST:
        top = gl.where((top - m) * scale > _LAZY, top, m)
    past = gl.exp2((m - top) * scale)
    if not FIRST:
        factor = gl.convert_layout(past, gl.SliceLayout(1, AL))
        if LATE:
            acc = rescale(acc, factor)
        else:
            acc = acc * gl.expand_dims(factor, 1)
    shift = top * scale
    if not FIRST:
        # The powers below leave room for the products above, and the compiler puts them there if
        # the factor is known before: nothing is added, unless the factor is not a number.
        shift += past * 0.0
    P = gl.exp2(S * scale - gl.expand_dims(shift, 1))
    fresh = _lane_sums(P)
    if FIRST:
        sums = fresh
    else:
        PART: gl.constexpr = gl.SliceLayout(1, fresh.type.layout)
        sums = sums * gl.expand_dims(gl.convert_layout(past, PART), 1) + fresh
    return P, past, top, peak, sums, acc

"""Hopper's scores of a tile: products, relu, weights, sums over heads, and the best of each 16.

A warpgroup takes 64 keys against ROWS tokens of 64 heads. Of the accumulators a thread has 2 keys
and a quarter of the heads; these partial sums change hands within four threads, so that each ends
with one (key, token), which it scales and writes:

    dots [64, ROWS * 64]  ->  parts [64, ROWS, 4]  ->  scores [64, ROWS]  ->  maxima [4, ROWS]
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anymla.ops.indexer.gluon_sm90_walk import PAGE, page_of, walk
from anymla.ops.indexer.gluon_sm90_words import (
    exchange,
    give_back,
    place_of_sum,
    places_of_sums,
)
from anymla.ops.indexer.selection_plan import GROUP

HEADS, CONSUMERS = 64, 4
_LISTED = 128  # pages that are looked at together
_H = gl.constexpr(HEADS)
_P = gl.constexpr(PAGE)
_G = gl.constexpr(GROUP)
_C = gl.constexpr(CONSUMERS)
_N = gl.constexpr(_LISTED)
_NAN_KEY = gl.constexpr(0x7F800001)  # as of triton_order
_KEEP_NAN = gl.constexpr(triton.language.PropagateNan.ALL)
# Names changed after triton 3.6.
_NEW = gl.constexpr(tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 7))


@gluon.jit
def view(memory, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The same shared memory as another type and shape."""
    if _NEW:
        return memory.reinterpret(DTYPE, SHAPE, LAYOUT)
    else:
        return memory._reinterpret(DTYPE, SHAPE, LAYOUT)


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=_KEEP_NAN)


@gluon.jit
def _columns(x, ROWS: gl.constexpr):
    """[64, ROWS * 64] as 16 of [64, ROWS, 4], in the order in which a thread has them.

    Pairs of neighbours lie in four threads, 8 pairs in each.
    """
    x = gl.permute(gl.reshape(x, [_P, ROWS, _H // 8, 4, 2]), [0, 1, 3, 4, 2])
    x = gl.reshape(x, [_P, ROWS, 4, 2, 2, 2, 2])
    even, odd = gl.split(x)
    e0, e1 = gl.split(even)
    o0, o1 = gl.split(odd)
    p0, p4 = _pairs(e0)
    p2, p6 = _pairs(e1)
    p1, p5 = _pairs(o0)
    p3, p7 = _pairs(o1)
    return p0, p1, p2, p3, p4, p5, p6, p7


@gluon.jit
def _pairs(x):
    """Two pairs of [.., pair, number]."""
    first, second = gl.split(x)
    return gl.split(first), gl.split(second)


@gluon.jit
def _add_pair(total, x, weight):
    return gl.fma(x[1], weight[1], gl.fma(x[0], weight[0], total))


@gluon.jit
def _store(sums, out, best_out, at, start, end, there, MASKED: gl.constexpr, ROWS: gl.constexpr):
    """Write the scores [64, ROWS] of a tile, and the best of each 16; all are seen unless MASKED.

    ``out`` and ``best_out`` (or None) point to what belongs to entry 0.
    """
    if MASKED:
        entry = at + gl.arange(0, _P, layout=gl.SliceLayout(1, sums.type.layout))
        entry = gl.expand_dims(entry, 1)
        seen = gl.expand_dims(start, 0) <= entry
        seen = seen & (entry < gl.expand_dims(end, 0))
        # What is not seen is below whatever is, or as low.
        sums = gl.where(there & seen, sums, float("-inf"))
        gl.store(out + at, sums, mask=seen)
    else:
        gl.store(out + at, sums)
    if best_out is not None:
        # Adding zero turns -0 into 0; NaN results are positive on this device, and so the largest.
        best = gl.reduce(gl.reshape(sums, [_P // _G, _G, ROWS]), 1, _larger) + 0.0
        bits = best.to(gl.int32, bitcast=True)
        rank = gl.minimum(bits ^ ((bits >> 31) & 0x7FFFFFFF), _NAN_KEY)
        if MASKED:
            some = gl.max(gl.reshape(seen.to(gl.int32), [_P // _G, _G, ROWS]), 1)
            gl.store(best_out + at // _G, rank, mask=some > 0)
        else:
            gl.store(best_out + at // _G, rank)


@gluon.jit
def _fill(out, low, high, live, WHO: gl.constexpr):
    """-inf for entries [low, high) of a row, if it is live; WHO takes every fourth part of them."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lane = gl.arange(0, 128, layout=ONE)
    nothing = gl.full([128], float("-inf"), gl.float32, ONE)
    for at in range(low + WHO * 128, gl.where(live, high, low), _C * 128):
        gl.store(out + at + lane, nothing, mask=at + lane < high)


@gluon.jit
def consume(
    table, table_row_stride, table_column_stride, lengths, starts, owners, weights, weights_stride,
    scores, scores_stride, maxima, maxima_stride, first_row, rows, per_request, requests, pages,
    covered, k, span, context, queries, keys, scales, full, words, BUFFERS: gl.constexpr,
    ROWS: gl.constexpr, FILL: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """Every fourth tile of a program, from tile WHO on; with FILL, -inf around them."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS * _H, 32])
    # 16 threads take the keys of a token; with one token, the other 16 the same. Triton reduces
    # wrongly over threads that are no neighbours.
    L: gl.constexpr = gl.DistributedLinearLayout(
        [], [[1, 0], [2, 0], [4, 0], [8, 0], [0, ROWS - 1]], [[16, 0], [32, 0]], [], [_P, ROWS]
    )
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    zero = gl.zeros([_P, ROWS], gl.float32, L)
    q0, low0, tiles0, q1, low1, tiles1, s0, e0, s1, e1, shared = walk(
        lengths, starts, owners, first_row, rows, per_request, requests, covered, k, span, ROWS
    )
    tiles = tiles0 + tiles1
    row = (gl.program_id(0) * ROWS).to(gl.int64)
    column = gl.arange(0, ROWS * _H, layout=gl.SliceLayout(0, ACC))
    weight = gl.load(
        weights + (row + column // _H) * weights_stride + column % _H,
        mask=row + column // _H < rows,
        other=0.0,
    )
    weight, _ = gl.broadcast(gl.expand_dims(weight, 0), gl.zeros([_P, ROWS * _H], gl.float32, ACC))
    weight = _columns(weight, ROWS)
    places = places_of_sums(words, weight[0][0], WHO, ROWS)
    place_of = place_of_sum(words, WHO, ROWS, L)
    member = gl.arange(0, ROWS, layout=gl.SliceLayout(0, L))
    place = gl.arange(0, _P, layout=gl.SliceLayout(1, L))
    out = scores + row * scores_stride + gl.expand_dims(member * scores_stride, 0)
    out = out + gl.expand_dims(place, 1)
    best_out = None
    if maxima is not None:
        some = gl.max(gl.reshape(zero, [_P // _G, _G, ROWS]), 1)
        M: gl.constexpr = some.type.layout
        pair = gl.arange(0, ROWS, layout=gl.SliceLayout(0, M)) * maxima_stride
        group = gl.arange(0, _P // _G, layout=gl.SliceLayout(1, M))
        best_out = maxima + row * maxima_stride + gl.expand_dims(pair, 0)
        best_out = best_out + gl.expand_dims(group, 1)
    start = gl.where(member == 0, s0, s1)
    if FILL:
        low = gl.program_id(1) * span
        high = gl.minimum(low + span, context)
        _fill(scores + row * scores_stride, low, gl.minimum(s0, high), row < rows, WHO)
        _fill(scores + row * scores_stride, gl.maximum(e0, low), high, row < rows, WHO)
        if ROWS > 1:
            other = scores + (row + 1) * scores_stride
            _fill(other, low, gl.minimum(s1, high), row + 1 < rows, WHO)
            _fill(other, gl.maximum(e1, low), high, row + 1 < rows, WHO)
    # Tiles between these are seen whole by all rows, which is all but a few of them.
    inner_low = gl.maximum(s0, s1)
    inner_high = gl.where(shared, gl.minimum(e0, e1), 0)
    number = gl.arange(0, _N, layout=gl.BlockedLayout([1], [32], [4], [0]))
    page, _at = page_of(
        table, table_row_stride, table_column_stride, q0, low0, tiles0, q1, low1, number, tiles
    )
    for first in range(0, tiles, _N):
        missing = (first + number < tiles) & ((page < 0) | (page >= pages))
        whole_below = gl.where(gl.max(missing.to(gl.int32), 0) > 0, 0, inner_high)
        page, _at = page_of(
            table, table_row_stride, table_column_stride, q0, low0, tiles0, q1, low1,
            first + _N + number, tiles,
        )  # fmt: skip
        at = low0 + (first + WHO) * _P
        for i in range(first + WHO, gl.minimum(first + _N, tiles), _C):
            b = i % BUFFERS
            mbarrier.wait(full.index(b), (i // BUFFERS) & 1)
            dots = warpgroup_mma(
                keys.index(b), queries.permute((1, 0)), gl.zeros([_P, ROWS * _H], gl.float32, ACC),
                use_acc=False, is_async=True,
            )  # fmt: skip
            scale = view(scales.index(b), gl.float32, [_P], FLAT).load(gl.SliceLayout(1, L))
            dots = warpgroup_mma_wait(0, deps=[dots])
            scale = give_back(words, b, scale)
            x = _columns(gl.maximum(dots, 0.0, propagate_nan=_KEEP_NAN), ROWS)
            # Spelled out, since compilers contract a sum of products in one way or another.
            parts = gl.fma(x[0][0], weight[0][0], x[0][1] * weight[0][1])
            parts = _add_pair(parts, x[1], weight[1])
            parts = _add_pair(parts, x[2], weight[2])
            parts = _add_pair(parts, x[3], weight[3])
            parts = _add_pair(parts, x[4], weight[4])
            parts = _add_pair(parts, x[5], weight[5])
            parts = _add_pair(parts, x[6], weight[6])
            parts = _add_pair(parts, x[7], weight[7])
            sums = exchange(parts, places, place_of) * gl.expand_dims(scale, 1)
            if (at >= inner_low) & (at + _P <= whole_below):
                _store(sums, out, best_out, at, start, start, True, False, ROWS)
            else:
                mine, where = page_of(
                    table, table_row_stride, table_column_stride, q0, low0, tiles0, q1, low1, i,
                    tiles,
                )  # fmt: skip
                there = (mine >= 0) & (mine < pages)
                second = i >= tiles0
                end0 = gl.where(second, 0, e0)
                end1 = gl.where(second | shared, e1, 0)
                end = gl.where(member == 0, end0, end1)
                _store(sums, out, best_out, where, start, end, there, True, ROWS)
            at += _C * _P

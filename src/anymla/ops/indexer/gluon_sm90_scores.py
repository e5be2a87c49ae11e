"""Scores of prefill queries on Hopper: 64 heads of FP8 against pages of 64 FP8 keys.

Grid: (pairs of neighbouring tokens, parts of the context). A program keeps two tokens' queries in
shared memory, [2 x 64 heads, 128], and walks the pages that they see; tokens of two requests take
their pages one request after the other.

    producer     pages -> ring of BUFFERS tiles, keys [64, 128] and 64 scales        24 registers
    4 consumers  every fourth tile each: keys . queries, relu, weights, sums        112 each

One consumer works on its sums while others use the tensor cores. Barriers: full[b] producer ->
consumer, free[b] consumer -> producer.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anymla.ops.indexer.selection_plan import GROUP

HEADS, WIDTH, PAGE = 64, 128, 64
BUFFERS = 8
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 112, 24
_H = gl.constexpr(HEADS)
_D = gl.constexpr(WIDTH)
_P = gl.constexpr(PAGE)
_G = gl.constexpr(GROUP)
_COLUMNS = gl.constexpr(2 * HEADS)
_CONSUMERS = gl.constexpr(4)
_NOTHING = gl.constexpr(-0x80000000)
_NAN_KEY = gl.constexpr(0x7F800001)  # as of triton_order
_KEEP_NAN = gl.constexpr(triton.language.PropagateNan.ALL)
# Names changed after triton 3.6.
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_NEW = gl.constexpr(tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 7))


@gluon.jit
def _view(memory, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The same shared memory as another type and shape."""
    if _NEW:
        return memory.reinterpret(DTYPE, SHAPE, LAYOUT)
    else:
        return memory._reinterpret(DTYPE, SHAPE, LAYOUT)


@gluon.jit
def _bounds(lengths, starts, owners, row, first_row, rows, per_request, requests, covered, k):
    """Request and entries [start, end) of a row that is scored; (0, 0) of any other."""
    live = row < rows
    if owners is None:
        request = (first_row + row) // per_request
    else:
        request = gl.load(owners + row, mask=live, other=-1)
    end = gl.minimum(gl.load(lengths + row, mask=live, other=0), covered)
    start = 0
    if starts is not None:
        start = gl.maximum(gl.load(starts + row, mask=live, other=0), 0)
    scored = live & (request >= 0) & (request < requests) & (end - start > k)
    return request, gl.where(scored, start, 0), gl.where(scored, end, 0)


@gluon.jit
def _plan(lengths, starts, owners, first_row, rows, per_request, requests, covered, k, span):
    """The tiles of this program: two runs of pages, and the rows that see them.

    Returns (request, first entry, tiles) of both runs, (start, end) of both rows, and whether the
    rows share the first run; the second is then empty.
    """
    row = gl.program_id(0) * 2
    q0, s0, e0 = _bounds(
        lengths, starts, owners, row, first_row, rows, per_request, requests, covered, k
    )
    q1, s1, e1 = _bounds(
        lengths, starts, owners, row + 1, first_row, rows, per_request, requests, covered, k
    )
    shared = (q0 == q1) & (e0 > 0) & (e1 > 0)
    low0 = gl.where(shared, gl.minimum(s0, s1), s0)
    high0 = gl.where(shared, gl.maximum(e0, e1), e0)
    high1 = gl.where(shared, 0, e1)
    first = gl.program_id(1) * span
    low0 = gl.maximum(low0 // _P * _P, first)
    low1 = gl.maximum(s1 // _P * _P, first)
    tiles0 = gl.maximum(gl.minimum(high0, first + span) - low0 + _P - 1, 0) // _P
    tiles1 = gl.maximum(gl.minimum(high1, first + span) - low1 + _P - 1, 0) // _P
    return q0, low0, tiles0, q1, low1, tiles1, s0, e0, s1, e1, shared


@gluon.jit
def _page(table, table_row_stride, table_column_stride, q0, low0, tiles0, q1, low1, tile, tiles):
    """Page id of a tile, and its first entry; -1 past the last tile."""
    second = tile >= tiles0
    request = gl.where(second, q1, q0)
    at = gl.where(second, low1 + (tile - tiles0) * _P, low0 + tile * _P)
    cell = request.to(gl.int64) * table_row_stride + (at // _P).to(gl.int64) * table_column_stride
    return gl.load(table + cell, mask=tile < tiles, other=-1), at


@gluon.jit
def _produce(
    keys_desc, scales_desc, table, table_row_stride, table_column_stride, lengths, starts, owners,
    first_row, rows, per_request, requests, pages, covered, k, span, keys, scales, full, free,
    BUFFERS: gl.constexpr,
):  # fmt: skip
    q0, low0, tiles0, q1, low1, tiles1, _s0, _e0, _s1, _e1, _shared = _plan(
        lengths, starts, owners, first_row, rows, per_request, requests, covered, k, span
    )
    L3: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=3)
    tiles = tiles0 + tiles1
    page, _at = _page(
        table, table_row_stride, table_column_stride, q0, low0, tiles0, q1, low1, 0, tiles
    )
    for i in range(tiles):
        ahead, _at = _page(
            table, table_row_stride, table_column_stride, q0, low0, tiles0, q1, low1, i + 1, tiles
        )
        b = i % BUFFERS
        mbarrier.wait(free.index(b), ((i // BUFFERS) & 1) ^ 1)
        mbarrier.expect(full.index(b), _P * _D + _P * 4)
        # Any page will do where there is none; its scores are not used.
        there = (page >= 0) & (page < pages)
        source = gl.where(there, page, 0)
        tile = _view(keys.index(b), gl.float8e4nv, [1, _P, _D], L3)
        _copy(keys_desc, [source, 0, 0], full.index(b), tile)
        _copy(scales_desc, [source, _P * _D // 4], full.index(b), scales.index(b))
        page = ahead


@gluon.jit
def _consume(
    table, table_row_stride, table_column_stride, lengths, starts, owners, weights, weights_stride,
    scores, scores_stride, maxima, maxima_stride, first_row, rows, per_request, requests, pages,
    covered, k, span, queries, keys, scales, full, free, BUFFERS: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    zero = gl.sum(gl.reshape(gl.zeros([_P, _COLUMNS], gl.float32, ACC), [_P, 2, _H]), 2)
    L: gl.constexpr = zero.type.layout
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q0, low0, tiles0, q1, low1, tiles1, s0, e0, s1, e1, shared = _plan(
        lengths, starts, owners, first_row, rows, per_request, requests, covered, k, span
    )
    tiles = tiles0 + tiles1
    row = (gl.program_id(0) * 2).to(gl.int64)
    column = gl.arange(0, _COLUMNS, layout=gl.SliceLayout(0, ACC))
    weight = gl.load(
        weights + (row + column // _H) * weights_stride + column % _H,
        mask=row + column // _H < rows,
        other=0.0,
    )
    member = gl.arange(0, 2, layout=gl.SliceLayout(0, L))
    place = gl.arange(0, _P, layout=gl.SliceLayout(1, L))
    out = scores + row * scores_stride + gl.expand_dims(member * scores_stride, 0)
    start = gl.where(member == 0, s0, s1)
    page, at = _page(
        table, table_row_stride, table_column_stride, q0, low0, tiles0, q1, low1, WHO, tiles
    )
    for i in range(WHO, tiles, _CONSUMERS):
        ahead, at_ahead = _page(
            table, table_row_stride, table_column_stride, q0, low0, tiles0, q1, low1,
            i + _CONSUMERS, tiles,
        )  # fmt: skip
        b = i % BUFFERS
        mbarrier.wait(full.index(b), (i // BUFFERS) & 1)
        dots = warpgroup_mma(
            keys.index(b), queries.permute((1, 0)), gl.zeros([_P, _COLUMNS], gl.float32, ACC),
            use_acc=False, is_async=True,
        )  # fmt: skip
        scale = _view(scales.index(b), gl.float32, [_P], FLAT).load(gl.SliceLayout(1, L))
        dots = warpgroup_mma_wait(0, deps=[dots])
        mbarrier.arrive(free.index(b), count=1)
        terms = gl.maximum(dots, 0.0, propagate_nan=_KEEP_NAN) * gl.expand_dims(weight, 0)
        sums = gl.sum(gl.reshape(terms, [_P, 2, _H]), 2)
        # Fused with zero: -0 becomes 0, which orders as it should.
        factor = gl.expand_dims(scale, 1) + zero
        sums = gl.fma(sums, factor, zero)
        there = (page >= 0) & (page < pages)
        sums = gl.where(there, sums, float("-inf"))
        second = i >= tiles0
        end0 = gl.where(second, 0, e0)
        end1 = gl.where(second | shared, e1, 0)
        end = gl.where(member == 0, end0, end1)
        entry = gl.expand_dims(at + place, 1)
        seen = (entry >= gl.expand_dims(start, 0)) & (entry < gl.expand_dims(end, 0))
        gl.store(out + entry, sums, mask=seen)
        if maxima is not None:
            bits = sums.to(gl.int32, bitcast=True)
            # NaN results are positive on this device, and so the largest.
            rank = gl.minimum(bits ^ ((bits >> 31) & 0x7FFFFFFF), _NAN_KEY)
            rank = gl.where(seen, rank, _NOTHING)
            best = gl.max(gl.reshape(rank, [_P // _G, _G, 2]), 1)
            M: gl.constexpr = best.type.layout
            group = at // _G + gl.arange(0, _P // _G, layout=gl.SliceLayout(1, M))
            pair = gl.arange(0, 2, layout=gl.SliceLayout(0, M)) * maxima_stride
            to = maxima + row * maxima_stride + gl.expand_dims(pair, 0) + gl.expand_dims(group, 1)
            gl.store(to, best, mask=best != _NOTHING)
        page, at = ahead, at_ahead


@gluon.jit
def _consumer0(
    table, table_row_stride, table_column_stride, lengths, starts, owners, weights, weights_stride,
    scores, scores_stride, maxima, maxima_stride, first_row, rows, per_request, requests, pages,
    covered, k, span, queries, keys, scales, full, free, BUFFERS: gl.constexpr,
):  # fmt: skip
    _consume(
        table, table_row_stride, table_column_stride, lengths, starts, owners, weights,
        weights_stride, scores, scores_stride, maxima, maxima_stride, first_row, rows, per_request,
        requests, pages, covered, k, span, queries, keys, scales, full, free, BUFFERS, 0,
    )  # fmt: skip


@gluon.jit
def _consumer1(
    table, table_row_stride, table_column_stride, lengths, starts, owners, weights, weights_stride,
    scores, scores_stride, maxima, maxima_stride, first_row, rows, per_request, requests, pages,
    covered, k, span, queries, keys, scales, full, free, BUFFERS: gl.constexpr,
):  # fmt: skip
    _consume(
        table, table_row_stride, table_column_stride, lengths, starts, owners, weights,
        weights_stride, scores, scores_stride, maxima, maxima_stride, first_row, rows, per_request,
        requests, pages, covered, k, span, queries, keys, scales, full, free, BUFFERS, 1,
    )  # fmt: skip


@gluon.jit
def _consumer2(
    table, table_row_stride, table_column_stride, lengths, starts, owners, weights, weights_stride,
    scores, scores_stride, maxima, maxima_stride, first_row, rows, per_request, requests, pages,
    covered, k, span, queries, keys, scales, full, free, BUFFERS: gl.constexpr,
):  # fmt: skip
    _consume(
        table, table_row_stride, table_column_stride, lengths, starts, owners, weights,
        weights_stride, scores, scores_stride, maxima, maxima_stride, first_row, rows, per_request,
        requests, pages, covered, k, span, queries, keys, scales, full, free, BUFFERS, 2,
    )  # fmt: skip


@gluon.jit
def _consumer3(
    table, table_row_stride, table_column_stride, lengths, starts, owners, weights, weights_stride,
    scores, scores_stride, maxima, maxima_stride, first_row, rows, per_request, requests, pages,
    covered, k, span, queries, keys, scales, full, free, BUFFERS: gl.constexpr,
):  # fmt: skip
    _consume(
        table, table_row_stride, table_column_stride, lengths, starts, owners, weights,
        weights_stride, scores, scores_stride, maxima, maxima_stride, first_row, rows, per_request,
        requests, pages, covered, k, span, queries, keys, scales, full, free, BUFFERS, 3,
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "first_row", "rows", "per_request", "requests", "pages", "covered", "k", "span"
    ]
)  # fmt: skip
def prefill_scores_kernel(
    q,
    keys_desc,
    scales_desc,
    table,
    table_row_stride,
    table_column_stride,
    lengths,
    starts,
    owners,
    weights,
    weights_stride,
    scores,
    scores_stride,
    maxima,
    maxima_stride,
    first_row,
    rows,
    per_request,
    requests,
    pages,
    covered,
    k,
    span,
    BUFFERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Two tokens and ``span`` entries; arguments as of ``select_scores_kernel``."""
    CODES: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=2)
    queries = gl.allocate_shared_memory(gl.float8e4nv, [_COLUMNS, _D], CODES)
    keys = gl.allocate_shared_memory(gl.float8e4nv, [BUFFERS, _P, _D], CODES)
    scales = gl.allocate_shared_memory(gl.float32, [BUFFERS, 1, _P], WORDS)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], BARRIER)
    for i in gl.static_range(BUFFERS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    LOAD: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    line = gl.arange(0, _COLUMNS, layout=gl.SliceLayout(1, LOAD))
    channel = gl.arange(0, _D, layout=gl.SliceLayout(0, LOAD))
    first = gl.program_id(0).to(gl.int64) * _COLUMNS
    codes = gl.load(
        q + (first + gl.expand_dims(line, 1)) * _D + gl.expand_dims(channel, 0),
        mask=gl.expand_dims(first + line < rows.to(gl.int64) * _H, 1),
        other=0,
    )
    queries.store(codes.to(gl.float8e4nv, bitcast=True))
    fence_async_shared()
    consumed = (
        table, table_row_stride, table_column_stride, lengths, starts, owners, weights,
        weights_stride, scores, scores_stride, maxima, maxima_stride, first_row, rows, per_request,
        requests, pages, covered, k, span, queries, keys, scales, full, free, BUFFERS,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consumer0, consumed),
            (_consumer1, consumed),
            (_consumer2, consumed),
            (_consumer3, consumed),
            (_produce, (
                keys_desc, scales_desc, table, table_row_stride, table_column_stride, lengths,
                starts, owners, first_row, rows, per_request, requests, pages, covered, k, span,
                keys, scales, full, free, BUFFERS,
            )),
        ],
        [4, 4, 4, 1],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip

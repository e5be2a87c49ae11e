"""Index scores on Hopper: 64 heads of FP8 against pages of 64 FP8 keys.

Grid: (tokens, or pairs of neighbours, parts of the context). A program keeps its tokens' queries in
shared memory, [ROWS x 64 heads, 128], and walks the pages that they see; tokens of two requests
take their pages one request after the other.

    producer     pages -> ring of BUFFERS tiles, keys [64, 128] and 64 scales        24 registers
    4 consumers  every fourth tile each: keys . queries, relu, weights, sums        112 each

One consumer works on its sums while others use the tensor cores. Barriers: full[b] producer ->
consumer, free[b] consumer -> producer.
"""

from collections.abc import Iterator

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

from anymla.ops._triton import Build, Target
from anymla.ops.indexer.selection_plan import GROUP

HEADS, WIDTH, PAGE = 64, 128, 64
BUFFERS = 8
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 112, 24
_H = gl.constexpr(HEADS)
_D = gl.constexpr(WIDTH)
_P = gl.constexpr(PAGE)
_G = gl.constexpr(GROUP)
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
def _plan(
    lengths, starts, owners, first_row, rows, per_request, requests, covered, k, span,
    ROWS: gl.constexpr,
):  # fmt: skip
    """The tiles of this program: two runs of pages, and the rows that see them.

    Returns (request, first entry, tiles) of both runs, (start, end) of both rows, and whether the
    rows share the first run; the second is then empty.
    """
    row = gl.program_id(0) * ROWS
    q0, s0, e0 = _bounds(
        lengths, starts, owners, row, first_row, rows, per_request, requests, covered, k
    )
    q1, s1, e1, shared = q0, s0, e0, e0 > 0
    if ROWS > 1:
        q1, s1, e1 = _bounds(
            lengths, starts, owners, row + 1, first_row, rows, per_request, requests, covered, k
        )
        shared = (q0 == q1) & (e0 > 0) & (e1 > 0)
    low0 = gl.where(shared, gl.minimum(s0, s1), s0)
    high0 = gl.where(shared, gl.maximum(e0, e1), e0)
    high1 = gl.where(shared, 0, e1)
    if ROWS == 1:
        high1 = gl.where(shared, 0, 0)
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
    BUFFERS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    q0, low0, tiles0, q1, low1, tiles1, _s0, _e0, _s1, _e1, _shared = _plan(
        lengths, starts, owners, first_row, rows, per_request, requests, covered, k, span, ROWS
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
def _store(sums, out, best_out, at, start, end, there, MASKED: gl.constexpr, ROWS: gl.constexpr):
    """Write the scores [64, ROWS] of a tile, and the best of each 16; all are seen unless MASKED.

    ``out`` and ``best_out`` (or None) point to what belongs to entry 0.
    """
    entry = at + gl.arange(0, _P, layout=gl.SliceLayout(1, sums.type.layout))
    entry = gl.expand_dims(entry, 1)
    seen = gl.expand_dims(start, 0) <= entry
    if MASKED:
        sums = gl.where(there, sums, float("-inf"))
        seen = seen & (entry < gl.expand_dims(end, 0))
        gl.store(out + at, sums, mask=seen)
    else:
        gl.store(out + at, sums)
    if best_out is not None:
        # Adding zero turns -0 into 0; NaN results are positive on this device, and so the largest.
        bits = (sums + 0.0).to(gl.int32, bitcast=True)
        rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        if MASKED:
            rank = gl.where(seen, rank, _NOTHING)
        best = gl.minimum(gl.max(gl.reshape(rank, [_P // _G, _G, ROWS]), 1), _NAN_KEY)
        if MASKED:
            gl.store(best_out + at // _G, best, mask=best != _NOTHING)
        else:
            gl.store(best_out + at // _G, best)


@gluon.jit
def _consume(
    table, table_row_stride, table_column_stride, lengths, starts, owners, weights, weights_stride,
    scores, scores_stride, maxima, maxima_stride, first_row, rows, per_request, requests, pages,
    covered, k, span, queries, keys, scales, full, free, BUFFERS: gl.constexpr,
    ROWS: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS * _H, 32])
    zero = gl.sum(gl.reshape(gl.zeros([_P, ROWS * _H], gl.float32, ACC), [_P, ROWS, _H]), 2)
    L: gl.constexpr = zero.type.layout
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q0, low0, tiles0, q1, low1, tiles1, s0, e0, s1, e1, shared = _plan(
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
    # Tiles between these are seen whole by all rows, which is all but a few of them.
    inner_low = gl.maximum(s0, s1)
    inner_high = gl.where(shared, gl.minimum(e0, e1), 0)
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
            keys.index(b), queries.permute((1, 0)), gl.zeros([_P, ROWS * _H], gl.float32, ACC),
            use_acc=False, is_async=True,
        )  # fmt: skip
        scale = _view(scales.index(b), gl.float32, [_P], FLAT).load(gl.SliceLayout(1, L))
        dots = warpgroup_mma_wait(0, deps=[dots])
        mbarrier.arrive(free.index(b), count=1)
        terms = gl.maximum(dots, 0.0, propagate_nan=_KEEP_NAN) * gl.expand_dims(weight, 0)
        sums = gl.sum(gl.reshape(terms, [_P, ROWS, _H]), 2) * gl.expand_dims(scale, 1)
        there = (page >= 0) & (page < pages)
        if there & (at >= inner_low) & (at + _P <= inner_high):
            _store(sums, out, best_out, at, start, start, there, False, ROWS)
        else:
            second = i >= tiles0
            end0 = gl.where(second, 0, e0)
            end1 = gl.where(second | shared, e1, 0)
            end = gl.where(member == 0, end0, end1)
            _store(sums, out, best_out, at, start, end, there, True, ROWS)
        page, at = ahead, at_ahead


@gluon.jit
def _consumer0(
    table, table_row_stride, table_column_stride, lengths, starts, owners, weights, weights_stride,
    scores, scores_stride, maxima, maxima_stride, first_row, rows, per_request, requests, pages,
    covered, k, span, queries, keys, scales, full, free, BUFFERS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    _consume(
        table, table_row_stride, table_column_stride, lengths, starts, owners, weights,
        weights_stride, scores, scores_stride, maxima, maxima_stride, first_row, rows, per_request,
        requests, pages, covered, k, span, queries, keys, scales, full, free, BUFFERS, ROWS, 0,
    )  # fmt: skip


@gluon.jit
def _consumer1(
    table, table_row_stride, table_column_stride, lengths, starts, owners, weights, weights_stride,
    scores, scores_stride, maxima, maxima_stride, first_row, rows, per_request, requests, pages,
    covered, k, span, queries, keys, scales, full, free, BUFFERS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    _consume(
        table, table_row_stride, table_column_stride, lengths, starts, owners, weights,
        weights_stride, scores, scores_stride, maxima, maxima_stride, first_row, rows, per_request,
        requests, pages, covered, k, span, queries, keys, scales, full, free, BUFFERS, ROWS, 1,
    )  # fmt: skip


@gluon.jit
def _consumer2(
    table, table_row_stride, table_column_stride, lengths, starts, owners, weights, weights_stride,
    scores, scores_stride, maxima, maxima_stride, first_row, rows, per_request, requests, pages,
    covered, k, span, queries, keys, scales, full, free, BUFFERS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    _consume(
        table, table_row_stride, table_column_stride, lengths, starts, owners, weights,
        weights_stride, scores, scores_stride, maxima, maxima_stride, first_row, rows, per_request,
        requests, pages, covered, k, span, queries, keys, scales, full, free, BUFFERS, ROWS, 2,
    )  # fmt: skip


@gluon.jit
def _consumer3(
    table, table_row_stride, table_column_stride, lengths, starts, owners, weights, weights_stride,
    scores, scores_stride, maxima, maxima_stride, first_row, rows, per_request, requests, pages,
    covered, k, span, queries, keys, scales, full, free, BUFFERS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    _consume(
        table, table_row_stride, table_column_stride, lengths, starts, owners, weights,
        weights_stride, scores, scores_stride, maxima, maxima_stride, first_row, rows, per_request,
        requests, pages, covered, k, span, queries, keys, scales, full, free, BUFFERS, ROWS, 3,
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "first_row", "rows", "per_request", "requests", "pages", "covered", "k", "span"
    ]
)  # fmt: skip
def page_scores_kernel(
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
    ROWS: gl.constexpr,
    BUFFERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """ROWS tokens and ``span`` entries; arguments as of ``select_scores_kernel``."""
    # A consumer meets the same buffers again, so it never waits for a fill two turns ahead, which
    # a barrier's parity could not tell from the last.
    gl.static_assert(BUFFERS % _CONSUMERS == 0)
    CODES: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=2)
    queries = gl.allocate_shared_memory(gl.float8e4nv, [ROWS * _H, _D], CODES)
    keys = gl.allocate_shared_memory(gl.float8e4nv, [BUFFERS, _P, _D], CODES)
    scales = gl.allocate_shared_memory(gl.float32, [BUFFERS, 1, _P], WORDS)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], BARRIER)
    for i in gl.static_range(BUFFERS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    LOAD: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    line = gl.arange(0, ROWS * _H, layout=gl.SliceLayout(1, LOAD))
    channel = gl.arange(0, _D, layout=gl.SliceLayout(0, LOAD))
    first = gl.program_id(0).to(gl.int64) * (ROWS * _H)
    codes = gl.load(
        q + (first + gl.expand_dims(line, 1)) * _D + gl.expand_dims(channel, 0),
        mask=gl.expand_dims(first + line < rows.to(gl.int64) * _H, 1),
        other=0,
    )
    queries.store(codes.to(gl.float8e4nv, bitcast=True))
    fence_async_shared()
    # Spelled out for each: constexprs would not survive in a variable.
    gl.warp_specialize(
        [
            (_consumer0, (
                table, table_row_stride, table_column_stride, lengths, starts, owners, weights,
                weights_stride, scores, scores_stride, maxima, maxima_stride, first_row, rows,
                per_request, requests, pages, covered, k, span, queries, keys, scales, full, free,
                BUFFERS, ROWS,
            )),
            (_consumer1, (
                table, table_row_stride, table_column_stride, lengths, starts, owners, weights,
                weights_stride, scores, scores_stride, maxima, maxima_stride, first_row, rows,
                per_request, requests, pages, covered, k, span, queries, keys, scales, full, free,
                BUFFERS, ROWS,
            )),
            (_consumer2, (
                table, table_row_stride, table_column_stride, lengths, starts, owners, weights,
                weights_stride, scores, scores_stride, maxima, maxima_stride, first_row, rows,
                per_request, requests, pages, covered, k, span, queries, keys, scales, full, free,
                BUFFERS, ROWS,
            )),
            (_consumer3, (
                table, table_row_stride, table_column_stride, lengths, starts, owners, weights,
                weights_stride, scores, scores_stride, maxima, maxima_stride, first_row, rows,
                per_request, requests, pages, covered, k, span, queries, keys, scales, full, free,
                BUFFERS, ROWS,
            )),
            (_produce, (
                keys_desc, scales_desc, table, table_row_stride, table_column_stride, lengths,
                starts, owners, first_row, rows, per_request, requests, pages, covered, k, span,
                keys, scales, full, free, BUFFERS, ROWS,
            )),
        ],
        [4, 4, 4, 1],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def builds(target: Target) -> Iterator[Build]:
    """A token and two, with maxima and without."""
    if target.name != "sm_90":
        return
    numbers = (
        "table_row_stride", "table_column_stride", "weights_stride", "scores_stride",
        "maxima_stride", "first_row", "rows", "per_request", "requests", "pages", "covered", "k",
        "span",
    )  # fmt: skip
    keys, scales = gl.NVMMASharedLayout(128, 8, rank=3), gl.NVMMASharedLayout(0, 32, rank=2)
    types = {
        "q": "*u8",
        "keys_desc": f"tensordesc<fp8e4nv[1, {PAGE}, {WIDTH}],{keys!r}>",
        "scales_desc": f"tensordesc<fp32[1, {PAGE}],{scales!r}>",
        "weights": "*fp32",
        "scores": "*fp32",
        **dict.fromkeys(("table", "lengths"), "*i32"),
        **dict.fromkeys(numbers, "i32"),
    }
    for rows in (1, 2):
        for given in ((), ("maxima",), ("maxima", "owners", "starts")):
            optional = ("maxima", "owners", "starts")
            yield Build(
                f"{rows} rows" + "".join(f", {name}" for name in given),
                page_scores_kernel,
                types | dict.fromkeys(given, "*i32"),
                {
                    **{name: None for name in optional if name not in given},
                    "ROWS": rows,
                    "BUFFERS": BUFFERS,
                    "CONSUMER_REGISTERS": CONSUMER_REGISTERS,
                    "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
                },
                divisible=("weights_stride", "scores_stride"),
                matrix="e4m3",
                # A value or two of each consumer.
                spills=64 if rows > 1 and given else 0,
            )

"""Index scores on Hopper: 64 heads of FP8 queries against pages of 64 FP8 keys.

The grid is (CTAs, splits of the context). CTAs are persistent: a work item is a token or a pair of
neighbouring tokens, and a CTA takes every n-th item. It keeps its item's queries in shared memory,
[ROWS x 64 heads, 128], loads the next item's meanwhile, and passes over the pages that the tokens
see. If two tokens belong to different requests, it takes one request's pages after the other's.

    2 producer warps         each loads every second tile by TMA, from pages to STAGES tiles in
                             shared memory, keys [64, 128] and 64 scales; 24 registers. The first
                             also loads queries.
    2 consumer warpgroups    each computes the same tiles: wgmma keys . queries, relu, weights, sums

Barriers: full[stage] from producer to consumer, managed by Gluon, and empty[stage] from consumer to
producer, in shared memory that the kernel manages itself. With OVERLAP, a tile's products run while
the sums of the tile before are taken, in two sets of accumulators. This suits CTAs with many tiles,
as it takes the registers of a whole SM; CTAs with few tiles start sooner without it.

A warpgroup multiplies 64 keys with ROWS tokens of 64 heads. A thread's accumulators hold 2 keys and
a quarter of the heads; four threads exchange their partial sums, so that each ends with one (key,
token), which it scales and writes:

    dots [64, ROWS * 64]  ->  partial [64, ROWS, 4]  ->  scores [64, ROWS]  ->  maxima [4, ROWS]
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

from anymla.ops._gluon import aggregate, view
from anymla.ops._gluon_ptx import (
    bar_warp_sync,
    gdc_launch_dependents,
    gdc_wait,
    laneid,
    ld_shared_v4_f32,
    mbarrier_arrive_after_read,
    mbarrier_init,
    mbarrier_wait,
    mbarrier_wait_if_negative,
    shared_array,
    st_shared_f32,
)
from anymla.ops.indexer.config import GROUP

HEADS = 64
WIDTH = 128
PAGE = 64
STAGES = 8
CONSUMERS = 2
PRODUCER_REGISTERS = 24
_H = gl.constexpr(HEADS)
_D = gl.constexpr(WIDTH)
_P = gl.constexpr(PAGE)
_C = gl.constexpr(CONSUMERS)
_G = gl.constexpr(GROUP)
_PAGES_CHECKED = gl.constexpr(512)  # page ids that are checked together
_NAN_KEY = gl.constexpr(0x7F800001)  # ordered integer of NaN, as in triton_topk
_KEEP_NAN = gl.constexpr(triton.language.PropagateNan.ALL)
# Triton 3.6 has the function's old name.
_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

# Shared memory that the kernel manages itself. With it, warps of a warpgroup need not wait for each
# other to release a stage or to exchange partial sums among their own threads, as the compiler's
# barriers and layout conversions would make them.
#
#     0      empty barriers: one arrival from every warp of the consumers that read a stage
#     1024   partial sums of two tiles: 1,024 bytes for every warp of two consumers
#
# The size is a multiple of 1,024, so that the compiler's shared memory stays aligned.
_PARTIALS = gl.constexpr(1024)
# Bytes between the partial sums of consecutive tiles.
_PARTIALS_OF_TILE = gl.constexpr(2048)


@gluon.constexpr_function
def _field(x):
    """Wrap a compile-time value, such as None, for a field of an aggregate."""
    return x if hasattr(x, "type") else gl.constexpr(x)


# --- tile scheduler: which pages a CTA passes over ----------------------------------------------


@aggregate
class RowRanges:
    """Rows of a launch and the pages that they see, as in ``ScoreInputs``.

    Attributes:
        table: pointer to page ids, int32 [R, pages]; None if pages are consecutive.
        row_stride, column_stride: elements between two rows, and two columns, of the table.
        rows: number of rows of the launch.
        pages: number of pages of the cache.
        split_size: number of entries that one CTA passes over.
    """

    table: object
    row_stride: object
    column_stride: object
    lengths: object
    starts: object
    row_requests: object
    first_row: object
    rows: object
    per_request: object
    num_requests: object
    pages: object
    covered: object
    k: object
    split_size: object

    @gluon.constexpr_function
    def __init__(
        self, table, row_stride, column_stride, lengths, starts, row_requests, first_row, rows,
        per_request, num_requests, pages, covered, k, split_size,
    ):  # fmt: skip
        self.table = _field(table)
        self.row_stride = _field(row_stride)
        self.column_stride = _field(column_stride)
        self.lengths = _field(lengths)
        self.starts = _field(starts)
        self.row_requests = _field(row_requests)
        self.first_row = _field(first_row)
        self.rows = _field(rows)
        self.per_request = _field(per_request)
        self.num_requests = _field(num_requests)
        self.pages = _field(pages)
        self.covered = _field(covered)
        self.k = _field(k)
        self.split_size = _field(split_size)


@aggregate
class TileRange:
    """Tiles of a CTA's work item: two ranges of pages, and the rows that see them.

    Attributes:
        q0: request of the first range.
        low0: first entry of the first range.
        tiles0: number of tiles of the first range.
        q1: request of the second range, which is empty if the rows share the first.
        low1: first entry of the second range.
        tiles1: number of tiles of the second range.
        s0: first entry that the first row sees.
        e0: one past the last entry that the first row sees.
        s1: first entry that the second row sees.
        e1: one past the last entry that the second row sees.
        shared: True if both rows see the first range.
    """

    q0: object
    low0: object
    tiles0: object
    q1: object
    low1: object
    tiles1: object
    s0: object
    e0: object
    s1: object
    e1: object
    shared: object

    @gluon.constexpr_function
    def __init__(self, q0, low0, tiles0, q1, low1, tiles1, s0, e0, s1, e1, shared):
        self.q0, self.low0, self.tiles0 = q0, low0, tiles0
        self.q1, self.low1, self.tiles1 = q1, low1, tiles1
        self.s0, self.e0, self.s1, self.e1 = s0, e0, s1, e1
        self.shared = shared


@gluon.jit
def _bounds(rows, row):
    """Return request and entries [start, end) of a row that is scored; (0, 0) for any other row."""
    live = row < rows.rows
    if rows.row_requests is None:
        request = (rows.first_row + row) // rows.per_request
    else:
        request = gl.load(rows.row_requests + row, mask=live, other=-1)
    end = gl.minimum(gl.load(rows.lengths + row, mask=live, other=0), rows.covered)
    start = 0
    if rows.starts is not None:
        start = gl.maximum(gl.load(rows.starts + row, mask=live, other=0), 0)
    scored = live & (request >= 0) & (request < rows.num_requests) & (end - start > rows.k)
    return request, gl.where(scored, start, 0), gl.where(scored, end, 0)


@gluon.jit
def _tile_range(rows, item, ROWS: gl.constexpr):
    """Return this CTA's tiles for the ``item``-th row, or pair of rows."""
    row = item * ROWS
    q0, s0, e0 = _bounds(rows, row)
    q1, s1, e1, shared = q0, s0, e0, e0 > 0
    if ROWS > 1:
        q1, s1, e1 = _bounds(rows, row + 1)
        shared = (q0 == q1) & (e0 > 0) & (e1 > 0)
    low0 = gl.where(shared, gl.minimum(s0, s1), s0)
    high0 = gl.where(shared, gl.maximum(e0, e1), e0)
    high1 = gl.where(shared, 0, e1)
    if ROWS == 1:
        high1 = gl.where(shared, 0, 0)
    first = gl.program_id(1) * rows.split_size
    low0 = gl.maximum(low0 // _P * _P, first)
    low1 = gl.maximum(s1 // _P * _P, first)
    tiles0 = gl.maximum(gl.minimum(high0, first + rows.split_size) - low0 + _P - 1, 0) // _P
    tiles1 = gl.maximum(gl.minimum(high1, first + rows.split_size) - low1 + _P - 1, 0) // _P
    return TileRange(q0, low0, tiles0, q1, low1, tiles1, s0, e0, s1, e1, shared)


@gluon.jit
def _page_of(rows, work, tile):
    """Return a tile's page id, -1 past the last tile, and the tile's first entry."""
    tiles = work.tiles0 + work.tiles1
    second = tile >= work.tiles0
    request = gl.where(second, work.q1, work.q0)
    at = gl.where(second, work.low1 + (tile - work.tiles0) * _P, work.low0 + tile * _P)
    if rows.table is None:
        page = gl.where(tile < tiles, at // _P, -1)
    else:
        cell = request.to(gl.int64) * rows.row_stride
        cell += (at // _P).to(gl.int64) * rows.column_stride
        page = gl.load(rows.table + cell, mask=tile < tiles, other=-1)
    return page, at


@gluon.jit
def _first_page_of(rows, work, item, tile, ROWS: gl.constexpr):
    """Return the page id of one of a CTA's first tiles, before lengths are known if possible.

    This is possible if rows begin at 0 and requests have equally many rows: then the place of the
    page in the table does not depend on lengths.
    """
    if (rows.table is not None) and (rows.row_requests is None) and (rows.starts is None):
        at = gl.program_id(1) * rows.split_size + tile * _P
        request = (rows.first_row + item * ROWS) // rows.per_request
        cell = request.to(gl.int64) * rows.row_stride + (at // _P).to(gl.int64) * rows.column_stride
        page = gl.load(rows.table + cell, mask=at < rows.covered, other=-1)
        other, _at = _page_of(
            rows, work, gl.where(tile < work.tiles0, work.tiles0 + work.tiles1, tile)
        )
        page = gl.where(tile < work.tiles0, page, other)
    else:
        page, _at = _page_of(rows, work, tile)
    return page


# --- shared memory that the kernel manages itself ------------------------------------------------


@gluon.jit
def _init_empty_barriers(scratch, FIRST: gl.constexpr, COUNT: gl.constexpr, WARPS: gl.constexpr):
    """Initialise barriers for WARPS arrivals each; a barrier of all threads makes them visible."""
    for i in gl.static_range(COUNT):
        mbarrier_init(scratch + 8 * (FIRST + i), WARPS)


@gluon.jit
def _release(scratch, stage, scale, lane):
    """Release a stage after its last read by a warp, which gave ``scale``; return ``scale``."""
    at = gl.zeros_like(scale).to(gl.int32) + scratch + 8 * stage
    return mbarrier_arrive_after_read(at, scale, lane)


@gluon.jit
def _partial_addresses(scratch, like, INDEX: gl.constexpr, ROWS: gl.constexpr):
    """Return addresses of partial sums [64, ROWS, 4], laid out as ``like``, keys' four adjacent."""
    L: gl.constexpr = like.type.layout
    key = gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    part = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, L)))
    line = gl.expand_dims((key // 16) * 32 + key % 16, 1) + gl.expand_dims(row * 16, 0)
    part = gl.expand_dims(gl.expand_dims(part, 0), 0)
    return scratch + _PARTIALS + INDEX * 2 * 2048 + gl.expand_dims(line * 16, 2) + part * 4


@gluon.jit
def _sum_address(scratch, INDEX: gl.constexpr, ROWS: gl.constexpr, L: gl.constexpr):
    """Return addresses of the first partial sum of each key, [64, ROWS] laid out as L."""
    key = gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, L))
    line = gl.expand_dims((key // 16) * 32 + key % 16, 1) + gl.expand_dims(row * 16, 0)
    return scratch + _PARTIALS + INDEX * 2 * 2048 + line * 16


@gluon.jit
def _store_partial(partial, partial_at):
    """Store partial sums of a tile and synchronise the threads of the warp."""
    st_shared_f32(partial_at, partial)
    bar_warp_sync()


@gluon.jit
def _load_partial_sum(sum_at):
    """Load and add four partial sums in the order of a butterfly over threads."""
    a, b, c, d = ld_shared_v4_f32(sum_at)
    return (a + c) + (b + d)


# --- epilogue: sums over heads, scores, maxima --------------------------------------------------


@aggregate
class Pipeline:
    """Shared memory and barriers of a CTA.

    Attributes:
        keys: ring of key tiles, [STAGES, 64, 128].
        scales: ring of the tiles' scales, [STAGES, 1, 64].
        queries: queries of this work item and the next, [2, ROWS * 64, 128].
        full: barriers of filled tiles, then those of filled queries.
        scratch: address of the kernel's own shared memory: empty barriers of tiles, then of
            queries, then partial sums.
    """

    keys: object
    scales: object
    queries: object
    full: object
    scratch: object

    @gluon.constexpr_function
    def __init__(self, keys, scales, queries, full, scratch):
        self.keys = keys
        self.scales = scales
        self.queries = queries
        self.full = full
        self.scratch = scratch


@aggregate
class ScoreArguments:
    """Pointers to weights and results, explained as arguments of ``scores_kernel``."""

    weights: object
    weights_stride: object
    scores: object
    scores_stride: object
    maxima: object
    maxima_stride: object
    context: object

    @gluon.constexpr_function
    def __init__(
        self, weights, weights_stride, scores, scores_stride, maxima, maxima_stride, context
    ):  # fmt: skip
        self.weights = _field(weights)
        self.weights_stride = _field(weights_stride)
        self.scores = _field(scores)
        self.scores_stride = _field(scores_stride)
        self.maxima = _field(maxima)
        self.maxima_stride = _field(maxima_stride)
        self.context = _field(context)


@aggregate
class Epilogue:
    """Pointers and per-thread values with which a work item's scores are made and stored.

    Attributes:
        out: pointers to the score of entry 0 of each row, [64, ROWS].
        maxima_out: pointers to the maximum of group 0 of each row, or None.
        weight: weights of the heads, laid out like their products in ``_split_heads``.
        partial_at: shared-memory address where a thread stores its partial sums.
        sum_at: shared-memory address of the partial sums that a thread adds.
        row_of_item: row within the work item that a thread's result belongs to.
        lane: number of a thread within its warp.
        pages: number of pages of the cache.
        inner_low: first entry of the range that every row sees whole and whose pages all exist,
            which leaves out only a few tiles.
        inner_high: one past the last entry of that range.
    """

    out: object
    maxima_out: object
    weight: object
    partial_at: object
    sum_at: object
    row_of_item: object
    lane: object
    pages: object
    inner_low: object
    inner_high: object

    @gluon.constexpr_function
    def __init__(
        self,
        out,
        maxima_out,
        weight,
        partial_at,
        sum_at,
        row_of_item,
        lane,
        pages,
        inner_low,
        inner_high,
    ):
        self.out = _field(out)
        self.maxima_out = _field(maxima_out)
        self.weight = _field(weight)
        self.partial_at = _field(partial_at)
        self.sum_at = _field(sum_at)
        self.row_of_item = _field(row_of_item)
        self.lane = _field(lane)
        self.pages = _field(pages)
        self.inner_low = _field(inner_low)
        self.inner_high = _field(inner_high)


@gluon.jit
def _max_nan(a, b):
    return gl.maximum(a, b, propagate_nan=_KEEP_NAN)


@gluon.jit
def _split_heads(x, ROWS: gl.constexpr):
    """Split [64, ROWS * 64] into 16 of [64, ROWS, 4], in the order in which a thread has them.

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
    """Split [.., pair, number] into two pairs."""
    first, second = gl.split(x)
    return gl.split(first), gl.split(second)


@gluon.jit
def _add_pair(total, x, weight):
    return gl.fma(x[1], weight[1], gl.fma(x[0], weight[0], total))


@gluon.jit
def _group_maxima(sums, ROWS: gl.constexpr):
    """Return the maximum of each 16 of [64, ROWS] as an ordered integer."""
    # Adding zero turns -0 into 0; NaN results are positive on this device, and so the largest.
    best = gl.reduce(gl.reshape(sums, [_P // _G, _G, ROWS]), 1, _max_nan) + 0.0
    bits = best.to(gl.int32, bitcast=True)
    return gl.minimum(bits ^ ((bits >> 31) & 0x7FFFFFFF), _NAN_KEY)


@gluon.jit
def _store_maxima(pending, pending_at, epilogue, ROWS: gl.constexpr):
    """Store the maxima of pending scores, of the tile at ``pending_at`` if that is >= 0.

    They are left pending for one tile so that the exchange between threads overlaps the next tile's
    sums.
    """
    if epilogue.maxima_out is not None:
        gl.store(
            epilogue.maxima_out + (pending_at >> 4),
            _group_maxima(pending, ROWS),
            mask=pending_at >= 0,
        )


@gluon.jit
def _issue_wgmma(
    pipeline, queries, stage, parity, ACC: gl.constexpr, L: gl.constexpr, ROWS: gl.constexpr
):
    """Issue the products of the tile in a stage, and load its keys' scales."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    mbarrier.wait(pipeline.full.index(stage), parity)
    dots = warpgroup_mma(
        pipeline.keys.index(stage), queries.permute((1, 0)),
        gl.zeros([_P, ROWS * _H], gl.float32, ACC), use_acc=False, is_async=True,
    )  # fmt: skip
    return dots, view(pipeline.scales.index(stage), gl.float32, [_P], FLAT).load(
        gl.SliceLayout(1, L)
    )


@gluon.jit
def _sum_heads(
    dots, buffer, prev, prev_scale, rows, work, epilogue, pending, pending_at,
    ROWS: gl.constexpr, FENCED: gl.constexpr,
):  # fmt: skip
    """Compute partial sums of a tile whose products are complete; store the ``prev`` tile's scores.

    The values that went into shared memory one tile ago are read back without a wait.

    Args:
        dots: products of the tile.
        buffer: index of the buffer for partial sums, 0 or 1.
        prev: tile whose partial sums lie in the other buffer; -1 for none.
        prev_scale: scales of that tile's keys.
        rows: rows of the launch, a ``RowRanges``.
        work: tiles of the work item, a ``TileRange``.
        epilogue: destination of scores, an ``Epilogue``.
        pending: scores whose maxima are to be stored.
        pending_at: entry at which they begin; -1 for none.
        ROWS: rows per work item.
        FENCED: True if scales of the next tile are being read, whose stage is released afterwards.

    Returns ``pending`` and ``pending_at`` of the ``prev`` tile.
    """
    total = _load_partial_sum(epilogue.sum_at + (1 - buffer) * _PARTIALS_OF_TILE)
    _store_maxima(pending, pending_at, epilogue, ROWS)
    x = _split_heads(gl.maximum(dots, 0.0, propagate_nan=_KEEP_NAN), ROWS)
    weight = epilogue.weight
    # Spell out each FMA, because compilers differ in how they contract a sum of products.
    partial = gl.fma(x[0][0], weight[0][0], x[0][1] * weight[0][1])
    partial = _add_pair(partial, x[1], weight[1])
    partial = _add_pair(partial, x[2], weight[2])
    partial = _add_pair(partial, x[3], weight[3])
    partial = _add_pair(partial, x[4], weight[4])
    partial = _add_pair(partial, x[5], weight[5])
    partial = _add_pair(partial, x[6], weight[6])
    partial = _add_pair(partial, x[7], weight[7])
    if FENCED:
        # Fence here: later it would wait for the stores that follow.
        fence_async_shared()
    _store_partial(partial, epilogue.partial_at + buffer * _PARTIALS_OF_TILE)
    return _store_scores(total * gl.expand_dims(prev_scale, 1), prev, rows, work, epilogue, ROWS)


@gluon.jit
def _store_last(
    buffer, prev, prev_scale, rows, work, epilogue, pending, pending_at, ROWS: gl.constexpr
):  # fmt: skip
    """Finish the last tile, whose partial sums lie in ``buffer``, like ``_sum_heads``."""
    total = _load_partial_sum(epilogue.sum_at + buffer * _PARTIALS_OF_TILE)
    _store_maxima(pending, pending_at, epilogue, ROWS)
    pending, pending_at = _store_scores(
        total * gl.expand_dims(prev_scale, 1), prev, rows, work, epilogue, ROWS
    )
    _store_maxima(pending, pending_at, epilogue, ROWS)


@gluon.jit
def _store_scores(pending, tile, rows, work, epilogue, ROWS: gl.constexpr):
    """Store the scores of a tile; return those that are pending and their entry, -1 for none."""
    pending_at = work.low0 + tile * _P
    if (pending_at >= epilogue.inner_low) & (pending_at + _P <= epilogue.inner_high):
        gl.store(epilogue.out + pending_at, pending)
    else:
        if tile >= 0:
            page, at = _page_of(rows, work, tile)
            second = tile >= work.tiles0
            start = gl.where(epilogue.row_of_item == 0, work.s0, work.s1)
            end0 = gl.where(second, 0, work.e0)
            end1 = gl.where(second | work.shared, work.e1, 0)
            end = gl.where(epilogue.row_of_item == 0, end0, end1)
            entry = at + gl.arange(0, _P, layout=gl.SliceLayout(1, pending.type.layout))
            entry = gl.expand_dims(entry, 1)
            seen = (gl.expand_dims(start, 0) <= entry) & (entry < gl.expand_dims(end, 0))
            # Scores of entries that are not seen must not exceed any other in a maximum.
            pending = gl.where((page >= 0) & (page < rows.pages) & seen, pending, float("-inf"))
            gl.store(epilogue.out + at, pending, mask=seen)
            if epilogue.maxima_out is not None:
                group_max = gl.max(gl.reshape(seen.to(gl.int32), [_P // _G, _G, ROWS]), 1)
                gl.store(
                    epilogue.maxima_out + at // _G, _group_maxima(pending, ROWS), mask=group_max > 0
                )
        pending_at = gl.to_tensor(-1)
    return pending, pending_at


# --- consumers ---------------------------------------------------------------------------------


@gluon.jit
def _fill(out, low, high, live, INDEX: gl.constexpr):
    """Store -inf to entries [low, high) of a live row; INDEX takes every second 128 of them."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lane = gl.arange(0, 128, layout=ONE)
    nothing = gl.full([128], float("-inf"), gl.float32, ONE)
    for at in range(low + INDEX * 128, gl.where(live, high, low), _C * 128):
        gl.store(out + at + lane, nothing, mask=at + lane < high)


@gluon.jit
def _fill_item(rows, work, given, item, ROWS: gl.constexpr, INDEX: gl.constexpr):
    """Store -inf around the entries that the rows of an item see."""
    row = (item * ROWS).to(gl.int64)
    low = gl.program_id(1) * rows.split_size
    high = gl.minimum(low + rows.split_size, given.context)
    line = given.scores + row * given.scores_stride
    live = row < rows.rows
    _fill(line, low, gl.minimum(work.s0, high), live, INDEX)
    _fill(line, gl.maximum(work.e0, low), high, live, INDEX)
    if ROWS > 1:
        line += given.scores_stride
        live = row + 1 < rows.rows
        _fill(line, low, gl.minimum(work.s1, high), live, INDEX)
        _fill(line, gl.maximum(work.e1, low), high, live, INDEX)


@gluon.jit
def _epilogue(
    rows, work, given, scratch, item, ACC: gl.constexpr, L: gl.constexpr, ROWS: gl.constexpr,
    INDEX: gl.constexpr,
):  # fmt: skip
    """Make the epilogue of an item's rows."""
    row = (item * ROWS).to(gl.int64)
    column = gl.arange(0, ROWS * _H, layout=gl.SliceLayout(0, ACC))
    weight = gl.load(
        given.weights + (row + column // _H) * given.weights_stride + column % _H,
        mask=row + column // _H < rows.rows,
        other=0.0,
    )
    weight, _ = gl.broadcast(gl.expand_dims(weight, 0), gl.zeros([_P, ROWS * _H], gl.float32, ACC))
    weight = _split_heads(weight, ROWS)
    row_of_item = gl.arange(0, ROWS, layout=gl.SliceLayout(0, L))
    key = gl.arange(0, _P, layout=gl.SliceLayout(1, L))
    out = given.scores + row * given.scores_stride
    out = out + gl.expand_dims(row_of_item * given.scores_stride, 0) + gl.expand_dims(key, 1)
    maxima_out = None
    if given.maxima is not None:
        group_max = gl.max(gl.reshape(gl.zeros([_P, ROWS], gl.float32, L), [_P // _G, _G, ROWS]), 1)
        M: gl.constexpr = group_max.type.layout
        pair = gl.arange(0, ROWS, layout=gl.SliceLayout(0, M)) * given.maxima_stride
        group = gl.arange(0, _P // _G, layout=gl.SliceLayout(1, M))
        maxima_out = given.maxima + row * given.maxima_stride + gl.expand_dims(pair, 0)
        maxima_out = maxima_out + gl.expand_dims(group, 1)
    # If any page is missing, all tiles are masked.
    missing = 0
    tiles = work.tiles0 + work.tiles1
    number = gl.arange(
        0, _PAGES_CHECKED, layout=gl.BlockedLayout([_PAGES_CHECKED // 128], [32], [4], [0])
    )
    for first in range(0, tiles, _PAGES_CHECKED):
        page, _at = _page_of(rows, work, first + number)
        absent = (first + number < tiles) & ((page < 0) | (page >= rows.pages))
        missing += gl.sum(absent.to(gl.int32), 0)
    inner_high = gl.where(work.shared & (missing == 0), gl.minimum(work.e0, work.e1), 0)
    partial_at = _partial_addresses(scratch, weight[0][0], INDEX, ROWS)
    return Epilogue(
        out, maxima_out, weight, partial_at, _sum_address(scratch, INDEX, ROWS, L), row_of_item,
        laneid(key), rows.pages, gl.maximum(gl.maximum(work.s0, work.s1), work.low0), inner_high,
    )  # fmt: skip


@gluon.jit
def _consume(
    rows, pipeline, given, items, ROWS: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
    FILL: gl.constexpr, PDL: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    """Score every second tile of a CTA's items, from tile INDEX on; FILL puts -inf around them."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS * _H, 32])
    # 16 threads take the keys of a token; with one token, the other 16 threads take the same keys.
    # Triton reduces wrongly over threads that are not neighbours.
    L: gl.constexpr = gl.DistributedLinearLayout(
        [], [[1, 0], [2, 0], [4, 0], [8, 0], [0, ROWS - 1]], [[16, 0], [32, 0]], [], [_P, ROWS]
    )
    DEPTH: gl.constexpr = STAGES // _C
    n = 0  # tiles so far
    phase = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        work = _tile_range(rows, item, ROWS)
        epilogue = _epilogue(rows, work, given, pipeline.scratch, item, ACC, L, ROWS, INDEX)
        if FILL:
            _fill_item(rows, work, given, item, ROWS, INDEX)
        queries = pipeline.queries.index(phase % 2)
        mbarrier.wait(pipeline.full.index(STAGES + phase % 2), (phase // 2) & 1)
        tiles = work.tiles0 + work.tiles1
        pending, pending_at = gl.zeros([_P, ROWS], gl.float32, L), gl.to_tensor(-1)
        prev, prev_scale = gl.to_tensor(-1), gl.zeros([_P], gl.float32, gl.SliceLayout(1, L))
        buffer = 0
        if OVERLAP:
            count = gl.maximum(tiles - INDEX + _C - 1, 0) // _C
            if count > 0:
                even, scale = _run_tile(pipeline, epilogue, queries, n, DEPTH, INDEX, ACC, L, ROWS)
                tile = work.low0 * 0 + INDEX
                for _ in range(0, (count - 1) // 2):
                    odd, odd_scale = _issue_tile(
                        pipeline, epilogue, queries, n + 1, DEPTH, INDEX, ACC, L, ROWS
                    )
                    pending, pending_at = _sum_heads(
                        even, 0, prev, prev_scale, rows, work, epilogue, pending, pending_at, ROWS,
                        True,
                    )  # fmt: skip
                    odd, odd_scale = _wait_tile(
                        pipeline, epilogue, odd, odd_scale, n + 1, DEPTH, INDEX
                    )
                    prev_scale = scale
                    even, scale = _issue_tile(
                        pipeline, epilogue, queries, n + 2, DEPTH, INDEX, ACC, L, ROWS
                    )
                    pending, pending_at = _sum_heads(
                        odd, 1, tile, prev_scale, rows, work, epilogue, pending, pending_at, ROWS,
                        True,
                    )  # fmt: skip
                    even, scale = _wait_tile(pipeline, epilogue, even, scale, n + 2, DEPTH, INDEX)
                    prev, prev_scale = tile + _C, odd_scale
                    n += 2
                    tile += 2 * _C
                n += 1
                if count % 2 == 0:
                    odd, odd_scale = _issue_tile(
                        pipeline, epilogue, queries, n, DEPTH, INDEX, ACC, L, ROWS
                    )
                    pending, pending_at = _sum_heads(
                        even, 0, prev, prev_scale, rows, work, epilogue, pending, pending_at, ROWS,
                        True,
                    )  # fmt: skip
                    prev, prev_scale = tile, scale
                    even, scale = _wait_tile(pipeline, epilogue, odd, odd_scale, n, DEPTH, INDEX)
                    n += 1
                    tile = tile + _C
                buffer = (count - 1) % 2
                pending, pending_at = _sum_heads(
                    even, buffer, prev, prev_scale, rows, work, epilogue, pending, pending_at, ROWS,
                    False,
                )  # fmt: skip
                _store_last(buffer, tile, scale, rows, work, epilogue, pending, pending_at, ROWS)
        else:
            for tile in range(INDEX, tiles, _C):
                dots, scale = _run_tile(pipeline, epilogue, queries, n, DEPTH, INDEX, ACC, L, ROWS)
                pending, pending_at = _sum_heads(
                    dots, buffer, prev, prev_scale, rows, work, epilogue, pending, pending_at, ROWS,
                    False,
                )  # fmt: skip
                prev, prev_scale = tile, scale
                buffer = 1 - buffer
                n += 1
            _store_last(
                1 - buffer, prev, prev_scale, rows, work, epilogue, pending, pending_at, ROWS
            )
        # All products of the item have been waited for.
        fence_async_shared()
        _release(pipeline.scratch, STAGES + phase % 2, epilogue.lane.to(gl.float32), epilogue.lane)
        phase += 1  # noqa: SIM113 - device code has no enumerate


@gluon.constexpr_function
def _log2(n):
    assert n & (n - 1) == 0
    return n.bit_length() - 1


@gluon.jit
def _issue_tile(
    pipeline, epilogue, queries, n, DEPTH: gl.constexpr, INDEX: gl.constexpr, ACC: gl.constexpr,
    L: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Issue the products of the n-th tile."""
    stage, parity = (n & (DEPTH - 1)) * _C + INDEX, (n >> _log2(DEPTH)) & 1
    dots, scale = _issue_wgmma(pipeline, queries, stage, parity, ACC, L, ROWS)
    # The compiler does not move code behind this branch in between the products.
    mbarrier_wait_if_negative(pipeline.scratch + 8 * (DEPTH * _C + 2), epilogue.pages)
    return dots, scale


@gluon.jit
def _wait_tile(pipeline, epilogue, dots, scale, n, DEPTH: gl.constexpr, INDEX: gl.constexpr):
    """Wait for the products of the n-th tile, and release the tile."""
    dots = warpgroup_mma_wait(0, deps=[dots])
    return dots, _release(pipeline.scratch, (n & (DEPTH - 1)) * _C + INDEX, scale, epilogue.lane)


@gluon.jit
def _run_tile(
    pipeline, epilogue, queries, n, DEPTH: gl.constexpr, INDEX: gl.constexpr, ACC: gl.constexpr,
    L: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Compute the products of the n-th tile to the end."""
    dots, scale = _issue_tile(pipeline, epilogue, queries, n, DEPTH, INDEX, ACC, L, ROWS)
    fence_async_shared()
    return _wait_tile(pipeline, epilogue, dots, scale, n, DEPTH, INDEX)


# --- producers ---------------------------------------------------------------------------------


@gluon.jit
def _produce(
    q_desc, keys_desc, scales_desc, rows, pipeline, items, ROWS: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    """Load the tiles of one consumer, page ids one tile ahead; the first also loads queries."""
    if PDL:
        gdc_wait()
    L3: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=3)
    # Scales of a page begin behind its codes.
    SCALES: gl.constexpr = 0 if rows.table is None else _P * _D // 4
    DEPTH: gl.constexpr = STAGES // _C
    n = 0  # tiles so far
    phase = 0
    if INDEX == 0:
        _load_queries(q_desc, pipeline, gl.program_id(0), 0, ROWS, STAGES)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        work = _tile_range(rows, item, ROWS)
        page = _first_page_of(rows, work, item, INDEX, ROWS)
        for tile in range(INDEX, work.tiles0 + work.tiles1, _C):
            next_page, _at = _page_of(rows, work, tile + _C)
            stage = n % DEPTH * _C + INDEX
            mbarrier_wait(pipeline.scratch, stage, ((n // DEPTH) & 1) ^ 1)
            n += 1
            mbarrier.expect(pipeline.full.index(stage), _P * _D + _P * 4)
            # If there is no page, load any other; its scores are not used.
            there = (page >= 0) & (page < rows.pages)
            source = gl.where(there, page, 0)
            keys = view(pipeline.keys.index(stage), gl.float8e4nv, [1, _P, _D], L3)
            _tma_load(keys_desc, [source, 0, 0], pipeline.full.index(stage), keys)
            _tma_load(
                scales_desc,
                [source, SCALES],
                pipeline.full.index(stage),
                pipeline.scales.index(stage),
            )
            page = next_page
        phase += 1  # noqa: SIM113 - device code has no enumerate
        if INDEX == 0:
            next_item = item + gl.num_programs(0)
            if next_item < items:
                mbarrier_wait(pipeline.scratch, STAGES + phase % 2, ((phase // 2) & 1) ^ 1)
                _load_queries(q_desc, pipeline, next_item, phase, ROWS, STAGES)


@gluon.jit
def _load_queries(q_desc, pipeline, item, phase, ROWS: gl.constexpr, STAGES: gl.constexpr):
    full = pipeline.full.index(STAGES + phase % 2)
    mbarrier.expect(full, ROWS * _H * _D)
    _tma_load(q_desc, [item * (ROWS * _H), 0], full, pipeline.queries.index(phase % 2))


@gluon.jit(
    do_not_specialize=[
        "first_row", "rows", "per_request", "num_requests", "pages", "covered", "k", "split_size",
        "context", "items", "table_row_stride",
    ]
)  # fmt: skip
def scores_kernel(
    q_desc,
    keys_desc,
    scales_desc,
    table,
    table_row_stride,
    table_column_stride,
    lengths,
    starts,
    row_requests,
    weights,
    weights_stride,
    scores,
    scores_stride,
    maxima,
    maxima_stride,
    first_row,
    rows,
    per_request,
    num_requests,
    pages,
    covered,
    k,
    split_size,
    context,
    items,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    FILL: gl.constexpr,
    PDL: gl.constexpr,
):
    """Score items of ROWS tokens, ``split_size`` entries per CTA.

    Arguments are those of ``triton_scores.scores_kernel``. With FILL, entries that a token does not
    see become -inf, up to ``context``.
    """
    # A consumer returns to its own stages, so it never waits for a fill two phases ahead, which a
    # barrier's parity could not tell from the last.
    gl.static_assert(STAGES % _C == 0)
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    FLAT: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=2)
    queries = gl.allocate_shared_memory(gl.float8e4nv, [2, ROWS * _H, _D], SWIZZLED)
    keys = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, _P, _D], SWIZZLED)
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, _P], FLAT)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES + 2, 1], BARRIER)
    scratch = shared_array("anymla_scores", 9216, 1024)
    _init_empty_barriers(scratch, 0, STAGES, 4)
    _init_empty_barriers(scratch, STAGES, 2, 4 * _C)
    _init_empty_barriers(scratch, STAGES + 2, 1, 4)
    for i in gl.static_range(STAGES + 2):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    seen = RowRanges(
        table, table_row_stride, table_column_stride, lengths, starts, row_requests, first_row,
        rows, per_request, num_requests, pages, covered, k, split_size,
    )  # fmt: skip
    pipeline = Pipeline(keys, scales, queries, full, scratch)
    given = ScoreArguments(
        weights, weights_stride, scores, scores_stride, maxima, maxima_stride, context
    )
    gl.warp_specialize(
        [
            (_consume, (seen, pipeline, given, items, ROWS, STAGES, OVERLAP, FILL, PDL, 0)),
            (_consume, (seen, pipeline, given, items, ROWS, STAGES, OVERLAP, FILL, PDL, 1)),
            (_produce, (
                q_desc, keys_desc, scales_desc, seen, pipeline, items, ROWS, STAGES, PDL, 0,
            )),
            (_produce, (
                q_desc, keys_desc, scales_desc, seen, pipeline, items, ROWS, STAGES, PDL, 1,
            )),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip

"""Decode attention on Hopper to windows that the queries of a request share, each row decoded once.

Grid: a CTA for each tile, 64 heads of at most eight neighbouring queries of a request. It decodes
the 128 rows that the first of them sees into shared memory, in bfloat16, and attends to them query
after query. A query sees one row that the one before does not, and the other way round: the new
row takes the old one's place, so that the order of rows is another and nothing else.

    scores   4 warps   S = Q K, the softmax               112 registers
    weigh    8 warps   P V                                160
    updater  4 warps   the row that the next query sees    80

Each of the 16 warps first decodes eight of the rows. Rows are two blocks of 64, of which the
second one's scores are computed while the first one's become probabilities. TMA brings Q of the
next query as soon as the last scores are there.

Barriers: loaded, once, all; q_full TMA -> scores; p_ready[b] scores -> weigh, with the factor by
which the first block's sums decay, and the one of the result; p_free[0] weigh -> updater, and
updated updater -> scores; p_free[1] weigh -> scores. Whoever multiplies by rows or probabilities
fences behind the wait, as in ``gluon_sm90_decode_m64``.

In bfloat16 every e4m3 code times any power of two is exact that bfloat16 has, queries stay as they
are, and P is rounded to bfloat16 as the contract has it. A row with a NaN among its codes or scales
gets NaN scores, which is what its products would be.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.ops._gluon import aggregate, view, warpgroup_barrier
from anymla.ops._gluon_epilogue import Output, prefetch_angles, store_quantized_sums
from anymla.ops._gluon_ptx import (
    cvt_bf16x2_e4m3x4_mul,
    gdc_launch_dependents,
    gdc_wait,
    ld_global_v4_if,
)

_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_LAYOUT = get_layout(MAIN_FP8)
_DATA = gl.constexpr(_LAYOUT.data_bytes)
_SCALES = gl.constexpr(_LAYOUT.scale_bytes)
_NOPE = gl.constexpr(_LAYOUT.nope)
_LOG2E = gl.constexpr(1.4426950408889634)
_LN2 = gl.constexpr(0.6931471805599453)
_NO_MAXIMUM = gl.constexpr(-1e29)
_MASKED = gl.constexpr(-1e30)
_HEADS = gl.constexpr(64)
_KEYS = gl.constexpr(64)  # of a block
_CHANNELS = gl.constexpr(_LAYOUT.channels)
PLACES = gl.constexpr(128)  # for rows
NEW_PLACES = gl.constexpr(8)  # of them those that change
_ONES = gl.constexpr(0x7F7F7F7F7F7F7F7F)  # scale bytes of rows that are not there: 1


@aggregate
class Shared:
    """Shared memory of a CTA.

    Attributes:
        q: bfloat16 [64, 512], the queries.
        q_halves: the same as [2, 64, 256].
        packed: int32 [2, 64, 256], two blocks of rows.
        rows: the same as bfloat16.
        p: bfloat16 [2, 64, 64], probabilities of a block.
        bias: float32 [2, 64], of the scores of a row.
        factors: float32 [2, 64], by how much the first block's sums decay; factor of the result.
        loaded: barriers; see the file, as for the next ones.
        q_full: one.
        p_ready: [2].
        p_free: [2].
        updated: one.
    """

    q: object
    q_halves: object
    packed: object
    rows: object
    p: object
    bias: object
    factors: object
    loaded: object
    q_full: object
    p_ready: object
    p_free: object
    updated: object

    @gluon.constexpr_function
    def __init__(
        self, q, q_halves, packed, rows, p, bias, factors, loaded, q_full, p_ready, p_free, updated
    ):  # fmt: skip
        self.q, self.q_halves = q, q_halves
        self.packed, self.rows, self.p = packed, rows, p
        self.bias, self.factors = bias, factors
        self.loaded, self.q_full, self.updated = loaded, q_full, updated
        self.p_ready, self.p_free = p_ready, p_free


@aggregate
class Tile:
    """What a CTA does.

    Attributes:
        slots: int32, the request's list from the first query's window on.
        seen: columns of it that the tile's queries see.
        cache: of the rows.
        limit: slots are below.
        token: first of the queries.
        head: first of the heads.
        count: queries.
        PAGE: rows of a page.
        STEP: bytes from a page to the next.
        WINDOW: rows that a query sees.
    """

    slots: gl.tensor
    seen: gl.tensor
    cache: gl.tensor
    limit: gl.tensor
    token: gl.tensor
    head: gl.tensor
    count: gl.tensor
    PAGE: gl.constexpr
    STEP: gl.constexpr
    WINDOW: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, slots, seen, cache, limit, token, head, count, PAGE, STEP, WINDOW):
        self.slots, self.seen, self.cache, self.limit = slots, seen, cache, limit
        self.token, self.head, self.count = token, head, count
        self.PAGE, self.STEP = gl.constexpr(PAGE), gl.constexpr(STEP)
        self.WINDOW = gl.constexpr(WINDOW)


@gluon.jit
def _row_of_eight(a, b, c, d, e, f, g, h, ROWS: gl.constexpr):
    """Pairs 0 .. 7 of each lane side by side: [ROWS, 32]."""
    joined = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
    return gl.reshape(gl.permute(joined, (0, 1, 4, 3, 2)), [ROWS, 32])


@gluon.jit
def _half_row(a, b, c, d, ROWS: gl.constexpr):
    """Four blocks side by side: [ROWS, 128] pairs."""
    joined = gl.join(gl.join(a, b), gl.join(c, d))
    return gl.reshape(gl.permute(joined, (0, 3, 2, 1)), [ROWS, 128])


@gluon.jit
def _factor(scales, PLACE: gl.constexpr):
    """2^(byte - 127) of byte PLACE of each int32, as two bfloat16; NaN is looked for elsewhere."""
    bits = (scales >> (8 * PLACE)) & 0xFF
    bits = gl.where(bits == 0, 0x40, bits << 7)
    return gl.expand_dims(bits | (bits << 16), 1)


@gluon.jit
def _block(x, scales, PLACE: gl.constexpr, ROWS: gl.constexpr):
    """64 channels of every row: [ROWS, 32] pairs."""
    factor = _factor(scales, PLACE)
    a, b = cvt_bf16x2_e4m3x4_mul(x[0], factor)
    c, d = cvt_bf16x2_e4m3x4_mul(x[1], factor)
    e, f = cvt_bf16x2_e4m3x4_mul(x[2], factor)
    g, h = cvt_bf16x2_e4m3x4_mul(x[3], factor)
    return _row_of_eight(a, b, c, d, e, f, g, h, ROWS)


@gluon.jit
def _nan_codes(x):
    """Bits that are set where one of sixteen codes is NaN, 0x7F or 0xFF."""
    a = ((x[0] & 0x7F7F7F7F) + 0x01010101) | ((x[1] & 0x7F7F7F7F) + 0x01010101)
    b = ((x[2] & 0x7F7F7F7F) + 0x01010101) | ((x[3] & 0x7F7F7F7F) + 0x01010101)
    return (a | b) & -0x7F7F7F80


@gluon.jit
def _nan_scales(low, high):
    """The same of seven scale bytes, 0xFF alone."""
    low = (low & 0x7F7F7F7F) + 0x01010101 & low
    high = (high & 0x7F7F7F7F) + 0x01010101 & high & 0x00FFFFFF
    return (low | high) & -0x7F7F7F80


@gluon.jit
def _fetch(tile, slots, L: gl.constexpr):
    """Ask for rows: whether there are such, and four lanes' bytes of each."""
    PAGE: gl.constexpr = tile.PAGE
    STEP: gl.constexpr = tile.STEP
    lane = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, L)), 0) * 16
    valid = (slots >= 0) & (slots < tile.limit)
    slots = gl.where(valid, slots, 0).to(gl.uint32)
    pages = slots // PAGE
    entry = (slots - pages * PAGE).to(gl.int32)
    page = tile.cache.to(gl.int64) + pages.to(gl.int64) * STEP
    scales_at = page + (PAGE * _DATA + entry * _SCALES)
    scales = gl.load(scales_at.to(gl.pointer_type(gl.int64)), mask=valid, other=_ONES)
    there = gl.expand_dims(valid, 1).to(gl.int32)
    at = gl.expand_dims(page + entry * _DATA, 1) + lane
    x0 = ld_global_v4_if(at, there)
    x1 = ld_global_v4_if(at + 64, there)
    x2 = ld_global_v4_if(at + 128, there)
    x3 = ld_global_v4_if(at + 192, there)
    x4 = ld_global_v4_if(at + 256, there)
    x5 = ld_global_v4_if(at + 320, there)
    x6 = ld_global_v4_if(at + 384, there)
    y0 = ld_global_v4_if(at + lane + _NOPE, there)
    y1 = ld_global_v4_if(at + lane + (_NOPE + 16), there)
    return valid, scales, x0, x1, x2, x3, x4, x5, x6, y0, y1


@gluon.jit
def _decoded(fetched, ROWS: gl.constexpr):
    """What ``_fetch`` asked for: both halves as [ROWS, 128] pairs, and the rows' bias."""
    valid, scales, x0, x1, x2, x3, x4, x5, x6, y0, y1 = fetched
    low = scales.to(gl.int32)
    high = (scales >> 32).to(gl.int32)
    left = _half_row(
        _block(x0, low, 0, ROWS), _block(x1, low, 1, ROWS),
        _block(x2, low, 2, ROWS), _block(x3, low, 3, ROWS), ROWS,
    )  # fmt: skip
    tail = _row_of_eight(y0[0], y0[1], y0[2], y0[3], y1[0], y1[1], y1[2], y1[3], ROWS)
    right = _half_row(
        _block(x4, high, 0, ROWS), _block(x5, high, 1, ROWS), _block(x6, high, 2, ROWS), tail, ROWS
    )
    nan = _nan_codes(x0) | _nan_codes(x1) | _nan_codes(x2) | _nan_codes(x3)
    nan = nan | _nan_codes(x4) | _nan_codes(x5) | _nan_codes(x6)
    nan = gl.max((nan != 0).to(gl.int32), 1) | (_nan_scales(low, high) != 0).to(gl.int32)
    bias = gl.where(valid, gl.where(nan != 0, float("nan"), 0.0), _MASKED)
    return left, right, bias


@gluon.jit
def _put(shared, fetched, BLOCK: gl.constexpr, ROW0: gl.constexpr, ROWS: gl.constexpr):
    """Decode what was asked for, and store it from a row of a block on."""
    left, right, bias = _decoded(fetched, ROWS)
    rows = shared.packed.index(BLOCK).slice(ROW0, ROWS, dim=0)
    rows.slice(0, 128, dim=1).store(left)
    rows.slice(128, 128, dim=1).store(right)
    shared.bias.index(BLOCK).slice(ROW0, ROWS, dim=0).store(bias)


@gluon.jit
def _load_rows(
    tile, shared, BLOCK: gl.constexpr, ROW0: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr
):
    """Rows that the first query sees, some of a block, by the warps of a partition."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [WARPS, 1], [1, 0])
    place = BLOCK * _KEYS + ROW0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    slots = gl.load(tile.slots + place, mask=place < tile.seen, other=-1)
    _put(shared, _fetch(tile, slots, L), BLOCK, ROW0, ROWS)
    mbarrier.arrive(shared.loaded, count=1)


@gluon.jit
def _updater(tile, shared):
    """A quarter of the rows; then what every further query sees instead of an older row."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    gdc_wait()
    _load_rows(tile, shared, 0, 32, 32, 4)
    place = gl.arange(0, NEW_PLACES, layout=gl.SliceLayout(1, L))
    for k in range(1, tile.count):
        column = gl.where(place < k, place + PLACES, place)
        slots = gl.load(tile.slots + column, mask=column < tile.seen, other=-1)
        fetched = _fetch(tile, slots, L)
        mbarrier.wait(shared.p_free.index(0), (k - 1) & 1)
        _put(shared, fetched, 0, 0, NEW_PLACES)
        mbarrier.arrive(shared.updated, count=1)


@aggregate
class Params:
    """What a launch is given beside its rows.

    Attributes:
        q_desc: TMA descriptor of queries.
        counts: int32 [R], queries of each request.
        sink: float32 [H].
        out: see ``_gluon_epilogue.Output``.
        lse: float32 [T, H].
        H: heads.
        scale: of the scores, times log2(e).
        empty: lse of a query without rows.
        first: of the tile's queries, among its request's.
        request: of the tile.
        SINK: there is one.
        COUNTS: there are such.
        WHOLE: heads are a multiple of 64.
    """

    q_desc: object
    counts: gl.tensor
    sink: gl.tensor
    out: object
    lse: gl.tensor
    H: gl.tensor
    scale: gl.tensor
    empty: gl.tensor
    first: gl.tensor
    request: gl.tensor
    SINK: gl.constexpr
    COUNTS: gl.constexpr
    WHOLE: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, q_desc, counts, sink, out, lse, H, scale, empty, first, request, SINK, COUNTS, WHOLE
    ):  # fmt: skip
        self.q_desc, self.counts, self.sink, self.out, self.lse = q_desc, counts, sink, out, lse
        self.H, self.scale, self.empty = H, scale, empty
        self.first, self.request = first, request
        self.SINK, self.COUNTS = gl.constexpr(SINK), gl.constexpr(COUNTS)
        self.WHOLE = gl.constexpr(WHOLE)


@gluon.jit
def _ask_query(tile, params, shared, k):
    """Let TMA bring the heads of a query."""
    row = (tile.token + k) * params.H + tile.head
    mbarrier.expect(shared.q_full, _HEADS * _CHANNELS * 2)
    for part in gl.static_range(2):
        to = shared.q_halves.index(part)
        _tma_load(params.q_desc, [row, part * (_CHANNELS // 2)], shared.q_full, to)


@gluon.jit
def _scores_of(shared, BLOCK: gl.constexpr, S: gl.constexpr):
    """Begin the scores of a block."""
    scores = gl.zeros([_HEADS, _KEYS], gl.float32, S)
    rows = shared.rows.index(BLOCK).permute((1, 0))
    return warpgroup_mma(shared.q, rows, scores, use_acc=False, is_async=True)


@gluon.jit
def _biased(
    scores, shared, tile, k, queries, COUNTS: gl.constexpr, BLOCK: gl.constexpr, S: gl.constexpr
):  # fmt: skip
    """Scores, of rows that the query does not see far below all others."""
    bias = shared.bias.index(BLOCK).load(gl.SliceLayout(0, S))
    if tile.WINDOW < PLACES:
        place = BLOCK * _KEYS + gl.arange(0, _KEYS, layout=gl.SliceLayout(0, S))
        column = gl.where(place < k, place + PLACES, place)
        bias = gl.where(column < k + tile.WINDOW, bias, _MASKED)
    if COUNTS:
        bias = gl.where(k < queries, bias, _MASKED)
    return scores + gl.expand_dims(bias, 0)


@gluon.jit
def _scores(tile, params, shared):
    """A quarter of the rows; then scores, probabilities, and the factors of the results."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    gdc_wait()
    gdc_launch_dependents()
    _ask_query(tile, params, shared, 0)
    _load_rows(tile, shared, 0, 0, 32, 4)
    head = tile.head + gl.arange(0, _HEADS, layout=ROW)
    there = head < params.H
    sink = gl.full([_HEADS], -float("inf"), gl.float32, ROW)
    if params.SINK:
        sink = gl.load(params.sink + head, mask=there, other=0.0) * _LOG2E
    queries = tile.count
    if params.COUNTS:
        queries = gl.load(params.counts + params.request) - params.first
    mbarrier.wait(shared.loaded, 0)
    scale = params.scale
    for k in range(0, tile.count):
        if k > 0:
            # So weigh is done with the first block, and its probabilities.
            mbarrier.wait(shared.updated, (k - 1) & 1)
        mbarrier.wait(shared.q_full, k & 1)
        fence_async_shared()
        first = _scores_of(shared, 0, S)
        if params.out.ROPE_DIM > 0:
            prefetch_angles(params.out, tile.token + k)
        second = _scores_of(shared, 1, S)
        first = warpgroup_mma_wait(1, deps=[first])
        first = _biased(first, shared, tile, k, queries, params.COUNTS, 0, S)
        top = gl.maximum(gl.max(first, 1), _NO_MAXIMUM)
        p = gl.exp2(first * scale - gl.expand_dims(top * scale, 1))
        sums = gl.sum(p, 1)
        shared.p.index(0).store(p.to(gl.bfloat16))
        fence_async_shared()
        mbarrier.arrive(shared.p_ready.index(0), count=1)
        second = warpgroup_mma_wait(0, deps=[second])
        if k + 1 < tile.count:
            # All warps are done with this query's heads.
            warpgroup_barrier()
            _ask_query(tile, params, shared, k + 1)
        second = _biased(second, shared, tile, k, queries, params.COUNTS, 1, S)
        peak = gl.maximum(top, gl.max(second, 1))
        decay = gl.exp2((top - peak) * scale)
        p = gl.exp2(second * scale - gl.expand_dims(peak * scale, 1))
        sums = sums * decay + gl.sum(p, 1)
        total = sums + gl.exp2(sink - peak * scale)
        mbarrier.wait(shared.p_free.index(1), (k & 1) ^ 1)
        shared.p.index(1).store(p.to(gl.bfloat16))
        shared.factors.index(0).store(decay)
        shared.factors.index(1).store(gl.where(sums == 0, 0.0, 1.0 / total))
        fence_async_shared()
        mbarrier.arrive(shared.p_ready.index(1), count=1)
        lse = gl.where(sums == 0, params.empty, (peak * scale + gl.log2(sums)) * _LN2)
        gl.store(params.lse + (tile.token + k).to(gl.int64) * params.H + head, lse, mask=there)


@gluon.jit
def _store(y, out, row, valid, WHOLE: gl.constexpr):
    """Store [64, 512] rounded, in full 32-byte sectors, exchanging values within a warp."""
    OL: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64], [0, 256]],
        [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [0, 128]],
        [],
        [64, 512],
    )
    o = gl.convert_layout(y.to(out.dtype.element_ty), OL)
    r = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, OL)), 1)
    c = gl.expand_dims(gl.arange(0, 512, layout=gl.SliceLayout(0, OL)), 0)
    at = out + row.to(gl.int64) * 512 + (r * 512 + c)
    if WHOLE:
        gl.store(at, o)
    else:
        gl.store(at, o, mask=(r < valid) & (c >= 0))


@gluon.jit
def _weigh(tile, params, shared):
    """Half of the rows; then every query's result."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 128, 16])
    R: gl.constexpr = gl.SliceLayout(1, L)
    gdc_wait()
    _load_rows(tile, shared, 1, 0, 64, 8)
    mbarrier.wait(shared.loaded, 0)
    out = params.out
    for k in range(0, tile.count):
        acc = gl.zeros([_HEADS, _CHANNELS], gl.float32, L)
        mbarrier.wait(shared.p_ready.index(0), k & 1)
        fence_async_shared()
        acc = warpgroup_mma(
            shared.p.index(0), shared.rows.index(0), acc, use_acc=False, is_async=True
        )
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(shared.p_free.index(0), count=1)
        mbarrier.wait(shared.p_ready.index(1), k & 1)
        fence_async_shared()
        factor = shared.factors.index(1).load(R)
        acc = acc * gl.expand_dims(shared.factors.index(0).load(R), 1)
        acc = warpgroup_mma(shared.p.index(1), shared.rows.index(1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(shared.p_free.index(1), count=1)
        token = tile.token + k
        acc = acc * gl.expand_dims(factor, 1)
        if out.ROPE_DIM > 0:
            store_quantized_sums(acc, out, token, params.H, tile.head, params.WHOLE)
        else:
            row = token * params.H + tile.head
            _store(acc, out.heads, row, params.H - tile.head, params.WHOLE)


@gluon.jit(
    do_not_specialize=[
        "queries", "group", "groups", "H", "limit", "stride", "scale", "empty", "angles"
    ]
)  # fmt: skip
def windows_kernel(
    q_desc, cache, slots, counts, sink, out, lse, scales, positions, table,
    angles, queries, group, groups, H, limit, stride, scale, empty,
    HEAD_TILES: gl.constexpr, WINDOW: gl.constexpr, PAGE: gl.constexpr, STEP: gl.constexpr,
    SINK: gl.constexpr, COUNTS: gl.constexpr, WHOLE: gl.constexpr,
    WEIGHING_REGISTERS: gl.constexpr, UPDATER_REGISTERS: gl.constexpr, ROPE_DIM: gl.constexpr,
):  # fmt: skip
    """Attend; see the file.

    Args:
        q_desc: of q as [T * H, 512], boxes of 64 x 256.
        cache: pages of rows.
        slots: int32 [R, WINDOW + queries - 1], ``stride`` apart.
        counts: int32 [R], read if COUNTS.
        sink: float32 [H], read if SINK.
        out: bfloat16 [T, H, 512]; codes if ROPE_DIM is not 0, see ``_gluon_epilogue.Output``, where
            the next ones but lse are.
        lse: float32 [T, H].
        scales: float32 [T, H, 4].
        positions: int64 [T].
        table: float32 [angles, ROPE_DIM].
        angles: rows of the table.
        queries: of a request.
        group: of a tile, at most NEW_PLACES.
        groups: tiles of a request's queries.
        H: heads.
        limit: slots are below.
        stride: of ``slots``.
        scale: of the scores, times log2(e).
        empty: lse of a query without rows.
        HEAD_TILES: ceil(H / 64).
        WINDOW: rows that a query sees, at most PLACES.
        PAGE: rows of a page.
        STEP: bytes from a page to the next.
        SINK: there is a sink.
        COUNTS: requests may have fewer queries.
        WHOLE: H is a multiple of 64.
        WEIGHING_REGISTERS: registers of a thread that multiplies by values.
        UPDATER_REGISTERS: of one that brings further rows.
        ROPE_DIM: 0 for heads as they are.
    """
    number = gl.program_id(0)
    place = number // HEAD_TILES
    request = place // groups
    first = (place % groups) * group
    count = gl.minimum(group, queries - first)
    tile = Tile(
        slots + request.to(gl.int64) * stride + first, WINDOW + count - 1, cache, limit,
        request * queries + first, (number % HEAD_TILES) * 64, count, PAGE, STEP, WINDOW,
    )  # fmt: skip
    to = Output(out, scales, positions, table, angles, ROPE_DIM, gl.bfloat16)
    params = Params(
        q_desc, counts, sink, to, lse, H, scale, empty, first, request, SINK, COUNTS, WHOLE
    )
    HALVES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    B: gl.constexpr = mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(gl.bfloat16, [64, 512], HALVES)
    q_halves = view(q_s, gl.bfloat16, [2, 64, 256], HALVES)
    packed = gl.allocate_shared_memory(gl.int32, [2, 64, 256], WORDS)
    rows = view(packed, gl.bfloat16, [2, 64, 512], HALVES)
    p_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], HALVES)
    bias = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    factors = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    loaded = gl.allocate_shared_memory(gl.int64, [1], B)
    updated = gl.allocate_shared_memory(gl.int64, [1], B)
    q_full = gl.allocate_shared_memory(gl.int64, [1], B)
    p_ready = gl.allocate_shared_memory(gl.int64, [2, 1], B)
    p_free = gl.allocate_shared_memory(gl.int64, [2, 1], B)
    mbarrier.init(loaded, count=3)
    mbarrier.init(q_full, count=1)
    mbarrier.init(updated, count=1)
    for i in gl.static_range(2):
        mbarrier.init(p_ready.index(i), count=1)
        mbarrier.init(p_free.index(i), count=1)
    shared = Shared(
        q_s, q_halves, packed, rows, p_s, bias, factors, loaded, q_full, p_ready, p_free, updated
    )
    gl.warp_specialize(
        [
            (_scores, (tile, params, shared)),
            (_weigh, (tile, params, shared)),
            (_updater, (tile, shared)),
        ],
        [8, 4],
        [WEIGHING_REGISTERS, UPDATER_REGISTERS],
    )

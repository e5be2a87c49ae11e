"""Decode attention on Hopper to windows that the queries of a request share, each row decoded once.

Grid: a CTA for each tile, 64 heads of at most eight neighbouring queries of a request. It decodes
the 128 rows that the first of them sees into shared memory, in bfloat16, and attends to them query
after query. A query sees one row that the one before does not, and the other way round: the new
row takes the old one's place, so that the order of rows is another and nothing else.

    scores   S = Q K, the softmax; rows that further queries see   88 registers
    weigh    P V, the output                                      168

Both are eight warps, and first decode 64 of the rows each. TMA brings Q of the next query as soon
as the scores are there, and further rows are decoded while the product with the values runs.

Entries, up to 64 that all queries of a request see, take the places of the window's first half when
a query is done with it, and the next query begins with them and with the window's second half. So
a query has two products of each kind, and each time one block of 64 rows is decoded.

Barriers: loaded, once, both; q_full TMA -> scores; p_ready scores -> weigh, with the factor of the
result; p_free weigh -> scores. Whoever multiplies by rows or probabilities fences behind the wait,
as in ``gluon_sm90_decode_m64``.

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
from anymla.ops._gluon import (
    aggregate,
    field,
    gdc_launch_dependents,
    gdc_wait,
    opaque,
    view,
    warpgroup_barrier,
)

_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_LAYOUT = get_layout(MAIN_FP8)
_DATA = gl.constexpr(_LAYOUT.data_bytes)
_SCALES = gl.constexpr(_LAYOUT.scale_bytes)
_NOPE = gl.constexpr(_LAYOUT.nope)
_LOG2E = gl.constexpr(1.4426950408889634)
_LN2 = gl.constexpr(0.6931471805599453)
_NO_MAXIMUM = gl.constexpr(-1e29)
_MASKED = gl.constexpr(-1e30)
_HEADS = gl.constexpr(64)
_CHANNELS = gl.constexpr(_LAYOUT.channels)
PLACES = gl.constexpr(128)  # for rows
FURTHER = gl.constexpr(8)  # rows that further queries see
_ONES = gl.constexpr(0x7F7F7F7F7F7F7F7F)  # scale bytes of rows that are not there: 1
_LOAD = gl.constexpr(
    "{ .reg .pred q; .reg .b64 p; createpolicy.fractional.L2::evict_first.b64 p, 1.0; "
    "setp.ne.s32 q, $5, 0; "
    "mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; "
    "@q ld.global.L1::evict_last.L2::cache_hint.L2::256B.v4.u32 {$0, $1, $2, $3}, [$4], p; }"
)
# Sign, exponent and mantissa of a code at the place of bfloat16's, whose exponents differ by 120.
_DECODE = gl.constexpr(
    "{ .reg .b32 a, b, c, d, k; mov.b32 k, 0x7B807B80; "
    "prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424; "
    "and.b32 c, a, 0x80008000; and.b32 d, b, 0x80008000; "
    "shr.u32 a, a, 4; shr.u32 b, b, 4; and.b32 a, a, 0x07F007F0; and.b32 b, b, 0x07F007F0; "
    "or.b32 a, a, c; or.b32 b, b, d; mul.rn.bf16x2 a, a, k; mul.rn.bf16x2 b, b, k; "
    "mul.rn.bf16x2 $0, a, $3; mul.rn.bf16x2 $1, b, $3; }"
)


@aggregate
class Shared:
    """Shared memory of a CTA.

    Attributes:
        q: bfloat16 [64, 512], the queries.
        q_halves: the same as [2, 64, 256].
        packed: int32 [128, 256], the rows.
        rows: the same as bfloat16.
        p: bfloat16 [64, 128], probabilities.
        bias: float32 [128], of the scores of a row.
        further: int32 [8, 256], rows that further queries see.
        further_bias: float32 [8], theirs.
        decay: float32 [64], of sums at a query's second product; None without entries.
        factor: float32 [64], of the result.
        loaded: barriers; see the file, as for the next ones.
        q_full: likewise.
        p_ready: likewise.
        p_free: likewise.
    """

    q: object
    q_halves: object
    packed: object
    rows: object
    p: object
    bias: object
    further: object
    further_bias: object
    decay: object
    factor: object
    loaded: object
    q_full: object
    p_ready: object
    p_free: object

    @gluon.constexpr_function
    def __init__(
        self, q, q_halves, packed, rows, p, bias, further, further_bias, decay, factor,
        loaded, q_full, p_ready, p_free,
    ):  # fmt: skip
        self.q, self.q_halves = q, q_halves
        self.packed, self.rows, self.p = packed, rows, p
        self.bias, self.factor = bias, factor
        self.further, self.further_bias, self.decay = further, further_bias, field(decay)
        self.loaded, self.q_full, self.p_ready, self.p_free = loaded, q_full, p_ready, p_free


@aggregate
class Tile:
    """What a CTA does.

    Attributes:
        slots: int32, the request's list from the first query's window on.
        seen: columns of it that the tile's queries see.
        cache: of the rows.
        limit: slots are below.
        more: the same of entries, a tuple (slots, columns, cache, limit); read if ENTRIES.
        token: first of the queries.
        head: first of the heads.
        count: queries.
        PAGE: rows of a page.
        STEP: bytes from a page to the next.
        WINDOW: rows that a query sees.
        ENTRIES: there are entries.
        MORE_PAGE: of them, as PAGE.
        MORE_STEP: of them, as STEP.
    """

    slots: gl.tensor
    seen: gl.tensor
    cache: gl.tensor
    limit: gl.tensor
    more: gl.tuple
    token: gl.tensor
    head: gl.tensor
    count: gl.tensor
    PAGE: gl.constexpr
    STEP: gl.constexpr
    WINDOW: gl.constexpr
    ENTRIES: gl.constexpr
    MORE_PAGE: gl.constexpr
    MORE_STEP: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, slots, seen, cache, limit, more, token, head, count,
        PAGE, STEP, WINDOW, ENTRIES, MORE_PAGE, MORE_STEP,
    ):  # fmt: skip
        self.slots, self.seen, self.cache, self.limit, self.more = slots, seen, cache, limit, more
        self.ENTRIES = gl.constexpr(ENTRIES)
        self.MORE_PAGE, self.MORE_STEP = gl.constexpr(MORE_PAGE), gl.constexpr(MORE_STEP)
        self.token, self.head, self.count = token, head, count
        self.PAGE, self.STEP = gl.constexpr(PAGE), gl.constexpr(STEP)
        self.WINDOW = gl.constexpr(WINDOW)


@gluon.jit
def _load(address, there):
    """16 bytes at each address, as four int32; zeros where there is no row."""
    return gl.inline_asm_elementwise(
        _LOAD, "=&r,=&r,=&r,=&r,l,r", [address, there],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


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
def _decode(codes, factor):
    """Four codes of each int32 times the factor, as two packed pairs of bfloat16."""
    return gl.inline_asm_elementwise(
        _DECODE, "=r,=r,r,r", [codes, factor], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )


@gluon.jit
def _block(x, scales, PLACE: gl.constexpr, ROWS: gl.constexpr):
    """64 channels of every row: [ROWS, 32] pairs."""
    factor = _factor(scales, PLACE)
    a, b = _decode(x[0], factor)
    c, d = _decode(x[1], factor)
    e, f = _decode(x[2], factor)
    g, h = _decode(x[3], factor)
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
def _address(slots, cache, limit, PAGE: gl.constexpr, STEP: gl.constexpr):
    """Whether there is a row, and the addresses of its data and of its scales."""
    valid = (slots >= 0) & (slots < limit)
    slots = gl.where(valid, slots, 0).to(gl.uint32)
    pages = slots // PAGE
    entry = (slots - pages * PAGE).to(gl.int32)
    page = cache.to(gl.int64) + pages.to(gl.int64) * STEP
    return valid, page + entry * _DATA, page + (PAGE * _DATA + entry * _SCALES)


@gluon.jit
def _fetch(address, L: gl.constexpr):
    """Ask for rows: whether there are such, and four lanes' bytes of each."""
    valid, data, scales_at = address
    lane = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, L)), 0) * 16
    scales = gl.load(scales_at.to(gl.pointer_type(gl.int64)), mask=valid, other=_ONES)
    there = gl.expand_dims(valid, 1).to(gl.int32)
    at = gl.expand_dims(data, 1) + lane
    x0 = _load(at, there)
    x1 = _load(at + 64, there)
    x2 = _load(at + 128, there)
    x3 = _load(at + 192, there)
    x4 = _load(at + 256, there)
    x5 = _load(at + 320, there)
    x6 = _load(at + 384, there)
    y0 = _load(at + lane + _NOPE, there)
    y1 = _load(at + lane + (_NOPE + 16), there)
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
def _put(rows, biases, decoded):
    """Store decoded rows."""
    left, right, bias = decoded
    rows.slice(0, 128, dim=1).store(left)
    rows.slice(128, 128, dim=1).store(right)
    biases.store(bias)


@gluon.jit
def _load_rows(tile, shared, ROW0: gl.constexpr):
    """Half of the rows that the first query sees."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [8, 1], [1, 0])
    place = ROW0 + gl.arange(0, PLACES // 2, layout=gl.SliceLayout(1, L))
    slots = gl.load(tile.slots + place, mask=place < tile.seen, other=-1)
    address = _address(slots, tile.cache, tile.limit, tile.PAGE, tile.STEP)
    fetched = _fetch(address, L)
    # Once, but the compiler does not know: before a loop that changes what they bring it leaves
    # loads that it would else put behind what waits for others of them.
    for _ in range(0, gl.num_programs(1)):
        rows = shared.packed.slice(ROW0, PLACES // 2, dim=0)
        biases = shared.bias.slice(ROW0, PLACES // 2, dim=0)
        _put(rows, biases, _decoded(fetched, PLACES // 2))
        address = _address(slots * 0 - 1, tile.cache, tile.limit, tile.PAGE, tile.STEP)
        fetched = _fetch(address, L)
    mbarrier.arrive(shared.loaded, count=1)


@gluon.jit
def _load_further_rows(tile, shared):
    """The rows that further queries see, which replace older ones."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [8, 1], [1, 0])
    column = PLACES + gl.arange(0, FURTHER, layout=gl.SliceLayout(1, L))
    slots = gl.load(tile.slots + column, mask=column < tile.seen, other=-1)
    address = _address(slots, tile.cache, tile.limit, tile.PAGE, tile.STEP)
    _put(shared.further, shared.further_bias, _decoded(_fetch(address, L), FURTHER))


@gluon.jit
def _fetch_other(tile, k, L: gl.constexpr):
    """Ask for entries in place of the window's first half, or for that in place of entries."""
    place = gl.arange(0, PLACES // 2, layout=gl.SliceLayout(1, L))
    entries = (k & 1) == 0
    column = gl.where(entries, place, gl.where(place < k, place + PLACES, place))
    seen = gl.where(entries, tile.more[1], tile.seen)
    base = gl.where(entries, tile.more[0].to(gl.int64), tile.slots.to(gl.int64))
    slots = base.to(gl.pointer_type(gl.int32)) + column
    slots = gl.load(slots, mask=column < seen, other=-1)
    valid, data, scales_at = _address(slots, tile.cache, tile.limit, tile.PAGE, tile.STEP)
    valid1, data1, scales1_at = _address(
        slots, tile.more[2], tile.more[3], tile.MORE_PAGE, tile.MORE_STEP
    )
    valid = gl.where(entries, valid1, valid)
    data = gl.where(entries, data1, data)
    return _fetch((valid, data, gl.where(entries, scales1_at, scales_at)), L)


@gluon.jit
def _replace_row(shared, k):
    """Put the row that query k + 1 sees first into the place of the one that it does not see."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0])
    place = gl.arange(0, FURTHER, layout=gl.SliceLayout(1, L))
    new = shared.further.load(L)
    rows = shared.packed.slice(0, FURTHER, dim=0)
    rows.store(gl.where(gl.expand_dims(place <= k, 1), new, rows.load(L)))
    new = shared.further_bias.load(gl.SliceLayout(1, L))
    biases = shared.bias.slice(0, FURTHER, dim=0)
    biases.store(gl.where(place <= k, new, biases.load(gl.SliceLayout(1, L))))


@aggregate
class Params:
    """What a launch is given beside its rows.

    Attributes:
        q_desc: TMA descriptor of queries.
        out_desc: of ``out``; used if WHOLE.
        counts: int32 [R], queries of each request.
        more_counts: int32 [T], entries that each query sees; read if MORE_COUNTS.
        sink: float32 [H].
        out: [T, H, 512].
        lse: float32 [T, H].
        H: heads.
        scale: of the scores, times log2(e).
        empty: lse of a query without rows.
        first: of the tile's queries, among its request's.
        request: of the tile.
        SINK: there is one.
        COUNTS: there are such.
        MORE_COUNTS: likewise.
        WHOLE: heads are a multiple of 64.
    """

    q_desc: object
    out_desc: object
    counts: gl.tensor
    more_counts: gl.tensor
    sink: gl.tensor
    out: gl.tensor
    lse: gl.tensor
    H: gl.tensor
    scale: gl.tensor
    empty: gl.tensor
    first: gl.tensor
    request: gl.tensor
    SINK: gl.constexpr
    COUNTS: gl.constexpr
    MORE_COUNTS: gl.constexpr
    WHOLE: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, q_desc, out_desc, counts, more_counts, sink, out, lse, H, scale, empty, first,
        request, SINK, COUNTS, MORE_COUNTS, WHOLE,
    ):  # fmt: skip
        self.q_desc, self.out_desc = q_desc, out_desc
        self.more_counts, self.MORE_COUNTS = more_counts, gl.constexpr(MORE_COUNTS)
        self.counts, self.sink, self.out, self.lse = counts, sink, out, lse
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
def _biased(
    x, shared, tile, k, queries, entries, more, COUNTS: gl.constexpr, KEYS: gl.constexpr,
    S: gl.constexpr,
):  # fmt: skip
    """Scores of the first KEYS places, of rows that the query does not see far below all others.

    Args:
        x: scores.
        shared: see there.
        tile: likewise.
        k: of the tile's queries.
        queries: of the tile that are there.
        entries: the first half of the places are entries.
        more: how many of them the query sees.
        COUNTS: queries are counted.
        KEYS: 128 or 64.
        S: layout of the scores.
    """
    bias = shared.bias
    if KEYS < PLACES:
        bias = bias.slice(0, KEYS, dim=0)
    bias = bias.load(gl.SliceLayout(0, S))
    place = gl.arange(0, KEYS, layout=gl.SliceLayout(0, S))
    visible = place >= 0
    if tile.WINDOW < PLACES:
        visible = gl.where(place < k, place + PLACES, place) < k + tile.WINDOW
    if tile.ENTRIES:
        visible = gl.where(entries & (place < PLACES // 2), place < more, visible)
    if COUNTS:
        visible = visible & (k < queries)
    if tile.WINDOW < PLACES or tile.ENTRIES or COUNTS:
        bias = gl.where(visible, bias, _MASKED)
    return x + gl.expand_dims(bias, 0)


@gluon.jit
def _ready_for_heads(tile, params, shared, k):
    """Ask for the next query's heads, when all warps are done with this one's."""
    if k + 1 < tile.count:
        warpgroup_barrier()
        _ask_query(tile, params, shared, k + 1)


@gluon.jit
def _scores(tile, params, shared):
    """Half of the rows; then scores, probabilities, factors of the results, and further rows."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16])
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    L: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [8, 1], [1, 0])
    ENTRIES: gl.constexpr = tile.ENTRIES
    gdc_wait()
    gdc_launch_dependents()
    _ask_query(tile, params, shared, 0)
    _load_rows(tile, shared, 0)
    queries = tile.count
    if params.COUNTS:
        queries = gl.load(params.counts + params.request) - params.first
    mbarrier.wait(shared.loaded, 0)
    scale = params.scale
    for k in range(0, tile.count):
        mbarrier.wait(shared.q_full, k & 1)
        fence_async_shared()
        warpgroup_barrier()
        x = gl.zeros([_HEADS, PLACES], gl.float32, S)
        x = warpgroup_mma(shared.q, shared.rows.permute((1, 0)), x, use_acc=False, is_async=True)
        x = warpgroup_mma_wait(0, deps=[x])
        if not ENTRIES:
            _ready_for_heads(tile, params, shared, k)
        head = tile.head + gl.arange(0, _HEADS, layout=ROW) + opaque(k * 0)
        there = head < params.H
        if params.SINK:
            sink = gl.load(params.sink + head, mask=there, other=0.0)
        entries = (k & 1) == 1
        more = k
        if ENTRIES:
            more = tile.more[1]
            if params.MORE_COUNTS:
                more = gl.load(params.more_counts + tile.token + k)
        x = _biased(x, shared, tile, k, queries, entries, more, params.COUNTS, PLACES, S)
        peak = gl.maximum(gl.max(x, 1), _NO_MAXIMUM) * scale
        p = gl.exp2(x * scale - gl.expand_dims(peak, 1))
        if ENTRIES:
            # Of the query before; without entries that has been waited for, below.
            mbarrier.wait(shared.p_free, 1)
        shared.p.store(p.to(gl.bfloat16))
        sums = gl.sum(p, 1)
        if ENTRIES:
            fence_async_shared()
            mbarrier.arrive(shared.p_ready, count=1)
            fetched = _fetch_other(tile, k, L)
            mbarrier.wait(shared.p_free, 0)
            rows = shared.packed.slice(0, PLACES // 2, dim=0)
            _put(rows, shared.bias.slice(0, PLACES // 2, dim=0), _decoded(fetched, PLACES // 2))
            fence_async_shared()
            warpgroup_barrier()
            x = gl.zeros([_HEADS, PLACES // 2], gl.float32, HALF)
            other = shared.rows.slice(0, PLACES // 2, dim=0)
            x = warpgroup_mma(shared.q, other.permute((1, 0)), x, use_acc=False, is_async=True)
            x = warpgroup_mma_wait(0, deps=[x])
            _ready_for_heads(tile, params, shared, k)
            entries = (k & 1) == 0
            x = _biased(
                x, shared, tile, k, queries, entries, more, params.COUNTS, PLACES // 2, HALF
            )
            before = peak
            peak = gl.maximum(gl.convert_layout(gl.max(x, 1), ROW) * scale, before)
            decay = gl.exp2(before - peak)
            shift = gl.convert_layout(peak, gl.SliceLayout(1, HALF))
            p = gl.exp2(x * scale - gl.expand_dims(shift, 1))
            shared.p.slice(0, PLACES // 2, dim=1).store(p.to(gl.bfloat16))
            shared.decay.store(decay)
            sums = sums * decay + gl.convert_layout(gl.sum(p, 1), ROW)
        total = sums
        if params.SINK:
            total = sums + gl.exp2(sink * _LOG2E - peak)
        shared.factor.store(gl.where(sums == 0, 0.0, 1.0 / total))
        fence_async_shared()
        mbarrier.arrive(shared.p_ready, count=1)
        lse = gl.where(sums == 0, params.empty, (peak + gl.log2(sums)) * _LN2)
        gl.store(params.lse + (tile.token + k).to(gl.int64) * params.H + head, lse, mask=there)
        if k + 1 < tile.count:
            if ENTRIES:
                # Where entries took their place, the rows that change are decoded again later.
                if k == 1:
                    _load_further_rows(tile, shared)
                if (k & 1) == 1:
                    mbarrier.wait(shared.p_free, 1)
                    _replace_row(shared, k)
            else:
                if k == 0:
                    _load_further_rows(tile, shared)
                mbarrier.wait(shared.p_free, k & 1)
                _replace_row(shared, k)


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
    o = gl.convert_layout(y, OL)
    r = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, OL)) + opaque(row * 0), 1)
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
    _load_rows(tile, shared, PLACES // 2)
    mbarrier.wait(shared.loaded, 0)
    for k in range(0, tile.count):
        acc = gl.zeros([_HEADS, _CHANNELS], gl.float32, L)
        if tile.ENTRIES:
            mbarrier.wait(shared.p_ready, 0)
            fence_async_shared()
            acc = warpgroup_mma(shared.p, shared.rows, acc, use_acc=False, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(shared.p_free, count=1)
            mbarrier.wait(shared.p_ready, 1)
            fence_async_shared()
            acc = acc * gl.expand_dims(shared.decay.load(R), 1)
            p = shared.p.slice(0, PLACES // 2, dim=1)
            rows = shared.rows.slice(0, PLACES // 2, dim=0)
            acc = warpgroup_mma(p, rows, acc, is_async=True)
        else:
            mbarrier.wait(shared.p_ready, k & 1)
            fence_async_shared()
            acc = warpgroup_mma(shared.p, shared.rows, acc, use_acc=False, is_async=True)
        factor = shared.factor.load(R)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(shared.p_free, count=1)
        row = (tile.token + k) * params.H + tile.head
        y = (acc * gl.expand_dims(factor, 1)).to(gl.bfloat16)
        if params.WHOLE:
            if k + 1 < tile.count:
                _store(y, params.out, row, params.H - tile.head, True)
            else:
                # No heads follow into this memory.
                shared.q.store(y)
                fence_async_shared()
                for part in gl.static_range(2):
                    to = shared.q_halves.index(part)
                    _tma_store(params.out_desc, [row, part * (_CHANNELS // 2)], to)
        else:
            _store(y, params.out, row, params.H - tile.head, False)
    if params.WHOLE:
        tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "queries",
        "group",
        "groups",
        "H",
        "limit",
        "stride",
        "scale",
        "empty",
        "more_limit",
        "more_stride",
        "more_columns",
    ]
)
def windows_kernel(
    q_desc, out_desc, cache, slots, counts, more_cache, more_slots, more_counts, sink, out, lse,
    queries, group, groups, H, limit, stride, scale, empty, more_limit, more_stride, more_columns,
    HEAD_TILES: gl.constexpr, WINDOW: gl.constexpr, PAGE: gl.constexpr, STEP: gl.constexpr,
    ENTRIES: gl.constexpr, MORE_PAGE: gl.constexpr, MORE_STEP: gl.constexpr,
    SINK: gl.constexpr, COUNTS: gl.constexpr, MORE_COUNTS: gl.constexpr, WHOLE: gl.constexpr,
    WEIGHING_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Attend; see the file.

    Args:
        q_desc: of q as [T * H, 512], boxes of 64 x 256.
        out_desc: of out, likewise; used if WHOLE.
        cache: pages of rows.
        slots: int32 [R, WINDOW + queries - 1], ``stride`` apart.
        counts: int32 [R], read if COUNTS.
        more_cache: pages of entries, like the next read if ENTRIES.
        more_slots: int32 [R, more_columns], ``more_stride`` apart.
        more_counts: int32 [T], read if MORE_COUNTS.
        sink: float32 [H], read if SINK.
        out: bfloat16 [T, H, 512].
        lse: float32 [T, H].
        queries: of a request.
        group: of a tile, at most FURTHER.
        groups: tiles of a request's queries.
        H: heads.
        limit: slots are below.
        stride: of ``slots``.
        scale: of the scores, times log2(e).
        empty: lse of a query without rows.
        more_limit: slots of entries are below.
        more_stride: of their lists.
        more_columns: of them, at most 64.
        HEAD_TILES: ceil(H / 64).
        WINDOW: rows that a query sees, at most PLACES.
        PAGE: rows of a page.
        STEP: bytes from a page to the next.
        ENTRIES: all queries of a request see entries of one list as well.
        MORE_PAGE: rows of their pages.
        MORE_STEP: bytes from one to the next.
        SINK: there is a sink.
        COUNTS: requests may have fewer queries.
        MORE_COUNTS: queries may see fewer entries.
        WHOLE: H is a multiple of 64.
        WEIGHING_REGISTERS: registers of a thread that multiplies by values.
    """
    number = gl.program_id(0)
    place = number // HEAD_TILES
    request = place // groups
    first = (place % groups) * group
    count = gl.minimum(group, queries - first)
    tile = Tile(
        slots + request.to(gl.int64) * stride + first, WINDOW + count - 1, cache, limit,
        (more_slots + request.to(gl.int64) * more_stride, more_columns, more_cache, more_limit),
        request * queries + first, (number % HEAD_TILES) * 64, count,
        PAGE, STEP, WINDOW, ENTRIES, MORE_PAGE, MORE_STEP,
    )  # fmt: skip
    params = Params(
        q_desc, out_desc, counts, more_counts, sink, out, lse, H, scale, empty, first, request,
        SINK, COUNTS, MORE_COUNTS, WHOLE,
    )  # fmt: skip
    HALVES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    B: gl.constexpr = mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(gl.bfloat16, [64, 512], HALVES)
    q_halves = view(q_s, gl.bfloat16, [2, 64, 256], HALVES)
    packed = gl.allocate_shared_memory(gl.int32, [128, 256], WORDS)
    rows = view(packed, gl.bfloat16, [128, 512], HALVES)
    p_s = gl.allocate_shared_memory(gl.bfloat16, [64, 128], HALVES)
    bias = gl.allocate_shared_memory(gl.float32, [128], FLAT)
    further = gl.allocate_shared_memory(gl.int32, [8, 256], WORDS)
    further_bias = gl.allocate_shared_memory(gl.float32, [8], FLAT)
    decay = None
    if ENTRIES:
        decay = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    factor = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    loaded = gl.allocate_shared_memory(gl.int64, [1], B)
    q_full = gl.allocate_shared_memory(gl.int64, [1], B)
    p_ready = gl.allocate_shared_memory(gl.int64, [1], B)
    p_free = gl.allocate_shared_memory(gl.int64, [1], B)
    mbarrier.init(loaded, count=2)
    mbarrier.init(q_full, count=1)
    mbarrier.init(p_ready, count=1)
    mbarrier.init(p_free, count=1)
    shared = Shared(
        q_s, q_halves, packed, rows, p_s, bias, further, further_bias, decay, factor,
        loaded, q_full, p_ready, p_free,
    )  # fmt: skip
    gl.warp_specialize(
        [(_scores, (tile, params, shared)), (_weigh, (tile, params, shared))],
        [8],
        [WEIGHING_REGISTERS],
    )

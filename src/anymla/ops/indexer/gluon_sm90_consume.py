"""Consumers of Hopper's scores: the tiles of a program, one after another or one ahead.

One ahead, the products of a tile are under way while the sums of the tile before are taken, in two
sets of accumulators. That is for programs with many tiles, as it takes the registers of a whole
multiprocessor; where there are few, they begin sooner without.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate  # public from 3.9 on

from anymla.ops.indexer.gluon_sm90_sums import (
    HEADS,
    Target,
    add_up,
    columns,
    multiply,
    write_last,
)
from anymla.ops.indexer.gluon_sm90_walk import PAGE, field, page_of, walk
from anymla.ops.indexer.gluon_sm90_words import (
    give_back,
    go_on,
    lane_of,
    place_of_sum,
    places_of_sums,
)
from anymla.ops.indexer.selection_plan import GROUP
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait

CONSUMERS = 2
_LISTED = 512  # pages that are looked at together
_C = gl.constexpr(CONSUMERS)
_H = gl.constexpr(HEADS)
_P = gl.constexpr(PAGE)
_G = gl.constexpr(GROUP)
_N = gl.constexpr(_LISTED)


@aggregate
class Ring:
    """Shared memory of a program.

    Attributes:
        keys: [BUFFERS, 64, 128], tiles.
        scales: [BUFFERS, 1, 64].
        queries: [2, ROWS * 64, 128], of this item and the next.
        full: barriers of tiles, then of queries.
        words: see ``gluon_sm90_words``; barriers that tiles, then queries, are given back by.
    """

    keys: object
    scales: object
    queries: object
    full: object
    words: object

    @gluon.constexpr_function
    def __init__(self, keys, scales, queries, full, words):
        self.keys = keys
        self.scales = scales
        self.queries = queries
        self.full = full
        self.words = words


@aggregate
class Results:
    """What scores are made with, and where they go; arguments of ``page_scores_kernel``."""

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
        self.weights = field(weights)
        self.weights_stride = field(weights_stride)
        self.scores = field(scores)
        self.scores_stride = field(scores_stride)
        self.maxima = field(maxima)
        self.maxima_stride = field(maxima_stride)
        self.context = field(context)


@gluon.jit
def _fill(out, low, high, live, WHO: gl.constexpr):
    """-inf for entries [low, high) of a row, if it is live; WHO takes every second part of them."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lane = gl.arange(0, 128, layout=ONE)
    nothing = gl.full([128], float("-inf"), gl.float32, ONE)
    for at in range(low + WHO * 128, gl.where(live, high, low), _C * 128):
        gl.store(out + at + lane, nothing, mask=at + lane < high)


@gluon.jit
def _fill_item(rows, way, results, item, ROWS: gl.constexpr, WHO: gl.constexpr):
    """-inf around what the rows of an item see."""
    row = (item * ROWS).to(gl.int64)
    low = gl.program_id(1) * rows.span
    high = gl.minimum(low + rows.span, results.context)
    line = results.scores + row * results.scores_stride
    live = row < rows.rows
    _fill(line, low, gl.minimum(way.s0, high), live, WHO)
    _fill(line, gl.maximum(way.e0, low), high, live, WHO)
    if ROWS > 1:
        line += results.scores_stride
        live = row + 1 < rows.rows
        _fill(line, low, gl.minimum(way.s1, high), live, WHO)
        _fill(line, gl.maximum(way.e1, low), high, live, WHO)


@gluon.jit
def _target(
    rows, way, results, words, item, ACC: gl.constexpr, L: gl.constexpr, ROWS: gl.constexpr,
    WHO: gl.constexpr,
):  # fmt: skip
    """Of an item's rows."""
    row = (item * ROWS).to(gl.int64)
    column = gl.arange(0, ROWS * _H, layout=gl.SliceLayout(0, ACC))
    weight = gl.load(
        results.weights + (row + column // _H) * results.weights_stride + column % _H,
        mask=row + column // _H < rows.rows,
        other=0.0,
    )
    weight, _ = gl.broadcast(gl.expand_dims(weight, 0), gl.zeros([_P, ROWS * _H], gl.float32, ACC))
    weight = columns(weight, ROWS)
    member = gl.arange(0, ROWS, layout=gl.SliceLayout(0, L))
    place = gl.arange(0, _P, layout=gl.SliceLayout(1, L))
    out = results.scores + row * results.scores_stride
    out = out + gl.expand_dims(member * results.scores_stride, 0) + gl.expand_dims(place, 1)
    best_out = None
    if results.maxima is not None:
        some = gl.max(gl.reshape(gl.zeros([_P, ROWS], gl.float32, L), [_P // _G, _G, ROWS]), 1)
        M: gl.constexpr = some.type.layout
        pair = gl.arange(0, ROWS, layout=gl.SliceLayout(0, M)) * results.maxima_stride
        group = gl.arange(0, _P // _G, layout=gl.SliceLayout(1, M))
        best_out = results.maxima + row * results.maxima_stride + gl.expand_dims(pair, 0)
        best_out = best_out + gl.expand_dims(group, 1)
    # Where a page is missing, all tiles are looked at.
    missing = 0
    tiles = way.tiles0 + way.tiles1
    number = gl.arange(0, _N, layout=gl.BlockedLayout([_N // 128], [32], [4], [0]))
    for first in range(0, tiles, _N):
        page, _at = page_of(rows, way, first + number)
        absent = (first + number < tiles) & ((page < 0) | (page >= rows.pages))
        missing += gl.sum(absent.to(gl.int32), 0)
    inner_high = gl.where(way.shared & (missing == 0), gl.minimum(way.e0, way.e1), 0)
    places = places_of_sums(words, weight[0][0], WHO, ROWS)
    return Target(
        out, best_out, weight, places, place_of_sum(words, WHO, ROWS, L), member,
        lane_of(place), rows.pages, gl.maximum(gl.maximum(way.s0, way.s1), way.low0), inner_high,
    )  # fmt: skip


@gluon.jit
def consume(
    rows, ring, results, items, ROWS: gl.constexpr, BUFFERS: gl.constexpr, AHEAD: gl.constexpr,
    FILL: gl.constexpr, PDL: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """Every second tile of a program's items, from tile WHO on; with FILL, -inf around them."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS * _H, 32])
    # 16 threads take the keys of a token; with one token, the other 16 the same. Triton reduces
    # wrongly over threads that are no neighbours.
    L: gl.constexpr = gl.DistributedLinearLayout(
        [], [[1, 0], [2, 0], [4, 0], [8, 0], [0, ROWS - 1]], [[16, 0], [32, 0]], [], [_P, ROWS]
    )
    EACH: gl.constexpr = BUFFERS // _C
    n = 0  # tiles so far
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        way = walk(rows, item, ROWS)
        to = _target(rows, way, results, ring.words, item, ACC, L, ROWS, WHO)
        if FILL:
            _fill_item(rows, way, results, item, ROWS, WHO)
        queries = ring.queries.index(turn % 2)
        mbarrier.wait(ring.full.index(BUFFERS + turn % 2), (turn // 2) & 1)
        tiles = way.tiles0 + way.tiles1
        held, held_at = gl.zeros([_P, ROWS], gl.float32, L), gl.to_tensor(-1)
        last, last_scale = gl.to_tensor(-1), gl.zeros([_P], gl.float32, gl.SliceLayout(1, L))
        side = 0
        if AHEAD:
            count = gl.maximum(tiles - WHO + _C - 1, 0) // _C
            if count > 0:
                even, scale = _ready(ring, to, queries, n, EACH, WHO, ACC, L, ROWS)
                tile = way.low0 * 0 + WHO
                for _ in range(0, (count - 1) // 2):
                    odd, odd_scale = _begun(ring, to, queries, n + 1, EACH, WHO, ACC, L, ROWS)
                    held, held_at = add_up(
                        even, tile, 0, last, last_scale, rows, way, to, held, held_at, ROWS, True
                    )
                    odd, odd_scale = _ended(ring, to, odd, odd_scale, n + 1, EACH, WHO)
                    last_scale = scale
                    even, scale = _begun(ring, to, queries, n + 2, EACH, WHO, ACC, L, ROWS)
                    held, held_at = add_up(
                        odd, tile + _C, 1, tile, last_scale, rows, way, to, held, held_at, ROWS,
                        True,
                    )  # fmt: skip
                    even, scale = _ended(ring, to, even, scale, n + 2, EACH, WHO)
                    last, last_scale = tile + _C, odd_scale
                    n += 2
                    tile += 2 * _C
                n += 1
                if count % 2 == 0:
                    odd, odd_scale = _begun(ring, to, queries, n, EACH, WHO, ACC, L, ROWS)
                    held, held_at = add_up(
                        even, tile, 0, last, last_scale, rows, way, to, held, held_at, ROWS, True
                    )
                    last, last_scale = tile, scale
                    even, scale = _ended(ring, to, odd, odd_scale, n, EACH, WHO)
                    n += 1
                    tile = tile + _C
                side = (count - 1) % 2
                held, held_at = add_up(
                    even, tile, side, last, last_scale, rows, way, to, held, held_at, ROWS, False
                )
                write_last(side, tile, scale, rows, way, to, held, held_at, ROWS)
        else:
            for tile in range(WHO, tiles, _C):
                dots, scale = _ready(ring, to, queries, n, EACH, WHO, ACC, L, ROWS)
                held, held_at = add_up(
                    dots, tile, side, last, last_scale, rows, way, to, held, held_at, ROWS, False
                )
                last, last_scale = tile, scale
                side = 1 - side
                n += 1
            write_last(1 - side, last, last_scale, rows, way, to, held, held_at, ROWS)
        # All products of the item have been waited for.
        fence_async_shared()
        give_back(ring.words, BUFFERS + turn % 2, to.lane.to(gl.float32), to.lane)
        turn += 1  # noqa: SIM113 - device code has no enumerate


@gluon.constexpr_function
def _log2(n):
    assert n & (n - 1) == 0
    return n.bit_length() - 1


@gluon.jit
def _begun(
    ring, to, queries, n, EACH: gl.constexpr, WHO: gl.constexpr, ACC: gl.constexpr, L: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Products of the n-th tile, under way."""
    buffer, parity = (n & (EACH - 1)) * _C + WHO, (n >> _log2(EACH)) & 1
    dots, scale = multiply(ring, queries, buffer, parity, ACC, L, ROWS)
    # What stands behind a branch is not issued in between the products.
    go_on(ring.words, EACH * _C + 2, to.pages)
    return dots, scale


@gluon.jit
def _ended(ring, to, dots, scale, n, EACH: gl.constexpr, WHO: gl.constexpr):
    """They have been waited for, and the tile given back."""
    dots = warpgroup_mma_wait(0, deps=[dots])
    return dots, give_back(ring.words, (n & (EACH - 1)) * _C + WHO, scale, to.lane)


@gluon.jit
def _ready(
    ring, to, queries, n, EACH: gl.constexpr, WHO: gl.constexpr, ACC: gl.constexpr, L: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Products of the n-th tile, finished."""
    dots, scale = _begun(ring, to, queries, n, EACH, WHO, ACC, L, ROWS)
    fence_async_shared()
    return _ended(ring, to, dots, scale, n, EACH, WHO)

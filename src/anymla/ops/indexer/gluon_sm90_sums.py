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
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)
from triton.language.core import _aggregate as aggregate  # public from 3.9 on

from anymla.ops.indexer.gluon_sm90_walk import PAGE, field, page_of
from anymla.ops.indexer.gluon_sm90_words import SIDE, put_parts, sum_of_parts
from anymla.ops.indexer.selection_plan import GROUP

HEADS = 64
_H = gl.constexpr(HEADS)
_P = gl.constexpr(PAGE)
_G = gl.constexpr(GROUP)
_NAN_KEY = gl.constexpr(0x7F800001)  # as of triton_order
_KEEP_NAN = gl.constexpr(triton.language.PropagateNan.ALL)
# Names changed after triton 3.6.
_NEW = gl.constexpr(tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 7))


@aggregate
class Target:
    """Where the scores of a program's rows go, and what makes them.

    Attributes:
        out: what belongs to entry 0, [64, ROWS].
        best_out: likewise of maxima, or None.
        weight: of the heads, as ``columns`` has their products.
        places: of partial sums in shared memory.
        place: of what a thread sums up.
        member: row of the result.
        lane: of a thread in its warp.
        pages: of the cache.
        inner_low: entries from here to the next are seen whole by all rows, and their pages exist,
            which is so for all but a few tiles.
        inner_high: see above.
    """

    out: object
    best_out: object
    weight: object
    places: object
    place: object
    member: object
    lane: object
    pages: object
    inner_low: object
    inner_high: object

    @gluon.constexpr_function
    def __init__(
        self, out, best_out, weight, places, place, member, lane, pages, inner_low, inner_high
    ):
        self.out = field(out)
        self.best_out = field(best_out)
        self.weight = field(weight)
        self.places = field(places)
        self.place = field(place)
        self.member = field(member)
        self.lane = field(lane)
        self.pages = field(pages)
        self.inner_low = field(inner_low)
        self.inner_high = field(inner_high)


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
def columns(x, ROWS: gl.constexpr):
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
def _rank(sums, ROWS: gl.constexpr):
    """The best of each 16 of [64, ROWS], as a key."""
    # Adding zero turns -0 into 0; NaN results are positive on this device, and so the largest.
    best = gl.reduce(gl.reshape(sums, [_P // _G, _G, ROWS]), 1, _larger) + 0.0
    bits = best.to(gl.int32, bitcast=True)
    return gl.minimum(bits ^ ((bits >> 31) & 0x7FFFFFFF), _NAN_KEY)


@gluon.jit
def write_best(held, held_at, to, ROWS: gl.constexpr):
    """The best of each 16 scores that are held back, of the tile at ``held_at`` if that is >= 0.

    Held back for a tile, the threads' talk about the best passes while they sum up the next.
    """
    if to.best_out is not None:
        gl.store(to.best_out + (held_at >> 4), _rank(held, ROWS), mask=held_at >= 0)


@gluon.jit
def multiply(ring, queries, b, parity, ACC: gl.constexpr, L: gl.constexpr, ROWS: gl.constexpr):
    """Products of the tile in buffer b, which are under way, and its keys' scales."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    mbarrier.wait(ring.full.index(b), parity)
    dots = warpgroup_mma(
        ring.keys.index(b), queries.permute((1, 0)), gl.zeros([_P, ROWS * _H], gl.float32, ACC),
        use_acc=False, is_async=True,
    )  # fmt: skip
    return dots, view(ring.scales.index(b), gl.float32, [_P], FLAT).load(gl.SliceLayout(1, L))


@gluon.jit
def add_up(
    dots, tile, side, last, last_scale, rows, way, to, held, held_at, ROWS: gl.constexpr,
    FENCED: gl.constexpr,
):  # fmt: skip
    """Partial sums of a tile whose products are there; the scores of the ``last`` one are written.

    What has gone into shared memory a tile ago comes back without waiting for it.

    Args:
        dots: products.
        tile: of them; its partial sums lie on side 0 or 1.
        side: see above.
        last: tile whose partial sums lie on the other side; -1 for none.
        last_scale: of its keys.
        rows: of the call.
        way: of the program.
        to: where scores go.
        held: scores, the best of which are written.
        held_at: where they are; -1 for nothing.
        ROWS: of an item.
        FENCED: scales of the next tile are being read, whose buffer is given back after this.

    Returns ``held`` and ``held_at`` of the last tile.
    """
    total = sum_of_parts(to.place + (1 - side) * SIDE)
    write_best(held, held_at, to, ROWS)
    x = columns(gl.maximum(dots, 0.0, propagate_nan=_KEEP_NAN), ROWS)
    weight = to.weight
    # Spelled out, since compilers contract a sum of products in one way or another.
    parts = gl.fma(x[0][0], weight[0][0], x[0][1] * weight[0][1])
    parts = _add_pair(parts, x[1], weight[1])
    parts = _add_pair(parts, x[2], weight[2])
    parts = _add_pair(parts, x[3], weight[3])
    parts = _add_pair(parts, x[4], weight[4])
    parts = _add_pair(parts, x[5], weight[5])
    parts = _add_pair(parts, x[6], weight[6])
    parts = _add_pair(parts, x[7], weight[7])
    if FENCED:
        # Here, as it would wait for stores that have just been made.
        fence_async_shared()
    put_parts(parts, to.places + side * SIDE)
    return _write(total * gl.expand_dims(last_scale, 1), last, rows, way, to, ROWS)


@gluon.jit
def write_last(
    side, last, last_scale, rows, way, to, held, held_at, ROWS: gl.constexpr
):  # fmt: skip
    """``add_up`` without products, whose last tile lies on ``side``."""
    total = sum_of_parts(to.place + side * SIDE)
    write_best(held, held_at, to, ROWS)
    held, held_at = _write(total * gl.expand_dims(last_scale, 1), last, rows, way, to, ROWS)
    write_best(held, held_at, to, ROWS)


@gluon.jit
def _write(held, tile, rows, way, to, ROWS: gl.constexpr):
    """Scores of a tile. Returns what is held of them, and where it is; -1 for nothing."""
    held_at = way.low0 + tile * _P
    if (held_at >= to.inner_low) & (held_at + _P <= to.inner_high):
        gl.store(to.out + held_at, held)
    else:
        if tile >= 0:
            page, at = page_of(rows, way, tile)
            second = tile >= way.tiles0
            start = gl.where(to.member == 0, way.s0, way.s1)
            end0 = gl.where(second, 0, way.e0)
            end1 = gl.where(second | way.shared, way.e1, 0)
            end = gl.where(to.member == 0, end0, end1)
            entry = at + gl.arange(0, _P, layout=gl.SliceLayout(1, held.type.layout))
            entry = gl.expand_dims(entry, 1)
            seen = (gl.expand_dims(start, 0) <= entry) & (entry < gl.expand_dims(end, 0))
            # What is not seen is below whatever is, or as low.
            held = gl.where((page >= 0) & (page < rows.pages) & seen, held, float("-inf"))
            gl.store(to.out + at, held, mask=seen)
            if to.best_out is not None:
                some = gl.max(gl.reshape(seen.to(gl.int32), [_P // _G, _G, ROWS]), 1)
                gl.store(to.best_out + at // _G, _rank(held, ROWS), mask=some > 0)
        held_at = gl.to_tensor(-1)
    return held, held_at

"""Gradients of the rows of windows, on Hopper: tile by tile of rows, in a fixed order of tokens.

A CTA takes 64 rows and 32 heads, and goes through the tokens whose windows reach its rows, two at a
time. Consumer w makes scores and <dout, row> of token t + w. Then both add [dS; P]^T [Q; dO] of
both tokens in registers, each in 256 channels. A row that a token does not see gets zeros from it,
so its sum depends neither on its tile nor on the tokens beside it. The sums of different heads are
stored apart.
"""

# mypy: ignore-errors
# ruff: noqa: B007, SIM113
# Device code is not ordinary Python: it has no enumerate, and static loops count with a name.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anymla.ops._gluon import aggregate
from anymla.ops._gluon_ptx import opaque
from anymla.ops.attention.gluon_sm90_prefill_backward_drows import sectors_layout
from anymla.ops.attention.gluon_sm90_prefill_backward_producer import (
    copy_channels,
    finish_copies,
    pair_lines,
)
from anymla.ops.attention.gluon_sm90_prefill_backward_shared import BLOCK, CHANNELS, DIM
from anymla.ops.attention.gluon_sm90_prefill_backward_weights import (
    Given,
    heads_like,
    join_weights,
    load_denominators,
    split_products,
    weights_of,
)

GROUP = gl.constexpr(32)  # heads of a CTA


@aggregate
class _Shared:
    """Shared memory of a CTA.

    Attributes:
        rows: the tile's rows, [blocks of channels, 64, channels of a block].
        pairs: q and dout of consumer w's token, [2 * blocks of channels, 64, channels of a block].
        weights: scaled ds and p of the consumers' tokens, [2, 64, 64].
        rows_full: mbarrier of loaded ``rows``.
        pairs_full: mbarriers of loaded ``pairs`` of each consumer's token.
        pairs_empty: mbarriers of released ``pairs`` of each consumer's token.
        weights_full: mbarrier of ``weights`` that both consumers have stored.
        weights_empty: mbarrier of ``weights`` that both consumers have read.
    """

    rows: object
    pairs: object
    weights: object
    rows_full: object
    pairs_full: object
    pairs_empty: object
    weights_full: object
    weights_empty: object

    @gluon.constexpr_function
    def __init__(
        self, rows, pairs, weights,
        rows_full, pairs_full, pairs_empty, weights_full, weights_empty,
    ):  # fmt: skip
        self.rows, self.pairs, self.weights = rows, pairs, weights
        self.rows_full, self.pairs_full, self.pairs_empty = rows_full, pairs_full, pairs_empty
        self.weights_full, self.weights_empty = weights_full, weights_empty


@gluon.jit
def _allocate(DTYPE: gl.constexpr):
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ONE: gl.constexpr = mbarrier.MBarrierLayout()
    rows = gl.allocate_shared_memory(DTYPE, [DIM // CHANNELS, BLOCK, CHANNELS], TILE)
    pairs = gl.allocate_shared_memory(DTYPE, [2 * (DIM // CHANNELS), 64, CHANNELS], TILE)
    weights = gl.allocate_shared_memory(DTYPE, [2, 64, BLOCK], TILE)
    rows_full = gl.allocate_shared_memory(gl.int64, [1], ONE)
    pairs_full = gl.allocate_shared_memory(gl.int64, [2, 1], ONE)
    pairs_empty = gl.allocate_shared_memory(gl.int64, [2, 1], ONE)
    weights_full = gl.allocate_shared_memory(gl.int64, [1], ONE)
    weights_empty = gl.allocate_shared_memory(gl.int64, [1], ONE)
    mbarrier.init(rows_full, count=1)
    for w in gl.static_range(2):
        mbarrier.init(pairs_full.index(w), count=1)
        mbarrier.init(pairs_empty.index(w), count=2)
    mbarrier.init(weights_full, count=2)
    mbarrier.init(weights_empty, count=2)
    return _Shared(
        rows, pairs, weights, rows_full, pairs_full, pairs_empty, weights_full, weights_empty
    )


@gluon.jit
def _tokens_of(users):
    """Return the first of a CTA's tokens, and their end."""
    tile = gl.program_id(0)
    return gl.load(users + tile * 2), gl.load(users + tile * 2 + 1)


@gluon.jit
def _producer(dout, q, kv, users, size, heads, shared):
    """Run the producer warpgroup: the rows, then q and dout of two tokens after two."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    BLOCKS: gl.constexpr = DIM // CHANNELS
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    c = gl.expand_dims(gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, L)), 0)
    first, last = _tokens_of(users)
    head = gl.program_id(1) * GROUP
    row = gl.program_id(0) * BLOCK + r
    there = gl.expand_dims(row < size, 1)
    p = gl.expand_dims(kv + gl.minimum(row, size - 1).to(gl.int64) * DIM, 1) + c
    copy_channels(shared.rows, 0, p, there, BLOCKS)
    finish_copies(shared.rows_full, 0)
    step = 0
    for token in range(first, last, 2):
        for w in gl.static_range(2):
            # The last token may be there twice; its window then reaches no row.
            at = gl.minimum(token + w, last - 1).to(gl.int64) * heads + head
            p = gl.expand_dims(pair_lines(q, dout, at, r), 1) + c
            mbarrier.wait(shared.pairs_empty.index(w), (step & 1) ^ 1)
            copy_channels(shared.pairs, w * BLOCKS, p, c >= 0, BLOCKS)
        finish_copies(shared.pairs_full.index(0), 1)
        finish_copies(shared.pairs_full.index(1), 0)
        step += 1


@gluon.jit
def _products(shared, w: gl.constexpr, zero, SL: gl.constexpr):
    """Multiply q and dout of consumer ``w``'s token with the rows, [64, 64]."""
    BLOCKS: gl.constexpr = DIM // CHANNELS
    acc = gl.zeros([64, BLOCK], gl.float32, SL)
    for j in gl.static_range(BLOCKS):
        rows = shared.rows.index(zero + j).permute((1, 0))
        pairs = shared.pairs.index(zero + w * BLOCKS + j)
        acc = warpgroup_mma(pairs, rows, acc, use_acc=j > 0, is_async=True)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def _add(sums, shared, w: gl.constexpr, zero, token: gl.constexpr):
    """Start adding what one of the two tokens adds to the rows."""
    BLOCKS: gl.constexpr = DIM // CHANNELS
    HALF: gl.constexpr = BLOCKS // 2
    weights = shared.weights.index(zero + token).permute((1, 0))
    more = ()
    for j in gl.static_range(HALF):
        pairs = shared.pairs.index(zero + token * BLOCKS + w * HALF + j)
        more += (warpgroup_mma(weights, pairs, sums[j], is_async=True),)
    return more


@gluon.jit
def _waited(sums, OUTSTANDING: gl.constexpr):
    waited = warpgroup_mma_wait(OUTSTANDING, deps=sums)
    found = ()
    for j in gl.static_range(len(sums)):
        found += (waited[j],)
    return found


@gluon.jit
def _consume(
    parts, users, ranges, given, scale, most, size, heads, shared,
    w: gl.constexpr, DLSE: gl.constexpr,
):  # fmt: skip
    """Run consumer ``w``; the other arguments are those of ``window_backward_kernel``."""
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    CL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHANNELS, 16])
    OL: gl.constexpr = sectors_layout(64, CHANNELS)
    HALF: gl.constexpr = DIM // CHANNELS // 2
    scores, _ = split_products(gl.zeros([64, BLOCK], gl.float32, SL))
    RL: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, scores.type.layout))
    row = gl.expand_dims(gl.expand_dims(gl.arange(0, BLOCK, layout=RL), 0), 0)
    row += gl.program_id(0) * BLOCK
    head = heads_like(scores) + gl.program_id(1) * GROUP
    first, last = _tokens_of(users)
    sums = ()
    for j in gl.static_range(HALF):
        sums += (gl.zeros([BLOCK, CHANNELS], gl.float32, CL),)
    mbarrier.wait(shared.rows_full, 0)
    step = 0
    for token in range(first, last, 2):
        mine = gl.minimum(token + w, last - 1)
        start = gl.maximum(gl.load(ranges + mine * 4), -(1 << 30))
        count = gl.minimum(gl.load(ranges + mine * 4 + 1), most)
        count = gl.where(token + w < last, count, 0)
        at = mine.to(gl.int64) * heads + head
        of_total, of_delta, of_lse, of_dlse = load_denominators(given, at, DLSE)
        phase = step & 1
        zero = opaque(0)
        mbarrier.wait(shared.pairs_full.index(w), phase)
        acc = _products(shared, w, zero, SL)
        p, ds = weights_of(acc, scale, of_total, of_delta, of_lse, of_dlse, DLSE)
        named = (row >= start) & (row - start < count)
        ds, p = gl.where(named, ds, 0.0), gl.where(named, p, 0.0)
        mbarrier.wait(shared.weights_empty, phase ^ 1)
        shared.weights.index(w).store(join_weights(ds, p, SL).to(shared.weights.dtype))
        fence_async_shared()
        mbarrier.arrive(shared.weights_full, count=1)
        mbarrier.wait(shared.weights_full, phase)
        sums = _add(sums, shared, w, zero, 0)
        sums = _add(sums, shared, w, zero, 1)
        sums = _waited(sums, HALF)
        mbarrier.arrive(shared.pairs_empty.index(0), count=1)
        sums = _waited(sums, 0)
        mbarrier.arrive(shared.pairs_empty.index(1), count=1)
        mbarrier.arrive(shared.weights_empty, count=1)
        step += 1
    r = gl.expand_dims(gl.arange(0, BLOCK, layout=gl.SliceLayout(1, OL)), 1)
    c = gl.expand_dims(gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, OL)), 0)
    r += gl.program_id(0) * BLOCK
    to = parts + (gl.program_id(1).to(gl.int64) * size + r) * DIM + c
    for j in gl.static_range(HALF):
        x = gl.convert_layout(sums[j], OL)
        # Rows that no window reaches are left as they are.
        gl.store(to + (w * HALF + j) * CHANNELS, x, mask=(r < size) & (c >= 0) & (first < last))


@gluon.jit
def _consumer0(
    parts, users, ranges, given, scale, most, size, heads, shared,
    DLSE: gl.constexpr,
):  # fmt: skip
    _consume(
        parts, users, ranges, given, scale, most, size, heads, shared,
        0, DLSE,
    )  # fmt: skip


@gluon.jit
def _consumer1(
    parts, users, ranges, given, scale, most, size, heads, shared,
    DLSE: gl.constexpr,
):  # fmt: skip
    _consume(
        parts, users, ranges, given, scale, most, size, heads, shared,
        1, DLSE,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["most", "size", "heads"])
def window_backward_kernel(
    parts,
    users,
    dout,
    q,
    kv,
    ranges,
    total,
    delta,
    lse,
    dlse,
    scale,
    most,
    size,
    heads,
    DLSE: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
):
    """Sum what the rows of windows get from 32 heads.

    The grid has a CTA for each tile of 64 rows and each group of heads.

    Args:
        parts: sums, float32 [H / 32, N, 512]; tiles that no window reaches are left as they are.
        users: first token whose window reaches a tile, and end of the last one, int32 [tiles, 2].
        dout: gradient of the output, [T, H, 512] of q's type.
        q: queries, [T, H, 512] of float16 or bfloat16.
        kv: rows, [N, 512] of q's type.
        ranges: int32 [T, 4], whose first two columns are start and length of each query's window.
        total: float32 [T, H], log2 of the denominators with the sink.
        delta: float32 [T, H], sums <dout, out>.
        lse: float32 [T, H], natural and without the sink; used if DLSE.
        dlse: float32 [T, H], gradient of lse; used if DLSE.
        scale: factor of the scores.
        most: largest number of rows of a window.
        size: number of rows N.
        heads: number of heads H.
        DLSE: True if lse has a gradient.
        CONSUMER_REGISTERS: registers per thread of each consumer; the producer gets the rest.
    """
    given = Given(total, delta, lse, dlse)
    shared = _allocate(q.dtype.element_ty)
    gl.warp_specialize(
        [
            (_producer, (dout, q, kv, users, size, heads, shared)),
            (
                _consumer0,
                (
                    parts, users, ranges, given, scale, most, size, heads, shared,
                    DLSE,
                ),
            ),
            (
                _consumer1,
                (
                    parts, users, ranges, given, scale, most, size, heads, shared,
                    DLSE,
                ),
            ),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS],
    )  # fmt: skip

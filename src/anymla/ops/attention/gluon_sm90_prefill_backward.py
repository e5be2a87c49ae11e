"""Gradients of prefill attention on Hopper: the persistent kernel and its two consumer warpgroups.

64 heads of one query, and 64 rows at a time. The grid has one CTA per SM. CTA p takes work tiles p,
p + CTAs, ...; a work tile is a query and a block of 64 heads. Three warpgroups share it:

    producer    q and dout of the heads, then block after block of rows, by cp.async
    consumer w  S and dP of heads 32 w .. 32 w + 31; then, of channels 256 w .. 256 w + 255,
                dQ += dS K, and what all heads add to the rows, [dS; P]^T [Q; dO]

Rows are keys and values, so q and dout are one operand, in which 8 heads of q are followed by the
same heads of dout: a thread of wgmma holds lines r and r + 8, which are the score and <dout, row>
of one head. So P and dS are made where the products leave them, and go through shared memory once.
The rows' buffer is released after dQ, and filled while what is added to rows is made and leaves.
"""

# mypy: ignore-errors
# ruff: noqa: B007, RUF005, SIM113
# Device code is not ordinary Python: it has no enumerate, and static loops count with a name.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anymla.ops._gluon_ptx import opaque
from anymla.ops.attention.gluon_sm90_prefill_backward_drows import (
    NOTHING,
    add_to_rows,
    sectors_layout,
)
from anymla.ops.attention.gluon_sm90_prefill_backward_producer import producer
from anymla.ops.attention.gluon_sm90_prefill_backward_shared import (
    BLOCK,
    CHANNELS,
    DIM,
    HEADS,
    allocate,
    counts_of,
    ds_of_all_heads,
)
from anymla.ops.attention.gluon_sm90_prefill_backward_weights import (
    Given,
    heads_like,
    join_weights,
    load_denominators,
    split_products,
    weights_of,
)


@gluon.jit
def _products(shared, w: gl.constexpr, zero, number, done, SL: gl.constexpr):
    """Multiply q and dout of consumer ``w``'s heads with a block's rows, [64, 64]."""
    BLOCKS: gl.constexpr = DIM // CHANNELS
    acc = gl.zeros([64, BLOCK], gl.float32, SL)
    for j in gl.static_range(BLOCKS):
        if j % (BLOCKS // 2) == 0:
            mbarrier.wait(shared.pairs_full.index(j // (BLOCKS // 2)), number & 1)
            mbarrier.wait(shared.rows_full.index(j // (BLOCKS // 2)), done & 1)
        rows = shared.rows.index(zero + j).permute((1, 0))
        pairs = shared.pairs.index(zero + w * BLOCKS + j)
        acc = warpgroup_mma(pairs, rows, acc, use_acc=j > 0, is_async=True)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def _addends(shared, zero, block, CL: gl.constexpr):
    """Start what all heads add to a block of channels of the rows, [64, CHANNELS]."""
    BLOCKS: gl.constexpr = DIM // CHANNELS
    acc = gl.zeros([BLOCK, CHANNELS], gl.float32, CL)
    for w in gl.static_range(2):
        weights = shared.weights.index(zero + w).permute((1, 0))
        pairs = shared.pairs.index(zero + w * BLOCKS + block)
        acc = warpgroup_mma(weights, pairs, acc, use_acc=w > 0, is_async=True)
    return acc


@gluon.jit
def _add_block(
    sums, drows, shared, w: gl.constexpr, zero, slots, first, column, last, CL: gl.constexpr,
    QUERIES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Add what all heads add to a block of rows, and wait for dQ, which was started; return dQ."""
    HALF: gl.constexpr = DIM // CHANNELS // 2
    adds = _addends(shared, zero, w * HALF, CL)
    if QUERIES:
        waited = warpgroup_mma_wait(2, deps=sums + (adds,))
        sums = ()
        for j in gl.static_range(HALF):
            sums += (waited[j],)
        adds = waited[HALF]
    mbarrier.arrive(shared.rows_empty.index(w), count=1)
    for j in gl.static_range(HALF):
        each = warpgroup_mma_wait(0, deps=[adds])
        if j + 1 == HALF:
            mbarrier.arrive(shared.weights_empty, count=1)
            if last:
                mbarrier.arrive(shared.pairs_empty, count=1)
        channel = (w * HALF + j) * CHANNELS
        add_to_rows(each, drows, slots, first, column, channel, ROWS)
        if j + 1 < HALF:
            adds = _addends(shared, zero, w * HALF + j + 1, CL)
    return sums


@gluon.jit
def _wait_for_queries(sums):
    """Wait for dQ, which was started, and return it."""
    waited = warpgroup_mma_wait(0, deps=sums)
    found = ()
    for j in gl.static_range(len(sums)):
        found += (waited[j],)
    return found


@gluon.jit
def _store_queries(acc, dq, tile, some, channel):
    """Store [64, CHANNELS] of dq rounded, or zeros for a query without rows."""
    OL: gl.constexpr = sectors_layout(64, CHANNELS)
    y = gl.convert_layout(gl.where(some, acc, 0.0).to(dq.dtype.element_ty), OL)
    r = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, OL)), 1)
    c = gl.expand_dims(gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, OL)), 0)
    gl.store(dq + tile.to(gl.int64) * (HEADS * DIM) + (r * DIM + c + channel), y)


@gluon.jit
def _consume(
    dq, drows, ranges, given, scale, window, width, tiles, shared,
    w: gl.constexpr, HEAD_BLOCKS: gl.constexpr, DLSE: gl.constexpr, QUERIES: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Run consumer ``w``; the other arguments are those of ``prefill_backward_kernel``."""
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    CL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHANNELS, 16])
    HALF: gl.constexpr = DIM // CHANNELS // 2
    DT: gl.constexpr = shared.pairs.dtype
    scores, _ = split_products(gl.zeros([64, BLOCK], gl.float32, SL))
    head = heads_like(scores) + w * 32
    ds_all = ds_of_all_heads(shared)
    done = 0
    number = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        token = tile // HEAD_BLOCKS
        count0, count1, blocks0, blocks = counts_of(ranges, token, window, width)
        at = tile.to(gl.int64) * HEADS + head
        of_total, of_delta, of_lse, of_dlse = load_denominators(given, at, DLSE)
        sums = ()
        for j in gl.static_range(HALF):
            sums += (gl.zeros([HEADS, CHANNELS], gl.float32, CL),)
        for i in range(blocks):
            phase = done & 1
            # Descriptors of operands are computed in place, as registers for all do not suffice.
            zero = opaque(0)
            acc = _products(shared, w, zero, number, done, SL)
            p, ds = weights_of(acc, scale, of_total, of_delta, of_lse, of_dlse, DLSE)
            mbarrier.wait(shared.weights_empty, phase ^ 1)
            if QUERIES:
                shared.ds.index(w).store(gl.reshape(ds, [32, BLOCK]).to(DT))
            if ROWS != NOTHING:
                shared.weights.index(w).store(join_weights(ds, p, SL).to(DT))
            fence_async_shared()
            mbarrier.arrive(shared.weights_full, count=1)
            mbarrier.wait(shared.weights_full, phase)
            if QUERIES:
                more = ()
                for j in gl.static_range(HALF):
                    rows = shared.rows.index(zero + w * HALF + j)
                    more += (warpgroup_mma(ds_all, rows, sums[j], is_async=True),)
                sums = more
            last = i + 1 == blocks
            slots = shared.slots.index(done % 2)
            if ROWS == NOTHING:
                sums = _wait_for_queries(sums)
                mbarrier.arrive(shared.rows_empty.index(w), count=1)
                mbarrier.arrive(shared.weights_empty, count=1)
                if last:
                    mbarrier.arrive(shared.pairs_empty, count=1)
            else:
                # Columns of the second scope alone are stored.
                column = (i - blocks0) * BLOCK
                first = tile.to(gl.int64) * width
                sums = _add_block(
                    sums, drows, shared, w, zero, slots, first, column, last, CL,
                    QUERIES, ROWS,
                )  # fmt: skip
            done += 1
        if QUERIES:
            for j in gl.static_range(HALF):
                channel = (w * HALF + j) * CHANNELS
                _store_queries(sums[j], dq, tile, count0 + count1 > 0, channel)
        number += 1


@gluon.jit
def consumer0(
    dq, drows, ranges, given, scale, window, width, tiles, shared,
    HEAD_BLOCKS: gl.constexpr, DLSE: gl.constexpr, QUERIES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Run consumer warpgroup 0."""
    _consume(
        dq, drows, ranges, given, scale, window, width, tiles, shared, 0,
        HEAD_BLOCKS, DLSE, QUERIES, ROWS,
    )  # fmt: skip


@gluon.jit
def consumer1(
    dq, drows, ranges, given, scale, window, width, tiles, shared,
    HEAD_BLOCKS: gl.constexpr, DLSE: gl.constexpr, QUERIES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Run consumer warpgroup 1."""
    _consume(
        dq, drows, ranges, given, scale, window, width, tiles, shared, 1,
        HEAD_BLOCKS, DLSE, QUERIES, ROWS,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["window", "width", "size", "tiles"])
def prefill_backward_kernel(
    dq,
    drows,
    dout,
    q,
    kv,
    ranges,
    lists,
    total,
    delta,
    lse,
    dlse,
    scale,
    window,
    width,
    size,
    tiles,
    HEAD_BLOCKS: gl.constexpr,
    LISTED: gl.constexpr,
    DLSE: gl.constexpr,
    QUERIES: gl.constexpr,
    ROWS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
):
    """Compute dq of ``tiles`` = queries x blocks of 64 heads, and their addends to rows.

    Args:
        dq: gradient of the queries, [T, H, 512] of their type; used if QUERIES.
        drows: float32 rows of 512 channels: sums of each row, [N, 512], for REDUCTIONS; a row for
            each work tile and column of the second scope for COLUMNS, of which those that name no
            row are left as they are.
        dout: gradient of the output, [T, H, 512] of q's type.
        q: queries, [T, H, 512] of float16 or bfloat16.
        kv: rows, [N, 512] of q's type.
        ranges: int32 [T, 4], start and length of each query's window and of its second scope.
        lists: int32 [T, width], relative to the second scope's start; used if LISTED.
        total: float32 [T, H], log2 of the denominators with the sink.
        delta: float32 [T, H], sums <dout, out>.
        lse: float32 [T, H], natural and without the sink; used if DLSE.
        dlse: float32 [T, H], gradient of lse; used if DLSE.
        scale: factor of the scores.
        window: largest number of rows in a window.
        width: columns of ``lists``, or the largest number of entries.
        size: number of rows N.
        tiles: number of work tiles, T * HEAD_BLOCKS.
        HEAD_BLOCKS: blocks of 64 heads per query.
        LISTED: True if the second scope is listed, False if it is a row range.
        DLSE: True if lse has a gradient.
        QUERIES: True to compute dq.
        ROWS: NOTHING, REDUCTIONS or COLUMNS.
        CONSUMER_REGISTERS: registers per thread of each consumer; the producer gets the rest.
    """
    given = Given(total, delta, lse, dlse)
    shared = allocate(q.dtype.element_ty)
    gl.warp_specialize(
        [
            (
                producer,
                (
                    dout, q, kv, ranges, lists, window, width, size, tiles, shared,
                    HEAD_BLOCKS, LISTED,
                ),
            ),
            (
                consumer0,
                (
                    dq, drows, ranges, given, scale, window, width, tiles, shared,
                    HEAD_BLOCKS, DLSE, QUERIES, ROWS,
                ),
            ),
            (
                consumer1,
                (
                    dq, drows, ranges, given, scale, window, width, tiles, shared,
                    HEAD_BLOCKS, DLSE, QUERIES, ROWS,
                ),
            ),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS],
    )  # fmt: skip

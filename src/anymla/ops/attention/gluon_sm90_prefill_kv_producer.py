"""Producer warpgroup of the prefill kernel, which fills Q and the K buffers.

Whole tiles of rows are loaded by TMA. Listed and ragged tiles are loaded row by row with cp.async,
with zeros for rows that do not count. Every count that more than one warpgroup needs is computed
here, once.
"""

# mypy: ignore-errors
# ruff: noqa: SIM113
# Device code is not ordinary Python and has no enumerate.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from anymla.ops._gluon_ptx import nanosleep, prefetch_global_l2
from anymla.ops.attention.gluon_sm90_prefill_shared import EMPTY_L, EMPTY_R, Q_EMPTY, put, wait

# Triton 3.9 renamed both functions.
_load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_load_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

_HALF_BYTES = gl.constexpr(64 * 256 * 2)
# Approximate time for a block of 64 rows.
_BLOCK_NANOSECONDS = gl.constexpr(1500)


@gluon.jit
def _inside(start, length, rows):
    """Return the part of a row range that lies in [0, rows)."""
    start = gl.maximum(start, -(1 << 30))
    skipped = gl.maximum(-start, 0)
    start += skipped
    return start, gl.maximum(gl.minimum(length - skipped, rows - start), 0)


@gluon.jit
def _load_queries(qdesc, row, blocks, number, shared):
    """Load Q, each half once it is released, and store the number of blocks."""
    phase = (number & 1) ^ 1
    wait(shared.mbarriers, Q_EMPTY, phase)
    put(shared.blocks.index(number % 2), blocks)
    mbarrier.expect(shared.q_full.index(0), _HALF_BYTES)
    mbarrier.arrive(shared.q_full.index(0), count=1)
    _load_tile(qdesc, [row, 0], shared.q_full.index(0), shared.q.index(0))
    wait(shared.mbarriers, Q_EMPTY + 1, phase)
    mbarrier.expect(shared.q_full.index(1), _HALF_BYTES)
    _load_tile(qdesc, [row, 256], shared.q_full.index(1), shared.q.index(1))


@gluon.jit
def _prefetch(q, token, head, heads):
    """Prefetch 64 heads of a query into L2."""
    PL: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    line = gl.arange(0, 512, layout=PL)
    row = token.to(gl.int64) * heads + head + gl.minimum(line // 8, heads - head - 1)
    line = row * 512 + line % 8 * 64
    prefetch_global_l2(q + line)


@gluon.jit
def _delay(blocks, tiles):
    """Stagger the start of CTAs that have one tile less than others.

    CTAs that begin a query together wait for memory together, and then leave it idle. The delay
    costs nothing, because the other CTAs need that time for their last tile.
    """
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    ctas = gl.num_programs(0)
    longer = (tiles - 1) % ctas + 1
    late = gl.maximum(gl.program_id(0) - longer, 0)
    nanoseconds = late * gl.minimum(blocks, 600) * _BLOCK_NANOSECONDS // ctas
    nanosleep(gl.full([1], 0, gl.int32, ONE) + nanoseconds)


@gluon.jit
def producer(
    q,
    kv,
    kdesc,
    qdesc,
    ranges,
    lists,
    stride,
    window,
    width,
    rows,
    tiles,
    heads,
    shared,
    HEAD_BLOCKS: gl.constexpr,
    LISTED: gl.constexpr,
    LISTS_ONLY: gl.constexpr,
):
    """Run the producer warpgroup, which fills Q and the K buffers tile after tile."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    c = gl.expand_dims(gl.arange(0, 256, layout=gl.SliceLayout(0, L)), 0)
    done = 0
    number = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        token = tile // HEAD_BLOCKS
        if LISTS_ONLY:
            count1 = gl.minimum(gl.load(ranges + token), width)
            start0, count0, start1 = count1 * 0, count1 * 0, count1 * 0
        else:
            range_at = ranges + token * 4
            start0, count0 = _inside(
                gl.load(range_at), gl.minimum(gl.load(range_at + 1), window), rows
            )
            start1 = gl.load(range_at + 2)
            count1 = gl.minimum(gl.load(range_at + 3), width)
        if LISTED:
            count1 = gl.maximum(count1, 0)
        else:
            start1, count1 = _inside(start1, count1, rows)
        blocks0 = (count0 + 63) // 64
        blocks = blocks0 + gl.maximum((count1 + 63) // 64, 2 - blocks0)
        list_ = lists + token.to(gl.int64) * stride
        if LISTED:
            place = r - blocks0 * 64
            slot = gl.load(list_ + place, mask=(place >= 0) & (place < count1), other=-1)
        row = token * heads + (tile % HEAD_BLOCKS) * 64

        if number == 0:
            _delay(blocks, tiles)
        for i in range(blocks):
            b = done % 2
            phase = ((done // 2) & 1) ^ 1
            if not LISTED:
                # Prefetch, because CTAs begin their queries together and would all wait for memory
                # together. Not if LISTED: it would disturb the threads that copy listed rows.
                next_tile = tile + gl.num_programs(0)
                if (i == 1) & (next_tile < tiles):
                    _prefetch(q, next_tile // HEAD_BLOCKS, (next_tile % HEAD_BLOCKS) * 64, heads)
            first = i < blocks0
            remaining = gl.where(first, count0 - i * 64, count1 - (i - blocks0) * 64)
            at = gl.where(first, start0 + i * 64, start1 + (i - blocks0) * 64)
            whole = remaining >= 64
            if LISTED:
                whole = whole & first
                place = (i + 1 - blocks0) * 64 + r
                following = gl.load(list_ + place, mask=(place >= 0) & (place < count1), other=-1)
            if whole:
                wait(shared.mbarriers, EMPTY_L + b, phase)
                put(shared.masked.index(b), 0, 4)
                mbarrier.expect(shared.full_l.index(b), _HALF_BYTES)
                mbarrier.arrive(shared.full_l.index(b), count=128)
                _load_tile(kdesc, [at, 0], shared.full_l.index(b), shared.k_l.index(b))
                if i == 0:
                    _load_queries(qdesc, row, blocks, number, shared)
                wait(shared.mbarriers, EMPTY_R + b, phase)
                mbarrier.expect(shared.full_r.index(b), _HALF_BYTES)
                mbarrier.arrive(shared.full_r.index(b), count=127)
                _load_tile(kdesc, [at, 256], shared.full_r.index(b), shared.k_r.index(b))
            else:
                if LISTED:
                    source = gl.where(first, at + r, start1 + slot)
                    ok = gl.where(first, r < remaining, slot >= 0) & (source >= 0) & (source < rows)
                else:
                    source = at + r
                    ok = r < remaining
                # Each warp writes its own flag, so that warps need not synchronise.
                missing = gl.max(gl.max(1 - gl.reshape(ok.to(gl.int32), [4, 4, 4]), 2), 0)
                p = gl.expand_dims(kv + gl.where(ok, source, 0).to(gl.int64) * 512, 1) + c
                mask = gl.expand_dims(ok, 1)
                wait(shared.mbarriers, EMPTY_L + b, phase)
                _load_rows(shared.k_l.index(b), p, mask=mask)
                async_copy.mbarrier_arrive(shared.full_l.index(b), increment_count=False)
                shared.masked.index(b).store(missing)
                shared.valid.index(b).store(ok.to(gl.int32))
                mbarrier.arrive(shared.full_l.index(b), count=1)
                if i == 0:
                    _load_queries(qdesc, row, blocks, number, shared)
                wait(shared.mbarriers, EMPTY_R + b, phase)
                _load_rows(shared.k_r.index(b), p + 256, mask=mask)
                async_copy.mbarrier_arrive(shared.full_r.index(b), increment_count=False)
            if LISTED:
                slot = following
            done += 1
        number += 1

"""Producer warpgroup of the Hopper gradients, which gathers rows, and a token's q and dout.

Everything is copied by cp.async, 16 bytes a thread, with zeros for rows that are not there. The
producer waits for its own copies and orders them before the consumers' wgmma: a proxy fence of a
consumer would wait for the sums that it is adding to global memory.
"""

# mypy: ignore-errors
# ruff: noqa: SIM113
# Device code is not ordinary Python and has no enumerate.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
)

from anymla.ops.attention.gluon_sm90_prefill_backward_shared import (
    BLOCK,
    CHANNELS,
    DIM,
    HEADS,
    counts_of,
)

# Triton 3.9 renamed the function.
_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def _slots(i, start0, count0, start1, count1, blocks0, listed, r, size, LISTED: gl.constexpr):
    """Return the row numbers of block ``i``, -1 where it names none."""
    first = i < blocks0
    column = gl.where(first, i, i - blocks0) * BLOCK + r
    start = gl.where(first, start0, start1).to(gl.int64)
    place = column
    if LISTED:
        place = gl.where(first, column, listed)
    slot = start + place.to(gl.int64)
    named = (column < gl.where(first, count0, count1)) & (place >= 0) & (slot >= 0) & (slot < size)
    return gl.where(named, slot, -1).to(gl.int32)


@gluon.jit
def copy_channels(to, first: gl.constexpr, p, there, BLOCKS: gl.constexpr):
    """Start copies of 64 rows' blocks of channels to ``to``, from its index ``first`` on, a group.

    ``p`` points to the first channels [64, CHANNELS] of the rows, which are zeros if not ``there``.
    """
    for j in gl.static_range(BLOCKS):
        _load(to.index(first + j), p + j * CHANNELS, mask=there)
    async_copy.commit_group()


@gluon.jit
def pair_lines(q, dout, first, r):
    """Return pointers to the lines ``r`` of q and dout of 32 heads.

    ``first`` is the number of the first head among all tokens' heads, int64.
    """
    at = (first + (r // 16 * 8 + r % 8)) * DIM
    return gl.where(r // 8 % 2 == 0, q + at, dout + at)


@gluon.jit
def finish_copies(mbar, OUTSTANDING: gl.constexpr):
    """Wait for groups of copies, order them before wgmma, and let the consumers know."""
    async_copy.wait_group(OUTSTANDING)
    fence_async_shared()
    mbarrier.arrive(mbar, count=1)


@gluon.jit
def producer(
    dout,
    q,
    kv,
    ranges,
    lists,
    window,
    width,
    size,
    tiles,
    shared,
    HEAD_BLOCKS: gl.constexpr,
    LISTED: gl.constexpr,
):
    """Run the producer warpgroup."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    HALF: gl.constexpr = DIM // CHANNELS // 2
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    c = gl.expand_dims(gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, L)), 0)
    done = 0
    number = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        token = tile // HEAD_BLOCKS
        count0, count1, blocks0, blocks = counts_of(ranges, token, window, width)
        start0, start1 = gl.load(ranges + token * 4), gl.load(ranges + token * 4 + 2)
        list_ = lists + token.to(gl.int64) * width
        listed = r
        if LISTED:
            place = r - blocks0 * BLOCK
            listed = gl.load(list_ + place, mask=(place >= 0) & (place < count1), other=-1)
        for i in range(blocks):
            slot = _slots(i, start0, count0, start1, count1, blocks0, listed, r, size, LISTED)
            if LISTED:
                place = (i + 1 - blocks0) * BLOCK + r
                listed = gl.load(list_ + place, mask=(place >= 0) & (place < count1), other=-1)
            there = gl.expand_dims(slot >= 0, 1)
            p = gl.expand_dims(kv + gl.maximum(slot, 0).to(gl.int64) * DIM, 1) + c
            for half in gl.static_range(2):
                mbarrier.wait(shared.rows_empty.index(half), (done & 1) ^ 1)
                copy_channels(shared.rows, half * HALF, p + half * HALF * CHANNELS, there, HALF)
            shared.slots.index(done % 2).store(slot)
            if i == 0:
                mbarrier.wait(shared.pairs_empty, (number & 1) ^ 1)
                for half in gl.static_range(2):
                    for w in gl.static_range(2):
                        p = pair_lines(q, dout, tile.to(gl.int64) * HEADS + w * 32, r)
                        p = gl.expand_dims(p, 1) + c + half * HALF * CHANNELS
                        copy_channels(shared.pairs, (2 * w + half) * HALF, p, c >= 0, HALF)
                finish_copies(shared.rows_full.index(0), 5)
                finish_copies(shared.rows_full.index(1), 4)
                finish_copies(shared.pairs_full.index(0), 2)
                finish_copies(shared.pairs_full.index(1), 0)
            else:
                finish_copies(shared.rows_full.index(0), 1)
                finish_copies(shared.rows_full.index(1), 0)
            done += 1
        number += 1

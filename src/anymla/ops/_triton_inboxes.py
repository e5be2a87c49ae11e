"""Triton device functions that exchange words through the ranks' inboxes; see ``_inboxes``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_inboxes(addresses, RANKS: tl.constexpr):
    """Load the address of each rank's inbox; this may happen before a kernel waits."""
    inboxes = ()
    for rank in tl.static_range(RANKS):
        inboxes += (tl.load(addresses + rank),)
    return inboxes


@triton.jit
def exchange(
    words, inboxes, turn, offset, inside,
    RANK: tl.constexpr, RANKS: tl.constexpr, RANKS_2: tl.constexpr, CAPACITY: tl.constexpr,
    BLANK: tl.constexpr,
):  # fmt: skip
    """Send B words, none of them blank, to all ranks; return all ranks' words [RANKS_2, B].

    Rows of ranks that do not exist are 0, and so are columns outside; ``inside`` is None if all
    columns are inside.
    """
    kind = tl.pointer_type(words.dtype)
    at = (turn * RANKS + RANK) * CAPACITY + offset
    for rank in tl.static_range(RANKS):
        tl.store(tl.multiple_of(inboxes[rank].to(kind), 16) + at, words, inside)
    mine = tl.multiple_of(inboxes[RANK].to(kind), 16)
    ranks = tl.arange(0, RANKS_2)[:, None]
    slots = ranks * CAPACITY + offset[None, :]
    blanked = mine + (turn + 2) % 3 * (RANKS * CAPACITY) + slots
    blank = tl.full((RANKS_2, words.shape[0]), BLANK, words.dtype)
    arriving = mine + turn * (RANKS * CAPACITY) + slots
    # Do not pass a mask that is always True: it would keep accesses from being wide.
    there = None
    if RANKS < RANKS_2:
        there = ranks < RANKS
    tl.store(blanked, blank, there)
    if inside is not None:
        wanted = inside[None, :]
        if there is not None:
            wanted &= there
    else:
        wanted = there
    arrived = _arrived(arriving, wanted)
    while tl.max(tl.max((arrived == BLANK).to(tl.int32), 0), 0) > 0:
        arrived = _arrived(arriving, wanted)
    return arrived


@triton.jit
def _arrived(arriving, wanted):
    if wanted is None:
        arrived = tl.load(arriving, volatile=True)
    else:
        arrived = tl.load(arriving, wanted, other=0, volatile=True)
    return arrived

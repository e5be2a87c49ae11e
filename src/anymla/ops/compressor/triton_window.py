"""Windows inside kernels: which tokens close one, and its states pooled channel by channel.

The tile is LOOKED states of the window by some channels, passed over with a running softmax:

    position p - n + 1 .. | score | kv |   state[position], its part for this window
    ...                   |       |    |   LOOKED rows at a time
    position p            |       |    |   -> one row
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def closing(
    state_slots,
    requests_of,
    positions,
    slots,
    tokens,
    pages,
    requests,
    capacity,
    RATIO: tl.constexpr,
    STATE_ENTRIES: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Which of the SPAN tokens of a program close a window that is to be stored."""
    token = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    given = token < tokens
    position = tl.load(positions + token, given, other=-1)
    slot = tl.load(slots + token, given, other=-1)
    state_slot = tl.load(state_slots + token, given, other=-1)
    request = tl.load(requests_of + token, given, other=-1)
    closes = (position >= 0) & ((position + 1) % RATIO == 0)
    wanted = (slot >= 0) & (slot < capacity) & (request >= 0) & (request < requests)
    stored = (state_slot >= 0) & (state_slot < pages.to(tl.int64) * STATE_ENTRIES)
    return closes & wanted & stored


@triton.jit
def next_of(which, last, SPAN: tl.constexpr):
    """Place of the first of ``which`` [SPAN] after place ``last``."""
    place = tl.arange(0, SPAN)
    return tl.min(tl.where(which & (place > last), place, SPAN), 0)


@triton.jit
def _looked_up(
    table,
    position,
    start,
    columns,
    pages,
    STATES: tl.constexpr,
    ENTRIES: tl.constexpr,
    LOOKED: tl.constexpr,
):
    """States ``start`` .. of the window up to ``position``: their pages, and which are there."""
    term = start + tl.arange(0, LOOKED)
    before = position - (STATES - 1) + term
    column = before // ENTRIES
    there = (term < STATES) & (before >= 0) & (column < columns)
    page = tl.load(table + column, mask=there, other=-1)
    return page, there & (page >= 0) & (page < pages)


@triton.jit
def pool_window(
    state,
    table,
    position,
    columns,
    pages,
    page_stride,
    channel,
    STATES: tl.constexpr,
    RATIO: tl.constexpr,
    ENTRIES: tl.constexpr,
    WIDTH: tl.constexpr,
    LOOKED: tl.constexpr,
):
    """Pool channels ``channel`` [c] of the STATES positions up to ``position`` to float32 [c].

    ``position`` is int64, and ``table`` points at the request's ``columns`` page ids. Returns the
    row and how many of the states are there; without any the row is NaN. With STATES = 2 RATIO a
    state has two parts.
    """
    PARTS: tl.constexpr = STATES // RATIO
    top = tl.full(channel.shape, float("-inf"), tl.float32)
    total = tl.zeros(channel.shape, tl.float32)
    pooled = tl.zeros(channel.shape, tl.float32)
    found = 0
    for start in range(0, STATES, LOOKED):
        page, there = _looked_up(table, position, start, columns, pages, STATES, ENTRIES, LOOKED)
        found += tl.sum(there.to(tl.int32), 0)
        term = start + tl.arange(0, LOOKED)
        entry = (position - (STATES - 1) + term) % ENTRIES
        at = state + page.to(tl.int64) * page_stride + entry * (2 * PARTS * WIDTH)
        # The older half of the terms gives its part for the next window.
        part = tl.where(term < STATES - RATIO, 0, (PARTS - 1) * WIDTH)
        at = (at + part)[:, None] + channel[None, :]
        score = tl.load(at + PARTS * WIDTH, mask=there[:, None], other=float("-inf"))
        value = tl.load(at, mask=there[:, None], other=0.0)
        higher = tl.maximum(top, tl.max(score, 0))
        # Without a finite score yet every weight is 0, not exp(-inf + inf).
        origin = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp(top - origin)
        weight = tl.exp(score - origin[None, :])
        total = total * kept + tl.sum(weight, 0)
        pooled = pooled * kept + tl.sum(weight * value, 0)
        top = higher
    return pooled / total, found


@triton.jit
def count_states(
    table,
    position,
    columns,
    pages,
    STATES: tl.constexpr,
    ENTRIES: tl.constexpr,
    LOOKED: tl.constexpr,
):
    """How many of the window's states are there."""
    found = 0
    for start in range(0, STATES, LOOKED):
        _, there = _looked_up(table, position, start, columns, pages, STATES, ENTRIES, LOOKED)
        found += tl.sum(there.to(tl.int32), 0)
    return found

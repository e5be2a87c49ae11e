"""Pool the states of a window, with a softmax of its own in every channel.

The tile is LOOKED states of the window by some channels, passed over with a running softmax:

    position p - n + 1 .. | score | kv |   state[position], its part for this window
    ...                   |       |    |   LOOKED rows at a time
    position p            |       |    |   -> one row

A long window is half a megabyte of states, too much for one program. It has a kernel of its own,
whose grid is (blocks of SPAN tokens, slices of channels).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._triton import Build, Target
from anymla.ops.early import early_launch, launches_early
from anymla.ops.workspace import scratch

# Enough loads under way for one program a multiprocessor.
_MOST_LOOKED = 16
# From this many states on, slices of channels are pooled apart.
_LONG_WINDOW = 64
_SLICE = 32
# Up to here tokens are of different requests, any of which may close a window.
FEW_TOKENS = 256
_MOST_SPAN = 32


@dataclasses.dataclass(frozen=True)
class Config:
    """States and channels of a tile, tokens and warps of a program.

    Attributes:
        slice: channels of a program of the kernel that pools apart; 0 if there is none.
    """

    looked: int
    slice: int
    span: int
    num_warps: int


def config(tokens: int, ratio: int, states: int, channels: int, target: Target) -> Config:
    """Thirty-two scores and as many values a thread, if the window has so many."""
    interpreted = target.backend == "cpu"  # which takes its time for every program
    few = tokens <= (2 if interpreted else FEW_TOKENS)
    long = states >= _LONG_WINDOW
    # Where every fourth token closes a window, looking for them takes longer than starting more.
    blocks = not few and (long or interpreted)
    span = min(_MOST_SPAN, triton.next_power_of_2(ratio)) if blocks else 1
    # The order of sums must not depend on the number of tokens, so this does not either.
    looked = min(2 * _LONG_WINDOW if long else _MOST_LOOKED, triton.next_power_of_2(states))
    apart = long and not (interpreted and few)
    width = (channels // 2 if interpreted else _SLICE) if apart else channels
    warps = looked * width // (32 * target.warp_size)
    return Config(looked, width if apart else 0, span, min(8, max(1, warps)))


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


@triton.jit(do_not_specialize=["tokens", "pages", "columns", "requests", "capacity"])
def pool_kernel(
    state,
    tables,
    state_slots,
    requests_of,
    positions,
    slots,
    pooled,
    tokens,
    pages,
    columns,
    requests,
    capacity,
    state_page_stride,
    table_stride,
    RATIO: tl.constexpr,
    STATES: tl.constexpr,
    STATE_ENTRIES: tl.constexpr,
    WIDTH: tl.constexpr,
    LOOKED: tl.constexpr,
    SLICE: tl.constexpr,
    SPAN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """SLICE channels of the windows that SPAN tokens close, to their rows of ``pooled``."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    channel = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    which = closing(
        state_slots,
        requests_of,
        positions,
        slots,
        tokens,
        pages,
        requests,
        capacity,
        RATIO,
        STATE_ENTRIES,
        SPAN,
    )
    last = -1
    for _ in range(tl.sum(which.to(tl.int32), 0)):
        last = next_of(which, last, SPAN)
        token = tl.program_id(0).to(tl.int64) * SPAN + last
        request = tl.load(requests_of + token).to(tl.int64)
        entry, _found_states = pool_window(
            state,
            tables + request * table_stride,
            tl.load(positions + token),
            columns,
            pages,
            state_page_stride,
            channel,
            STATES,
            RATIO,
            STATE_ENTRIES,
            WIDTH,
            LOOKED,
        )
        tl.store(pooled + token * WIDTH + channel, entry)


def launch_pool(
    state_cache: Tensor,
    tables: Tensor,
    state_slots: Tensor,
    requests_of: Tensor,
    positions: Tensor,
    slots: Tensor,
    capacity: int,
    channels: int,
    ratio: int,
    states: int,
    chosen: Config,
) -> Tensor:
    """Float32 [T, channels] whose rows of tokens that close a window are the pooled windows."""
    tokens = positions.shape[0]
    pooled = scratch((tokens, channels), torch.float32, slots.device)
    pool_kernel[(triton.cdiv(tokens, chosen.span), channels // chosen.slice)](
        state_cache,
        tables,
        state_slots,
        requests_of,
        positions,
        slots,
        pooled,
        tokens,
        state_cache.shape[0],
        tables.shape[1],
        tables.shape[0],
        capacity,
        state_cache.stride(0),
        tables.stride(0),
        ratio,
        states,
        state_cache.shape[1],
        channels,
        chosen.looked,
        chosen.slice,
        chosen.span,
        num_warps=chosen.num_warps,
        enable_fp_fusion=False,
        **early_launch(slots.device),
    )
    return pooled


_NUMBERS = ("tokens", "pages", "columns", "requests", "capacity", "table_stride")
# Types of what both kernels are given.
GIVEN = {
    "state": "*fp32",
    **dict.fromkeys(("tables", "requests_of"), "*i32"),
    **dict.fromkeys(("state_slots", "positions", "slots"), "*i64"),
    **dict.fromkeys((*_NUMBERS, "state_page_stride"), "i32"),
}


def builds(target: Target) -> Iterator[Build]:
    """The windows of 128 tokens, few and many tokens."""
    for tokens in (1, 1 + FEW_TOKENS):
        chosen = config(tokens, 128, 128, 512, target)
        yield Build(
            label=f"ratio 128, {chosen.span} tokens",
            kernel=pool_kernel,
            types={**GIVEN, "pooled": "*fp32"},
            constants={
                "RATIO": 128,
                "STATES": 128,
                "STATE_ENTRIES": 8,
                "WIDTH": 512,
                "LOOKED": chosen.looked,
                "SLICE": chosen.slice,
                "SPAN": chosen.span,
                "EARLY": launches_early(target),
            },
            num_warps=chosen.num_warps,
            fp_fusion=False,
            divisible=("state_page_stride",),
        )

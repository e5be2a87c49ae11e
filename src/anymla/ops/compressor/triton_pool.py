"""Softmax-weighted mean of a window's states, channel by channel, in Triton.

The tile is BLOCK_STATES states of the window by some channels, with a running softmax:

    position p - n + 1 .. | score | kv |   state[position], its channels for this window
    ...                   |       |    |   BLOCK_STATES rows at a time
    position p            |       |    |   -> one row

Short windows are pooled by the kernel that stores entries. Long ones, half a megabyte, are too much
for one CTA, so ``pool_kernel`` takes slices of channels. Its grid: (blocks of tokens, slices); most
CTAs leave at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anymla.ops._triton_launch import PreparedLaunch, cdiv
from anymla.ops.compressor.config import CompressConfig, Window
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch


@triton.jit
def closing_tokens(
    state_slots,
    token_to_req,
    positions,
    slots,
    tokens,
    pages,
    requests,
    capacity,
    WINDOW: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Return a mask [BLOCK_T] of the tokens that close a window whose entry is to be stored."""
    RATIO: tl.constexpr = getattr(WINDOW, "ratio")
    PAGE_SIZE: tl.constexpr = getattr(WINDOW, "page_size")
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = token < tokens
    position = tl.load(positions + token, inside, other=-1)
    slot = tl.load(slots + token, inside, other=-1)
    state_slot = tl.load(state_slots + token, inside, other=-1)
    request = tl.load(token_to_req + token, inside, other=-1)
    closes = (position >= 0) & ((position + 1) % RATIO == 0)
    wanted = (slot >= 0) & (slot < capacity) & (request >= 0) & (request < requests)
    stored = (state_slot >= 0) & (state_slot < pages.to(tl.int64) * PAGE_SIZE)
    return closes & wanted & stored


@triton.jit
def next_token(closes, last, BLOCK_T: tl.constexpr):
    """Return the place of the first token of ``closes`` [BLOCK_T] after place ``last``."""
    place = tl.arange(0, BLOCK_T)
    return tl.min(tl.where(closes & (place > last), place, BLOCK_T), 0)


@triton.jit
def _state_pages(
    table,
    position,
    start,
    columns,
    pages,
    WINDOW: tl.constexpr,
    BLOCK_STATES: tl.constexpr,
):
    """Load the pages of states from ``start`` on of the window up to ``position``, and a mask.

    The mask is True for states that exist.
    """
    STATES: tl.constexpr = getattr(WINDOW, "states")
    PAGE_SIZE: tl.constexpr = getattr(WINDOW, "page_size")
    term = start + tl.arange(0, BLOCK_STATES)
    before = position - (STATES - 1) + term
    column = before // PAGE_SIZE
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
    WINDOW: tl.constexpr,
    BLOCK_STATES: tl.constexpr,
):
    """Pool channels ``channel`` [c] of the states up to ``position`` to float32 [c].

    ``position`` is int64, and ``table`` points at the request's ``columns`` page ids. Returns the
    row and how many of the states are there; without any the row is NaN.
    """
    STATES: tl.constexpr = getattr(WINDOW, "states")
    PAGE_SIZE: tl.constexpr = getattr(WINDOW, "page_size")
    WIDTH: tl.constexpr = getattr(WINDOW, "width")
    CHANNELS: tl.constexpr = getattr(WINDOW, "channels")
    RATIO: tl.constexpr = getattr(WINDOW, "ratio")
    top = tl.full(channel.shape, float("-inf"), tl.float32)
    total = tl.zeros(channel.shape, tl.float32)
    pooled = tl.zeros(channel.shape, tl.float32)
    found = 0
    for start in range(0, STATES, BLOCK_STATES):
        page, there = _state_pages(table, position, start, columns, pages, WINDOW, BLOCK_STATES)
        found += tl.sum(there.to(tl.int32), 0)
        term = start + tl.arange(0, BLOCK_STATES)
        entry = (position - (STATES - 1) + term) % PAGE_SIZE
        at = state + page.to(tl.int64) * page_stride + entry * (2 * WIDTH)
        # With overlap, states of the previous window give the channels that they hold for the next
        # window.
        own = tl.where(term < STATES - RATIO, 0, WIDTH - CHANNELS)
        at = (at + own)[:, None] + channel[None, :]
        score = tl.load(at + WIDTH, mask=there[:, None], other=float("-inf"))
        value = tl.load(at, mask=there[:, None], other=0.0)
        higher = tl.maximum(top, tl.max(score, 0))
        # While there is no finite score, every weight is 0 rather than exp(-inf + inf).
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
    WINDOW: tl.constexpr,
    BLOCK_STATES: tl.constexpr,
):
    """Count the window's states that exist."""
    STATES: tl.constexpr = getattr(WINDOW, "states")
    found = 0
    for start in range(0, STATES, BLOCK_STATES):
        _, there = _state_pages(table, position, start, columns, pages, WINDOW, BLOCK_STATES)
        found += tl.sum(there.to(tl.int32), 0)
    return found


@triton.jit(
    do_not_specialize=["tokens", "pages", "columns", "requests", "capacity", "table_stride"]
)
def pool_kernel(
    state,
    tables,
    state_slots,
    token_to_req,
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
    WINDOW: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_STATES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """Pool a slice of channels of the windows that a CTA's tokens close to rows of ``pooled``."""
    CHANNELS: tl.constexpr = getattr(WINDOW, "channels")
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    channel = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    closes = closing_tokens(
        state_slots,
        token_to_req,
        positions,
        slots,
        tokens,
        pages,
        requests,
        capacity,
        WINDOW,
        BLOCK_T,
    )
    last = -1
    for _ in range(tl.sum(closes.to(tl.int32), 0)):
        last = next_token(closes, last, BLOCK_T)
        token = tl.program_id(0).to(tl.int64) * BLOCK_T + last
        request = tl.load(token_to_req + token).to(tl.int64)
        entry, _found_states = pool_window(
            state,
            tables + request * table_stride,
            tl.load(positions + token),
            columns,
            pages,
            state_page_stride,
            channel,
            WINDOW,
            BLOCK_STATES,
        )
        tl.store(pooled + token * CHANNELS + channel, entry)


def prepare_pool(
    numbers: tuple[int, ...], window: Window, config: CompressConfig, device: torch.device
) -> PreparedLaunch:
    """Prepare ``pool_kernel`` with the caller's ``numbers``; it writes pooled windows [T, D]."""
    return PreparedLaunch(
        pool_kernel,
        (cdiv(numbers[0], config.block_t), window.channels // config.pool_channels),
        *numbers,
        WINDOW=window,
        SLICE=config.pool_channels,
        BLOCK_STATES=config.block_states,
        BLOCK_T=config.block_t,
        num_warps=config.num_warps,
        enable_fp_fusion=False,
        **pdl_launch(device),
    )

"""Pool long windows, whose states are half a megabyte, too much for one program.

Grid: (blocks of SPAN tokens, slices of channels); most blocks leave at once. Short windows are
pooled by the kernel that stores them, whose programs ``config`` describes as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._build import Build
from anymla.ops.compressor.triton_window import closing, next_of, pool_window
from anymla.ops.device import Target
from anymla.ops.pdl import pdl_launch, target_has_pdl
from anymla.ops.streams import scratch

# Enough loads under way for one program a multiprocessor.
_MOST_LOOKED = 16
# From this many states on, slices of channels are pooled apart.
_LONG_WINDOW = 64
_SLICE = 32
# Up to here tokens are of different requests, any of which may close a window.
FEW_TOKENS = 256
_MOST_SPAN = 32
# Of more tokens, entries that are made by one warp each are made by a plain launch.
MOST_EARLY = 8192


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


def early(tokens: int, chosen: Config) -> bool:
    """Whether entries are made by a kernel that is launched early, where kernels are.

    A wait costs each of many programs of one warp, most of which find nothing to do, more than all
    of them gain by it: 42 us instead of 27 for 32,768 tokens on an H200.
    """
    return tokens <= MOST_EARLY or chosen.num_warps > 1


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
    PDL: tl.constexpr,
):
    """SLICE channels of the windows that SPAN tokens close, to their rows of ``pooled``."""
    if PDL:
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
        **pdl_launch(slots.device),
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
                "PDL": target_has_pdl(target),
            },
            num_warps=chosen.num_warps,
            fp_fusion=False,
            divisible=("state_page_stride",),
        )

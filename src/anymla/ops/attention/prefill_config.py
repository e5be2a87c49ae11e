"""Choices of the Hopper kernel of prefill attention, and the calls that it takes."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import torch
from torch import Tensor

from anymla.ops.device import Support, Target, target_of, triton_support

CHANNELS = 512
HEADS = 64  # of a work tile: the M of a wgmma
ROPE_DIM = 64  # channels that the quantising epilogue rotates
# Scales whose product with a masked score, -1e30, is far below all others, and finite in float32.
_LEAST_SCALE, _LARGEST_SCALE = 2.0**-60, 2.0**30
_OPERANDS = (torch.float16, torch.bfloat16)
# Decoding an entry into a workspace moves 1.6 KB; so many entries a query take as long as attention
# by slots takes longer. 64 heads, 512 selected of 8,192 entries: 64 queries take 26 us by slots, 28
# decoded; 512 take 117, 86; of 32,768 entries 128 queries take 35, 48; 512 take 124, 107 ("Decoded,
# or by slots" in docs/performance/prefill.md).
ENTRIES_PER_QUERY = 128


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """How a call is run.

    Attributes:
        ctas: of the grid; they take work tiles of a query and ``HEADS`` heads in turn.
        tma_store: heads are stored by TMA from a K buffer, not by threads.
        lazy_rescale: accumulators are rescaled only when a maximum has grown by more than 2^8. Not
            in bfloat16, where the rounding of a largest weight that is not 1 costs 4 % of accuracy.
        consumer0_registers: of a thread that computes scores and half the output.
        consumer1_registers: of a thread that computes the other half. The producer gets what is
            left of 168 * 3, 88; other splits spill (docs/performance/prefill.md).
    """

    ctas: int
    tma_store: bool
    lazy_rescale: bool
    consumer0_registers: int = 240
    consumer1_registers: int = 176


def choose_config(
    tokens: int,
    heads: int,
    dtype: torch.dtype,
    target: Target,
    *,
    out_dtype: torch.dtype | None = None,
    quantized: bool = False,
) -> PrefillConfig:
    """The configuration of a call whose rows are of ``dtype``."""
    return PrefillConfig(
        ctas=min(tokens * -(-heads // HEADS), target.sm_count),
        tma_store=stores_by_tma(heads, dtype, out_dtype, quantized),
        lazy_rescale=dtype == torch.float16,
    )


def stores_by_tma(
    heads: int, dtype: torch.dtype, out_dtype: torch.dtype | None, quantized: bool
) -> bool:
    """Whether results, of ``dtype`` like the rows unless another is named, leave by TMA."""
    return not quantized and heads % HEADS == 0 and out_dtype in (None, dtype)


def decoding_pays(tokens: int, entries: int) -> bool:
    """Whether queries attend sooner to rows that are decoded for them than to rows in their pages.

    Args:
        tokens: queries.
        entries: compressed entries that they can see between them.
    """
    return entries <= ENTRIES_PER_QUERY * tokens


# Of the SMs in a verification step's waves, so many are at work at least where lists are of two or
# three blocks, and where they are longer, which by slots are cut to fill the last wave.
_SHORT_FILL, _LONG_FILL = 0.7, 0.9
_SHORT_ENTRIES = 64
# Longer ones have not been measured, and every request's workspace has 1 KB for each.
_MOST_ENTRIES = 2048


def decoding_pays_in_steps(
    requests: int, queries: int, heads: int, entries: int, sm_count: int
) -> bool:
    """Whether decode steps of several queries a request had better decode their rows first.

    All queries of a request then attend to the same decoded rows: its window with those that the
    further queries see, and its first entries. By slots each query decodes them for itself.

    Measured on an H200, us by slots and decoded (docs/performance/verification.md): 32 requests of
    8 queries, 64 heads: window 20.9, 18.3; with 64 entries 25.9, 23.6; with 1,024 94.8, 91.2; of 6
    queries 20.4, 18.2; 24.8, 22.8; 84.8, 89.1. 128 heads, 8 queries, 32 requests: 44.8, 33.5; with
    1,024 183, 151; 8 requests: 11.8, 11.9; with 1,024 47.4, 41.0. 8 requests of 64 heads and one
    request: no gain, or a loss.

    Args:
        requests: R.
        queries: of a request.
        heads: query heads.
        entries: compressed entries that a request's queries can see; 0 for its window alone.
        sm_count: SMs of the device.
    """
    if queries < 2 or heads % HEADS or entries > _MOST_ENTRIES:
        return False
    tiles = requests * queries * (heads // HEADS)
    fill = tiles / (-(-tiles // sm_count) * sm_count)
    if entries <= _SHORT_ENTRIES:
        return tiles > sm_count and fill >= _SHORT_FILL
    return fill >= _LONG_FILL


@cache
def runs_on(device: torch.device) -> Support:
    """Whether the kernel runs on a device at all."""
    support = triton_support(torch.empty(0, device=device))
    if not support:
        return support
    if target_of(device).name != "sm_90":
        return Support(False, "needs a Hopper GPU (compute capability 9.0)")
    return Support(True)


def gluon_prefill_support(
    q: Tensor, rows: Tensor, *args: Any, scale: float | None = None, **keywords: Any
) -> Support:
    """``supports`` of backend ``gluon_sm90``."""
    support = runs_on(q.device)
    if not support:
        return support
    if q.dtype not in _OPERANDS or rows.dtype != q.dtype:
        return Support(False, "q and rows must both be float16, or both bfloat16")
    if q.shape[2] != CHANNELS:
        return Support(False, f"{CHANNELS} channels, got {q.shape[2]}")
    if scale is not None and not _LEAST_SCALE <= scale <= _LARGEST_SCALE:
        return Support(False, f"scale must be positive and of ordinary size, got {scale}")
    if len(rows) == 0:
        return Support(False, "at least one row")
    return support


def gluon_prefill_fp8_quant_support(
    q: Tensor,
    rows: Tensor,
    ranges: Tensor,
    lists: Tensor | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    **keywords: Any,
) -> Support:
    """``supports`` of backend ``gluon_sm90`` of ``prefill_attention_fp8_quant``."""
    if cos_sin_cache.shape[1] != ROPE_DIM or cos_sin_cache.dtype != torch.float32:
        return Support(False, f"{ROPE_DIM} float32 angles a position")
    return gluon_prefill_support(q, rows, ranges, lists, scale=keywords.get("scale"))

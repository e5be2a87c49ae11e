"""Launch decode attention on Hopper to windows that the queries of a request share."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from anymla.formats.page_layout import MAIN_FP8
from anymla.formats.pages import pages_of
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch
from anymla.ops.device import target_of
from anymla.ops.pdl import pdl_launch
from anymla.ops.sparse_attention.config import (
    M64,
    WINDOW_WEIGHING_REGISTERS,
    choose_window_group,
)
from anymla.ops.sparse_attention.gluon_sm90_windows import windows_kernel

_LOG2E = 1.4426950408889634
_LARGEST_INT32 = 2**31 - 1
_TILE = NVMMASharedLayout(128, 16, rank=2)


def sparse_attention_windows(
    q: Tensor,
    k_cache: Tensor,
    slots: Tensor,
    counts: Tensor | None = None,
    *,
    queries: int,
    sink: Tensor | None = None,
    scale: float | None = None,
    extra_cache: Tensor | None = None,
    extra_slots: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    layout: str = MAIN_FP8,
    extra_layout: str = MAIN_FP8,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the contract."""
    tokens, heads, channels = q.shape
    given = out
    if out is None or not out.is_contiguous():
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    if q.numel():
        q, cache = q.contiguous(), pages_of(k_cache)
        slots = slots if slots.stride(1) == 1 else slots.contiguous()
        sink = None if sink is None else sink.float().contiguous()
        more, listed = cache, slots
        if extra_cache is not None and extra_slots is not None:
            more, listed = pages_of(extra_cache), extra_slots.contiguous()
        sizes = len(slots), queries, slots.shape[1], slots.stride(0), heads
        entries = listed.shape[1] if extra_slots is not None else 0
        paged = tuple((_limit(each), each.shape[1], each.stride(0)) for each in (cache, more))
        has = sink is not None, counts is not None, extra_lengths is not None
        scale = channels**-0.5 if scale is None else scale
        launch = _attention(sizes, entries, paged, has, scale * _LOG2E, q.device)
        heads_in, heads_out = (
            TensorDescriptor.from_tensor(each.view(-1, channels), [M64, channels // 2], _TILE)
            for each in (q, out)
        )
        launch(
            heads_in, heads_out, cache, slots, slots if counts is None else counts.contiguous(),
            more, listed, listed if extra_lengths is None else extra_lengths.contiguous(),
            lse if sink is None else sink, out, lse,
        )  # fmt: skip
    return (out if given is None or given is out else given.copy_(out)), lse


def _limit(cache: Tensor) -> int:
    """Slots are below."""
    return min(cache.shape[0] * cache.shape[1], _LARGEST_INT32)


@functools.lru_cache(LAUNCHES)
def _attention(
    sizes: tuple[int, int, int, int, int],
    entries: int,
    paged: tuple[tuple[int, int, int], ...],
    has: tuple[bool, bool, bool],
    scale: float,
    device: torch.device,
) -> PreparedLaunch:
    """Of requests, queries, columns, a list's stride, heads; entries; of both caches' pages.

    These are the slots' limit, rows of a page, and bytes to the next; ``has`` is what is given.
    """
    requests, queries, columns, stride, heads = sizes
    (limit, page, step), (more_limit, more_page, more_step) = paged
    tiles = -(-heads // M64)
    sms = target_of(device).sm_count
    group = choose_window_group(requests, queries, tiles, sms, entries=entries > 0)
    groups = -(-queries // group)
    return PreparedLaunch(
        windows_kernel,
        (requests * groups * tiles,),
        queries,
        group,
        groups,
        heads,
        limit,
        stride,
        scale,
        float("-inf"),
        more_limit,
        entries,
        entries,
        HEAD_TILES=tiles,
        WINDOW=columns - queries + 1,
        PAGE=page,
        STEP=step,
        ENTRIES=entries > 0,
        MORE_PAGE=more_page,
        MORE_STEP=more_step,
        SINK=has[0],
        COUNTS=has[1],
        MORE_COUNTS=has[2],
        WHOLE=heads % M64 == 0,
        WEIGHING_REGISTERS=WINDOW_WEIGHING_REGISTERS,
        num_warps=8,
        launch_pdl=pdl_launch(device)["PDL"],
    )

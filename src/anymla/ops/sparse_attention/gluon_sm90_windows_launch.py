"""Launch decode attention on Hopper to windows that the queries of a request share."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from anymla.formats.page_layout import MAIN_FP8
from anymla.formats.pages import pages_of
from anymla.ops._epilogue import QuantizedOut, epilogue_pointers
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch
from anymla.ops.device import target_of
from anymla.ops.pdl import pdl_launch
from anymla.ops.sparse_attention.config import (
    M64,
    WINDOW_UPDATER_REGISTERS,
    WINDOW_WEIGHING_REGISTERS,
    choose_window_group,
)
from anymla.ops.sparse_attention.gluon_sm90_windows import windows_kernel
from anymla.ops.streams import scratch

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
    layout: str = MAIN_FP8,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the contract."""
    given = out
    if out is None or not out.is_contiguous():
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    _attend(q, k_cache, slots, counts, queries, sink, scale, out, lse, None)
    return (out if given is None or given is out else given.copy_(out)), lse


def sparse_attention_windows_fp8_quant(
    q: Tensor,
    k_cache: Tensor,
    slots: Tensor,
    counts: Tensor | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    queries: int,
    n_groups: int,
    sink: Tensor | None = None,
    scale: float | None = None,
    layout: str = MAIN_FP8,
) -> tuple[Tensor, Tensor]:
    """See the contract. Rounded to q's dtype in between, as separate calls do."""
    to = QuantizedOut.allocate(q, positions, cos_sin_cache, native=True)
    lse = scratch(tuple(q.shape[:2]), torch.float32, q.device)
    codes = to.codes.view(torch.int16)
    _attend(q, k_cache, slots, counts, queries, sink, scale, codes, lse, to)
    return to.results(n_groups)


def _attend(
    q: Tensor,
    k_cache: Tensor,
    slots: Tensor,
    counts: Tensor | None,
    queries: int,
    sink: Tensor | None,
    scale: float | None,
    out: Tensor,
    lse: Tensor,
    quantized: QuantizedOut | None,
) -> None:
    if not q.numel():
        return
    _, heads, channels = q.shape
    q, cache = q.contiguous(), pages_of(k_cache)
    slots = slots if slots.stride(1) == 1 else slots.contiguous()
    sink = None if sink is None else sink.float().contiguous()
    limit = min(cache.shape[0] * cache.shape[1], _LARGEST_INT32)
    sizes = len(slots), queries, slots.shape[1], slots.stride(0), heads, limit
    pages = cache.shape[1], cache.stride(0)
    scale = channels**-0.5 if scale is None else scale
    has = sink is not None, counts is not None
    rope_dim = 0 if quantized is None else quantized.rope.dim
    launch = _attention(sizes, pages, has, rope_dim, scale * _LOG2E, q.device)
    rows = TensorDescriptor.from_tensor(q.view(-1, channels), [M64, channels // 2], _TILE)
    launch(
        rows, cache, slots, slots if counts is None else counts.contiguous(),
        lse if sink is None else sink, out, lse, *epilogue_pointers(quantized, lse),
    )  # fmt: skip


@functools.lru_cache(LAUNCHES)
def _attention(
    sizes: tuple[int, int, int, int, int, int],
    pages: tuple[int, int],
    has: tuple[bool, bool],
    rope_dim: int,
    scale: float,
    device: torch.device,
) -> PreparedLaunch:
    """Of requests, queries, columns, a list's stride, heads and slots; of what is given."""
    requests, queries, columns, stride, heads, limit = sizes
    tiles = -(-heads // M64)
    group = choose_window_group(requests, queries, tiles, target_of(device).sm_count)
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
        HEAD_TILES=tiles,
        WINDOW=columns - queries + 1,
        PAGE=pages[0],
        STEP=pages[1],
        SINK=has[0],
        COUNTS=has[1],
        WHOLE=heads % M64 == 0,
        WEIGHING_REGISTERS=WINDOW_WEIGHING_REGISTERS,
        UPDATER_REGISTERS=WINDOW_UPDATER_REGISTERS,
        ROPE_DIM=rope_dim,
        num_warps=4,
        launch_pdl=pdl_launch(device)["PDL"],
    )

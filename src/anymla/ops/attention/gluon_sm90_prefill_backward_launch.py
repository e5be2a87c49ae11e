"""Launcher of the Hopper gradients of prefill attention, by reductions or in a fixed order."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from anymla.ops import device as device_facts
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch, cdiv
from anymla.ops.attention.composed import named_rows
from anymla.ops.attention.gluon_sm90_prefill_backward import prefill_backward_kernel
from anymla.ops.attention.gluon_sm90_prefill_backward_drows import COLUMNS, NOTHING, REDUCTIONS
from anymla.ops.attention.gluon_sm90_window_backward import window_backward_kernel
from anymla.ops.attention.prefill_backward_config import (
    PARTS_BYTES,
    WINDOW_HEADS,
    WINDOW_ROWS,
)
from anymla.ops.attention.prefill_config import HEADS
from anymla.ops.attention.triton_prefill_backward import sum_parts_kernel, window_users_kernel
from anymla.ops.attention.triton_prefill_backward_launch import (
    add_in_order,
    allocate,
    denominators,
)

_TOKENS = 1024  # looked at together by window_users_kernel
_REGISTERS = 232  # per thread of a consumer; the producer gets the rest of 168 * 3
_SUM_ROWS = 4  # of a program that sums parts


def prefill_attention_backward(
    dout: Tensor,
    q: Tensor,
    rows: Tensor,
    ranges: Tensor,
    lists: Tensor | None,
    out: Tensor | None,
    lse: Tensor,
    *,
    window: int,
    entries: int = 0,
    sink: Tensor | None = None,
    scale: float | None = None,
    dlse: Tensor | None = None,
    delta: Tensor | None = None,
    gradients: str = "all",
    deterministic: bool = False,
    drows: Tensor | None = None,
    mass: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See the contract."""
    assert mass is None
    tokens, heads, channels = q.shape
    width = entries if lists is None else lists.shape[1]
    dq, drows, dsink = allocate(q, rows, gradients, drows)
    if not tokens or not heads:
        return dq, drows, dsink.sum(0)
    dout, q, rows, ranges = (each.contiguous() for each in (dout, q, rows, ranges))
    lists = None if lists is None else lists.contiguous()
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
    scale = channels**-0.5 if scale is None else scale
    kind = NOTHING if gradients == "queries" else COLUMNS if deterministic else REDUCTIONS
    delta, total = denominators(dout, out, lse, sink, delta, dsink)
    step = tokens
    if kind is COLUMNS:
        step = max(1, PARTS_BYTES // max(heads // HEADS * width * channels * 4, 1))
        _add_windows(
            drows, dout, q, rows, ranges, total, delta, lse, dlse,
            window=window, scale=scale,
        )  # fmt: skip
    given = lists is not None, dlse is not None, gradients != "rows"
    for start in range(0, tokens, step):
        chunk = slice(start, start + step)
        count = len(q[chunk])
        target = drows
        if kind is COLUMNS:
            target = drows.new_empty(count, heads // HEADS, width, channels)
        some = None if lists is None else lists[chunk]
        launch = _backward(
            (count, heads, window, width, len(rows)), scale, given, kind.value, q.device
        )
        launch(
            dq[chunk] if gradients != "rows" else q, target, dout[chunk], q[chunk], rows,
            ranges[chunk], ranges if some is None else some, total[chunk], delta[chunk],
            lse[chunk], lse if dlse is None else dlse[chunk],
        )  # fmt: skip
        if kind is COLUMNS and width:
            add_in_order(drows, target, *named_rows(ranges[chunk], some, 0, entries))
    return dq, drows, dsink.sum(0)


def _add_windows(
    drows: Tensor,
    dout: Tensor,
    q: Tensor,
    rows: Tensor,
    ranges: Tensor,
    total: Tensor,
    delta: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    *,
    window: int,
    scale: float,
) -> None:
    """Add to the rows what windows add to them, in the order of tokens."""
    (tokens, heads, channels), size, device = q.shape, len(rows), q.device
    if not window or not size:
        return
    tiles, count = cdiv(size, WINDOW_ROWS), heads // WINDOW_HEADS
    users = torch.empty((tiles, 2), dtype=torch.int32, device=device)
    parts = torch.empty((count, size, channels), dtype=torch.float32, device=device)
    _users(tiles, tokens, window)(users, ranges)
    _windows(tiles, count, scale, window, size, heads, dlse is not None)(
        parts, users, dout, q, rows, ranges, total, delta, lse, lse if dlse is None else dlse
    )
    _sums(size, count, channels)(drows, parts, users)


@functools.lru_cache(LAUNCHES)
def _users(tiles: int, tokens: int, window: int) -> PreparedLaunch:
    return PreparedLaunch(
        window_users_kernel, (tiles,), tokens, window, BN=WINDOW_ROWS, BT=_TOKENS, num_warps=4
    )


@functools.lru_cache(LAUNCHES)
def _windows(
    tiles: int,
    count: int,
    scale: float,
    window: int,
    size: int,
    heads: int,
    dlse: bool,
) -> PreparedLaunch:
    return PreparedLaunch(
        window_backward_kernel, (tiles, count), scale, window, size, heads,
        DLSE=dlse, CONSUMER_REGISTERS=_REGISTERS, num_warps=4,
    )  # fmt: skip


@functools.lru_cache(LAUNCHES)
def _sums(size: int, count: int, channels: int) -> PreparedLaunch:
    return PreparedLaunch(
        sum_parts_kernel, (cdiv(size, _SUM_ROWS),), count, size, CHANNELS=channels,
        BN=WINDOW_ROWS, BR=_SUM_ROWS, num_warps=4,
    )  # fmt: skip


@functools.lru_cache(LAUNCHES)
def _backward(
    sizes: tuple[int, int, int, int, int],
    scale: float,
    given: tuple[bool, bool, bool],
    kind: int,
    device: torch.device,
) -> PreparedLaunch:
    """Prepare a launch.

    Args:
        sizes: numbers of tokens, heads, window rows, list columns and rows.
        scale: factor of the scores.
        given: True each for lists, a gradient of lse, and a wanted gradient of the queries.
        kind: NOTHING, REDUCTIONS or COLUMNS.
        device: device of the launch.
    """
    tokens, heads, window, width, rows = sizes
    listed, dlse, queries = given
    blocks = heads // HEADS
    tiles = tokens * blocks
    return PreparedLaunch(
        prefill_backward_kernel,
        (min(tiles, device_facts.target_of(device).sm_count),),
        scale,
        window,
        width,
        rows,
        tiles,
        HEAD_BLOCKS=blocks,
        LISTED=listed,
        DLSE=dlse,
        QUERIES=queries,
        ROWS=kind,
        CONSUMER_REGISTERS=_REGISTERS,
        num_warps=4,
    )

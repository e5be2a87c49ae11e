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
from anymla.ops.attention.gluon_sm90_range_backward import range_backward_kernel
from anymla.ops.attention.prefill_backward_config import (
    PARTS_BYTES,
    RANGE_HEADS,
    RANGE_ROWS,
    GluonBackwardConfig,
    choose_gluon_config,
    range_splits,
)
from anymla.ops.attention.prefill_config import HEADS
from anymla.ops.attention.triton_prefill_backward import sum_parts_kernel, window_users_kernel
from anymla.ops.attention.triton_prefill_backward_launch import (
    add_in_order,
    allocate,
    denominators,
)

_TOKENS = 1024  # looked at together by window_users_kernel
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
    config = choose_gluon_config()
    kind = NOTHING if gradients == "queries" else COLUMNS if deterministic else REDUCTIONS
    tiles = kind is COLUMNS or (kind is REDUCTIONS and lists is None and config.range_tiles)
    fused = config.fused_delta and delta is None and not tiles
    total = lse
    if not fused:
        delta, total = denominators(dout, out, lse, sink, delta, dsink)
    elif sink is not None:
        sink = sink.float().contiguous()
    out = dout if out is None else out.contiguous()
    delta = lse if delta is None else delta
    if tiles:
        scopes = [(0, window, tokens + window)] + [(2, width, width)] * (lists is None)
        for column, most, reached in scopes:
            splits = 1 if deterministic else None
            add_ranges(
                drows, dout, q, rows, ranges, total, delta, lse, dlse,
                column=column, most=most, reached=reached, scale=scale, splits=splits,
                config=config,
            )  # fmt: skip
        if lists is None:
            kind = NOTHING
    if kind is NOTHING and gradients == "rows":
        return dq, drows, dsink.sum(0)
    step = tokens
    if kind is COLUMNS:
        step = max(1, PARTS_BYTES // max(heads // HEADS * width * channels * 4, 1))
    given = lists is not None, fused, sink is not None, dlse is not None, gradients != "rows"
    for start in range(0, tokens, step):
        chunk = slice(start, start + step)
        count = len(q[chunk])
        target = drows
        if kind is COLUMNS:
            target = drows.new_empty(count, heads // HEADS, width, channels)
        some = None if lists is None else lists[chunk]
        launch = _backward(
            (count, heads, window, width, len(rows)), scale, given, kind.value,
            config, q.device,
        )  # fmt: skip
        launch(
            dq[chunk] if gradients != "rows" else q, target, dsink[chunk], dout[chunk], q[chunk],
            rows, out[chunk], ranges[chunk], ranges if some is None else some, total[chunk],
            delta[chunk], lse[chunk], lse if dlse is None else dlse[chunk],
            lse if sink is None or not fused else sink,
        )  # fmt: skip
        if kind is COLUMNS and width:
            add_in_order(drows, target, *named_rows(ranges[chunk], some, 0, entries))
    return dq, drows, dsink.sum(0)


def add_ranges(
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
    column: int,
    most: int,
    reached: int,
    scale: float,
    splits: int | None,
    config: GluonBackwardConfig,
) -> None:
    """Add to the rows what the ranges in columns ``column`` and ``column`` + 1 add to them.

    ``reached`` is the number of rows that ranges are expected to reach; by it the tokens of a tile
    are divided if ``splits`` is None.
    """
    (tokens, heads, channels), size, device = q.shape, len(rows), q.device
    if not most or not size:
        return
    if splits is None:
        splits = range_splits(heads, reached, size, device_facts.target_of(device))
    tiles, count = cdiv(size, RANGE_ROWS), heads // RANGE_HEADS * splits
    users = torch.empty((tiles, 2), dtype=torch.int32, device=device)
    scope = ranges.flatten()[column:]
    parts = torch.empty((count, size, channels), dtype=torch.float32, device=device)
    _users(tiles, tokens, most)(users, scope)
    _ranges(tiles, count, scale, most, splits, size, heads, dlse is not None, config)(
        parts, users, dout, q, rows, scope, total, delta, lse, lse if dlse is None else dlse
    )
    _sums(size, count, channels)(drows, parts, users)


@functools.lru_cache(LAUNCHES)
def _users(tiles: int, tokens: int, most: int) -> PreparedLaunch:
    return PreparedLaunch(
        window_users_kernel, (tiles,), tokens, most, BN=RANGE_ROWS, BT=_TOKENS, num_warps=4
    )


@functools.lru_cache(LAUNCHES)
def _ranges(
    tiles: int,
    count: int,
    scale: float,
    most: int,
    splits: int,
    size: int,
    heads: int,
    dlse: bool,
    config: GluonBackwardConfig,
) -> PreparedLaunch:
    return PreparedLaunch(
        range_backward_kernel, (tiles, count), scale, most, splits, size, heads,
        DLSE=dlse, CHANNELS=config.channels, CONSUMER_REGISTERS=config.consumer_registers,
        num_warps=4,
    )  # fmt: skip


@functools.lru_cache(LAUNCHES)
def _sums(size: int, count: int, channels: int) -> PreparedLaunch:
    return PreparedLaunch(
        sum_parts_kernel, (cdiv(size, _SUM_ROWS),), count, size, CHANNELS=channels,
        BN=RANGE_ROWS, BR=_SUM_ROWS, num_warps=4,
    )  # fmt: skip


@functools.lru_cache(LAUNCHES)
def _backward(
    sizes: tuple[int, int, int, int, int],
    scale: float,
    given: tuple[bool, bool, bool, bool, bool],
    kind: int,
    config: GluonBackwardConfig,
    device: torch.device,
) -> PreparedLaunch:
    """Prepare a launch.

    Args:
        sizes: numbers of tokens, heads, window rows, list columns and rows.
        scale: factor of the scores.
        given: True each for lists, denominators to be made, sinks, a gradient of lse, and a wanted
            gradient of the queries.
        kind: NOTHING, REDUCTIONS or COLUMNS.
        config: launch parameters of the kernel.
        device: device of the launch.
    """
    tokens, heads, window, width, rows = sizes
    listed, fused, sink, dlse, queries = given
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
        FUSED_DELTA=fused,
        SINK=sink and fused,
        DLSE=dlse,
        QUERIES=queries,
        ROWS=kind,
        CHANNELS=config.channels,
        AHEAD=config.ahead,
        VECTOR=config.vector,
        CONSUMER_REGISTERS=config.consumer_registers,
        num_warps=4,
    )

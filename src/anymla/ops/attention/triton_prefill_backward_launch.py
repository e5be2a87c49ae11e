"""Launch Triton's gradients of prefill attention, by atomic sums or in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.ops import device as device_facts
from anymla.ops._sizes import next_power_of_2
from anymla.ops._triton_launch import PreparedLaunch, cdiv
from anymla.ops.attention.composed import named_rows
from anymla.ops.attention.prefill_backward_config import PARTS_BYTES, choose_config
from anymla.ops.attention.triton_prefill_backward import (
    ATOMICS,
    COLUMNS,
    NOTHING,
    backward_kernel,
    delta_kernel,
    segmented_sum_kernel,
    window_rows_kernel,
    window_users_kernel,
)
from anymla.ops.attention.triton_prefill_backward_divided import (
    divided_backward_kernel,
    divided_window_kernel,
)

_DELTA_HEADS, _DELTA_WARPS = 2, 1  # 133 us for 4,096 tokens on an H200; 16 heads, 4 warps 189
_SUM_CHANNELS = 512
_LEAST_CHANNELS = 64  # of a part
_MOST_CHANNELS = 512  # of all parts; a tail has those behind them
_LEAST_K = 16  # of a matrix instruction
_TOKENS = 1024  # looked at together by window_users_kernel


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
    tokens, heads, channels = q.shape
    values = dout.shape[2]
    width = entries if lists is None else lists.shape[1]
    dq, drows, dsink = allocate(q, rows, gradients, drows)
    if mass is not None:
        mass.zero_()
    if not tokens or not heads or not channels:
        return dq, drows, dsink.sum(0)

    dout, q, rows = (
        each if each.stride(-1) == 1 else each.contiguous() for each in (dout, q, rows)
    )
    ranges = ranges.contiguous()
    lists = None if lists is None else lists.contiguous()
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
    delta, total = denominators(dout, out, lse, sink, delta, dsink)

    scale = channels**-0.5 if scale is None else scale
    target = device_facts.target_of(q.device)
    config = choose_config(heads, q.dtype, target, channels)
    blocks = cdiv(heads, config.heads)
    parts = None if mass is None else mass.new_zeros(tokens, blocks, width)
    strides = dout.stride(0), dout.stride(1), q.stride(0), q.stride(1), rows.stride(0)
    padded = _padded(min(channels, _MOST_CHANNELS))
    tail = _padded(channels - padded) if channels > padded else 0
    fixed = {
        "CHANNELS": channels, "VALUES": values, "BC": padded, "TAIL": tail, "BH": config.heads,
    }  # fmt: skip
    of_tokens, of_windows = backward_kernel, window_rows_kernel
    if config.divided:
        of_tokens, of_windows = divided_backward_kernel, divided_window_kernel
        fixed["PARTS"] = max(1, min(config.parts, padded // _LEAST_K))
        fixed["WIDE"] = target.arc_a
        parts_and_stages = {"num_stages": 1}
    else:
        fixed["TRANSPOSED"] = config.transposed
        pieces = max(1, min(config.parts, padded // _LEAST_CHANNELS))
        parts_and_stages = {"PARTS": pieces, "STAGES": config.num_stages}
    kind = NOTHING if gradients == "queries" else COLUMNS if deterministic else ATOMICS
    if kind is COLUMNS and window and len(rows):
        tiles = cdiv(len(rows), config.window_rows)
        users = torch.empty((tiles, 2), dtype=torch.int32, device=q.device)
        bounds = PreparedLaunch(
            window_users_kernel, (tiles,), tokens, window, BN=config.window_rows, BT=_TOKENS,
            num_warps=4,
        )  # fmt: skip
        bounds(users, ranges)
        launch = PreparedLaunch(
            of_windows, (tiles,), len(rows), window, heads, scale, *strides, **fixed,
            BN=config.window_rows, num_stages=1, num_warps=config.window_warps or config.num_warps,
        )  # fmt: skip
        launch(drows, users, dout, q, rows, ranges, total, delta, lse, dlse)
    step = tokens
    if kind is COLUMNS:
        step = max(1, PARTS_BYTES // max(blocks * width * channels * 4, 1))
    for start in range(0, tokens, step):
        chunk = slice(start, start + step)
        count = len(q[chunk])
        sums = drows
        if kind is COLUMNS:
            sums = drows.new_empty(count, blocks, width, channels)
        some = None if lists is None else lists[chunk]
        launch = PreparedLaunch(
            of_tokens, (count, blocks), len(rows), window, width, heads, scale, *strides,
            **fixed, **parts_and_stages, BN=config.rows, QUERIES=gradients != "rows",
            ROWS=kind.value, num_warps=config.num_warps,
        )  # fmt: skip
        launch(
            dq[chunk] if gradients != "rows" else dq, sums,
            None if parts is None else parts[chunk], dout[chunk], q[chunk], rows, ranges[chunk],
            some, total[chunk], delta[chunk], lse[chunk], None if dlse is None else dlse[chunk],
        )  # fmt: skip
        if kind is COLUMNS and width:
            add_in_order(drows, sums, *named_rows(ranges[chunk], some, 0, entries))
    if mass is not None and parts is not None:
        mass.copy_(parts.sum(1))
    return dq, drows, dsink.sum(0)


def allocate(
    q: Tensor, rows: Tensor, gradients: str, drows: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate dq; drows, zeros unless they are given; and each token's share of dsink, zeros."""
    tokens, heads, channels = q.shape
    wanted = 0 if gradients == "rows" else tokens
    dq = torch.empty((wanted, heads, channels), dtype=q.dtype, device=q.device)
    if drows is None:
        listed = 0 if gradients == "queries" else len(rows)
        drows = torch.zeros((listed, channels), dtype=torch.float32, device=q.device)
    elif gradients == "queries":
        drows = drows[:0]
    return dq, drows, torch.zeros((tokens, heads), dtype=torch.float32, device=q.device)


def denominators(
    dout: Tensor,
    out: Tensor | None,
    lse: Tensor,
    sink: Tensor | None,
    delta: Tensor | None,
    dsink: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return delta and log2 of each head's denominator, [T, H]; dsink takes each token's share."""
    tokens, heads, channels = dout.shape
    given = None if delta is None else delta.contiguous()
    total = torch.empty_like(lse)
    made = torch.empty_like(lse) if given is None else given
    if out is not None and out.stride(2) != 1:
        out = out.contiguous()
    launch = PreparedLaunch(
        delta_kernel, (tokens, cdiv(heads, _DELTA_HEADS)), heads, dout.stride(0), dout.stride(1),
        *((0, 0) if out is None else out.stride()[:2]), CHANNELS=channels,
        BC=_padded(channels), BH=_DELTA_HEADS, num_warps=_DELTA_WARPS,
    )  # fmt: skip
    launch(made, total, dsink, dout, out, given, lse, None if sink is None else sink.contiguous())
    return made, total


def add_in_order(drows: Tensor, parts: Tensor, index: Tensor, used: Tensor) -> None:
    """Add parts [T, blocks, columns, D] to the rows that ``index`` [T, columns] names."""
    size, (_, blocks, columns, channels) = len(drows), parts.shape
    column = torch.arange(columns, device=index.device)
    named = (index >= 0) & (index < size) & (column < used.unsqueeze(1))
    # Columns that name no row are sorted behind all rows. A stable sort keeps tokens in order.
    slots, order = index.where(named, size).flatten().sort(stable=True)
    rows = torch.arange(size + 1, dtype=slots.dtype, device=slots.device)
    first = torch.searchsorted(slots, rows)
    launch = PreparedLaunch(
        segmented_sum_kernel, (size, cdiv(channels, _SUM_CHANNELS)), columns, CHANNELS=channels,
        BC=min(_padded(channels), _SUM_CHANNELS), BLOCKS=blocks, num_warps=4, num_stages=3,
    )  # fmt: skip
    if size:
        launch(drows, parts, order, first)


def _padded(channels: int) -> int:
    """Return the width of a tile of channels: a power of two, and at least the K of a product."""
    return max(_LEAST_K, next_power_of_2(channels))

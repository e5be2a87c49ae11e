"""Gradients of prefill attention in torch, in tiles of tokens: memory grows with tokens and rows.

On a CPU a tile's products are dense over the union of the rows that its tokens name, with a count
of how often each token names each row; a tile is as long as its tokens share rows. On a device that
must not be waited for, each token's rows are gathered instead.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from anymla.ops import _host
from anymla.ops.attention.composed import named_rows

_LONGEST_TILE = 64
_SCORES = 1 << 22  # 16 MB of float32 scores a tile
# Products with so many times a token's rows take as long as gathering its own.
_SHARED = 4
# Rows gathered at a time, as in the forward pass.
_DEVICE_ROWS = 1 << 17


class _Call(NamedTuple):
    """Arguments that every tile needs, and the gradients that tiles write or add to.

    ``dq`` and ``drows`` are None where they are not wanted.
    """

    dout: Tensor
    q: Tensor
    rows: Tensor
    lse: Tensor
    total: Tensor
    delta: Tensor
    dlse: Tensor | None
    scale: float
    dq: Tensor | None
    drows: Tensor | None
    deterministic: bool


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
    wide = lse.dtype
    scale = q.shape[2] ** -0.5 if scale is None else scale
    if delta is None:
        assert out is not None
        delta = torch.linalg.vecdot(dout.to(wide), out.to(wide))
    total = lse
    dsink = lse.new_zeros(q.shape[1])
    if sink is not None:
        total = torch.logaddexp(lse, sink.to(wide))
        # A token without rows has delta 0; with a sink of -inf its L is -inf as well.
        share = torch.exp(sink.to(wide) - total).masked_fill(total.isinf(), 0)
        dsink = -torch.where(sink.isinf(), 0, share * delta).sum(0)

    index, used = named_rows(ranges, lists, window, entries)
    column = torch.arange(index.shape[1], device=q.device)
    valid = (index >= 0) & (index < len(rows)) & (column < used.unsqueeze(1))
    index = index.where(valid, -1).long()
    dq = torch.empty_like(q[:0] if gradients == "rows" else q)
    if drows is None:
        drows = rows.new_zeros(rows.shape, dtype=wide)
    call = _Call(
        dout, q, rows, lse, total, delta, dlse, scale,
        dq if gradients != "rows" else None, drows if gradients != "queries" else None,
        deterministic,
    )  # fmt: skip
    run = _shared if _host.on_host(q) else _gathered
    run(call, index, None if mass is None else mass, window)
    return dq, drows if gradients != "queries" else drows[:0], dsink


def _shared(call: _Call, index: Tensor, mass: Tensor | None, window: int) -> None:
    """Tile by tile, dense over the rows that a tile's tokens name."""
    heads, columns = call.q.shape[1], index.shape[1]
    # A token alone takes the same products in any batch.
    longest = 1 if call.deterministic else _LONGEST_TILE
    start = 0
    while start < len(index):
        named = index[start : start + longest]
        tokens = len(named)
        known = named >= 0
        union, place = torch.unique(named[known], return_inverse=True)
        too_many = len(union) > max(_SHARED * columns, 1) or tokens * heads * len(union) > _SCORES
        if too_many and longest > 1:
            longest //= 4
            continue
        tile = slice(start, start + tokens)
        owner = torch.nonzero(known)[:, 0]
        flat = owner * len(union) + place
        count = torch.bincount(flat, minlength=tokens * len(union))
        count = count.view(tokens, 1, len(union)).to(call.lse.dtype)
        r = call.rows[union].to(call.lse.dtype)
        p, ds = _weights(call, tile, r, count)
        if call.dq is not None:
            call.dq[tile] = torch.matmul(ds, r).to(call.dq.dtype)
        if call.drows is not None:
            wide = call.lse.dtype
            each = ds.flatten(0, 1).T @ call.q[tile].to(wide).flatten(0, 1)
            of_values = p.flatten(0, 1).T @ call.dout[tile].to(wide).flatten(0, 1)
            each[:, : of_values.shape[1]] += of_values
            call.drows.index_add_(0, union, each)
        if mass is not None:
            summed = (p.sum(1) / count.squeeze(1).clamp(min=1)).flatten()
            every = mass.new_zeros(named.shape)
            every[known] = summed[flat]
            mass[tile] = every[:, window:]
        start += tokens


def _gathered(call: _Call, index: Tensor, mass: Tensor | None, window: int) -> None:
    """Tile by tile, over the rows of each token, zeros where it names none."""
    wide, size = call.lse.dtype, len(call.rows)
    step = max(1, _DEVICE_ROWS // max(index.shape[1], 1))
    # Columns that name no row are added to one behind the last.
    sums = call.rows.new_zeros(size + 1, call.rows.shape[1], dtype=wide)
    for start in range(0, len(index), step):
        tile = slice(start, start + step)
        named = index[tile]
        known = named >= 0
        if size:
            r = call.rows.index_select(0, named.clamp(min=0).flatten()).unflatten(0, named.shape)
            r = torch.where(known.unsqueeze(2), r.to(wide), 0)
        else:
            r = sums.new_zeros(*named.shape, sums.shape[1])
        p, ds = _weights(call, tile, r, known.unsqueeze(1).to(wide))
        if call.dq is not None:
            call.dq[tile] = torch.matmul(ds, r).to(call.dq.dtype)
        if call.drows is not None:
            each = ds.mT @ call.q[tile].to(wide)
            of_values = p.mT @ call.dout[tile].to(wide)
            each[..., : of_values.shape[2]] += of_values
            target = named.where(known, size).flatten()
            if call.deterministic:
                sums.index_put_((target,), each.flatten(0, 1), accumulate=True)
            else:
                sums.index_add_(0, target, each.flatten(0, 1))
        if mass is not None:
            mass[tile] = p.sum(1)[:, window:]
    if call.drows is not None:
        call.drows.add_(sums[:size])


def _weights(call: _Call, tile: slice, r: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return p and scale * ds of a tile, [t, H, rows], each times how often a token names a row.

    Args:
        call: arguments of the whole call.
        tile: tokens of the tile.
        r: rows [rows, D] that all tokens share, or each token's own [t, rows, D].
        count: number of times that each token names each row, [t, 1, rows].
    """
    wide = call.lse.dtype
    named = count > 0
    scores = call.scale * torch.matmul(call.q[tile].to(wide), r.mT)
    p = torch.exp(scores - call.total[tile].unsqueeze(2)).where(named, 0) * count
    dp = torch.matmul(call.dout[tile].to(wide), r[..., : call.dout.shape[2]].mT)
    ds = dp.sub_(call.delta[tile].unsqueeze(2)).mul_(p)
    if call.dlse is not None:
        alone = torch.exp(scores - call.lse[tile].unsqueeze(2)).where(named, 0) * count
        ds += call.dlse[tile].unsqueeze(2) * alone
    return p, ds.mul_(call.scale)

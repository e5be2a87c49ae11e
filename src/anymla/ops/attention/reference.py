"""The mathematics of attention, one token at a time; float64 for float64 queries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anymla.formats.page_layout import get_layout
from anymla.ops._epilogue import InverseRopeQuant
from anymla.ops._reference import attend, inverse_rope_fp8_quant
from anymla.ops.attention.cache_rows import CacheRows


def sparse_attention(
    q: Tensor,
    rows: Sequence[CacheRows],
    *,
    sink: Tensor | None = None,
    scale: float | None = None,
    value_dim: int | None = None,
    empty_lse: float | None = None,
    batch_invariant: bool = False,
    plan: Tensor | None = None,
    epilogue: InverseRopeQuant | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the contract."""
    wide = torch.promote_types(q.dtype, torch.float32)

    def rows_of(token: int) -> Tensor:
        return torch.cat([_rows_of(each.dense(), token, wide) for each in rows])

    values = q.shape[2] if value_dim is None else value_dim
    tokens = [attend(q[t], rows_of(t), sink, scale, values) for t in range(len(q))]
    heads, lse = _stack(tokens, q, values, empty_lse, out, None)
    return (heads, lse) if epilogue is None else inverse_rope_fp8_quant(heads, **epilogue._asdict())


def sparse_attention_rows(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lengths: Tensor | None = None,
    *,
    sink: Tensor | None = None,
    scale: float | None = None,
    value_dim: int = 512,
    empty_lse: float | None = None,
    batch_invariant: bool = False,
    out: Tensor | None = None,
    max_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the contract."""
    rows = kv.flatten(1)
    tokens = [
        attend(q[t], rows[_listed(indices, lengths, t, len(rows))], sink, scale, value_dim)
        for t in range(len(q))
    ]
    return _stack(tokens, q, value_dim, empty_lse, out, max_logits)


def prefill_attention(
    q: Tensor,
    rows: Tensor,
    ranges: Tensor,
    lists: Tensor | None = None,
    *,
    window: int,
    entries: int = 0,
    sink: Tensor | None = None,
    scale: float | None = None,
    value_dim: int | None = None,
    epilogue: InverseRopeQuant | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the contract."""
    wide = torch.promote_types(q.dtype, torch.float32)
    values = q.shape[2] if value_dim is None else value_dim
    output = q.new_empty(*q.shape[:2], values) if out is None else out
    lse = torch.empty(q.shape[:2], dtype=wide, device=q.device)
    for token in range(len(q)):
        seen, _ = _named(token, ranges, lists, window, entries)
        inside = seen[(seen >= 0) & (seen < len(rows))]
        result, lse[token], _ = attend(q[token], rows[inside], sink, scale, values)
        output[token] = result.to(q.dtype)
    if epilogue is not None:
        return inverse_rope_fp8_quant(output, **epilogue._asdict())
    return output, lse


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
    wide = torch.promote_types(q.dtype, torch.float32)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    plain = torch.full(q.shape[1:2], -torch.inf, dtype=wide, device=q.device)
    sink = plain if sink is None else sink.to(wide)
    values = dout.shape[2]
    dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
    drows = rows.new_zeros(rows.shape, dtype=wide) if drows is None else drows
    dsink = torch.zeros_like(plain)
    if mass is not None:
        mass.zero_()
    for token in range(len(q)):
        seen, column = _named(token, ranges, lists, window, entries)
        inside = (seen >= 0) & (seen < len(rows))
        seen, column = seen[inside], column[inside]
        if not len(seen):
            continue
        heads, grad, listed = q[token].to(wide), dout[token].to(wide), rows[seen].to(wide)
        total = torch.logaddexp(lse[token], sink).unsqueeze(1)
        scores = scale * heads @ listed.T
        p = torch.exp(scores - total)
        if delta is None:
            assert out is not None
            inner = (grad * out[token].to(wide)).sum(1)
        else:
            inner = delta[token]
        ds = p * (grad @ listed[:, :values].T - inner.unsqueeze(1))
        if dlse is not None:
            ds += dlse[token].unsqueeze(1) * torch.exp(scores - lse[token].unsqueeze(1))
        dq[token] = (scale * ds @ listed).to(q.dtype)
        if gradients != "queries":
            added = scale * ds.T @ heads
            added[:, :values] += p.T @ grad
            drows.index_add_(0, seen, added)
        share = torch.where(sink.isinf(), 0.0, torch.exp(sink - total.squeeze(1)))
        dsink -= share * inner
        if mass is not None:
            second = column >= 0
            mass[token].index_copy_(0, column[second], p.sum(0)[second])
    if gradients == "queries":
        drows = drows[:0]
    return dq[:0] if gradients == "rows" else dq, drows, dsink


def _named(
    token: int, ranges: Tensor, lists: Tensor | None, window: int, entries: int
) -> tuple[Tensor, Tensor]:
    """Return the rows that a token names, and their columns in the second range or -1."""
    start, count, base, more = ranges[token].tolist()
    first = torch.arange(start, start + max(min(count, window), 0), device=ranges.device)
    if lists is None:
        column = torch.arange(max(min(more, entries), 0), device=ranges.device)
        second = base + column
    else:
        column = torch.nonzero(lists[token, : max(more, 0)] >= 0).flatten()
        second = base + lists[token, column].long()
    return torch.cat((first, second)), torch.cat((torch.full_like(first, -1), column))


def _rows_of(listed: CacheRows, token: int, wide: torch.dtype) -> Tensor:
    """Decode the rows of one cache that a token lists, [n, D]."""
    slots = _listed(listed.indices, listed.lengths, token, listed.limit)
    return get_layout(listed.layout).read(listed.cache, slots, wide)


def _listed(indices: Tensor, lengths: Tensor | None, token: int, size: int) -> Tensor:
    """Return the valid slots of one token, in order, with repetitions."""
    row = indices[token].flatten()
    if lengths is not None:
        row = row[: max(int(lengths[token]), 0)]
    return row[(row >= 0) & (row < size)].long()


def _stack(
    tokens: list[tuple[Tensor, Tensor, Tensor]],
    q: Tensor,
    value_dim: int,
    empty_lse: float | None,
    out: Tensor | None,
    max_logits: Tensor | None,
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    if not tokens:
        output = q.new_zeros(0, q.shape[1], value_dim)
        return output if out is None else out, q.new_zeros(0, q.shape[1], dtype=wide)
    outputs, sums, peaks = zip(*tokens, strict=True)
    output, lse = torch.stack(outputs).to(q.dtype), torch.stack(sums)
    if empty_lse is not None:
        lse[lse == -torch.inf] = empty_lse
    if max_logits is not None:
        max_logits.copy_(torch.stack(peaks))
    return output if out is None else out.copy_(output), lse

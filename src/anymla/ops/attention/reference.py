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
    epilogue: InverseRopeQuant | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the contract."""
    wide = torch.promote_types(q.dtype, torch.float32)
    output = torch.empty_like(q) if out is None else out
    lse = torch.empty(q.shape[:2], dtype=wide, device=q.device)
    for token, (start, count, base, more) in enumerate(ranges.tolist()):
        seen = torch.arange(start, start + max(min(count, window), 0), device=q.device)
        if lists is None:
            second = torch.arange(base, base + max(min(more, entries), 0), device=q.device)
        else:
            listed = lists[token, : max(more, 0)].long()
            second = base + listed[listed >= 0]
        seen = torch.cat((seen, second))
        inside = seen[(seen >= 0) & (seen < len(rows))]
        result, lse[token], _ = attend(q[token], rows[inside], sink, scale, q.shape[2])
        output[token] = result.to(q.dtype)
    if epilogue is not None:
        return inverse_rope_fp8_quant(output, **epilogue._asdict())
    return output, lse


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

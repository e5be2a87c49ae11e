"""The mathematics of attention during prefill, one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.ops._reference import attend


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
    return output, lse

"""Attention during prefill in torch: the runs written out, their rows gathered."""

from __future__ import annotations

from torch import Tensor

from anymla.ops.prefill_attention.named_rows import named_rows
from anymla.ops.sparse_attention.torch_attention import sparse_attention_rows


def prefill_attention(
    q: Tensor,
    rows: Tensor,
    runs: Tensor,
    lists: Tensor | None = None,
    *,
    window: int,
    entries: int = 0,
    sink: Tensor | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the contract."""
    indices, lengths = named_rows(runs, lists, window, entries)
    same = out is None or out.dtype == q.dtype
    result, lse = sparse_attention_rows(
        q, rows, indices, lengths,
        sink=sink, scale=scale, value_dim=q.shape[2], out=out if same else None,
    )  # fmt: skip
    return (result if same or out is None else out.copy_(result)), lse

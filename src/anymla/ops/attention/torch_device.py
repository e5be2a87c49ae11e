"""Sparse attention in torch: entry points, and the path for devices that must not be waited for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anymla.ops import _host
from anymla.ops._epilogue import InverseRopeQuant
from anymla.ops._torch_norm_rope import inverse_rope_fp8_quant
from anymla.ops.attention.cache_rows import CacheRows, flat
from anymla.ops.attention.torch_cpu import attend_cpu, attend_rows
from anymla.ops.attention.torch_rows import ListedRows, TensorRows

# Rows decoded at a time: bounds the workspace to some hundred MB, whatever T and K.
_DEVICE_ROWS = 1 << 17


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
    listed = [ListedRows.in_cache(each) for each in rows]
    values = q.shape[2] if value_dim is None else value_dim
    heads, lse = _attend(q, listed, sink, scale, values, empty_lse, batch_invariant, out, None)
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
    rows = TensorRows(kv.squeeze(1) if kv.ndim == 3 else kv)
    listed = ListedRows(rows, flat(indices), lengths)
    return _attend(q, [listed], sink, scale, value_dim, empty_lse, batch_invariant, out, max_logits)


def _attend(
    q: Tensor,
    listed: list[ListedRows],
    sink: Tensor | None,
    scale: float | None,
    value_dim: int,
    empty_lse: float | None,
    batch_invariant: bool,
    out: Tensor | None,
    peaks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    tokens, heads, dim = q.shape
    scale = dim**-0.5 if scale is None else scale
    given = out
    if out is None or not out.is_contiguous():
        out = torch.empty((tokens, heads, value_dim), dtype=q.dtype, device=q.device)
    run = attend_cpu if _host.on_host(q) else _attend_device
    if batch_invariant and tokens > 1:
        # Products of another shape or at another alignment may add in another order.
        wide = torch.promote_types(q.dtype, torch.float32)
        lse = torch.empty(q.shape[:2], dtype=wide, device=q.device)
        for token in range(tokens):
            one = slice(token, token + 1)
            alone = [each.part(one) for each in listed]
            result = torch.empty_like(out[one])
            its_peaks = None if peaks is None else peaks[one]
            lse[one] = run(q[one].clone(), alone, sink, scale, result, its_peaks)
            out[one] = result
    else:
        lse = run(q, listed, sink, scale, out, peaks)
    if empty_lse is not None:
        lse.masked_fill_(lse == -torch.inf, empty_lse)
    return out if given is None or given is out else given.copy_(out), lse


def _attend_device(
    q: Tensor,
    listed: list[ListedRows],
    sink: Tensor | None,
    scale: float,
    out: Tensor,
    peaks: Tensor | None,
) -> Tensor:
    """Read the rows of some tokens at a time, zeros for invalid slots, and attend; never wait."""
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=wide, device=q.device)
    columns = sum(each.indices.shape[1] for each in listed)
    if columns == 0 or not len(q):
        out.zero_()
        if peaks is not None:
            peaks.fill_(-torch.inf)
        return lse
    step = max(1, _DEVICE_ROWS // columns)
    for start in range(0, len(q), step):
        tokens = slice(start, start + step)
        rows, valid = [], []
        for source, index, lengths in (each.part(tokens) for each in listed):
            here = _valid(index, lengths, source.size)
            rows.append(source.read_or_zero(index, here, wide))
            valid.append(here)
        mask = torch.cat(valid, 1)
        lse[tokens] = attend_rows(
            q[tokens].to(wide),
            torch.cat(rows, 1),
            bias=torch.where(mask, 0.0, -torch.inf).to(wide),
            empty=~mask.any(1),
            sink=sink,
            scale=scale,
            out=out[tokens],
            peaks=None if peaks is None else peaks[tokens],
        )
    return lse


def _valid(index: Tensor, lengths: Tensor | None, size: int) -> Tensor:
    """Return the mask [T, K] of columns that list a row which exists."""
    valid = (index >= 0) & (index < size)
    if lengths is not None:
        valid &= torch.arange(index.shape[1], device=index.device) < lengths.unsqueeze(1)
    return valid

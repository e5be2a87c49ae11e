"""Prefill attention by ``sparse_attention_rows``: row ranges written out as index lists."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from anymla.ops._epilogue import InverseRopeQuant
from anymla.ops.device import Support, float32_support
from anymla.ops.registry import LazyFunction

# The widest rows of sparse_attention_rows' Triton kernels.
_TRITON_CHANNELS = 640
_LARGEST_INT32 = 2**31 - 1
# Module of each backend's epilogue.
_QUANTIZE = {"torch": "anymla.ops._torch_norm_rope", "triton": "anymla.ops._triton_epilogue"}


def named_rows(
    ranges: Tensor, lists: Tensor | None, window: int, entries: int
) -> tuple[Tensor, Tensor]:
    """Write out the rows that ``prefill_attention`` names for each token.

    Args:
        ranges: two row ranges of each token, [T, 4] int32, as the operation takes them.
        lists: rows listed for each token, [T, K] int32; None for the whole second range.
        window: number of columns for the first range.
        entries: number of columns for the second range without lists.

    Returns:
        rows: row numbers, [T, window + entries] int32 (K for entries if there are lists); -1 for
            none.
        used: number of leading columns in use, [T] int32.
    """
    start, count, base, more = ranges.long().split(1, dim=1)
    place = torch.arange(window, device=ranges.device)
    first = torch.where(place < count, start + place, -1)
    if lists is None:
        place = torch.arange(entries, device=ranges.device)
        second = torch.where(place < more, base + place, -1)
    else:
        place = torch.arange(lists.shape[1], device=ranges.device)
        second = torch.where((place < more) & (lists >= 0), base + lists, -1)
    width = window + second.shape[1]
    # Where there are entries, the lists begin with the whole width of the window.
    used = torch.where(more > 0, window + more, count).clamp(0, width)
    named = torch.cat((first, second), 1).clamp(-1, _LARGEST_INT32)
    return named.int(), used.squeeze(1).int()


def triton_lists_support(q: Tensor, rows: Tensor, *args: object, **keywords: object) -> Support:
    """Return support of a ``prefill_attention`` call by backend "triton"."""
    support = float32_support(q, rows)
    if support and q.shape[2] > _TRITON_CHANNELS:
        return Support(False, f"at most {_TRITON_CHANNELS} channels, got {q.shape[2]}")
    return support


def by_lists(
    sparse_attention_rows: Callable[..., tuple[Tensor, Tensor]], backend: str
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return ``prefill_attention`` by the backend "torch" or "triton" of the given operation."""
    quantize = LazyFunction(_QUANTIZE[backend], "inverse_rope_fp8_quant")

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
        indices, lengths = named_rows(ranges, lists, window, entries)
        same = out is None or out.dtype == q.dtype
        result, lse = sparse_attention_rows(
            q, rows, indices, lengths, sink=sink, scale=scale,
            value_dim=q.shape[2] if value_dim is None else value_dim, out=out if same else None,
            backend=backend,
        )  # fmt: skip
        if epilogue is not None:
            return quantize(result, **epilogue._asdict())
        return (result if same or out is None else out.copy_(result)), lse

    return prefill_attention

"""Exact top-k by sorting keys that hold a score and its place in one integer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from anymla.ops import _host

# Elements of a block of rows: 2 MiB of int64 on a CPU, 128 MiB elsewhere.
_CPU_BLOCK = 1 << 18
_DEVICE_BLOCK = 1 << 24
_NAN_RANK = 0x7F800001  # float32 bits just above +inf's
NOT_A_COLUMN = torch.iinfo(torch.int64).min


def topk_per_row(
    logits: Tensor, starts: Tensor, ends: Tensor, k: int, *, out: Tensor | None = None
) -> Tensor:
    """See ``interface.topk_per_row``."""
    shape = (len(logits), k)
    best = starts.new_full(shape, -1) if out is None else out.fill_(-1)
    width = logits.shape[1]
    starts = starts.long()
    firsts, lasts = starts.clamp(min=0), ends.long().clamp(max=width)
    if _host.on_host(logits):
        blocks = _blocks_of_similar_rows(firsts.tolist(), lasts.tolist())
    else:
        blocks = _blocks_of_all_columns(len(logits), width)
    for row, row_end, first, last in blocks:
        rows = slice(row, row_end)
        order = _order(
            logits[rows, first:last],
            (firsts[rows] - first).unsqueeze(1),
            (lasts[rows] - first).unsqueeze(1),
            min(k, last - first),
        )
        relative = order + (first - starts[rows]).unsqueeze(1)
        best[rows, : order.shape[1]] = torch.where(order >= 0, relative, -1).int()
    return best


def _order(scores: Tensor, first: Tensor, last: Tensor, k: int) -> Tensor:
    """Columns of the k best scores of each row with first <= column < last, then -1; int64."""
    column = torch.arange(scores.shape[1], device=scores.device)
    outside = (column < first) | (column >= last)
    if scores.dtype == torch.float64:
        order = torch.sort(scores, dim=1, descending=True, stable=True).indices
        unseen, moved = torch.sort(outside.gather(1, order), dim=1, stable=True)
        return order.gather(1, moved).masked_fill_(unseen, -1)[:, :k]
    key = ordered_keys(scores, column.flip(0)).masked_fill_(outside, NOT_A_COLUMN)
    top = key.topk(k, dim=1)
    return top.indices.masked_fill_(top.values == NOT_A_COLUMN, -1)


def ordered_keys(scores: Tensor, low: Tensor) -> Tensor:
    """int64 of float32 scores [.., N] and of a number below 2^31 [N], which decides between equals.

    -0 equals 0, and NaN is the highest score.
    """
    # Adding zero turns -0 into 0; flipping a negative number's other bits orders bits as numbers.
    bits = (scores + 0.0).view(torch.int32)
    rank = bits ^ (bits >> 31).bitwise_and_(0x7FFFFFFF)
    rank.masked_fill_(scores.isnan(), _NAN_RANK)
    return rank.long().bitwise_left_shift_(32).bitwise_or_(low)


def _blocks_of_all_columns(rows: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """(row, row_end, first, last) for blocks of rows of full width."""
    step = max(1, _DEVICE_BLOCK // max(width, 1))
    for row in range(0, rows if width else 0, step):
        yield row, min(row + step, rows), 0, width


def _blocks_of_similar_rows(
    firsts: Sequence[int], lasts: Sequence[int]
) -> Iterator[tuple[int, int, int, int]]:
    """(row, row_end, first, last) for runs of rows that see nearly the same columns.

    Columns [first, last) hold what each row sees; a run is not much wider than its shortest row.
    """
    row = 0
    while row < len(firsts):
        first, last = firsts[row], lasts[row]
        if first >= last:
            row += 1
            continue
        row_end, shortest = row + 1, last - first
        while row_end < len(firsts):
            wider = min(first, firsts[row_end]), max(last, lasts[row_end])
            width = wider[1] - wider[0]
            least = min(shortest, lasts[row_end] - firsts[row_end])
            if width > 1024 + 2 * least or width * (row_end + 1 - row) > _CPU_BLOCK or least < 1:
                break
            (first, last), shortest = wider, least
            row_end += 1
        yield row, row_end, first, last
        row = row_end

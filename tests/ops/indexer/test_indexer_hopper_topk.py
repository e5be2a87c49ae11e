"""Hopper's selecting kernel on a CPU, see ``crossrun.hopper``.

Its threads have neighbours, as lanes of inline PTX have there.
"""

import math

import pytest
import torch
from index_scores import i32

pytest.importorskip("triton")

from anymla.ops.indexer.config import GROUP
from anymla.ops.indexer.gluon_sm90_topk import topk_kernel
from crossrun.hopper import run


def rows_of(kind, rows, covered):
    if kind == "ties":
        return torch.randint(-2, 3, (rows, covered)).float()
    x = torch.randn(rows, covered)
    if kind == "close":
        return 1 + x * 2**-20
    if kind == "few":
        return torch.where(torch.arange(covered) % 60 == 7, x, -9.0)
    if kind == "odd":
        x[:, ::5], x[:, 3], x[:, 70], x[:, 9] = -torch.inf, torch.nan, torch.inf, -0.0
    return x


def by_rule(scores, k):
    """Places of the k best: higher, NaN highest, then earlier."""
    order = sorted(
        range(len(scores)),
        key=lambda n: (not math.isnan(scores[n]), 0 if math.isnan(scores[n]) else -scores[n], n),
    )
    return sorted(order[:k])


@pytest.mark.parametrize("kind", ["random", "ties", "close", "odd", "few"])
@pytest.mark.parametrize(("groups", "k"), [(0, 20), (128, 20), (128, 16), (128, 3)])
def test_selection(kind, groups, k):
    rows, covered, kept = 6, 600, 32 if k > 16 else 16
    columns = -(-covered // 256) * 256
    values = rows_of(kind, rows, covered)
    scores = torch.full((rows, columns), torch.nan)
    scores[:, :covered] = values
    lengths = i32([covered, 0, k, k + 1, 355, covered])
    entry = torch.arange(columns)
    bits = (scores + 0.0).view(torch.int32)
    rank = torch.where(scores.isnan(), 0x7F800001, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    seen = entry < lengths.unsqueeze(1)
    maxima = torch.where(seen, rank, -(2**31)).view(rows, -1, GROUP).amax(2)
    maxima = torch.where(maxima == -(2**31), 0x7FFFFFFF, maxima).int()
    out, slots = (torch.full((rows, k), -7, dtype=torch.int32) for _ in range(2))
    counts = torch.full((rows,), -7, dtype=torch.int32)
    table = i32([[5, 0, -1, 2, 9, 30, 31, 8, 1, 4]] * rows)
    given = [
        scores.view(torch.int32), columns,
        maxima if groups else None, columns // GROUP,
        lengths, None, out, k,
        slots, k, counts, table, *table.stride(), table.shape[1], 64,
        0, 1, rows, covered, k,
    ]  # fmt: skip
    run(
        topk_kernel, rows, *given,
        GROUPS=groups, ELEMENTS=512 if groups else 1024, PADDED_K=kept, PDL=True, WARPS=4,
    )  # fmt: skip
    for row in range(rows):
        want = by_rule(values[row, : int(lengths[row])].tolist(), k)
        count = len(want)
        assert out[row].tolist() == want + [-1] * (k - count)
        assert counts[row] == count
        places = out[row, :count].long()
        page = table[row][places // 64]
        slot = torch.where(page < 0, -1, page * 64 + places % 64)
        assert slots[row, :count].tolist() == slot.tolist()
        assert (slots[row, count:] == -1).all()

"""How far results of the same inputs are apart."""

from __future__ import annotations

import torch
from torch import Tensor

BF16_FRACTION_BITS = 7

# A value that rounds the other way is one step of e4m3 away: at most 32 where 448 is the largest.
E4M3_STEP = 32 / 448


def ulps(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference within a row, in bf16 units in the last place of the row's maximum."""
    ours, theirs = ours.float().flatten(0, -2), theirs.float().flatten(0, -2)
    largest = torch.maximum(ours.abs(), theirs.abs()).amax(-1).clamp(min=1e-30)
    unit = torch.exp2(torch.floor(torch.log2(largest)) - BF16_FRACTION_BITS)
    return float(((ours - theirs).abs().amax(-1) / unit).max())


def changed(ours: Tensor, theirs: Tensor) -> dict[str, float]:
    """Of decoded cache rows: the share of values that differ, and by how much in the worst row."""
    if not ours.numel():
        return {"share_changed": 0.0, "relative": 0.0}
    size = theirs.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return {
        "share_changed": float((ours != theirs).float().mean()),
        "relative": float(((ours - theirs).abs() / size).max()),
    }


def missed(scores: Tensor, chosen: Tensor, visible: Tensor) -> float:
    """How much better than a selected entry one that was left out is, of the largest score."""
    worst = 0.0
    for row, best, length in zip(scores, chosen.long(), visible.tolist(), strict=True):
        best = best[best >= 0]
        assert len(best) == len(best.unique()) == min(length, chosen.shape[1])
        if 0 < len(best) < length:
            row = row[:length]
            least = row.topk(len(best)).values[-1]
            lost = (least - row[best]).max() / row.abs().max()
            worst = max(worst, float(lost))
    return worst

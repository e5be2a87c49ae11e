"""One softmax over listed rows and the sink: scores, weights and the weighted sum."""

from __future__ import annotations

import torch
from torch import Tensor

_MANY_QUERIES = 16  # measured on an AVX512-BF16 core


def attend(
    q: Tensor,
    rows: Tensor,
    *,
    bias: Tensor | None,
    empty: Tensor | None,
    sink: Tensor | None,
    scale: float,
    out: Tensor,
    peaks: Tensor | None,
) -> Tensor:
    """Attend tokens in groups that share their rows.

    Args:
        q: [T, H, D] in the dtype of ``rows``. T = groups * tokens per group.
        rows: [groups, n, D], finite or listed by every token of the group; n >= 1.
        bias: added to the scores, [T, n] float32 or wider: log of how often the token lists the
            row, -inf where it does not. None for zeros.
        empty: [T] bool, tokens without rows (their bias is -inf throughout), or None.
        sink: [H], or None.
        scale: of the scores.
        out: [T, H, value dim] contiguous, any float dtype; written.
        peaks: [T, H] to write the largest scores into, or None; a bias is part of them.

    Returns:
        lse [T, H] in the dtype of the scores.
    """
    tokens, heads, dim = q.shape
    groups, count, _ = rows.shape
    # bfloat16 products of many queries run faster as rows times queries, all others the other way
    # round: scores are [groups, n, tokens of the group, H] or [groups, tokens of the group, H, n].
    by_group = q.reshape(groups, -1, dim)
    rows_first = rows.dtype == torch.bfloat16 and by_group.shape[1] >= _MANY_QUERIES
    axis = 1 if rows_first else 3
    if rows_first:
        scores = _scores(rows, by_group.transpose(1, 2), scale).view(groups, count, -1, heads)
    else:
        scores = _scores(by_group, rows.transpose(1, 2), scale).view(groups, -1, heads, count)
    if bias is not None:
        bias = bias.view(groups, -1, count)
        scores += bias.transpose(1, 2).unsqueeze(3) if rows_first else bias.unsqueeze(2)
    if empty is not None:
        empty = empty.view(groups, -1, 1)
        scores.masked_fill_(empty.unsqueeze(axis), 0)
    # torch's fused softmax takes half the time of exp, sum and divide; its largest value is
    # exp(0) / sum, which gives the sum back.
    weights = torch.softmax(scores, axis)
    largest = scores.amax(axis)
    if peaks is not None:
        kept = largest if empty is None else largest.masked_fill(empty, -torch.inf)
        peaks.copy_(kept.view(peaks.shape))
    lse = largest.sub_(weights.amax(axis).log_())
    keep = None if sink is None else torch.sigmoid(lse - sink)
    if empty is not None:
        lse.masked_fill_(empty, -torch.inf)
        weights.masked_fill_(empty.unsqueeze(axis), 0)
    if keep is not None:
        rounded = torch.empty(weights.shape, dtype=rows.dtype, device=rows.device)
        weights = torch.mul(weights, keep.unsqueeze(axis), out=rounded)
    weights = weights.to(rows.dtype)
    weights = (
        weights.view(groups, count, -1).transpose(1, 2)
        if rows_first
        else weights.view(groups, -1, count)
    )
    values = rows[..., : out.shape[-1]]
    if out.dtype == rows.dtype:
        torch.bmm(weights, values, out=out.view(groups, -1, out.shape[-1]))
    else:
        out.copy_(torch.bmm(weights, values).view(out.shape))
    return lse.view(tokens, heads)


def _scores(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Scaled matrix products in float32 (float64 for float64 operands).

    A bfloat16 product is accumulated in float32 and then rounded to bfloat16, which scores do not
    survive. Computing it again minus the rounded result leaves the part that was lost; the sum of
    both is good to 2^-17, and two bfloat16 products cost less than one in float32. The scale comes
    last: oneDNN's products of factor 0 leave their result as it was allocated.
    """
    if left.dtype != torch.bfloat16:
        return torch.bmm(left, right).mul_(scale)
    high = torch.bmm(left, right)
    low = torch.baddbmm(high, left, right, beta=-1)
    return high.float().add_(low).mul_(scale)

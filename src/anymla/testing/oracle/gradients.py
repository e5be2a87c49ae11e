"""Gradients of sparse attention by autograd through dense scores in float64.

No formula of a gradient is written down here: the forward pass is, over all rows at once, with the
number of times that each token names each row as a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class AttentionGradients(NamedTuple):
    """Result of attention and its gradients, in float64.

    Attributes:
        out: output of each head, [T, H, V].
        lse: logarithm of the sum without the sink, [T, H]; -inf for a token without rows.
        dq: gradient of the queries, [T, H, D].
        drows: gradient of the rows, [N, D].
        dsink: gradient of the sinks, [H].
        mass: probabilities summed over heads by token and row, each row counted once, [T, N].
    """

    out: Tensor
    lse: Tensor
    dq: Tensor
    drows: Tensor
    dsink: Tensor
    mass: Tensor


def attention_gradients(
    dout: Tensor,
    q: Tensor,
    rows: Tensor,
    named: Sequence[Sequence[int]],
    *,
    sink: Tensor | None = None,
    scale: float | None = None,
    dlse: Tensor | None = None,
) -> AttentionGradients:
    """Differentiate <dout, out> + <dlse, lse>.

    Args:
        dout: gradient of the output, [T, H, V].
        q: queries of all heads, [T, H, D].
        rows: rows that are the key, and in their first V channels the value, [N, D].
        named: row numbers of each token, which count as often as they stand there; those outside
            [0, N) do not count.
        sink: one logit per head that carries no value, [H]; None for none.
        scale: factor of the scores; None for D ** -0.5.
        dlse: gradient of lse, [T, H]; None for 0. That of a token without rows is left out.

    Returns:
        The result and its gradients.
    """
    dout, q, rows = dout.double(), q.double(), rows.double()
    scale = q.shape[2] ** -0.5 if scale is None else scale
    sinks = torch.full_like(q[0, :, 0], -torch.inf) if sink is None else sink.double()
    count = torch.zeros(len(q), len(rows), dtype=torch.float64)
    for token, numbers in enumerate(named):
        for row in numbers:
            if 0 <= row < len(rows):
                count[token, row] += 1
    listed = (count > 0).unsqueeze(1)
    some = listed.any(2)

    leaves = q.clone(), rows.where((count > 0).any(0).unsqueeze(1), 0.0), sinks.clone()
    for leaf in leaves:
        leaf.requires_grad_()
    with torch.enable_grad():
        heads, keys, logit = leaves
        scores = torch.where(listed, scale * torch.einsum("thd,nd->thn", heads, keys), -torch.inf)
        none = scores.new_full((*scores.shape[:2], 1), -torch.inf)
        top = torch.cat((scores.detach(), none), 2).amax(2, keepdim=True)
        top = torch.where(some.unsqueeze(2), top, 0.0)
        weight = torch.where(listed, torch.exp(scores - top), 0.0)
        total = torch.where(some, (weight * count.unsqueeze(1)).sum(2), 1.0)
        lse = total.log() + top.squeeze(2)
        # A share of exp(lse) / (exp(lse) + exp(sink)) is left to the rows.
        p = weight * (torch.sigmoid(lse - logit) / total).unsqueeze(2)
        out = (p * count.unsqueeze(1)) @ keys[:, : dout.shape[2]]
        loss = (dout * out).sum()
        if dlse is not None:
            loss = loss + torch.where(some, dlse.double() * lse, 0.0).sum()
        dq, drows, dsink = torch.autograd.grad(loss, leaves)
    lse = torch.where(some, lse.detach(), -torch.inf)
    return AttentionGradients(out.detach(), lse, dq, drows, dsink, p.detach().sum(1))

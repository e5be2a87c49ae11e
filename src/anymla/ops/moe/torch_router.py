"""Routers on any torch device, without looking at values."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from anymla.ops._check import wide_dtype
from anymla.ops.moe.reference import SUM_FLOOR


def _scores(x: Tensor, gate: Tensor) -> Tensor:
    dtype = wide_dtype(x.dtype)
    return functional.softplus(functional.linear(x.to(dtype), gate.to(dtype))).sqrt_()


def _weights(scores: Tensor, ids: Tensor, scale: float) -> Tensor:
    chosen = scores.gather(1, ids)
    return chosen.div_(chosen.sum(-1, keepdim=True).add_(SUM_FLOOR)).mul_(scale)


def route_hash(
    x: Tensor, gate: Tensor, token_ids: Tensor, tid2eid: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """See interface.route_hash."""
    clamped = token_ids.clamp(0, tid2eid.shape[0] - 1)
    ids = tid2eid.index_select(0, clamped)
    weights = _weights(_scores(x, gate), ids, scale)
    unknown = (clamped != token_ids).unsqueeze(1)
    return ids.masked_fill_(unknown, -1).int(), weights.masked_fill_(unknown, 0.0)


def route_biased(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    *,
    k: int,
    scale: float,
    is_valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See interface.route_biased."""
    scores = _scores(x, gate)
    ranked = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices
    ids = ranked[:, :k]
    weights = _weights(scores, ids, scale)
    if is_valid is None:
        return ids.int(), weights
    known = is_valid.unsqueeze(1)
    return torch.where(known, ids, -1).int(), torch.where(known, weights, 0.0)

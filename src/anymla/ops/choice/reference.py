"""Reference of the greedy choice, in float32 (float64 for float64 logits)."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.ops._check import wide_dtype


def best_logits(
    logits: Tensor, x: Tensor | None = None, weight: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of ``interface.best_logits``; see its contract."""
    wide = logits.to(wide_dtype(logits.dtype))
    if x is not None and weight is not None:
        wide = wide + x.to(wide.dtype) @ weight.to(wide.dtype).T
    is_nan = wide.isnan()
    best = torch.where(is_nan, torch.inf, wide).amax(1, keepdim=True)
    is_best = torch.where(is_nan.any(1, keepdim=True), is_nan, wide == best)
    tokens = torch.arange(wide.shape[1], device=wide.device)
    first = torch.where(is_best, tokens, wide.shape[1]).amin(1)
    value = wide.gather(1, first.unsqueeze(1)).squeeze(1)
    return value, first, wide.logsumexp(1)

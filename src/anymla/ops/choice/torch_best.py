"""Greedy choice on any torch device."""

from __future__ import annotations

from torch import Tensor

from anymla.ops._check import wide_dtype


def best_logits(
    logits: Tensor, x: Tensor | None = None, weight: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Backend of ``interface.best_logits`` in torch; see its contract."""
    wide = logits.to(wide_dtype(logits.dtype))
    if x is not None and weight is not None:
        wide = wide + x.to(wide.dtype) @ weight.to(wide.dtype).T
    # argmax returns the first of equal values, as torch documents, and NaN before all others.
    first = wide.argmax(1, keepdim=True)
    return wide.gather(1, first).squeeze(1), first.squeeze(1), wide.logsumexp(1)

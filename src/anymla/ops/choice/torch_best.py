"""The greedy choice on any torch device."""

from __future__ import annotations

from torch import Tensor

from anymla.ops._check import wide_dtype


def best_logits(
    logits: Tensor, x: Tensor | None = None, weight: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See interface.best_logits."""
    wide = logits.to(wide_dtype(logits.dtype))
    if x is not None and weight is not None:
        wide = wide + x.to(wide.dtype) @ weight.to(wide.dtype).T
    # The first of equals, as torch's documentation has it; NaN before everything.
    first = wide.argmax(1, keepdim=True)
    return wide.gather(1, first).squeeze(1), first.squeeze(1), wide.logsumexp(1)

"""Contract of the greedy choice of a token.

Letters: T rows, V tokens of the vocabulary or of a rank's part of it, K rank of a low-rank term.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.ops.device import float32_support
from anymla.ops.registry import FLOATS, INT64, check, operation, require, wide_dtype


def _of_rows(logits: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
    wide = logits.new_empty(logits.shape[:1], dtype=wide_dtype(logits.dtype))
    return wide, torch.empty_like(wide, dtype=INT64), torch.empty_like(wide)


@operation(outputs=_of_rows)
def best_logits(
    logits: Tensor,
    x: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the largest logit of each row, and the logarithm of the row's sum of exponentials.

        l[t, v] = logits[t, v] + sum_k x[t, k] weight[v, k]

    The log-probability of the largest logit is its value minus that logarithm.

    Args:
        logits: logits of each row, [T, V] any float dtype, V at least 1; the row stride may exceed
            V.
        x: left factor of a low-rank term, [T, K] any float dtype; None without the term.
        weight: right factor of the term, [V, K] any float dtype; given if and only if x is.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Largest logit of each row [T], float32 (float64 for float64 logits), NaN if the row holds a
        NaN; its token [T] int64, the lowest of equal ones, or that of the first NaN; and log(sum_v
        exp(l[t, v])) [T] of the first result's dtype.

    Raises:
        TypeError: if an argument has another dtype than above.
        ValueError: if an argument has another shape than above, or only one of x and weight is
            given.
    """
    name = "best_logits"
    sizes = check(
        name,
        logits=(logits, "T V", FLOATS),
        x=(x, "T K", FLOATS),
        weight=(weight, "V K", FLOATS),
    )
    require(sizes["V"] >= 1, name, "logits", "[T, V] with V at least 1", tuple(logits.shape))
    require((x is None) == (weight is None), name, "weight", "given together with x", weight)


best_logits.register_lazy("reference", "anymla.ops.choice.reference")
best_logits.register_lazy("torch", "anymla.ops.choice.torch_best")
best_logits.register_lazy("triton", "anymla.ops.choice.triton_best", supports=float32_support)

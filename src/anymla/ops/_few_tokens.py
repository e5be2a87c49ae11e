"""Support checks of numba's kernels for a decode step's few tokens on a CPU."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from anymla.ops.device import Support, numba_problem

# Largest number of tokens of a call to a numba kernel. Tokens are processed one after the other,
# and each reads the weight again: as long as there are few, from the core's own cache.
FEW_TOKENS = 4
# Elements of a weight up to which one core is faster than several, and up to which the weight stays
# in that core's cache for the next token.
FEW_ELEMENTS = 1 << 20


def few_tokens_support(
    tokens: int, bf16: Iterable[Tensor | None], f32: Iterable[Tensor | None] = ()
) -> Support:
    """Return support of a few-token kernel, from the token count and its operands' dtypes."""
    problem = numba_problem()
    if problem:
        return Support(False, problem)
    for dtype, given in ((torch.bfloat16, bf16), (torch.float32, f32)):
        for each in given:
            if each is not None and (each.dtype != dtype or not each.is_cpu):
                return Support(False, f"{dtype} on a CPU, got {each.dtype} on {each.device.type}")
    if not 0 < tokens <= FEW_TOKENS:
        return Support(False, f"1 to {FEW_TOKENS} tokens, got {tokens}")
    return Support(True)

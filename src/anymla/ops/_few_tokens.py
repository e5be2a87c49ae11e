"""Which calls are a decode step's on a CPU: few tokens, for which numba's kernels are made."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from anymla.ops.device import Support, numba_problem

# Tokens that a kernel takes, one after the other: it reads a weight again for each, out of a core's
# own cache while there are few.
FEW_TOKENS = 4
# Elements of a weight that one core reads sooner than several share it out, and that stay in its
# cache for a second token.
FEW_ELEMENTS = 1 << 20


def few_tokens_support(
    tokens: int, bf16: Iterable[Tensor | None], f32: Iterable[Tensor | None] = ()
) -> Support:
    """``supports`` of a kernel of few tokens: their number, and the dtypes of what is given."""
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

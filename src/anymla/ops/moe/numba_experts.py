"""Routed experts for few tokens on a CPU; packed weights are decoded in registers."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from anymla.ops._numba_launch import Product, multiply
from anymla.ops.moe.config import MAX_NUMBA_PAIRS
from anymla.ops.moe.torch_experts import ExpertMlps, run_experts, total_of_few


class _NumbaMlps(ExpertMlps):
    """Expert products that are computed together, so that threads share them."""

    def gates_and_ups(self, parts: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        """Compute ``ExpertMlps.gates_and_ups`` in one call of ``multiply``."""
        gates = [self._of(rows, self.w1[e], self.s1[e]) for rows, e in parts]
        ups = [self._of(rows, self.w3[e], self.s3[e]) for rows, e in parts]
        outs = multiply(gates + ups)
        dtype = parts[0][0].dtype
        return torch.cat(outs[: len(parts)]).to(dtype), torch.cat(outs[len(parts) :]).to(dtype)

    def downs(self, parts: list[tuple[Tensor, int]]) -> Tensor:
        """Compute ``ExpertMlps.downs`` in one call of ``multiply``."""
        outs = multiply([self._of(rows, self.w2[e], self.s2[e]) for rows, e in parts])
        return torch.cat(outs).to(parts[0][0].dtype)

    def fits_batched(self, rows: Tensor, count: int) -> bool:
        """Return False: copying weights into one batch gains nothing here."""
        return False

    def _of(self, rows: Tensor, codes: Tensor, scale: Tensor) -> Product:
        return Product(rows, codes, scale, self.weight_format == "fp8", self.quantized)


def _total(x: Tensor, ids: Tensor, weights: Tensor, mlps: ExpertMlps, offset: int) -> Tensor:
    """Sum as ``total_of_few`` does, for a bounded number of pairs at a time."""
    step = max(1, MAX_NUMBA_PAIRS // max(1, ids.shape[1]))
    parts = [slice(first, first + step) for first in range(0, max(1, len(x)), step)]
    return torch.cat(
        [total_of_few(x[part], ids[part], weights[part], mlps, offset) for part in parts]
    )


experts = functools.partial(run_experts, _NumbaMlps, _total)

"""Routed experts for few tokens on a CPU; packed weights are decoded in registers."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.ops._numba_launch import Product, multiply
from anymla.ops.moe.config import MAX_NUMBA_PAIRS
from anymla.ops.moe.torch_experts import ExpertMlps, total_of_few
from anymla.ops.streams import flush_stream_wait


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


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: list[Tensor] | Tensor,
    w3: list[Tensor] | Tensor,
    w2: list[Tensor] | Tensor,
    s1: list[Tensor] | Tensor,
    s3: list[Tensor] | Tensor,
    s2: list[Tensor] | Tensor,
    *,
    weight_format: str,
    swiglu_limit: float,
    quantize_activations: bool,
    expert_offset: int = 0,
    shared: Tensor | None = None,
    quant_block: int = FP8_BLOCK,
    global_scales: Tensor | None = None,
) -> Tensor:
    """Backend of ``interface.experts`` in numba; see its contract."""
    flush_stream_wait()
    mlps = _NumbaMlps(
        w1, w3, w2, s1, s3, s2, weight_format, swiglu_limit, quantize_activations, quant_block
    )
    step = max(1, MAX_NUMBA_PAIRS // max(1, ids.shape[1]))
    totals = [
        total_of_few(x[part], ids[part], weights[part], mlps, expert_offset)
        for part in (slice(first, first + step) for first in range(0, max(1, len(x)), step))
    ]
    total = torch.cat(totals)
    if shared is not None:
        total.add_(shared)
    return total.to(x.dtype)

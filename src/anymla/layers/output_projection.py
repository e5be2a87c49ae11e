"""The output projection: from attention's heads to the layer's width."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from anymla.layers.linear import Linear, PackedWeight
from anymla.layers.ranks import ALONE, Ranks
from anymla.ops.linear import grouped_output_projection, grouped_output_projection_fp8


class OutputProjection(nn.Module):
    """Inverse RoPE, then a low-rank projection of each group of heads, then one of all groups.

    The grouped weight is decoded to the activations' dtype and multiplied in it, as in DeepSeek's
    inference code. With ``quantize_heads``, an FP8 weight is multiplied with heads quantised in
    blocks of 128 channels, as in vLLM on CUDA devices.

    Attributes:
        wo_a: [groups * rank, heads per group * head_dim], weight of each group's projection.
        wo_b: projection [hidden, groups * rank] of all groups.
        groups: number of groups; with several ranks, those of this rank.
        quantize_heads: see above; needs FP8 weights and groups of whole 128 x 128 blocks.
        ranks: ranks that have the other groups.
    """

    def __init__(
        self,
        *,
        wo_a: PackedWeight,
        wo_b: Linear,
        groups: int,
        quantize_heads: bool = False,
        ranks: Ranks = ALONE,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        assert not quantize_heads or wo_a.kind == "fp8"
        self.wo_a = wo_a
        self.wo_b = wo_b
        self.groups = groups
        self.quantize_heads = quantize_heads
        self.ranks = ranks
        self.backend = backend

    def forward(self, o: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        """Map attention outputs [T, H, D] to [T, hidden], without quantising the heads."""
        wo_a = self.wo_a.dense(o.dtype).unflatten(0, (self.groups, -1))
        z: Tensor = grouped_output_projection(o, positions, cos_sin, wo_a, backend=self.backend)
        return self.ranks.total(self.wo_b(z))

    def of_quantized(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Map heads that are rotated and quantised already to [T, hidden] in ``dtype``."""
        return self.ranks.total(self.wo_b(self._from_codes(codes, scales, dtype)))

    def _from_codes(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        assert self.wo_a.scale is not None
        z: Tensor = grouped_output_projection_fp8(
            codes,
            scales,
            self.wo_a.weight.unflatten(0, (self.groups, -1)),
            self.wo_a.scale.unflatten(0, (self.groups, -1)),
            out_dtype="bf16" if dtype == torch.bfloat16 else "fp32",
            backend=self.backend,
        )
        return z

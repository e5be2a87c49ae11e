"""Linear layers over weights as they lie in the checkpoint."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor, nn

from anymla.formats.fp8_block import dequantize_fp8_weight
from anymla.formats.mxfp4 import dequantize_mxfp4
from anymla.formats.nvfp4 import dequantize_nvfp4
from anymla.ops.linear import fp8_block_linear, linear, mxfp4_linear, nvfp4_linear

WeightKind = Literal["plain", "fp8", "mxfp4", "nvfp4"]


@dataclasses.dataclass(frozen=True)
class PackedWeight:
    """A linear layer's weight [N, K] in the form it is stored in.

    Attributes:
        kind: which of the formats.
        weight: [N, K] floating point (plain), uint8 e4m3 codes [N, K] (fp8), or packed e2m1
            uint8 [N, K/2] (mxfp4, nvfp4).
        scale: uint8 or float32 [ceil(N/128), ceil(K/128)] (fp8), uint8 [N, K/32] (mxfp4),
            uint8 e4m3 codes [N, K/16] (nvfp4), None (plain).
        global_scale: float32 [1] (nvfp4), else None.
    """

    kind: WeightKind
    weight: Tensor
    scale: Tensor | None = None
    global_scale: Tensor | None = None

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight [N, K] decoded to ``dtype``."""
        if self.kind == "plain":
            return self.weight.to(dtype)
        assert self.scale is not None
        if self.kind == "fp8":
            return dequantize_fp8_weight(self.weight, self.scale, dtype)
        if self.kind == "mxfp4":
            return dequantize_mxfp4(self.weight, self.scale, dtype)
        assert self.global_scale is not None
        return dequantize_nvfp4(self.weight, self.scale, self.global_scale, dtype)


class Linear(nn.Module):
    """``x @ weight^T`` with the weight kept as stored.

    Attributes:
        packed: the weight.
        quantize_activations: quantise ``x`` in runs of 128 channels before the product, as
            checkpoints with ``activation_scheme: dynamic`` ask for their FP8 and MXFP4 layers.
        backend: backend asked of the operation; None for the best.
    """

    def __init__(
        self,
        packed: PackedWeight,
        *,
        quantize_activations: bool = False,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.packed = packed
        self.quantize_activations = quantize_activations
        self.backend = backend

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N], same dtype."""
        packed = self.packed
        if packed.kind == "plain":
            out: Tensor = linear(x, packed.weight, backend=self.backend)
        elif packed.kind == "fp8":
            out = fp8_block_linear(
                x,
                packed.weight,
                packed.scale,
                quantize_activations=self.quantize_activations,
                backend=self.backend,
            )
        elif packed.kind == "mxfp4":
            out = mxfp4_linear(
                x,
                packed.weight,
                packed.scale,
                quantize_activations=self.quantize_activations,
                backend=self.backend,
            )
        else:
            out = nvfp4_linear(
                x, packed.weight, packed.scale, packed.global_scale, backend=self.backend
            )
        return out

    def extra_repr(self) -> str:
        """Kind and size, for ``print(model)``."""
        return f"{self.packed.kind}, {list(self.packed.weight.shape)}"

"""Linear layers over weights in the checkpoint's own formats."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor, nn

from anymla.formats.fp8_block import FP8_BLOCK, dequantize_fp8_weight
from anymla.formats.mxfp4 import MXFP4_BLOCK, dequantize_mxfp4
from anymla.formats.nvfp4 import NVFP4_BLOCK, dequantize_nvfp4
from anymla.formats.quantized_rows import QuantizedRows
from anymla.formats.ue8m0 import decode_ue8m0
from anymla.layers import codes
from anymla.ops.linear import fp8_block_linear, linear, mxfp4_linear, nvfp4_linear
from anymla.ops.linear.config import plain_backend

WeightKind = Literal["plain", "fp8", "mxfp4", "nvfp4"]


@dataclasses.dataclass(frozen=True)
class PackedWeight:
    """A linear layer's weight [N, K] as stored.

    Attributes:
        kind: name of the storage format: "plain", "fp8", "mxfp4" or "nvfp4".
        weight: [N, K] floating point (plain), uint8 e4m3 codes [N, K] (fp8), or packed e2m1 uint8
            [N, K/2] (mxfp4, nvfp4).
        scale: uint8 or float32 [ceil(N/block), ceil(K/block)] (fp8), uint8 [N, K/32] (mxfp4),
            uint8 e4m3 codes [N, K/16] (nvfp4), None (plain).
        global_scale: float32 [1] factor of all values (nvfp4), else None.
        block: rows and columns that share a scale (fp8), and channels that share a scale in an
            activation that is quantised for the product.
    """

    kind: WeightKind
    weight: Tensor
    scale: Tensor | None = None
    global_scale: Tensor | None = None
    block: int = FP8_BLOCK

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Decode the weight [N, K] to ``dtype``."""
        if self.kind == "plain":
            return self.weight.to(dtype)
        assert self.scale is not None
        if self.kind == "fp8":
            return dequantize_fp8_weight(self.weight, self.scale, dtype, self.block)
        if self.kind == "mxfp4":
            return dequantize_mxfp4(self.weight, self.scale, dtype)
        assert self.global_scale is not None
        return dequantize_nvfp4(self.weight, self.scale, self.global_scale, dtype)

    def with_float_scales(self) -> PackedWeight:
        """Return the same weight with float32 scales, which the vendor's FP8 products need."""
        if self.scale is None or self.scale.dtype == torch.float32:
            return self
        return dataclasses.replace(self, scale=decode_ue8m0(self.scale, torch.float32))

    def rows(self, part: range) -> PackedWeight:
        """Return the rows of some outputs, as a view.

        Raises:
            ValueError: the part begins or ends amid rows that share a scale, and is not within one
                such block.
        """
        step = self.block if self.kind == "fp8" else 1
        self._require_aligned("rows", part, len(self.weight), step)
        scale = None if self.scale is None else self.scale[_scaled(part, step)]
        return dataclasses.replace(self, weight=self.weight[_slice(part)], scale=scale)

    def columns(self, part: range) -> PackedWeight:
        """Return the columns of some inputs, as a contiguous copy.

        Raises:
            ValueError: the part cuts through columns that share a scale, unless it is FP8 and lies
                within them.
        """
        step = {"fp8": self.block, "mxfp4": MXFP4_BLOCK, "nvfp4": NVFP4_BLOCK}.get(self.kind, 1)
        packed = 2 if self.kind in ("mxfp4", "nvfp4") else 1
        self._require_aligned("columns", part, packed * self.weight.shape[1], step)
        weight = self.weight[:, _scaled(part, packed)].contiguous()
        scale = None if self.scale is None else self.scale[:, _scaled(part, step)].contiguous()
        return dataclasses.replace(self, weight=weight, scale=scale)

    def _require_aligned(self, what: str, part: range, size: int, step: int) -> None:
        whole = part.start % step == 0 and (part.stop % step == 0 or part.stop == size)
        # A block of FP8 may be cut short, a block of FP4 may not.
        within = self.kind == "fp8" and part.start // step == (part.stop - 1) // step
        if not whole and not within:
            raise ValueError(
                f"{what} {part.start}..{part.stop - 1} of a {self.kind} weight "
                f"{list(self.weight.shape)} share scales with others: {step} belong together"
            )


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)


def _scaled(part: range, step: int) -> slice:
    """Return the part counted in steps; a last step may be incomplete."""
    return slice(part.start // step, -(-part.stop // step))


class LinearPair(nn.Module):
    """Two linear layers of one input, merged into one product if their formats allow.

    Attributes:
        rows: output sizes of the two layers.
        merged: the merged layer, or None.
        first, second: the two layers; if merged, their weights are views of the merged weight.
    """

    def __init__(self, first: Linear, second: Linear) -> None:
        super().__init__()
        self.rows = (len(first.packed.weight), len(second.packed.weight))
        self.first = first
        self.second = second
        self.merged = Linear.together(first, second)
        if self.merged is not None:
            whole = self.merged.packed
            first.packed = whole.rows(range(self.rows[0]))
            second.packed = whole.rows(range(self.rows[0], sum(self.rows)))

    @property
    def reads_codes(self) -> bool:
        """True if either layer reads quantised inputs."""
        return self.first.reads_codes or self.second.reads_codes

    def forward(self, x: Tensor, quantised: QuantizedRows | None = None) -> tuple[Tensor, Tensor]:
        """Map [..., K] to the first layer's [..., N] and the second one's [..., M]."""
        if self.merged is None:
            return self.first(x, quantised), self.second(x, quantised)
        first, second = self.merged(x, quantised).split(self.rows, dim=-1)
        return first, second


class Linear(nn.Module):
    """``x @ weight^T`` with the weight kept as stored.

    Attributes:
        packed: weight of the layer.
        quantize_activations: True to quantise ``x`` in blocks before the product, as checkpoints
            with ``activation_scheme: dynamic`` require for their FP8 and MXFP4 layers.
        backend: name of the operation's backend; None for the best.
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

    @property
    def _quant_block(self) -> dict[str, Any]:
        """Return the operations' keyword arguments for unusual block sizes, else {}."""
        block = self.packed.block
        return {} if block == FP8_BLOCK else {"quant_block": block}

    @property
    def reads_codes(self) -> bool:
        """True if it saves a launch to pass the input in quantised form as well."""
        packed = self.packed
        quantizes = self.quantize_activations and packed.kind == "fp8"
        coded = quantizes and packed.block == FP8_BLOCK
        return coded and codes.supports_prequantized(packed.weight)

    def forward(self, x: Tensor, quantised: QuantizedRows | None = None) -> Tensor:
        """Map [..., K] to [..., N] of the same dtype.

        Args:
            x: input activations of any leading shape, [..., K].
            quantised: the same input [T, K] in FP8, if available, for layers that read it.
        """
        packed = self.packed
        if packed.kind == "plain":
            return linear(x, packed.weight, backend=plain_backend(self.backend))
        assert packed.scale is not None
        if packed.kind == "fp8":
            return fp8_block_linear(
                x,
                packed.weight,
                packed.scale,
                quantize_activations=self.quantize_activations,
                backend=self.backend,
                **self._quant_block,
                **codes.as_kwargs(quantised if self.reads_codes else None),
            )
        if packed.kind == "mxfp4":
            return mxfp4_linear(
                x,
                packed.weight,
                packed.scale,
                quantize_activations=self.quantize_activations,
                backend=self.backend,
                **self._quant_block,
            )
        assert packed.global_scale is not None
        return nvfp4_linear(
            x, packed.weight, packed.scale, packed.global_scale, backend=self.backend
        )

    @classmethod
    def together(cls, first: Linear, second: Linear) -> Linear | None:
        """Merge two layers of the same input into one; None if they cannot be merged.

        One layer needs fewer calls and quantises its input once. Blocks of rows that share a scale
        must not straddle the two layers, and NVFP4 weights have one scale for the whole tensor.
        """
        a, b = first.packed, second.packed
        if a.kind != b.kind or a.kind == "nvfp4" or a.weight.dtype != b.weight.dtype:
            return None
        if first.quantize_activations != second.quantize_activations or a.block != b.block:
            return None
        scale = None
        if a.scale is not None and b.scale is not None:
            if a.scale.dtype != b.scale.dtype or (a.kind == "fp8" and len(a.weight) % a.block):
                return None
            scale = torch.cat((a.scale, b.scale))
        packed = PackedWeight(a.kind, torch.cat((a.weight, b.weight)), scale, block=a.block)
        return cls(packed, quantize_activations=first.quantize_activations, backend=first.backend)

    def extra_repr(self) -> str:
        """Describe kind and size for ``print(model)``."""
        return f"{self.packed.kind}, {list(self.packed.weight.shape)}"

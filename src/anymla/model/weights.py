"""A checkpoint's tensors in the form that modules keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from anymla.layers.linear import Linear, PackedWeight
from anymla.layers.ranks import Ranks

ReadTensor = Callable[[str], Tensor]
ReadLinear = Callable[[str], PackedWeight]


class Weights:
    """Reads by name, wherever weights come from.

    Attributes:
        read: a tensor by its checkpoint name, on the target device.
        read_linear: a linear layer's weight by its prefix, on the target device.
        dtype: dtype of the activations. Plain weights are kept in it; quantised ones as stored.
        device: where they are.
        quantize_activations: as the checkpoint asks, and only in reduced precision.
        ranks: the processes that share the network.
        backend: of the linear layers.
    """

    def __init__(
        self,
        read: ReadTensor,
        read_linear: ReadLinear,
        *,
        dtype: torch.dtype,
        device: torch.device,
        quantize_activations: bool,
        ranks: Ranks,
        backend: str | None,
    ) -> None:
        """See the attributes."""
        self.read = read
        self.read_linear = read_linear
        self.dtype = dtype
        self.device = device
        self.quantize_activations = quantize_activations
        self.ranks = ranks
        self.backend = backend

    def linear(
        self, name: str, *, rows: range | None = None, columns: range | None = None
    ) -> Linear:
        """A linear layer; formats with quantised activations quantise them as asked."""
        packed = self.packed(name, rows=rows, columns=columns)
        quantize = self.quantize_activations and packed.kind in ("fp8", "mxfp4")
        return Linear(packed, quantize_activations=quantize, backend=self.backend)

    def packed(
        self, name: str, *, rows: range | None = None, columns: range | None = None
    ) -> PackedWeight:
        """A linear weight, or some of its outputs or inputs; plain ones in the activations' dtype.

        Raises:
            ValueError: the part cuts through values that share a scale.
        """
        packed = self.read_linear(name)
        if self.ranks.size > 1:
            if rows is not None:
                packed = packed.rows(rows)
                if self.device.type != "cpu":  # mapped files may be looked into, memory is let go
                    packed = dataclasses.replace(packed, weight=packed.weight.clone())
            packed = packed if columns is None else packed.columns(columns)
        if packed.kind == "plain":
            return PackedWeight("plain", packed.weight.to(self.dtype))
        if packed.kind == "fp8" and self.device.type == "cuda":
            return packed.with_float_scales()
        return packed

    def of_expert(
        self, name: str, *, rows: range | None = None, columns: range | None = None
    ) -> PackedWeight:
        """A routed expert's weight as stored, or some of its outputs or inputs."""
        packed = self.read_linear(name)
        if rows is not None:
            packed = packed.rows(rows)
            if self.device.type != "cpu":  # as above
                scale = None if packed.scale is None else packed.scale.clone()
                packed = dataclasses.replace(packed, weight=packed.weight.clone(), scale=scale)
        return packed if columns is None else packed.columns(columns)

    def as_stored(self, name: str) -> Tensor:
        """A linear weight as a tensor: plain ones as stored, others decoded to float32."""
        packed = self.read_linear(name)
        return packed.weight if packed.kind == "plain" else packed.dense(torch.float32)

    def float32(self, name: str) -> Tensor:
        """A small tensor that the mathematics uses in float32."""
        return self.read(name).float()

    def logits_weight(self, name: str, rows: range | None = None) -> Tensor:
        """As stored where products of 16-bit operands have float32 results, else float32."""
        stored = self.read(name)
        if rows is not None and len(rows) < len(stored):
            stored = stored[rows.start : rows.stop]
            stored = stored if stored.is_cpu else stored.clone()
        as_stored = self.device.type == "cuda" and stored.dtype == self.dtype
        return stored if as_stored else stored.float()

    def gate(self, name: str) -> Tensor:
        """As stored where its products with the activations are exact in float32, else float32."""
        stored = self.read(name)
        as_stored = self.device.type != "cpu" and stored.dtype == self.dtype
        return stored if as_stored else stored.float()

"""A checkpoint's tensors in the modules' form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from anymla.layers.linear import Linear, PackedWeight
from anymla.layers.ranks import Ranks
from anymla.model.config_fields import ConfigError

ReadTensor = Callable[[str], Tensor]
ReadLinear = Callable[[str], PackedWeight]


class Weights:
    """Reads weights by name, from any source.

    Attributes:
        read: function from a tensor's checkpoint name to the tensor on the target device.
        read_linear: function from a linear layer's prefix to its weight on the target device.
        dtype: dtype of the activations and of plain weights; quantised weights stay as stored.
        device: device of the weights.
        quantize_activations: True if the checkpoint asks for it and the precision is reduced.
        ranks: ranks that share the network.
        rank_counts: numbers of ranks that can share heads and groups.
        backend: name of the backend of the linear layers; None for the best.
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
        rank_counts: Sequence[int],
        backend: str | None,
    ) -> None:
        """Keep the arguments as attributes."""
        self.read = read
        self.read_linear = read_linear
        self.dtype = dtype
        self.device = device
        self.quantize_activations = quantize_activations
        self.ranks = ranks
        self.rank_counts = rank_counts
        self.backend = backend

    def linear(
        self, name: str, *, rows: range | None = None, columns: range | None = None
    ) -> Linear:
        """Read a linear layer; formats with quantised activations quantise them if required."""
        packed = self.packed(name, rows=rows, columns=columns)
        quantize = self.quantize_activations and packed.kind in ("fp8", "mxfp4")
        return Linear(packed, quantize_activations=quantize, backend=self.backend)

    def packed(
        self, name: str, *, rows: range | None = None, columns: range | None = None
    ) -> PackedWeight:
        """Read a linear weight or a part of its outputs or inputs; plain ones in the model's dtype.

        Raises:
            ConfigError: the part cuts through values that share a scale; the message names the
                possible numbers of ranks.
        """
        packed = self.read_linear(name)
        if self.ranks.size > 1:
            if rows is not None:
                packed = self._part(name, packed.rows, rows)
                # a view into a mapped file costs nothing, but on a device it would keep the whole
                # weight alive
                if self.device.type != "cpu":
                    packed = dataclasses.replace(packed, weight=packed.weight.clone())
            if columns is not None:
                packed = self._part(name, packed.columns, columns)
        if packed.kind == "plain":
            return PackedWeight("plain", packed.weight.to(self.dtype))
        if packed.kind == "fp8" and self.device.type == "cuda":
            return packed.with_float_scales()
        return packed

    def of_expert(
        self, name: str, *, rows: range | None = None, columns: range | None = None
    ) -> PackedWeight:
        """Read a routed expert's weight as stored, or some of its outputs or inputs."""
        packed = self.read_linear(name)
        if rows is not None:
            packed = self._part(name, packed.rows, rows)
            if self.device.type != "cpu":  # as above
                scale = None if packed.scale is None else packed.scale.clone()
                packed = dataclasses.replace(packed, weight=packed.weight.clone(), scale=scale)
        return packed if columns is None else self._part(name, packed.columns, columns)

    def _part(self, name: str, cut: Callable[[range], PackedWeight], part: range) -> PackedWeight:
        """Return this rank's part of a weight, of which all ranks have equal parts."""
        try:
            return cut(part)
        except ValueError as error:
            size = len(part) * self.ranks.size
            possible = [str(n) for n in self.rank_counts if _comes_apart(cut, size, n)]
            raise ConfigError(
                f"{name}.weight cannot be shared by {self.ranks.size} ranks: {error}; possible "
                f"are {', '.join(possible)}"
            ) from None

    def as_stored(self, name: str) -> Tensor:
        """Read a linear weight as a tensor: plain ones as stored, others decoded to float32."""
        packed = self.read_linear(name)
        return packed.weight if packed.kind == "plain" else packed.dense(torch.float32)

    def vocabulary(self, prefix: str) -> Tensor:
        """Read the embedding or the head: plain as stored, decoded if it is quantised.

        It is decoded to the activations' dtype if that is exact, that is if scales are powers of
        two.
        """
        stored = self.read(f"{prefix}.weight")
        if stored.dtype.itemsize > 1:
            return stored
        packed = self.read_linear(prefix)
        exact = packed.scale is not None and packed.scale.dtype == torch.uint8
        return packed.dense(self.dtype if exact else torch.float32)

    def float32(self, name: str) -> Tensor:
        """Read a small tensor that is used in float32."""
        return self.read(name).float()

    def logits_weight(self, prefix: str, rows: range | None = None) -> Tensor:
        """Read as stored if products of 16-bit operands have float32 results, else as float32."""
        stored = self.vocabulary(prefix)
        if rows is not None and len(rows) < len(stored):
            stored = stored[rows.start : rows.stop]
            stored = stored if stored.is_cpu else stored.clone()
        as_stored = self.device.type == "cuda" and stored.dtype == self.dtype
        return stored if as_stored else stored.float()

    def gate(self, name: str) -> Tensor:
        """Read as stored if products with activations are exact in float32, else as float32."""
        stored = self.read(name)
        as_stored = self.device.type != "cpu" and stored.dtype == self.dtype
        return stored if as_stored else stored.float()


def _comes_apart(cut: Callable[[range], PackedWeight], size: int, count: int) -> bool:
    """True if a weight of ``size`` rows or columns can be cut into ``count`` equal parts."""
    try:
        for rank in range(count):
            cut(Ranks(rank, count).share(size))
    except ValueError:
        return False
    return True

"""A checkpoint's tensors in float64, dequantised exactly."""

from __future__ import annotations

import pathlib

import torch
from safetensors import safe_open
from torch import Tensor

from anymla.testing.oracle import rounding


class Weights:
    """Tensors of a directory of safetensors files by name; quantised ones come dequantised.

    A linear layer is requested by its module's name: ``weights.linear("layers.0.attn.wkv")``. Its
    stored form (plain; e4m3 with a scale for each block; e2m1 with a scale for each 32 or 16 input
    channels) is recognised by dtype.
    """

    def __init__(self, directory: str | pathlib.Path, block: tuple[int, int] = (128, 128)) -> None:
        self._block = block
        self._files: dict[str, pathlib.Path] = {}
        for path in sorted(pathlib.Path(directory).glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                self._files.update(dict.fromkeys(file.keys(), path))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Tensor:
        """Return an unquantised tensor; floats as float64, integers unchanged."""
        tensor = self._raw(name)
        return tensor.double() if tensor.is_floating_point() else tensor

    def linear(self, module: str) -> Tensor:
        """Return the weight [N, K] of a linear layer in float64."""
        weight = self._raw(f"{module}.weight")
        if weight.dtype in (torch.int8, torch.uint8):
            return self._fp4(module, weight.view(torch.uint8))
        if weight.dtype == torch.float8_e4m3fn:
            values = rounding.decode_e4m3(weight.view(torch.uint8))
            scale = self._scale(f"{module}.scale")
            rows, columns = self._block
            wide = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            return values * wide[: values.shape[0], : values.shape[1]]
        return weight.double()

    def apply(self, x: Tensor, module: str) -> Tensor:
        """Run x [..., K] through a linear layer."""
        return x @ self.linear(module).T

    def table(self, module: str, rows: Tensor) -> Tensor:
        """Return rows [..., D] of a table, by numbers [...]; e4m3 has a scale for 32 channels."""
        chosen = self._raw(f"{module}.weight")[rows]
        if chosen.dtype != torch.float8_e4m3fn:
            return chosen.double()
        values = rounding.decode_e4m3(chosen.view(torch.uint8))
        scale = rounding.decode_ue8m0(self._raw(f"{module}.scale").view(torch.uint8)[rows])
        return values * scale.repeat_interleave(values.shape[-1] // scale.shape[-1], -1)

    def _fp4(self, module: str, packed: Tensor) -> Tensor:
        values = rounding.decode_e2m1_pairs(packed)
        if f"{module}.weight_scale_2" in self:  # NVFP4
            scale = self._scale(f"{module}.weight_scale") * self._scale(f"{module}.weight_scale_2")
        else:
            scale = self._scale(f"{module}.scale")
        return values * scale.repeat_interleave(values.shape[1] // scale.shape[1], 1)

    def _scale(self, name: str) -> Tensor:
        scale = self._raw(name)
        if scale.dtype == torch.float8_e4m3fn:
            return rounding.decode_e4m3(scale.view(torch.uint8))
        if scale.dtype.itemsize == 1:
            return rounding.decode_ue8m0(scale.view(torch.uint8))
        return scale.double()

    def _raw(self, name: str) -> Tensor:
        if name not in self._files:
            raise KeyError(f"the checkpoint has no tensor {name!r}")
        with safe_open(self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

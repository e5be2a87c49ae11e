"""Random weights of real sizes, made where they are used and as a checkpoint would store them."""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch
from torch import Tensor

from anymla.formats.mxfp4 import MXFP4_BLOCK
from anymla.layers.linear import PackedWeight
from anymla.model.config import ModelConfig
from anymla.model.schema import expected_linears, expected_plain, expected_tables

# Root mean squares of codes drawn evenly, roughly: e4m3 up to 0x6F, and all of e2m1.
_E4M3_RMS, _E2M1_RMS = 60.0, 3.0


def random_e4m3(*shape: int, device: torch.device | None = None) -> Tensor:
    """Draw codes of e4m3 numbers evenly, without NaN."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    codes[(codes & 0x7F) == 0x7F] = 0
    return codes


def random_experts(
    count: int, d: int, inner: int, device: torch.device | None = None
) -> dict[str, Any]:
    """Draw MXFP4 weights of random codes, with scales around those of released weights.

    Args:
        count: number of experts.
        d: width of the layer's rows.
        inner: width of the rows between an expert's two products.
        device: device that holds the weights; None for torch's default.

    Returns:
        Keyword arguments of ``experts``: w1, w3, w2, and their scales s1, s3, s2.
    """

    def random(low: int, high: int, *shape: int) -> list[Tensor]:
        made = torch.randint(low, high, (count, *shape), dtype=torch.uint8, device=device)
        return list(made)

    return {
        "w1": random(0, 256, inner, d // 2),
        "w3": random(0, 256, inner, d // 2),
        "w2": random(0, 256, d, inner // 2),
        "s1": random(116, 121, inner, d // 32),
        "s3": random(116, 121, inner, d // 32),
        "s2": random(116, 121, d, inner // 32),
    }


class RandomWeights:
    """Readers for ``Builder``: FP4 experts, FP8 for most other linear layers, as released.

    Results have the magnitude of their inputs.
    """

    def __init__(
        self, config: ModelConfig, device: torch.device, *, seed: int | None = None
    ) -> None:
        """Make nothing yet.

        Args:
            config: configuration of the model.
            device: device on which weights are made.
            seed: values follow from it and the weight's name, whoever makes which; None: from
                torch's generator, in the order in which they are asked for.
        """
        self._seed = seed
        seeded = seed is not None and device.type != "meta"
        self._random = torch.Generator(device) if seeded else None
        self._linears = expected_linears(config)
        self._plain = expected_plain(config)
        self._tables = expected_tables(config)
        self._experts = config.n_routed_experts
        self._block = config.family.weight_block
        self._device = device

    def tensor(self, name: str) -> Tensor:
        """Draw a tensor that is not part of a linear layer."""
        expected = self._plain[name]
        self._begin(name)
        if "I64" in expected.dtypes:
            return self._integers(self._experts, expected.shape, torch.int64)
        if name in ("embed.weight", "head.weight") or ".markov_head." in name:
            return self._normal(expected.shape, torch.bfloat16) / 64
        noise = self._normal(expected.shape)
        if name.endswith("ffn.gate.weight"):
            return (noise / math.sqrt(expected.shape[-1])).bfloat16()
        norms = "norm" in name or ".engram." in name
        return 1 + 0.1 * noise if norms else noise / math.sqrt(expected.shape[-1])

    def linear(self, prefix: str) -> PackedWeight:
        """Draw a linear layer's weight."""
        shape = self._linears[prefix]
        self._begin(prefix)
        if ".experts." in prefix:
            return self._mxfp4(shape.rows, shape.columns)
        if "fp8" in shape.kinds:
            return self._fp8(shape.rows, shape.columns)
        weight = self._normal((shape.rows, shape.columns))
        return PackedWeight("plain", (weight / math.sqrt(shape.columns)).bfloat16())

    def table(self, prefix: str) -> tuple[Tensor, Tensor]:
        """Draw a table of n-grams' rows and its scales, on the host."""
        rows, width = self._tables[prefix]
        codes = torch.randint(0x70, (rows, width), dtype=torch.uint8, device="cpu")
        exponent = 127 - round(math.log2(_E4M3_RMS))
        return codes, torch.full((rows, width // 32), exponent, dtype=torch.uint8, device="cpu")

    def _fp8(self, rows: int, columns: int) -> PackedWeight:
        codes = self._integers(0x70, (rows, columns))
        codes |= self._integers(2, (rows, columns)) << 7
        block = self._block
        blocks = (-(-rows // block), -(-columns // block))
        return PackedWeight("fp8", codes, self._scales(blocks, columns, _E4M3_RMS), block=block)

    def _mxfp4(self, rows: int, columns: int) -> PackedWeight:
        codes = self._integers(256, (rows, columns // 2))
        scales = self._scales((rows, columns // MXFP4_BLOCK), columns, _E2M1_RMS)
        return PackedWeight("mxfp4", codes, scales, block=self._block)

    def _scales(self, shape: tuple[int, int], columns: int, rms: float) -> Tensor:
        exponent = 127 - round(math.log2(rms * math.sqrt(columns)))
        return torch.full(shape, exponent, dtype=torch.uint8, device=self._device)

    def _begin(self, name: str) -> None:
        if self._random is not None:
            self._random.manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))

    def _normal(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=self._device, generator=self._random)

    def _integers(
        self, high: int, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8
    ) -> Tensor:
        return torch.randint(high, shape, dtype=dtype, device=self._device, generator=self._random)

"""Shapes of the mixture of experts, and those of DeepSeek-V4, which builds and tests share."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class ExpertsShape:
    """One call of the routed experts.

    Attributes:
        tokens: rows T.
        experts_per_token: K.
        experts: that are on this device.
        inner: an expert's inner size I.
        d: hidden size D.
    """

    tokens: int
    experts_per_token: int
    experts: int
    inner: int
    d: int

    @property
    def pairs(self) -> int:
        """(token, expert) pairs: rows of the grouped GEMMs."""
        return self.tokens * self.experts_per_token

    @property
    def pairs_per_expert(self) -> float:
        """Rows of one expert's GEMM, if tokens choose evenly."""
        return self.pairs / max(1, self.experts)


@dataclasses.dataclass(frozen=True)
class ExpertFormats:
    """Dtypes and addresses of a call, as far as configs depend on them.

    Attributes:
        x: dtype of the activations.
        weight: "plain", "fp8" or "mxfp4".
        stored: dtype of the weights' tensors.
        quantized: activations are quantised.
        weight_alignment: bytes that the addresses of all weights are multiples of, at most 16.
        scale_alignment: likewise of their scales.
    """

    x: torch.dtype
    weight: str
    stored: torch.dtype
    quantized: bool
    weight_alignment: int = 16
    scale_alignment: int = 16


def flash(tokens: int, experts: int = 256) -> ExpertsShape:
    """V4-Flash; 32 experts are one device's of eight."""
    return ExpertsShape(tokens, 6, experts, 2048, 4096)


def pro(tokens: int, experts: int = 384) -> ExpertsShape:
    """V4-Pro."""
    return ExpertsShape(tokens, 6, experts, 3072, 7168)


# Sizes of the routers: experts and hidden size.
FLASH_ROUTER, PRO_ROUTER = (256, 4096), (384, 7168)

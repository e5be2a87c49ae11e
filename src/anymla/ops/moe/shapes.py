"""Shapes of the mixture of experts, of DeepSeek-V4 and V4.1, which builds and tests share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from anymla.formats.fp8_block import FP8_BLOCK


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
        weight: "plain", "fp8", "mxfp4" or "nvfp4".
        stored: dtype of the weights' tensors.
        quantized: activations are quantised.
        weight_alignment: bytes that the addresses of all weights are multiples of, at most 16.
        scale_alignment: likewise of their scales.
        quant_block: rows and columns of an FP8 weight, and channels of quantised activations, that
            share a scale.
    """

    x: torch.dtype
    weight: str
    stored: torch.dtype
    quantized: bool
    weight_alignment: int = 16
    scale_alignment: int = 16
    quant_block: int = FP8_BLOCK


def flash(tokens: int, experts: int = 256) -> ExpertsShape:
    """V4-Flash; 32 experts are one device's of eight."""
    return ExpertsShape(tokens, 6, experts, 2048, 4096)


def pro(tokens: int, experts: int = 384) -> ExpertsShape:
    """V4-Pro."""
    return ExpertsShape(tokens, 6, experts, 3072, 7168)


def v41(tokens: int, experts: int = 384) -> ExpertsShape:
    """V4.1-Flash."""
    return ExpertsShape(tokens, 6, experts, 2304, 5120)


def odd(tokens: int, inner: int = 1984) -> ExpertsShape:
    """No whole quant blocks of channels, or with 1920 an odd number of them."""
    return ExpertsShape(tokens, 6, 32, inner, 4096)


MODELS = {"flash": flash, "pro": pro}
V41_MODELS = {"flash-41": v41}
# GPUs that share a model.
RANKS = (1, 2, 4, 8)
# Sizes of the routers: experts and hidden size.
FLASH_ROUTER, PRO_ROUTER = (256, 4096), (384, 7168)
# Tokens that routers take, on both sides of every threshold.
ROUTER_TOKENS = (1, 16, 17, 512, 513, 4096)
# Pairs up to which grouping them has another config, and pairs an expert up to which GEMMs have.
_PAIRS = (16, 32, 64, 128, 256, 512)
_PAIRS_PER_EXPERT = (3, 11, 12, 16, 26, 32, 48)


def step_tokens(sized: Callable[..., ExpertsShape], experts: int) -> list[int]:
    """Tokens of a step, on both sides of every threshold of ``config``.

    Args:
        sized: ``flash``, ``pro`` or ``v41``.
        experts: of one device.
    """
    chosen = sized(1).experts_per_token
    # Tiles of any format are of 64 pairs from 17 an expert on.
    pairs = (*_PAIRS, *(share * experts for share in _PAIRS_PER_EXPERT), 17 * experts - 1)
    most = [most // chosen for most in pairs]
    return sorted({1, *most, *(each + 1 for each in most), 4096})

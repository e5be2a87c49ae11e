"""Shapes of V4's and V4.1's mixture of experts, which builds and tests share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.ops._sizes import next_power_of_2


@dataclasses.dataclass(frozen=True)
class ExpertsShape:
    """Sizes of one call of the routed experts.

    Attributes:
        tokens: number of tokens T.
        experts_per_token: number of experts K of each token.
        experts: number of experts on this device.
        inner: inner size I of an expert.
        d: hidden size D of the model.
    """

    tokens: int
    experts_per_token: int
    experts: int
    inner: int
    d: int

    @property
    def pairs(self) -> int:
        """Number of (token, expert) pairs, the rows of the grouped GEMMs."""
        return self.tokens * self.experts_per_token

    @property
    def pairs_per_expert(self) -> float:
        """Average number of pairs of one expert, if all pairs are on this device."""
        return self.pairs / max(1, self.experts)

    @property
    def rehearsed(self) -> ExpertsShape:
        """These sizes with the number of tokens that a warm-up runs for them, a power of two."""
        return dataclasses.replace(self, tokens=next_power_of_2(self.tokens))


@dataclasses.dataclass(frozen=True)
class ExpertFormats:
    """Dtypes, formats and alignments of a call that configs depend on.

    Attributes:
        x: dtype of the activations.
        weight: format of the weights, "plain", "fp8", "mxfp4" or "nvfp4".
        stored: dtype of the weights' tensors.
        quantized: True if activations are quantised.
        weight_alignment: bytes that divide the addresses of all weights, at most 16.
        scale_alignment: bytes that divide the addresses of all scales, at most 16.
        quant_block: number of rows and columns of an FP8 weight, and of channels of quantised
            activations, that share a scale.
    """

    x: torch.dtype
    weight: str
    stored: torch.dtype
    quantized: bool
    weight_alignment: int = 16
    scale_alignment: int = 16
    quant_block: int = FP8_BLOCK


def flash(tokens: int, experts: int = 256) -> ExpertsShape:
    """Sizes of V4-Flash; 32 experts are those of one device of eight."""
    return ExpertsShape(tokens, 6, experts, 2048, 4096)


def pro(tokens: int, experts: int = 384) -> ExpertsShape:
    """Sizes of V4-Pro's experts."""
    return ExpertsShape(tokens, 6, experts, 3072, 7168)


def v41(tokens: int, experts: int = 384) -> ExpertsShape:
    """Sizes of V4.1-Flash's experts."""
    return ExpertsShape(tokens, 6, experts, 2304, 5120)


def odd(tokens: int, inner: int = 1984) -> ExpertsShape:
    """Sizes with part of a quant block, or with an ``inner`` of 1920 an odd number of blocks."""
    return ExpertsShape(tokens, 6, 32, inner, 4096)


MODELS = {"flash": flash, "pro": pro}
V41_MODELS = {"flash-41": v41}
# Numbers of GPUs that share a model.
RANKS = (1, 2, 4, 8)
# Numbers of experts and hidden sizes of the routers.
FLASH_ROUTER, PRO_ROUTER = (256, 4096), (384, 7168)
# Numbers of tokens for routers, on both sides of every threshold.
ROUTER_TOKENS = (1, 16, 17, 512, 513, 4096)
# Largest number of pairs of each config that groups them, and most pairs an expert of each GEMM
# config.
_PAIRS = (16, 32, 64, 128, 256, 512)
_PAIRS_PER_EXPERT = (3, 5, 12, 13, 16, 26, 32, 48)


def step_tokens(sized: Callable[..., ExpertsShape], experts: int) -> list[int]:
    """List token numbers of a step on both sides of every threshold in ``config``.

    Args:
        sized: function that gives a model's sizes, ``flash``, ``pro`` or ``v41``.
        experts: number of experts on one device.
    """
    chosen = sized(1).experts_per_token
    # From 17 pairs an expert on, every format has tiles of 64 pairs.
    pairs = (*_PAIRS, *(share * experts for share in _PAIRS_PER_EXPERT), 17 * experts - 1)
    most = [most // chosen for most in pairs]
    return sorted({1, *most, *(each + 1 for each in most), 4096})

"""Configs of the grouped GEMM of MXFP4 experts on Hopper, and which calls it takes.

Measured on an H200 (docs/performance/experts.md).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from anymla.ops.device import TARGETS, runs_gluon, triton_support
from anymla.ops.registry import Support

# Pairs of an expert, on average, up to which blocks of so many nearly always hold all of them.
_SHARES = ((3, 8), (9, 16), (26, 32))
_SHARED = TARGETS["sm_90"].shared_bytes
_SHARED_TOGETHER = _SHARED + 1024
_RESERVED = 1024  # of a CTA


@dataclasses.dataclass(frozen=True)
class Sm90Config:
    """Tile and pipeline of one grouped GEMM.

    Attributes:
        columns: pairs of a block.
        rows: of a tile, 16 a warp.
        channels: of a stage.
        stages: of the ring.
        ctas_per_sm: resident at a time.
        later: products in flight while those before are added up.
        batch: of w2's input, runs that are quantised at once.
    """

    columns: int
    rows: int
    channels: int
    stages: int
    ctas_per_sm: int
    later: int
    batch: int = 1


_CONFIGS = {
    8: (
        (Sm90Config(8, 64, 512, 2, 3, 4), Sm90Config(8, 64, 512, 4, 2, 4)),
        (Sm90Config(8, 64, 512, 3, 3, 4, 8),),
    ),
    # V4-Pro's 16 columns fit with one CTA of 128 rows only. By themselves they are 3 % slower
    # than not streamed, a layer is 3 to 6 % faster: what does not stream is not launched early.
    16: (
        (Sm90Config(16, 64, 512, 2, 2, 4), Sm90Config(16, 128, 512, 4, 1, 4)),
        (Sm90Config(16, 64, 512, 3, 2, 4, 4), Sm90Config(16, 128, 512, 3, 1, 4, 4)),
    ),
    32: ((Sm90Config(32, 128, 512, 2, 1, 0),), (Sm90Config(32, 128, 512, 3, 1, 0, 2),)),
}


def _fitted(configs: tuple[Sm90Config, ...], width: int) -> Sm90Config | None:
    """The first of which shared memory holds two stages or more, with as many as it holds."""
    for config in configs:
        for channels in (512, 256):
            rows = config.columns * width + config.columns * (width // 128) * 4
            factors = config.rows * (channels // 32) * 4
            stage = config.rows * (channels // 2 + channels // 32)
            memory = min(_SHARED, _SHARED_TOGETHER // config.ctas_per_sm - _RESERVED)
            stages = min(
                (memory - rows - factors) // stage,
                config.stages * config.channels // channels,
                width // channels - 1,
            )
            if width % channels == 0 and stages >= 2:
                return dataclasses.replace(config, channels=channels, stages=stages)
    return None


def sm90_configs(pairs: int, sizes: tuple[int, int, int]) -> tuple[Sm90Config, Sm90Config] | None:
    """For w1 and w3, and for w2; None if there is none.

    Args:
        pairs: how many.
        sizes: experts, their inner size, hidden size.
    """
    experts, inner, d = sizes
    for share, columns in _SHARES:
        if pairs <= share * experts:
            up, down = (
                _fitted(choice, width)
                for choice, width in zip(_CONFIGS[columns], (d, inner), strict=True)
            )
            if up is None or down is None or 2 * inner % up.rows or d % down.rows:
                return None
            if inner // 128 % down.batch:
                return None
            return up, down
    return None


def gluon_support(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: list[Tensor],
    w3: list[Tensor],
    w2: list[Tensor],
    s1: list[Tensor],
    s3: list[Tensor],
    s2: list[Tensor],
    *,
    weight_format: str,
    swiglu_limit: float,
    quantize_activations: bool,
    expert_offset: int = 0,
    shared: Tensor | None = None,
) -> Support:
    """``supports`` of ``experts``; nothing is launched."""
    support = triton_support(x)
    if not support:
        return support
    if not runs_gluon(x.device):
        return Support(False, "instructions of sm_90, and triton 3.6 or newer")
    if weight_format != "mxfp4" or not quantize_activations or x.dtype is not torch.bfloat16:
        return Support(False, "only mxfp4 experts and bfloat16 activations that are quantised")
    if not w1 or not ids.numel():
        return Support(False, "at least one expert and one pair")
    sizes = len(w1), w1[0].shape[0], x.shape[1]
    if sizes[1] % 128 or sizes[2] % 128:
        return Support(False, f"whole blocks of 128 channels, got {sizes[1:]}")
    if sm90_configs(ids.numel(), sizes) is None:
        return Support(False, f"few pairs of experts that fit shared memory, got {ids.numel()}")
    matrices, scales = (*w1, *w3, *w2), (*s1, *s3, *s2)
    if not (_aligned(matrices, 16) and _aligned(scales, 4)):
        return Support(False, "matrices at multiples of 16 bytes, scales at multiples of 4")
    return Support(True)


def _aligned(tensors: tuple[Tensor, ...], size: int) -> bool:
    """Whether all begin at multiples of so many bytes; copies, made contiguous, do."""
    return not any(each.data_ptr() % size and each.is_contiguous() for each in tensors)

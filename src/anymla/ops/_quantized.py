"""Checks and helpers of operations whose results can also be returned quantised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK, quantize_fp8_rows
from anymla.ops._check import check, require
from anymla.ops.device import Support

# Channels that share a scale in DeepSeek-V4 and in V4.1.
QUANT_BLOCKS = (FP8_BLOCK, 32)


def in_blocks_of(
    sizes: tuple[int, ...], supports: Callable[..., Support], *, told: bool = False
) -> Callable[..., Support]:
    """Restrict ``supports`` of a kernel to calls whose ``quant_block`` is one of ``sizes``.

    With ``told``, ``supports`` also gets the ``quant_block``.
    """

    def answer(*args: Any, quant_block: int = FP8_BLOCK, **kwargs: Any) -> Support:
        if quant_block not in sizes:
            known = " or ".join(map(str, sizes))
            return Support(False, f"scales of blocks of {known}, got {quant_block}")
        size = {"quant_block": quant_block} if told else {}
        return supports(*args, **kwargs, **size)

    return answer


def in_blocks_of_128(supports: Callable[..., Support]) -> Callable[..., Support]:
    """Restrict ``supports`` to quant blocks of 128 channels, DeepSeek-V4's."""
    return in_blocks_of((FP8_BLOCK,), supports)


def check_codes(name: str, x: Tensor, codes: Tensor | None, code_scales: Tensor | None) -> None:
    """Check the buffers for quantised rows of x [T, K]; see ``formats.quantized_rows``.

    Raises:
        TypeError, ValueError: if one is given without the other, or dtype, shape, strides or device
            is wrong.
    """
    if codes is None and code_scales is None:
        return
    both = codes is not None and code_scales is not None
    require(both, name, "codes, code_scales", "given together", "one of them")
    assert codes is not None
    rows, width = x.shape
    check(
        name,
        dims={"T": rows, "K": width, "S": -(-width // FP8_BLOCK)},
        codes=(codes, "T+ K", torch.uint8),
        code_scales=(code_scales, "T+ S", torch.float32),
    )
    require(codes.is_contiguous(), name, "codes", "contiguous", codes.stride())
    require(codes.device == x.device, name, "codes", f"on {x.device}", codes.device)


def fill_codes(x: Tensor, codes: Tensor | None, code_scales: Tensor | None) -> None:
    """Quantise x [T, K] into the first T rows of both buffers, if they are given."""
    if codes is None or code_scales is None:
        return
    found, scales = quantize_fp8_rows(x)
    codes[: len(x)] = found
    code_scales[: len(x)] = scales

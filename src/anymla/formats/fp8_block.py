"""Block-scaled FP8: weights in square blocks, activations in blocks of as many channels.

Blocks have 128 x 128 values in DeepSeek-V4, and 32 x 32 in V4.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.e4m3 import E4M3_MAX, decode_e4m3, encode_e4m3
from anymla.formats.e4m3_bits import (
    e4m3_values_shifted,
    has_nan_code,
    scales_are_exact,
    shifted_scale,
)
from anymla.formats.ue8m0 import decode_ue8m0, encode_ue8m0, scale_exponent

FP8_BLOCK = 128
# Lower bound of a block's amax, below which its scale is constant; heads have their own.
ACTIVATION_AMAX_FLOOR = 1e-4
HEAD_AMAX_FLOOR = 1e-10


def quantize_fp8_weight(
    w: Tensor, scale_format: str = "ue8m0", block: int = FP8_BLOCK
) -> tuple[Tensor, Tensor]:
    """Quantise a weight in square blocks; those at the edges may be smaller.

    Args:
        w: floating point weight [N, K].
        scale_format: "ue8m0" (power of two, rounded up) or "fp32" (amax / 448).
        block: rows and columns that share a scale.

    Returns:
        e4m3 codes uint8 [N, K]; scales [ceil(N/block), ceil(K/block)], uint8 (ue8m0) or float32.

    Raises:
        ValueError: the scale format is another one.
    """
    amax = _blocks(w.float(), block).abs().amax((1, 3))
    if scale_format == "ue8m0":
        stored = encode_ue8m0(scale_exponent(amax, E4M3_MAX, ACTIVATION_AMAX_FLOOR))
        scale = decode_ue8m0(stored)
    elif scale_format == "fp32":
        stored = scale = amax.clamp(min=ACTIVATION_AMAX_FLOOR) / E4M3_MAX
    else:
        raise ValueError(
            f"quantize_fp8_weight: scale_format must be ue8m0 or fp32, got {scale_format!r}"
        )
    return encode_e4m3(w.float() / expand_block_scales(scale, w.shape, block)), stored


def dequantize_fp8_weight(
    codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32, block: int = FP8_BLOCK
) -> Tensor:
    """Decode a block-scaled weight.

    Args:
        codes: uint8 [N, K], e4m3 codes of the weight.
        scales: [ceil(N/block), ceil(K/block)], scales of the blocks in uint8 (ue8m0) or float32.
        dtype: dtype of the result. Power-of-two scales decode exactly in bfloat16 and wider.
        block: rows and columns that share a scale.

    Returns:
        [N, K] in ``dtype``; the product is computed in float32 (float64 if requested) and rounded
        once.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if dtype in (torch.bfloat16, torch.float32) and _decodes_by_bits(codes, scales):
        values, scale = e4m3_values_shifted(codes), shifted_scale(scales, dtype)
        rows, columns = codes.shape
        if rows % block or columns % block:
            return torch.mul(values, expand_block_scales(scale, codes.shape, block))
        blocks = values.view(rows // block, block, -1, block)
        return torch.mul(blocks, scale[:, None, :, None]).view(rows, columns)
    scale = decode_ue8m0(scales, wide) if scales.dtype == torch.uint8 else scales.to(wide)
    return (decode_e4m3(codes, wide) * expand_block_scales(scale, codes.shape, block)).to(dtype)


def quantize_fp8_rows(
    x: Tensor, block: int = FP8_BLOCK, floor: float = ACTIVATION_AMAX_FLOOR
) -> tuple[Tensor, Tensor]:
    """Quantise activations in blocks of ``block`` channels with power-of-two scales.

    Args:
        x: [..., K] floating point; the last block may be shorter.
        block: channels that share a scale.
        floor: lower bound of a block's amax.

    Returns:
        e4m3 codes uint8 [..., K]; scales float32 [..., ceil(K/block)], powers of two.
    """
    width = x.shape[-1]
    blocks = -(-width // block)
    wide = x if x.dtype == torch.float64 else x.float()
    padded = torch.nn.functional.pad(wide, (0, blocks * block - width)).unflatten(
        -1, (blocks, block)
    )
    exponent = scale_exponent(padded.abs().amax(-1), E4M3_MAX, floor)
    codes = encode_e4m3(torch.ldexp(padded, -exponent.unsqueeze(-1))).flatten(-2)[..., :width]
    return codes, torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)


def dequantize_fp8_rows(
    codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32, block: int = FP8_BLOCK
) -> Tensor:
    """Decode activations: codes uint8 [..., K] times scales [..., ceil(K/block)], in ``dtype``."""
    expanded = scales.repeat_interleave(block, -1)[..., : codes.shape[-1]]
    return decode_e4m3(codes, dtype) * expanded.to(dtype)


def expand_block_scales(
    scales: Tensor, shape: torch.Size | tuple[int, ...], block: int = FP8_BLOCK
) -> Tensor:
    """Repeat scales [ceil(N/block), ceil(K/block)] over their blocks to [N, K]."""
    rows, columns = shape
    return scales.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]


def _decodes_by_bits(codes: Tensor, scales: Tensor) -> bool:
    """True if the integer decoder is exact here, and reading the values to find out is cheap."""
    if codes.device.type != "cpu" or scales.dtype != torch.uint8:
        return False
    return scales_are_exact(scales) and not has_nan_code(codes)


def _blocks(w: Tensor, block: int) -> Tensor:
    """View [N, K] padded with zeros as [N/block, block, K/block, block]."""
    rows, columns = w.shape
    padded = torch.nn.functional.pad(w, (0, -columns % block, 0, -rows % block))
    return padded.unflatten(1, (-1, block)).unflatten(0, (-1, block))

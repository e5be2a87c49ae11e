"""NVFP4: e2m1 codes, one e4m3 scale for 16 channels, one float32 scale for the tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.e2m1 import E2M1_MAX, decode_packed_e2m1, encode_e2m1, pack_nibbles
from anymla.formats.e4m3 import E4M3_MAX, decode_e4m3, encode_e4m3

NVFP4_BLOCK = 16


def quantize_nvfp4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise a tensor with two levels of scales.

    The tensor's scale is ``amax / (6 * 448)``; a block's scale is the e4m3 value nearest to
    ``block amax / 6 / global``; a value is the e2m1 code nearest to ``x / (block * global)``
    (NVIDIA TensorRT Model Optimizer's published recipe).

    Args:
        x: [..., n] floating point, n a multiple of 16.

    Returns:
        packed uint8 [..., n/2], e4m3 block scales uint8 [..., n/16], global scale float32 [1].

    Raises:
        ValueError: if n is not a multiple of 16.
    """
    if x.shape[-1] % NVFP4_BLOCK:
        raise ValueError(f"quantize_nvfp4: last dim must be a multiple of 16, got {x.shape[-1]}")
    blocks = x.float().unflatten(-1, (-1, NVFP4_BLOCK))
    amax = blocks.abs().amax(-1)
    whole = amax.amax() if amax.numel() else amax.new_zeros(())
    global_scale = torch.where(whole > 0, whole / (E2M1_MAX * E4M3_MAX), 1.0).reshape(1)
    block_codes = encode_e4m3(amax / E2M1_MAX / global_scale)
    step = (decode_e4m3(block_codes) * global_scale).unsqueeze(-1)
    codes = encode_e2m1(torch.where(step > 0, blocks / step, torch.zeros_like(blocks)))
    return pack_nibbles(codes.flatten(-2)), block_codes, global_scale


def dequantize_nvfp4(
    packed: Tensor,
    block_scales: Tensor,
    global_scale: Tensor,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Decode to [..., n] of ``dtype``: ``e2m1 * e4m3`` is exact, times the global scale in float32.

    With float64 the product is taken in float64.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = decode_packed_e2m1(packed, wide).unflatten(-1, (-1, NVFP4_BLOCK))
    scaled = values * decode_e4m3(block_scales, wide).unsqueeze(-1)
    return (scaled.flatten(-2) * global_scale.to(wide)).to(dtype)

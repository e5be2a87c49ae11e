"""NVFP4: e2m1 codes, an e4m3 scale for 16 channels and, for whole tensors, a float32 scale."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.e2m1 import E2M1_MAX, decode_packed_e2m1, encode_e2m1, pack_nibbles
from anymla.formats.e4m3 import E4M3_MAX, decode_e4m3, encode_e4m3

NVFP4_BLOCK = 16
# Lower bound of a row block's amax: with no global scale, the smallest scale is e4m3's smallest
# value.
NVFP4_AMAX_FLOOR = E2M1_MAX * 2.0**-9


def quantize_nvfp4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise a tensor with two levels of scales.

    The tensor's scale is ``amax / (6 * 448)``; a block's scale is the e4m3 value nearest to
    ``block amax / 6 / global``; a value is the e2m1 code nearest to ``x / (block * global)``
    (NVIDIA TensorRT Model Optimizer's published recipe).

    Args:
        x: [..., n] floating point, n a multiple of 16.

    Returns:
        Packed codes uint8 [..., n/2], e4m3 block scales uint8 [..., n/16], global scale float32
        [1].

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


def quantize_nvfp4_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise blocks of 16 channels without a global scale.

    A block's scale is the e4m3 value nearest to ``amax / 6``, saturating at 448, with amax floored
    at 6 * 2^-9; a value is the e2m1 code nearest to ``x / scale``, ties to even, saturating, its
    sign kept (DeepSeek-V4.1 inference/model.py). Because scales are rounded to nearest, values
    above six scales occur. A block with a NaN or an infinity has the scale NaN, and the codes of
    its values divided by 448.

    Args:
        x: [..., n] floating point, n a multiple of 16.

    Returns:
        Packed codes uint8 [..., n/2] and e4m3 scales uint8 [..., n/16].

    Raises:
        ValueError: if n is not a multiple of 16.
    """
    if x.shape[-1] % NVFP4_BLOCK:
        raise ValueError(
            f"quantize_nvfp4_rows: last dim must be a multiple of 16, got {x.shape[-1]}"
        )
    blocks = (x if x.dtype == torch.float64 else x.float()).unflatten(-1, (-1, NVFP4_BLOCK))
    amax = blocks.abs().amax(-1)
    scales = encode_e4m3(amax.clamp(min=NVFP4_AMAX_FLOOR) / E2M1_MAX)
    step = torch.where(amax.isfinite(), decode_e4m3(scales, blocks.dtype), E4M3_MAX)
    # Division rounds correctly, so a quotient on a tie of two codes stays on it.
    codes = encode_e2m1(blocks / step.unsqueeze(-1))
    scales = torch.where(amax.isfinite(), scales, 0x7F).to(torch.uint8)
    return pack_nibbles(codes.flatten(-2)), scales


def dequantize_nvfp4(
    packed: Tensor,
    block_scales: Tensor,
    global_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Decode to [..., n] in ``dtype``: ``e2m1 * e4m3``, exact, times the global scale in float32.

    With float64 the product is computed in float64. Without a global scale every value is exact in
    bfloat16 and float16.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = decode_packed_e2m1(packed, wide).unflatten(-1, (-1, NVFP4_BLOCK))
    scaled = (values * decode_e4m3(block_scales, wide).unsqueeze(-1)).flatten(-2)
    return (scaled if global_scale is None else scaled * global_scale.to(wide)).to(dtype)

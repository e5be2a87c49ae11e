"""GEMMs of the vendor's library, cuBLAS, through torch.

On Hopper it takes DeepSeek's blocks of scales.

From some tens of tokens on it is the faster one (H200, 4096 x 4096, quantising included: 18 us
against 47 us for 256 tokens, 66 against 244 for 2048); below, reading the weight is what takes the
time, and a kernel that splits K is faster. It takes tokens in multiples of 4; they come in 16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.formats.ue8m0 import decode_ue8m0
from anymla.ops.device import target_of, triton_support
from anymla.ops.linear import torch_linear
from anymla.ops.registry import Support

_FEWEST_TOKENS = 64
TOKEN_STEP = 16
# The scales of a row of blocks are read as 16 bytes.
_CHANNEL_STEP = 4 * FP8_BLOCK


def vendor_support(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    quantize_activations: bool = False,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
    dtype: torch.dtype | None = torch.bfloat16,
) -> Support:
    """``supports`` of ``fp8_block_linear``; ``dtype`` is what x must be, None for codes."""
    support = triton_support(x)  # quantises
    if not support:
        return support
    if x.device.type != "cuda" or torch.version.hip or target_of(x.device).name != "sm_90":
        return Support(False, "blocks of scales are multiplied by the vendor's library on sm_90")
    if not hasattr(functional, "scaled_mm"):
        return Support(False, f"torch {torch.__version__} has no scaled_mm")
    if not quantize_activations or dtype not in (None, x.dtype):
        return Support(False, "only bfloat16 activations that are quantised")
    rows, width = weight.shape
    if rows % FP8_BLOCK or width % _CHANNEL_STEP:
        return Support(False, f"whole blocks, K a multiple of {_CHANNEL_STEP}; got {rows, width}")
    if codes is not None and len(codes) % TOKEN_STEP:
        return Support(False, f"codes of {TOKEN_STEP} rows and multiples, got {len(codes)}")
    tokens = x.numel() // width
    return Support(True, automatic=tokens >= _FEWEST_TOKENS)


def scaled_product(codes: Tensor, x_scales: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Multiply e4m3 activations and weights with their scales.

    Args:
        codes: [T, K] float8_e4m3fn, rows anywhere; T a multiple of 4.
        x_scales: float32 [T, K / 128], T last in memory.
        weight: uint8 codes [N, K].
        scale: uint8 or float32 [N / 128, K / 128].

    Returns:
        bfloat16 [T, N].
    """
    kinds: Any = functional
    factors = decode_ue8m0(scale, torch.float32) if scale.dtype == torch.uint8 else scale
    out: Tensor = kinds.scaled_mm(
        codes,
        weight.contiguous().view(torch.float8_e4m3fn).t(),
        x_scales,
        kinds.ScalingType.BlockWise1x128,
        factors.contiguous().t(),
        kinds.ScalingType.BlockWise128x128,
        swizzle_a=kinds.SwizzleType.NO_SWIZZLE,
        swizzle_b=kinds.SwizzleType.NO_SWIZZLE,
        output_dtype=torch.bfloat16,
    )
    return out


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """See ``interface.linear``."""
    return functional.linear(x, weight)


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """See ``interface.linear_float32``."""
    return torch_linear.linear_float32(x, weight)


def fp8_block_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    quantize_activations: bool = False,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
) -> Tensor:
    """See ``interface.fp8_block_linear``."""
    from anymla.ops.linear.triton_quantize import quantize_rows_mn_major

    rows = x.reshape(-1, x.shape[-1])
    if not len(rows):
        return x.new_empty((*x.shape[:-1], len(weight)))
    if codes is None or code_scales is None:
        codes, code_scales = quantize_rows_mn_major(rows.contiguous(), TOKEN_STEP)
    out = scaled_product(codes.view(torch.float8_e4m3fn), code_scales, weight, scale)
    return out[: len(rows)].view(*x.shape[:-1], -1)

"""Calls that each backend of the linear layers takes."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.ops.device import INTERPRETED, runs_gluon, target_of, triton_support
from anymla.ops.linear.config import (
    BF16_BLOCK_K,
    BF16_FEW,
    BF16_ROW_STEP,
    MOST_BF16_ROWS,
    MOST_EXACT,
    MOST_TOKENS,
    ROW_STEP,
)
from anymla.ops.registry import Support

# Channels that the FP8 instruction takes at a time.
_WGMMA_STEP = 4 * FP8_BLOCK
# The one target whose instructions take blocks of scales.
SCALED_TARGET = "sm_100"


def gluon_support(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    quantize_activations: bool = False,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
) -> Support:
    """``supports`` of ``fp8_block_linear``."""
    support = triton_support(x)
    if not support:
        return support
    if not quantize_activations or x.dtype == torch.float64:
        return Support(False, "only activations of up to 32 bits that are quantised")
    tokens = x.numel() // max(1, x.shape[-1])
    return gluon_gemm_support(tokens, weight, scale, x.dtype == torch.float32)


def gluon_gemm_support(tokens: int, weight: Tensor, scale: Tensor, exact: bool) -> Support:
    """Of codes by weights [..., N, K]; ``exact``: products must not be rounded."""
    rows, width = weight.shape[-2:]
    device = weight.device
    if not runs_gluon(device):
        return Support(False, "instructions of sm_90, and triton 3.6 or newer")
    if not 1 <= tokens <= MOST_TOKENS:
        return Support(False, f"1 to {MOST_TOKENS} tokens, got {tokens}")
    if rows % ROW_STEP or width % FP8_BLOCK or (weight.ndim > 2 and rows % FP8_BLOCK):
        return Support(False, f"whole tiles of rows and blocks of channels, got {rows, width}")
    if not (weight.is_contiguous() and scale.is_contiguous()) or weight.data_ptr() % 16:
        return Support(False, "weights that are not contiguous at a multiple of 16 bytes")
    if tokens > MOST_EXACT and exact:
        return Support(False, f"float32 results of up to {MOST_EXACT} tokens, got {tokens}")
    if tokens > MOST_EXACT and width % _WGMMA_STEP:
        return Support(False, f"K a multiple of {_WGMMA_STEP} for {tokens} tokens, got {width}")
    return Support(True)


def gluon_bf16_support(x: Tensor, weight: Tensor) -> Support:
    """``supports`` of ``linear_float32``."""
    support = triton_support(x)
    if not support:
        return support
    if not runs_gluon(x.device):
        return Support(False, "instructions of sm_90, and triton 3.6 or newer")
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return Support(False, f"bfloat16 by bfloat16, got {x.dtype} and {weight.dtype}")
    rows, width = weight.shape
    tokens = x.numel() // max(1, width)
    if not 1 <= tokens <= MOST_EXACT:
        return Support(False, f"1 to {MOST_EXACT} tokens, got {tokens}")
    if rows % BF16_ROW_STEP or width % BF16_BLOCK_K:
        return Support(False, f"whole tiles of rows and blocks of channels, got {rows, width}")
    if not weight.is_contiguous() or weight.data_ptr() % 16:
        return Support(False, "weights that are not contiguous at a multiple of 16 bytes")
    # Tiles are of 8 and of 32 tokens; one of 32 that is not full takes longer than the vendor's.
    full = tokens <= BF16_FEW or tokens == MOST_EXACT
    return Support(True, automatic=full and rows <= MOST_BF16_ROWS)


def scaled_support(
    x: Tensor, weight: Tensor, scale: Tensor, *, quantize_activations: bool = False
) -> Support:
    """``supports`` of ``mxfp4_linear`` by instructions that take blocks of scales."""
    support = triton_support(x)
    if not support:
        return support
    if not quantize_activations or x.dtype != torch.bfloat16:
        return Support(False, "only bfloat16 activations that are quantised")
    if INTERPRETED or target_of(x.device).name == SCALED_TARGET:
        return support
    return Support(False, f"instructions with blocks of scales are those of {SCALED_TARGET}")


def library_support(x: Tensor, weight: Tensor) -> Support:
    """``supports`` of plain products by the vendor's library."""
    if x.device.type in ("cuda", "xpu"):
        return Support(True)
    return Support(False, f"the vendor's library multiplies on cuda and xpu, got {x.device.type}")

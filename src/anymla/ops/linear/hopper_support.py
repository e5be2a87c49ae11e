"""Calls that the kernels for Hopper take."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.ops.device import runs_gluon, triton_support
from anymla.ops.registry import Support

# Whether the kernels are chosen without having been named.
AUTOMATIC = True
MOST_TOKENS = 128
# Up to here products are exact; above they are those of the FP8 instruction, as the vendor's.
MOST_EXACT = 32
# Channels that it takes at a time.
_ROUNDED_STEP = 4 * FP8_BLOCK
# bfloat16 channels of 128 bytes, rows of a tile, and rows up to which it has been measured.
PLAIN_RUN, PLAIN_ROW_STEP, MOST_PLAIN_ROWS = 64, 16, 8192
PLAIN_FEW = 8
# Rows of the smallest tiles that every kernel has.
ROW_STEP = 64


def hopper_support(
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
    return product_support(tokens, weight, scale, x.dtype == torch.float32)


def product_support(tokens: int, weight: Tensor, scale: Tensor, exact: bool) -> Support:
    """Of codes by weights [..., N, K]; ``exact``: products must not be rounded."""
    rows, width = weight.shape[-2:]
    device = weight.device
    if not runs_gluon(device):
        return Support(False, "instructions of sm_90, and triton 3.6 or newer")
    if not 1 <= tokens <= MOST_TOKENS:
        return Support(False, f"1 to {MOST_TOKENS} tokens, got {tokens}")
    if rows % ROW_STEP or width % FP8_BLOCK or (weight.ndim > 2 and rows % FP8_BLOCK):
        return Support(False, f"whole tiles of rows and runs of channels, got {rows, width}")
    if not (weight.is_contiguous() and scale.is_contiguous()) or weight.data_ptr() % 16:
        return Support(False, "weights that are not contiguous at a multiple of 16 bytes")
    if tokens > MOST_EXACT and exact:
        return Support(False, f"float32 results of up to {MOST_EXACT} tokens, got {tokens}")
    if tokens > MOST_EXACT and width % _ROUNDED_STEP:
        return Support(False, f"K a multiple of {_ROUNDED_STEP} for {tokens} tokens, got {width}")
    return Support(True, automatic=AUTOMATIC)


def plain_support(x: Tensor, weight: Tensor) -> Support:
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
    if rows % PLAIN_ROW_STEP or width % PLAIN_RUN:
        return Support(False, f"whole tiles of rows and runs of channels, got {rows, width}")
    if not weight.is_contiguous() or weight.data_ptr() % 16:
        return Support(False, "weights that are not contiguous at a multiple of 16 bytes")
    # Tiles are of 8 and of 32 tokens; one of 32 that is not full takes longer than the vendor's.
    full = tokens <= PLAIN_FEW or tokens == MOST_EXACT
    return Support(True, automatic=AUTOMATIC and full and rows <= MOST_PLAIN_ROWS)

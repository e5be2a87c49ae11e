"""Support checks of each backend of the linear layers; nothing is launched."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.ops.device import (
    Support,
    float32_support,
    numba_problem,
    runs_gluon,
    target_of,
    triton_support,
)
from anymla.ops.linear.config import (
    BF16_BLOCK_K,
    BF16_ROW_STEP,
    BF16_SMALL_BLOCK_M,
    MAX_BF16_ROWS,
    MAX_EXACT_TOKENS,
    MAX_NUMBA_TOKENS,
    MAX_TOKENS,
    NUMBA_CHANNEL_STEP,
    ROW_STEP,
    VENDOR_CHANNEL_STEP,
    VENDOR_GROUPED_TOKENS,
    VENDOR_TOKEN_STEP,
    VENDOR_TOKENS,
    WGMMA_CHANNEL_STEP,
)

_NO_SM90 = Support(False, "instructions of sm_90, and triton 3.6 or newer")
_NO_FLOAT64 = Support(False, "computes in float32, but out_dtype is fp64")


def gluon_support(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    quantize_activations: bool = False,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
    quant_block: int = FP8_BLOCK,
) -> Support:
    """Return support of Hopper's ``fp8_block_linear``: few tokens, quantised activations."""
    support = triton_support(x)
    if not support:
        return support
    if not quantize_activations or x.dtype == torch.float64:
        return Support(False, "only activations of up to 32 bits that are quantised")
    tokens = x.numel() // max(1, x.shape[-1])
    if quant_block != FP8_BLOCK and tokens > MAX_EXACT_TOKENS:
        reason = f"blocks of {quant_block} with up to {MAX_EXACT_TOKENS} tokens, got {tokens}"
        return Support(False, reason)
    return _gluon_gemm_support(tokens, weight, scale, x.dtype == torch.float32)


def gluon_grouped_support(
    o: Tensor, o_scale: Tensor, wo_a: Tensor, wo_a_scale: Tensor, *, out_dtype: str = "bf16"
) -> Support:
    """Return support of Hopper's ``grouped_output_projection_fp8``: few tokens."""
    if out_dtype == "fp64":
        return _NO_FLOAT64
    return _gluon_gemm_support(len(o), wo_a, wo_a_scale, out_dtype == "fp32")


def _gluon_gemm_support(tokens: int, weight: Tensor, scale: Tensor, exact: bool) -> Support:
    """Return support of codes by weights [..., N, K]; ``exact``: products must not round."""
    rows, width = weight.shape[-2:]
    if not runs_gluon(weight.device):
        return _NO_SM90
    if not 1 <= tokens <= MAX_TOKENS:
        return Support(False, f"1 to {MAX_TOKENS} tokens, got {tokens}")
    if rows % ROW_STEP or width % FP8_BLOCK or (weight.ndim > 2 and rows % FP8_BLOCK):
        return Support(False, f"whole tiles of rows and blocks of channels, got {rows, width}")
    if not (weight.is_contiguous() and scale.is_contiguous()) or weight.data_ptr() % 16:
        return Support(False, "weights that are not contiguous at a multiple of 16 bytes")
    if tokens > MAX_EXACT_TOKENS and exact:
        return Support(False, f"float32 results of up to {MAX_EXACT_TOKENS} tokens, got {tokens}")
    if tokens > MAX_EXACT_TOKENS and width % WGMMA_CHANNEL_STEP:
        reason = f"K a multiple of {WGMMA_CHANNEL_STEP} for {tokens} tokens, got {width}"
        return Support(False, reason)
    return Support(True)


def gluon_bf16_support(x: Tensor, weight: Tensor) -> Support:
    """Return support of Hopper's ``linear_float32``: bfloat16 operands, few tokens."""
    support = triton_support(x)
    if not support:
        return support
    if not runs_gluon(x.device):
        return _NO_SM90
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return Support(False, f"bfloat16 by bfloat16, got {x.dtype} and {weight.dtype}")
    rows, width = weight.shape
    tokens = x.numel() // max(1, width)
    if not 1 <= tokens <= MAX_EXACT_TOKENS:
        return Support(False, f"1 to {MAX_EXACT_TOKENS} tokens, got {tokens}")
    if rows % BF16_ROW_STEP or width % BF16_BLOCK_K:
        return Support(False, f"whole tiles of rows and blocks of channels, got {rows, width}")
    if not weight.is_contiguous() or weight.data_ptr() % 16:
        return Support(False, "weights that are not contiguous at a multiple of 16 bytes")
    # Tiles have 8 or 32 tokens; a tile of 32 that is not full is slower than the vendor's kernel.
    full = tokens <= BF16_SMALL_BLOCK_M or tokens == MAX_EXACT_TOKENS
    return Support(True, automatic=full and rows <= MAX_BF16_ROWS)


def vendor_plain_support(x: Tensor, weight: Tensor) -> Support:
    """Return support of plain products by the vendor's library."""
    if x.device.type in ("cuda", "xpu"):
        return Support(True)
    return Support(False, f"the vendor's library multiplies on cuda and xpu, got {x.device.type}")


def triton_inverse_rope_support(o: Tensor, *args: object, **kwargs: object) -> Support:
    """Return support of Triton's inverse RoPE: whole pairs of channels, all in one tile."""
    if o.shape[2] % 2:
        return Support(False, f"heads of an even number of channels, got {o.shape[2]}")
    return float32_support(o, *args, **kwargs)


def vendor_projection_support(
    o: Tensor, positions: Tensor, cos_sin_cache: Tensor, wo_a: Tensor
) -> Support:
    """Return support of the vendor's ``grouped_output_projection``; Triton rotates the heads."""
    support = vendor_plain_support(o, wo_a)
    return support and triton_inverse_rope_support(o, positions, cos_sin_cache, wo_a)


def vendor_support(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    quantize_activations: bool = False,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
) -> Support:
    """Return support of cuBLAS's ``fp8_block_linear``: quantised activations, many tokens."""
    support = _scaled_mm_support(x, *weight.shape)
    if not support:
        return support
    if not quantize_activations or x.dtype != torch.bfloat16:
        return Support(False, "only bfloat16 activations that are quantised")
    if codes is not None and len(codes) % VENDOR_TOKEN_STEP:
        reason = f"codes of {VENDOR_TOKEN_STEP} rows and multiples, got {len(codes)}"
        return Support(False, reason)
    return Support(True, automatic=x.numel() // weight.shape[1] >= VENDOR_TOKENS)


def numba_support(x: Tensor, weight: Tensor, scale: Tensor, **_: object) -> Support:
    """Return support of numba's products with packed weights, on a CPU."""
    problem = numba_problem()
    if problem:
        return Support(False, problem)
    if x.device.type != "cpu":
        return Support(False, f"CPU tensors, got {x.device.type}")
    if x.dtype == torch.float64 or scale.dtype == torch.float64:
        return Support(False, "computes in float32, but an argument is float64")
    width = x.shape[-1]
    if width % NUMBA_CHANNEL_STEP:
        return Support(False, f"K a multiple of {NUMBA_CHANNEL_STEP}, got {width}")
    tokens = x.numel() // max(1, width)
    return Support(True, automatic=tokens <= MAX_NUMBA_TOKENS)


def vendor_grouped_support(
    o: Tensor, o_scale: Tensor, wo_a: Tensor, wo_a_scale: Tensor, *, out_dtype: str = "bf16"
) -> Support:
    """Return support of cuBLAS's ``grouped_output_projection_fp8``: many tokens."""
    if out_dtype != "bf16":
        return Support(False, f"results in bf16 only, got {out_dtype}")
    support = _scaled_mm_support(o, *wo_a.shape[1:])
    return dataclasses.replace(support, automatic=len(o) >= VENDOR_GROUPED_TOKENS)


def _scaled_mm_support(x: Tensor, rows: int, width: int) -> Support:
    """Return support of codes by a weight with a scale for 128 x 128 values."""
    support = triton_support(x)  # Triton quantises
    if not support:
        return support
    if x.device.type != "cuda" or torch.version.hip or target_of(x.device).name != "sm_90":
        return Support(False, "blocks of scales are multiplied by the vendor's library on sm_90")
    if not hasattr(functional, "scaled_mm"):
        return Support(False, f"torch {torch.__version__} has no scaled_mm")
    if rows % FP8_BLOCK or width % VENDOR_CHANNEL_STEP:
        reason = f"whole blocks, K a multiple of {VENDOR_CHANNEL_STEP}; got {rows, width}"
        return Support(False, reason)
    return Support(True)


def triton_grouped_support(
    o: Tensor, o_scale: Tensor, wo_a: Tensor, wo_a_scale: Tensor, *, out_dtype: str = "bf16"
) -> Support:
    """Return support of Triton's ``grouped_output_projection_fp8``."""
    if out_dtype == "fp64":
        return _NO_FLOAT64
    return float32_support(o, o_scale, wo_a, wo_a_scale)

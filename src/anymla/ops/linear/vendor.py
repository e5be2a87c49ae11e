"""GEMMs by the vendor's library, cuBLAS, through torch.

On Hopper, cuBLAS takes DeepSeek's blocks of scales. From some tens of tokens on it is fastest
(``config``); with fewer, reading the weight dominates, and a kernel that splits K is faster.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.formats.ue8m0 import decode_ue8m0
from anymla.ops.linear import torch_linear
from anymla.ops.linear.config import VENDOR_TOKEN_STEP


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Backend of ``interface.linear`` by the vendor's library; see its contract."""
    return functional.linear(x, weight)


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """Backend of ``interface.linear_float32`` by the vendor's library; see its contract."""
    return torch_linear.linear_float32(x, weight)


def fp8_block_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    quantize_activations: bool = False,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
    quant_block: int = FP8_BLOCK,
) -> Tensor:
    """Backend of ``interface.fp8_block_linear`` in cuBLAS; see its contract."""
    from anymla.ops._triton_quantize import quantize_rows_mn_major

    rows = x.reshape(-1, x.shape[-1])
    if not len(rows):
        return x.new_empty((*x.shape[:-1], len(weight)))
    if codes is None or code_scales is None:
        codes, code_scales = quantize_rows_mn_major(rows.contiguous(), VENDOR_TOKEN_STEP)
    out = _scaled_mm(codes.view(torch.float8_e4m3fn), code_scales, weight, scale)
    return out[: len(rows)].view(*x.shape[:-1], -1)


def grouped_output_projection(
    o: Tensor, positions: Tensor, cos_sin_cache: Tensor, wo_a: Tensor
) -> Tensor:
    """Backend of ``interface.grouped_output_projection``: a batched GEMM without a copy."""
    from anymla.ops.linear.triton_inverse_rope import inverse_rope

    tokens, (groups, rank, width) = len(o), wo_a.shape
    rotated = inverse_rope(o, positions, cos_sin_cache)
    out = torch.empty((tokens, groups, rank), dtype=o.dtype, device=o.device)
    by_group = rotated.view(tokens, groups, width).transpose(0, 1)
    torch.bmm(by_group, wo_a.transpose(1, 2), out=out.transpose(0, 1))
    return out.view(tokens, groups * rank)


def grouped_output_projection_fp8(
    o: Tensor, o_scale: Tensor, wo_a: Tensor, wo_a_scale: Tensor, *, out_dtype: str = "bf16"
) -> Tensor:
    """Backend of ``interface.grouped_output_projection_fp8`` in cuBLAS; see its contract.

    Each group is one GEMM; tokens beyond a multiple of VENDOR_TOKEN_STEP are left to Triton.
    """
    from anymla.ops.linear import triton_launch

    (tokens, groups, _), rank = o.shape, wo_a.shape[1]
    whole = tokens // VENDOR_TOKEN_STEP * VENDOR_TOKEN_STEP
    out = torch.empty((tokens, groups * rank), dtype=torch.bfloat16, device=o.device)
    if whole:
        scales = o_scale[:whole].permute(1, 2, 0).contiguous()
        parts = [
            _scaled_mm(o[:whole, group], scales[group].t(), wo_a[group], wo_a_scale[group])
            for group in range(groups)
        ]
        torch.cat(parts, 1, out=out[:whole])
    if whole < tokens:
        out[whole:] = triton_launch.grouped_output_projection_fp8(
            o[whole:], o_scale[whole:], wo_a, wo_a_scale
        )
    return out


def _scaled_mm(codes: Tensor, x_scales: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Multiply e4m3 activations by e4m3 weights, with the scales of both.

    Args:
        codes: activations with any row stride, [T, K] float8_e4m3fn; T a multiple of 4.
        x_scales: scales of the activations, float32 [T, K / 128], T innermost in memory.
        weight: e4m3 codes of the weight, uint8 [N, K].
        scale: scales of the weight's blocks, uint8 (ue8m0) or float32 [N / 128, K / 128].

    Returns:
        Products of all tokens, [T, N] bfloat16.
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

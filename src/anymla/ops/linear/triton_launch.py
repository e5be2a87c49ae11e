"""Launch of Triton's GEMMs: linear layers with packed weights, grouped output projection.

Few tokens make few tiles, so K is split too; every split stores float32 sums, which a second kernel
adds in the order of the splits. float32 scales of either operand multiply sums, so products of
codes stay exact.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.formats.quantized_rows import QuantizedRows
from anymla.ops._triton_gemm import TL_DTYPES, fragments, operand_rows
from anymla.ops._triton_quantize import quantize_rows
from anymla.ops.device import target_of
from anymla.ops.linear.config import OUT_DTYPES, GemmShape, TritonConfig, choose_triton_config
from anymla.ops.linear.triton_gemm import (
    REDUCE_BLOCK,
    gemm_kernel,
    split_k_reduce_kernel,
)
from anymla.ops.linear.triton_gemm_swap_ab import gemm_swap_ab_kernel
from anymla.ops.linear.triton_inverse_rope import inverse_rope
from anymla.ops.pdl import pdl_launch
from anymla.ops.streams import scratch


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
    """Backend of ``interface.fp8_block_linear`` in Triton; see its contract."""
    coded = None
    if codes is not None and code_scales is not None:
        coded = QuantizedRows(codes, code_scales)
    return _linear(
        x, weight, scale, "fp8", quantize=quantize_activations, coded=coded, block=quant_block
    )


def mxfp4_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    quantize_activations: bool = False,
    quant_block: int = FP8_BLOCK,
) -> Tensor:
    """Backend of ``interface.mxfp4_linear`` in Triton; see its contract."""
    return _linear(x, weight, scale, "mxfp4", quantize=quantize_activations, block=quant_block)


def nvfp4_linear(x: Tensor, weight: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """Backend of ``interface.nvfp4_linear`` in Triton; see its contract."""
    return _linear(x, weight, scale, "nvfp4", quantize=False, factor=global_scale)


def grouped_output_projection(
    o: Tensor, positions: Tensor, cos_sin_cache: Tensor, wo_a: Tensor
) -> Tensor:
    """Backend of ``interface.grouped_output_projection`` in Triton; see its contract."""
    groups, _, width = wo_a.shape
    rotated = inverse_rope(o, positions, cos_sin_cache).view(len(o), groups, width)
    w = wo_a.contiguous()
    config = _config(rotated, w, None, "plain", quantized=False, x_dtype=o.dtype)
    out = launch_gemm(rotated, None, w, None, config, weight_format="plain", out_dtype=o.dtype)
    return out.flatten(1)


def grouped_output_projection_fp8(
    o: Tensor, o_scale: Tensor, wo_a: Tensor, wo_a_scale: Tensor, *, out_dtype: str = "bf16"
) -> Tensor:
    """Backend of ``interface.grouped_output_projection_fp8`` in Triton; see its contract."""
    w, scales = wo_a.contiguous(), wo_a_scale.contiguous()
    config = _config(o, w, scales, "fp8", quantized=True, x_dtype=torch.bfloat16)
    given, x_scales = o.contiguous().view(torch.uint8), o_scale.contiguous()
    if config.float16_x:
        rows = fragments(given.flatten(1), x_scales.flatten(1))
        given, x_scales = (each.view(*o.shape[:2], -1) for each in rows)
    out = launch_gemm(
        given,
        x_scales,
        w,
        scales,
        config,
        weight_format="fp8",
        out_dtype=OUT_DTYPES[out_dtype],
    )
    return out.flatten(1)


def _linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    weight_format: str,
    *,
    quantize: bool,
    coded: QuantizedRows | None = None,
    factor: Tensor | None = None,
    block: int = FP8_BLOCK,
) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    w, scales = weight.contiguous().unsqueeze(0), scale.contiguous().unsqueeze(0)
    config = _config(
        rows.unsqueeze(1), w, scales, weight_format, quantized=quantize, x_dtype=x.dtype,
        block=block,
    )  # fmt: skip
    given: Tensor
    x_scales: Tensor | None
    if config.swap_ab and weight_format == "mxfp4":
        given, x_scales = operand_rows(
            rows, config.operand, weight_format=weight_format, quantize=True, block=block
        )
    elif coded is not None:
        given, x_scales = coded.codes[: len(rows)], coded.scales[: len(rows)]
        if config.float16_x:
            given, x_scales = fragments(given, x_scales, block=block)
        else:
            x_scales = x_scales.contiguous()
    elif config.float16_x:
        given, x_scales = fragments(rows, block=block)
    else:
        given, x_scales = quantize_rows(rows, block) if quantize else (rows, None)
    out = launch_gemm(
        given.unsqueeze(1),
        x_scales,
        w,
        scales,
        config,
        weight_format=weight_format,
        out_dtype=x.dtype,
        factor=factor,
        block=block,
    )
    return out.view(*x.shape[:-1], weight.shape[0])


def _config(
    x: Tensor,
    w: Tensor,
    scales: Tensor | None,
    weight_format: str,
    *,
    quantized: bool,
    x_dtype: torch.dtype,
    block: int = FP8_BLOCK,
) -> TritonConfig:
    """Choose the config of x [T, G, K] by w [G, N, bytes of a row]."""
    tokens, groups, k = x.shape
    # If the first int32 of four scales is aligned, so are those of every group and row.
    aligned = w.data_ptr() % 16 == 0 and (scales is None or scales.data_ptr() % 4 == 0)
    return choose_triton_config(
        GemmShape(tokens, w.shape[1], k, groups),
        weight_format,
        target_of(x.device),
        x_dtype=x_dtype,
        weight_dtype=w.dtype,
        quantized=quantized,
        aligned=aligned,
        quant_block=block,
    )


def launch_gemm(
    x: Tensor,
    x_scales: Tensor | None,
    w: Tensor,
    scales: Tensor | None,
    config: TritonConfig,
    *,
    weight_format: str,
    out_dtype: torch.dtype,
    factor: Tensor | None = None,
    block: int = FP8_BLOCK,
) -> Tensor:
    """Multiply every group's activations by the group's weight.

    Args:
        x: activations, contiguous [T, G, K]: floating point, e4m3 codes as uint8 (with x_scales),
            or operands of ``operand_rows`` (swap_ab with "mxfp4") or ``fragments``.
        x_scales: scales of the activations, float32 [T, G, ceil(K/block)]; None if not quantised.
        w: weights of all groups, contiguous [G, N, bytes of a row].
        scales: scales of the weights, contiguous [G, ...]; None for "plain".
        config: kernel, tile and K splits.
        weight_format: format of the weight, "plain", "fp8", "mxfp4" or "nvfp4".
        out_dtype: dtype of the result.
        factor: number that multiplies every result, float32 [1], or None; not with swap_ab.
        block: number of rows and columns of an FP8 weight, and of channels of activations, that
            share a scale.

    Returns:
        Products, [T, G, N] of ``out_dtype``.
    """
    (tokens, groups, k), n = x.shape, w.shape[1]
    out = torch.empty((tokens, groups, n), dtype=out_dtype, device=x.device)
    if not out.numel():
        return out
    splits, tile = config.splits(k), config.tile
    result = out if splits == 1 else scratch((splits, *out.shape), torch.float32, x.device)
    grid = (triton.cdiv(n, tile.block_n), triton.cdiv(tokens, tile.block_m), groups * splits)
    options = {
        "FORMAT": weight_format,
        "OPERAND": TL_DTYPES[config.operand],
        "SPLITS": splits > 1,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "NATIVE": target_of(x.device).native_e4m3,
        "QUANT": block,
        "num_warps": tile.num_warps,
        **pdl_launch(x.device),
    }
    strides = (w[0].numel(), 0 if scales is None else scales[0].numel())
    if config.swap_ab:
        assert x_scales is not None
        assert factor is None
        gemm_swap_ab_kernel[grid](
            x, x_scales, w, scales, result, tokens, n, k, groups, config.split_k // 128,
            w.shape[2], scales.shape[2], *strides,
            STAGES=tile.num_stages, BLOCK_DIAGONAL=config.block_diagonal,
            K_WARPS=config.k_warps, **options,
        )  # fmt: skip
    else:
        gemm_kernel[grid](
            x, x_scales, w, scales, factor, result, tokens, n, k, groups, config.split_k,
            groups * k, groups * triton.cdiv(k, block), *strides,
            CODED=x_scales is not None, BY_WORDS=config.by_words,
            STAGES=tile.num_stages if config.scales_ahead else None, num_stages=tile.num_stages,
            **options,
        )  # fmt: skip
    if splits > 1:
        count = out.numel()
        split_k_reduce_kernel[(triton.cdiv(count, REDUCE_BLOCK),)](
            result, out, count, splits, BLOCK=REDUCE_BLOCK, **pdl_launch(x.device)
        )
    return out

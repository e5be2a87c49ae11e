"""Launch of ``gluon_sm90_gemm``'s GEMMs: FP8 and bfloat16 weights, up to 128 tokens."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.formats.quantized_rows import ROW_STEP
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch
from anymla.ops._triton_quantize import quantize_rows, quantize_rows_mn_major
from anymla.ops.device import target_of
from anymla.ops.linear.config import (
    BF16_BLOCK_K,
    OUT_DTYPES,
    GemmShape,
    Sm90Config,
    choose_sm90_bf16_config,
    choose_sm90_config,
)
from anymla.ops.linear.gluon_sm90_gemm import (
    fp8_wgmma_kernel,
    warp_split_k_kernel,
    warp_split_n_kernel,
)
from anymla.ops.pdl import pdl_launch

# Layouts of shared memory that TMA fills with blocks, and with rows by bytes of an element.
_BLOCKED = NVMMASharedLayout(128, 32, rank=3)
_ROWS = {size: NVMMASharedLayout(128, 8 * size, rank=2) for size in (1, 4)}


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
    """Backend of ``interface.fp8_block_linear`` on Hopper; see its contract."""
    assert quantize_activations
    rows = x.reshape(-1, x.shape[-1])
    tokens = len(rows)
    if quant_block != FP8_BLOCK:
        codes, code_scales = quantize_rows(rows.contiguous(), quant_block)
    elif codes is None or code_scales is None:
        codes, code_scales = quantize_rows_mn_major(rows.contiguous(), ROW_STEP)
    out = _gemm(
        codes[:tokens].unsqueeze(1),
        code_scales[:tokens].unsqueeze(1),
        weight.unsqueeze(0),
        scale.unsqueeze(0),
        x.dtype,
        quant_block,
    )
    return out.view(*x.shape[:-1], len(weight))


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """Backend of ``interface.linear_float32`` on Hopper; see its contract."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = bf16_gemm(rows, weight, choose_sm90_bf16_config(len(rows)), target_of(x.device).sm_count)
    return out.view(*x.shape[:-1], len(weight))


def grouped_output_projection_fp8(
    o: Tensor, o_scale: Tensor, wo_a: Tensor, wo_a_scale: Tensor, *, out_dtype: str = "bf16"
) -> Tensor:
    """Backend of ``interface.grouped_output_projection_fp8`` on Hopper; see its contract."""
    codes, scales = o.contiguous().view(torch.uint8), o_scale.contiguous()
    return _gemm(codes, scales, wo_a, wo_a_scale, OUT_DTYPES[out_dtype]).flatten(1)


def _gemm(
    x: Tensor,
    x_scales: Tensor,
    w: Tensor,
    scales: Tensor,
    out_dtype: torch.dtype,
    quant_block: int = FP8_BLOCK,
) -> Tensor:
    """Call ``launch_gemm`` with the config for the shape."""
    (tokens, groups, k), target = x.shape, target_of(x.device)
    config = choose_sm90_config(GemmShape(tokens, w.shape[1], k, groups), target, quant_block)
    return launch_gemm(
        x, x_scales, w, scales, out_dtype, config, target.sm_count, quant_block=quant_block
    )


def launch_gemm(
    x: Tensor,
    x_scales: Tensor,
    w: Tensor,
    scales: Tensor,
    out_dtype: torch.dtype,
    config: Sm90Config,
    sm_count: int,
    quant_block: int = FP8_BLOCK,
) -> Tensor:
    """Multiply every group's activations by the group's weight.

    Args:
        x: e4m3 codes of the activations, uint8 [T, G, K] contiguous.
        x_scales: scales of the activations, float32 [T, G, K / b] with b = quant_block; groups
            follow each other like quant blocks. If tokens are adjacent in memory, there must be
            memory for as many tokens as ``QuantizedRows`` allocates.
        w: codes of all groups' weights, uint8 [G, N, K] contiguous.
        scales: scales of the weights, [G, ceil(N / b), K / b] contiguous.
        out_dtype: dtype of the result.
        config: kernel, tile and pipeline.
        sm_count: number of SMs of the device.
        quant_block: rows of the weight, and channels, that share a scale; 32 only in
            "warp_split_k".

    Returns:
        Products, [T, G, N] of ``out_dtype``.
    """
    tokens, groups, width = x.shape
    n, k_blocks = w.shape[1], width // FP8_BLOCK
    assert groups == 1 or x_scales.stride(1) == width // quant_block * x_scales.stride(2)
    out = torch.empty((tokens, groups, n), dtype=out_dtype, device=x.device)
    tiles = groups * n // config.block_n
    numbers = (tokens, n, k_blocks, tiles, groups, x_scales.stride(0), x_scales.stride(2))
    launch = _multiplication(config, numbers, sm_count, x.device, quant_block)
    given = (_aligned(x), tokens, groups * k_blocks, config.block_m)
    weight = (w, groups * n, k_blocks, config.block_n)
    if config.kernel == "warp_split_k":
        x_desc = _blocked_descriptor(*given, config.warps)
        w_desc = _blocked_descriptor(*weight, config.warps)
    else:
        kind = torch.float8_e4m3fn if config.kernel == "fp8_wgmma" else torch.int32
        x_desc, w_desc = _row_descriptor(*given, kind), _row_descriptor(*weight, kind)
    launch(x_desc, x_scales, w_desc, scales, out)
    return out


@functools.lru_cache(LAUNCHES)
def _multiplication(
    config: Sm90Config,
    numbers: tuple[int, ...],
    sm_count: int,
    device: torch.device,
    quant_block: int,
) -> PreparedLaunch:
    """Prepare a launch of one of the kernels for FP8 weights, which take the same ``numbers``."""
    tiles, scale_stride = numbers[3], numbers[5]
    grid = (min(tiles, config.ctas_per_sm * sm_count),)
    constants = {"BLOCK_N": config.block_n, "BLOCK_M": config.block_m, "STAGES": config.stages}
    constants |= _options(config, device)
    assert quant_block == FP8_BLOCK or config.kernel == "warp_split_k"
    if config.kernel == "fp8_wgmma":
        constants["IN_FLIGHT"] = config.in_flight
        return PreparedLaunch(fp8_wgmma_kernel, grid, *numbers, **constants)
    constants |= {"WARPS": config.warps, "MN_MAJOR": scale_stride == 1}
    if config.kernel == "warp_split_n":
        return PreparedLaunch(warp_split_n_kernel, grid, *numbers, **constants)
    constants |= {"BF16": False, "QUANT": quant_block}
    return PreparedLaunch(warp_split_k_kernel, grid, *numbers, **constants)


def bf16_gemm(x: Tensor, w: Tensor, config: Sm90Config, sm_count: int) -> Tensor:
    """Multiply contiguous bfloat16 x [T, K] by contiguous bfloat16 w [N, K] to float32 [T, N]."""
    (tokens, width), n = x.shape, len(w)
    k_blocks, tiles = width // BF16_BLOCK_K, n // config.block_n
    out = torch.empty((tokens, n), dtype=torch.float32, device=x.device)
    warp_split_k_kernel[(min(tiles, config.ctas_per_sm * sm_count),)](
        _blocked_descriptor(_aligned(x), tokens, k_blocks, config.block_m, config.warps), None,
        _blocked_descriptor(w, n, k_blocks, config.block_n, config.warps), None, out, tokens, n,
        k_blocks, tiles, 1, 0, 0, BLOCK_N=config.block_n, BLOCK_M=config.block_m,
        WARPS=config.warps, STAGES=config.stages, MN_MAJOR=False, BF16=True, QUANT=FP8_BLOCK,
        **_options(config, x.device),
    )  # fmt: skip
    return out


def _options(config: Sm90Config, device: torch.device) -> dict[str, Any]:
    return {"num_warps": config.warps, "maxnreg": config.registers, **pdl_launch(device)}


def _aligned(x: Tensor) -> Tensor:
    """Return x, or a copy of it at an address that TMA can read."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _blocked_descriptor(
    x: Tensor, lines: int, k_blocks: int, box: int, warps: int
) -> TensorDescriptor:
    """Describe ``lines`` lines of K blocks as packed int32; a TMA box has one for each warp."""
    return TensorDescriptor(
        x.view(-1).view(torch.int32), [k_blocks, lines, 32], [32, k_blocks * 32, 1],
        [warps, box, 32], _BLOCKED,
    )  # fmt: skip


def _row_descriptor(
    x: Tensor, lines: int, k_blocks: int, box: int, kind: torch.dtype
) -> TensorDescriptor:
    """Describe lines of ``kind``; a TMA box is a K block of 128 bytes of ``box`` lines."""
    layout = _ROWS[kind.itemsize]
    of_block = FP8_BLOCK // kind.itemsize
    shape = [lines, k_blocks * of_block]
    return TensorDescriptor(x.view(-1).view(kind), shape, [shape[1], 1], [box, of_block], layout)

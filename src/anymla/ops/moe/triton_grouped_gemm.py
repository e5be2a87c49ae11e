"""Grouped GEMMs of the experts in Triton; a tile multiplies one expert's rows by a block of pairs.

    gate_up   (tiles of I, blocks of pairs): w1 and w3, SwiGLU, routing weight -> inner [P, I]
    down      (tiles of D, blocks of pairs): w2 -> results [P, D]

A CTA passes over all channels of its tile; blocks without pairs end at once. There are two main
loops:

- Any format and size: pairs are rows of the matrix instruction, and w1 is multiplied before w3.
- SWAP_AB: the weight's rows are rows of the instruction, so the weight goes from registers into it
  without a mask; half of a tile's rows are w1's and half w3's. Every byte of a visited expert is
  read once for up to BLOCK_M pairs, and one token still has several CTAs an SM. With K_WARPS, a
  CTA's warps share the channels of a step and not the rows of the tile.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.triton_cast import widen
from anymla.ops._triton_gemm import (
    TL_DTYPES,
    ActivationRows,
    WeightRows,
    gemm_tile,
    gemm_tile_swap_ab,
    operand_rows,
)
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch, cdiv
from anymla.ops._triton_quantize import quantize_rows
from anymla.ops.device import Target, target_of
from anymla.ops.moe.config import GemmConfig
from anymla.ops.moe.inputs import ExpertInputs, ExpertTensors
from anymla.ops.moe.shapes import ExpertFormats, ExpertsShape
from anymla.ops.moe.triton_align import align, align_and_quantize, load_block
from anymla.ops.moe.triton_swiglu import clamped_swiglu
from anymla.ops.streams import scratch


@triton.jit
def expert_distance(expert, stride, table, UNIT: tl.constexpr):
    """Return the elements from the first expert's tensor to this one's; a table counts in UNITs."""
    here = expert.to(tl.int64)
    return tl.load(table + expert) * UNIT if table is not None else here * stride


@triton.jit(do_not_specialize=["count", "offset"])
def gate_up_kernel(
    x,
    x_scales,
    ids,
    weights,
    sorted_pairs,
    blocks,
    w1,
    w1_stride,
    w1_table,
    s1,
    s1_stride,
    s1_table,
    w3,
    w3_stride,
    w3_table,
    s3,
    s3_stride,
    s3_table,
    factors,
    inner,
    count,
    offset,
    experts,
    per_token,
    width,
    w_row,
    s_row,
    n,
    limit,
    FORMAT: tl.constexpr,
    QUANTIZED: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr,
    W_UNIT: tl.constexpr,
    SWAP_AB: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE_LOADS: tl.constexpr,
    QUANT: tl.constexpr,
    K_WARPS: tl.constexpr,
    GAPS: tl.constexpr,
):
    """Compute a tile of w2's input."""
    expert, pair, inside = load_block(
        ids, sorted_pairs, blocks, count, offset, experts, BLOCK_M, GAPS
    )
    if expert >= 0:
        if SWAP_AB:
            HALF: tl.constexpr = BLOCK_N // 2
            lane = tl.arange(0, BLOCK_N)
            row = (tl.program_id(0) * HALF + lane % HALF).to(tl.int64)
            block = row // QUANT if FORMAT == "fp8" else row
            w1 += expert_distance(expert, w1_stride, w1_table, W_UNIT)
            w3 += expert_distance(expert, w3_stride, w3_table, W_UNIT)
            s1 += expert_distance(expert, s1_stride, s1_table, 1)
            s3 += expert_distance(expert, s3_stride, s3_table, 1)
            token = pair // per_token
            k_blocks = width // 128
            row_blocks = k_blocks * (128 // QUANT)
            total = gemm_tile_swap_ab(
                tl.where(lane < HALF, w1, w3) + row * w_row,
                tl.where(lane < HALF, s1, s3) + block * s_row,
                x + token * width,
                None if x_scales is None else x_scales + token * row_blocks,
                inside, k_blocks, FORMAT, OPERAND, NATIVE, BLOCK_K, STAGES, False, WIDE_LOADS,
                QUANT, K_WARPS,
            )  # fmt: skip
            halves = tl.permute(tl.reshape(total, (2, HALF, BLOCK_M)), (1, 2, 0))
            gate, up = tl.split(halves)
        else:
            token = pair // per_token
            channel = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
            exists = channel < n
            w1 += expert_distance(expert, w1_stride, w1_table, W_UNIT)
            w3 += expert_distance(expert, w3_stride, w3_table, W_UNIT)
            if FORMAT != "plain":
                s1 += expert_distance(expert, s1_stride, s1_table, 1)
                s3 += expert_distance(expert, s3_stride, s3_table, 1)
            row_blocks = tl.cdiv(width, QUANT)
            gate = gemm_tile(
                ActivationRows(x, x_scales, token, inside, width, row_blocks, token),
                WeightRows(w1, s1, channel, exists), 0, width, width,
                FORMAT, QUANTIZED, OPERAND, BLOCK_K, NATIVE, QUANT,
            )  # fmt: skip
            up = gemm_tile(
                ActivationRows(x, x_scales, token, inside, width, row_blocks, token),
                WeightRows(w3, s3, channel, exists), 0, width, width,
                FORMAT, QUANTIZED, OPERAND, BLOCK_K, NATIVE, QUANT,
            )  # fmt: skip
            if FORMAT == "nvfp4":
                gate *= tl.load(factors + 3 * expert)
                up *= tl.load(factors + 3 * expert + 1)
        dtype = inner.dtype.element_ty
        value = clamped_swiglu(widen(gate.to(dtype)), widen(up.to(dtype)), limit)
        weight = tl.load(weights + pair, inside, other=0.0)
        if SWAP_AB:
            value *= weight[None, :]
            channel = tl.program_id(0) * HALF + tl.arange(0, HALF)
            at = channel[:, None] + (pair * n)[None, :]
            tl.store(inner + at, value.to(dtype), inside[None, :])
        else:
            value *= weight[:, None]
            at = (pair * n)[:, None] + channel[None, :]
            tl.store(inner + at, value.to(dtype), inside[:, None] & exists[None, :])


@triton.jit(do_not_specialize=["count", "offset"])
def down_kernel(
    inner,
    inner_scales,
    ids,
    sorted_pairs,
    blocks,
    w2,
    w2_stride,
    w2_table,
    s2,
    s2_stride,
    s2_table,
    factors,
    out,
    count,
    offset,
    experts,
    width,
    w_row,
    s_row,
    n,
    FORMAT: tl.constexpr,
    QUANTIZED: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr,
    W_UNIT: tl.constexpr,
    SWAP_AB: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE_LOADS: tl.constexpr,
    QUANT: tl.constexpr,
    K_WARPS: tl.constexpr,
    GAPS: tl.constexpr,
):
    """Compute a tile of the pairs' results."""
    expert, pair, inside = load_block(
        ids, sorted_pairs, blocks, count, offset, experts, BLOCK_M, GAPS
    )
    if expert >= 0:
        channel = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        if SWAP_AB:
            block = channel // QUANT if FORMAT == "fp8" else channel
            w2 += expert_distance(expert, w2_stride, w2_table, W_UNIT)
            s2 += expert_distance(expert, s2_stride, s2_table, 1)
            k_blocks = width // 128
            row_blocks = k_blocks * (128 // QUANT)
            value = gemm_tile_swap_ab(
                w2 + channel * w_row,
                s2 + block * s_row,
                inner + pair * width,
                None if inner_scales is None else inner_scales + pair * row_blocks,
                inside, k_blocks, FORMAT, OPERAND, NATIVE, BLOCK_K, STAGES, False, WIDE_LOADS,
                QUANT, K_WARPS,
            )  # fmt: skip
            at = channel[:, None] + (pair * n)[None, :]
            tl.store(out + at, value.to(out.dtype.element_ty), inside[None, :])
        else:
            exists = channel < n
            w2 += expert_distance(expert, w2_stride, w2_table, W_UNIT)
            if FORMAT != "plain":
                s2 += expert_distance(expert, s2_stride, s2_table, 1)
            row_blocks = tl.cdiv(width, QUANT)
            value = gemm_tile(
                ActivationRows(inner, inner_scales, pair, inside, width, row_blocks, pair),
                WeightRows(w2, s2, channel, exists), 0, width, width,
                FORMAT, QUANTIZED, OPERAND, BLOCK_K, NATIVE, QUANT,
            )  # fmt: skip
            if FORMAT == "nvfp4":
                value *= tl.load(factors + 3 * expert + 2)
            at = (pair * n)[:, None] + channel[None, :]
            tl.store(out + at, value.to(out.dtype.element_ty), inside[:, None] & exists[None, :])


def grouped_gemm(inputs: ExpertInputs, results: Tensor, config: GemmConfig) -> None:
    """Write each pair's product, its expert's output for its token, to results [P, D].

    Args:
        inputs: arguments of the ``experts`` call.
        results: buffer to write, contiguous; rows of pairs without an expert here are left as they
            are.
        config: tile and pipeline from ``choose_config``.
    """
    ids, shape, device = inputs.ids, inputs.shape, inputs.x.device
    sorted_pairs, blocks, count = None, None, shape.pairs
    if config.grouped and config.adjacent:
        operands, x_scales, aligned = align_and_quantize(
            inputs.x, ids, shape.experts, inputs.expert_offset, config.block_m,
            inputs.quant_block, pairs_of_run=_pairs_of_run(config),
        )  # fmt: skip
        rows: tuple[Tensor, Tensor | None] = operands, x_scales
    else:
        rows = _operands(inputs.x, inputs, config)
    if config.grouped:
        if not config.adjacent:
            aligned = align(ids, shape.experts, inputs.expert_offset, config.block_m)
        sorted_pairs, blocks, count = aligned.sorted_pairs, aligned.blocks, aligned.count
    strides = _row_strides(inputs.w1, inputs.s1, config), _row_strides(inputs.w2, inputs.s2, config)
    given = count, inputs.expert_offset, float(inputs.swiglu_limit), inputs.unit
    gate_up, down = _launches(shape, inputs.formats, config, given, strides, device)
    inner = scratch((shape.pairs, shape.inner), inputs.x.dtype, device)
    gate_up(
        *rows, ids, inputs.weights, sorted_pairs, blocks,
        *inputs.gate_up_pointers, inputs.global_scales, inner,
    )  # fmt: skip
    down(
        *_operands(inner, inputs, config), ids, sorted_pairs, blocks, *inputs.down_pointers,
        inputs.global_scales, results,
    )  # fmt: skip


@functools.lru_cache(LAUNCHES)
def _launches(
    shape: ExpertsShape,
    formats: ExpertFormats,
    config: GemmConfig,
    given: tuple[int, int, float, int],
    strides: tuple[tuple[int | None, int | None], tuple[int | None, int | None]],
    device: torch.device,
) -> tuple[PreparedLaunch, PreparedLaunch]:
    """Prepare both launches.

    ``given`` are the block count, the first expert's id, SwiGLU's limit, and the unit of address
    distances.
    """
    count, offset, limit, unit = given
    target, down_config = target_of(device), config.down or config
    blocks = {"GAPS": not config.adjacent}
    gate_up_rows = config.block_n // 2 if config.swap_ab else config.block_n
    numbers = count, offset, shape.experts
    gate_up = PreparedLaunch(
        gate_up_kernel, (cdiv(shape.inner, gate_up_rows), count), *numbers,
        shape.experts_per_token, shape.d, *strides[0], shape.inner, limit,
        **_options(config, formats, target, unit), **blocks,
    )  # fmt: skip
    down = PreparedLaunch(
        down_kernel, (cdiv(shape.d, down_config.block_n), count), *numbers,
        shape.inner, *strides[1], shape.d, **_options(down_config, formats, target, unit), **blocks,
    )  # fmt: skip
    return gate_up, down


def _row_strides(
    weight: ExpertTensors, scale: ExpertTensors, config: GemmConfig
) -> tuple[int | None, int | None]:
    """Return elements between rows of weight and scale; None if the main loop derives them."""
    if not config.swap_ab or not weight.count or not scale.count:
        return None, None
    return weight.shape[1], scale.shape[1]


def _operands(
    rows: Tensor, inputs: ExpertInputs, config: GemmConfig
) -> tuple[Tensor, Tensor | None]:
    """Return activations [n, K] as the kernels take them, and their scales."""
    if config.swap_ab:
        return operand_rows(
            rows,
            config.operand,
            weight_format=inputs.weight_format,
            quantize=inputs.quantized,
            block=inputs.quant_block,
            pairs=_pairs_of_run(config),
        )
    return quantize_rows(rows, inputs.quant_block) if inputs.quantized else (rows, None)


def _pairs_of_run(config: GemmConfig) -> int:
    """Return the pairs of operands that a thread holds next to each other."""
    return 2 if config.k_warps else 1


def _options(
    config: GemmConfig, formats: ExpertFormats, target: Target, unit: int
) -> dict[str, Any]:
    stages = {} if config.swap_ab else {"num_stages": config.num_stages}
    return stages | {
        "FORMAT": formats.weight,
        "QUANTIZED": formats.quantized,
        "OPERAND": TL_DTYPES[config.operand],
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "NATIVE": target.native_e4m3,
        "SWAP_AB": config.swap_ab,
        "STAGES": config.num_stages,
        "WIDE_LOADS": config.wide_loads,
        "QUANT": formats.quant_block,
        "K_WARPS": config.k_warps,
        "W_UNIT": unit,
        "num_warps": config.num_warps,
    }

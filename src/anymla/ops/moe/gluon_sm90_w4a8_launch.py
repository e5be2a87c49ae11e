"""Launch of the W4A8 grouped GEMMs: MXFP4 experts by Hopper's FP8 instruction.

align, close_gaps   group pairs by expert, in adjacent blocks
quantize_pairs      activations of sorted pairs -> e4m3 [P, D]
w4a8_sums           w1 and w3, SwiGLU, routing weight -> inner [P, I], sorted
quantize_pairs      inner -> e4m3 [P, I]
w4a8_sums           w2 -> results [P, D], in the order of pairs

Blocks of 64 and 128 pairs are multiplied by w4a8_gemm.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch
from anymla.ops.device import target_of
from anymla.ops.moe.config import W4A8Config, choose_w4a8_config
from anymla.ops.moe.gluon_sm90_w4a8_gemm import w4a8_gemm_kernel
from anymla.ops.moe.gluon_sm90_w4a8_sums import w4a8_sums_kernel
from anymla.ops.moe.inputs import ExpertInputs, ExpertTensors
from anymla.ops.moe.shapes import ExpertsShape
from anymla.ops.moe.triton_align import AlignedPairs
from anymla.ops.moe.triton_sort_quantize import align_closely, quantize_pairs
from anymla.ops.pdl import pdl_launch
from anymla.ops.streams import scratch

_CODES = NVMMASharedLayout(64, 8, rank=2)
_OPERANDS = NVMMASharedLayout(128, 8, rank=2)
_SCALES = NVMMASharedLayout(0, 32, rank=2)
# Rows and bytes of a TMA box of packed codes.
_BOX = 64
# Channels of a stage where sums are scaled.
_STAGE_OF_SUMS = 256


def multiply(inputs: ExpertInputs, results: Tensor) -> None:
    """Multiply by the config of the inputs' sizes; see ``grouped_gemm``."""
    config = choose_w4a8_config(inputs.shape, inputs.quant_block)
    assert config is not None
    grouped_gemm(inputs, results, config)


def grouped_gemm(inputs: ExpertInputs, results: Tensor, config: W4A8Config) -> None:
    """Write each pair's product, its expert's output for its token, to results [P, D].

    Args:
        inputs: call with quantised activations and MXFP4 experts whose tensors lie evenly, as
            slices of one tensor do.
        results: buffer to write, contiguous; rows of pairs without an expert here are left as they
            are.
        config: block size and pipelines.
    """
    x, shape, quant = inputs.x, inputs.shape, inputs.quant_block
    aligned = align_closely(inputs.ids, shape.experts, inputs.expert_offset, config.block_m)
    inner = scratch((shape.pairs, shape.inner), x.dtype, x.device)
    gate_up, down = _launches(shape, config, float(inputs.swiglu_limit), quant, x.device)
    quantize = functools.partial(
        quantize_pairs, pairs=shape.pairs, aligned=aligned, block_m=config.block_m,
        by_group=config.scaled_sums, quant_block=quant,
    )  # fmt: skip
    operands = quantize(x, per_token=shape.experts_per_token)
    parts = (inputs.w1.evenly(), inputs.s1.evenly()), (inputs.w3.evenly(), inputs.s3.evenly())
    _multiply(gate_up, operands, parts, inputs, aligned, config, inner)
    operands = quantize(inner, per_token=0)
    parts = ((inputs.w2.evenly(), inputs.s2.evenly()),) * 2
    _multiply(down, operands, parts, inputs, aligned, config, results)


def _multiply(
    launch: PreparedLaunch,
    operands: tuple[Tensor, Tensor],
    parts: tuple[tuple[ExpertTensors, ExpertTensors], ...],
    inputs: ExpertInputs,
    aligned: AlignedPairs,
    config: W4A8Config,
    out: Tensor,
) -> None:
    codes, scales = operands
    (w1, s1), (w3, s3) = parts
    n = config.block_m
    of_stage = _STAGE_OF_SUMS // inputs.quant_block if config.scaled_sums else 1
    x_desc = TensorDescriptor.from_tensor(
        codes.view(torch.float8_e4m3fn), [n, FP8_BLOCK], _OPERANDS
    )
    a_desc, a_rows = _codes_descriptor(w1)
    b_desc, b_rows = _codes_descriptor(w3)
    launch(
        x_desc, TensorDescriptor.from_tensor(scales, [of_stage, n], _SCALES), a_desc, b_desc,
        inputs.weights, aligned.sorted_pairs, aligned.blocks, *s1.pointers()[:2],
        *s3.pointers()[:2], out, aligned.count, a_rows, b_rows,
    )  # fmt: skip


def _codes_descriptor(w: ExpertTensors) -> tuple[TensorDescriptor, int]:
    """Return a TMA descriptor of all experts' rows, and the rows between consecutive experts."""
    assert w.first is not None
    assert w.addresses is not None
    assert w.addresses.stride is not None
    rows, width = w.shape
    step = w.addresses.stride // width
    shape = [(w.count - 1) * step + rows, width]
    return TensorDescriptor(w.first, shape, [width, 1], [_BOX, _BOX], _CODES), step


@functools.lru_cache(LAUNCHES)
def _launches(
    shape: ExpertsShape, config: W4A8Config, limit: float, quant: int, device: torch.device
) -> tuple[PreparedLaunch, PreparedLaunch]:
    """Prepare the launch of w1 and w3, with SwiGLU's limit, and that of w2."""
    options: dict[str, Any] = {
        "N": config.block_m,
        "CONSUMER_REGISTERS": config.consumer_registers,
        "PRODUCER_REGISTERS": config.producer_registers,
        "num_warps": 4,
        **pdl_launch(device),
    }
    grid, kernel = (target_of(device).sm_count,), w4a8_gemm_kernel
    if config.scaled_sums:
        kernel, options["QUANT"] = w4a8_sums_kernel, quant
    gate_up = PreparedLaunch(
        kernel, grid, limit, K=shape.d, OUT=shape.inner, UP=True,
        STAGES=config.gate_up_stages, **options,
    )  # fmt: skip
    down = PreparedLaunch(
        kernel, grid, 0.0, K=shape.inner, OUT=shape.d, UP=False,
        STAGES=config.down_stages, **options,
    )  # fmt: skip
    return gate_up, down

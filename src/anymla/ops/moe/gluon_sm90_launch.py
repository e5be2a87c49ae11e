"""Launch of the routed experts on Hopper: a grouped GEMM of (w1, w3) and one of w2.

``takes_w4a8`` chooses persistent CTAs (``gluon_sm90_grouped_gemm``, launched here) or W4A8
(``gluon_sm90_w4a8_launch``).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch
from anymla.ops.device import target_of
from anymla.ops.moe import gluon_sm90_w4a8_launch
from anymla.ops.moe.config import Sm90Config, choose_sm90_config, takes_w4a8
from anymla.ops.moe.gluon_sm90_grouped_gemm import grouped_gemm_kernel
from anymla.ops.moe.inputs import ExpertInputs
from anymla.ops.moe.shapes import ExpertsShape
from anymla.ops.moe.triton_align import align_and_quantize
from anymla.ops.moe.triton_launch import Gemms, Projections, run_experts
from anymla.ops.pdl import pdl_launch
from anymla.ops.streams import scratch


def gemms(shape: ExpertsShape, quant_block: int, projections: Projections) -> Gemms:
    """Choose W4A8 or persistent CTAs for sizes and tensors that ``gluon_support`` accepts."""
    if takes_w4a8(shape, quant_block, projections):
        return Gemms(gluon_sm90_w4a8_launch.multiply, weight_alignment=16, scale_alignment=16)
    return Gemms(_multiply, weight_alignment=16, scale_alignment=4)


experts = functools.partial(run_experts, gemms)


def _multiply(inputs: ExpertInputs, results: Tensor) -> None:
    chosen = choose_sm90_config(inputs.shape, inputs.quant_block)
    assert chosen is not None
    grouped_gemm(inputs, results, *chosen)


def grouped_gemm(inputs: ExpertInputs, results: Tensor, up: Sm90Config, down: Sm90Config) -> None:
    """Write each pair's product, its expert's output for its token, to results [P, D].

    Args:
        inputs: call with MXFP4 experts and quantised activations.
        results: buffer to write, contiguous; rows of pairs without an expert here are left as they
            are.
        up: config of w1 and w3.
        down: config of w2, with the same block size as ``up``.
    """
    x, shape = inputs.x, inputs.shape
    operands, x_scales, aligned = align_and_quantize(
        x, inputs.ids, shape.experts, inputs.expert_offset, up.block_m, inputs.quant_block
    )
    inner = scratch((shape.pairs, shape.inner), x.dtype, x.device)
    given = (inputs.weights, aligned.sorted_pairs, aligned.blocks)
    numbers = aligned.count, float(inputs.swiglu_limit), inputs.unit, inputs.quant_block
    gate_up, down_launch = _launches(shape, up, down, numbers, x.device)
    gate_up(operands, x_scales, *given, *inputs.gate_up_pointers, inner)
    down_launch(inner, None, *given, *inputs.down_pointers, *(None,) * 6, results)


@functools.lru_cache(LAUNCHES)
def _launches(
    shape: ExpertsShape,
    up: Sm90Config,
    down: Sm90Config,
    numbers: tuple[int, float, int, int],
    device: torch.device,
) -> tuple[PreparedLaunch, PreparedLaunch]:
    """Prepare both launches.

    ``numbers`` are the block count, SwiGLU's limit, the unit of address distances, and the channels
    of a scale.
    """
    count, limit, unit, quant = numbers
    pdl, sm_count = pdl_launch(device), target_of(device).sm_count
    gate_up = PreparedLaunch(
        grouped_gemm_kernel, (sm_count * up.ctas_per_sm,), count, limit, K=shape.d,
        OUT=shape.inner, PER_TOKEN=shape.experts_per_token, UP=True, QUANT=quant,
        **_options(up, unit), **pdl,
    )  # fmt: skip
    down_launch = PreparedLaunch(
        grouped_gemm_kernel, (sm_count * down.ctas_per_sm,), count, 0.0, K=shape.inner,
        OUT=shape.d, PER_TOKEN=1, UP=False, QUANT=quant, **_options(down, unit), **pdl,
    )  # fmt: skip
    return gate_up, down_launch


def _options(config: Sm90Config, unit: int) -> dict[str, Any]:
    return {
        "M": config.block_n,
        "N": config.block_m,
        "CHUNK": config.block_k,
        "STAGES": config.stages,
        "W_UNIT": unit,
        "WARPS": config.block_n // 16,
        "CTAS_PER_SM": config.ctas_per_sm,
        "BATCH": config.quantize_batch,
        "num_warps": config.block_n // 16,
    }

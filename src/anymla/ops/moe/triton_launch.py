"""Launch of the routed experts in Triton: two grouped GEMMs, and the sum over a token's experts.

    align     group (token, expert) pairs by expert, in blocks
    gate_up   gate and up, SwiGLU, routing weight -> inner [P, I]
    down      inner -> results [P, D]
    combine   (tokens, blocks of D): sum of a token's pairs in the order of its columns, plus
              ``shared``

Alignment and GEMMs are in ``triton_align`` and ``triton_grouped_gemm``; ``gluon_sm90_launch``
replaces them by its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch, cdiv
from anymla.ops.device import target_of
from anymla.ops.moe.config import COMBINE_CHANNELS, choose_config
from anymla.ops.moe.inputs import ExpertInputs, ExpertTensors
from anymla.ops.moe.shapes import ExpertsShape
from anymla.ops.moe.triton_grouped_gemm import grouped_gemm
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch
from anymla.ops.streams import flush_stream_wait, has_deferred_wait, scratch


@triton.jit(do_not_specialize=["offset"])
def combine_kernel(
    results,
    ids,
    shared,
    out,
    offset,
    experts,
    n,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum BLOCK channels of one token over its experts."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < n
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        local = tl.load(ids + token * K + j).to(tl.int64) - offset
        written = tl.where((local >= 0) & (local < experts), n, 0)
        value = tl.load(results + (token * K + j) * n + column, column < written, other=0.0)
        total += value.to(tl.float32)
    if shared is not None:
        total += tl.load(shared + token * n + column, exists, other=0.0).to(tl.float32)
    tl.store(out + token * n + column, total.to(out.dtype.element_ty), exists)


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: list[Tensor] | Tensor,
    w3: list[Tensor] | Tensor,
    w2: list[Tensor] | Tensor,
    s1: list[Tensor] | Tensor,
    s3: list[Tensor] | Tensor,
    s2: list[Tensor] | Tensor,
    *,
    weight_format: str,
    swiglu_limit: float,
    quantize_activations: bool,
    expert_offset: int = 0,
    shared: Tensor | None = None,
    quant_block: int = FP8_BLOCK,
    global_scales: Tensor | None = None,
) -> Tensor:
    """Backend of ``interface.experts`` in Triton; see its contract."""
    projections = [ExpertTensors(each) for each in (w1, w3, w2, s1, s3, s2)]
    return run_experts(
        _multiply, x, ids, weights, projections, weight_format=weight_format,
        swiglu_limit=swiglu_limit, quantize_activations=quantize_activations,
        expert_offset=expert_offset, shared=shared, quant_block=quant_block,
        global_scales=global_scales,
    )  # fmt: skip


def _multiply(inputs: ExpertInputs, results: Tensor) -> None:
    config = choose_config(inputs.shape, inputs.formats, target_of(inputs.x.device))
    grouped_gemm(inputs, results, config)


def run_experts(
    multiply: Callable[[ExpertInputs, Tensor], None],
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    projections: list[ExpertTensors],
    *,
    weight_format: str,
    swiglu_limit: float,
    quantize_activations: bool,
    expert_offset: int,
    shared: Tensor | None,
    quant_block: int = FP8_BLOCK,
    global_scales: Tensor | None = None,
) -> Tensor:
    """Run ``interface.experts`` with ``multiply`` for the grouped GEMMs.

    Args:
        multiply: function that writes results [P, D] of the inputs' pairs; pairs without an expert
            here are not read.
        x: activations, as in ``interface.experts``.
        ids: expert ids, as in ``interface.experts``.
        weights: routing weights, as in ``interface.experts``.
        projections: tensors of w1, w3, w2, s1, s3 and s2, in this order.
        weight_format: format of the weights, as in ``interface.experts``.
        swiglu_limit: bound of SwiGLU's clamps, positive.
        quantize_activations: True to quantise activations, as in ``interface.experts``.
        expert_offset: global id of the first expert.
        shared: output of the shared expert to add, [T, D]; or None.
        quant_block: number of channels that share a scale.
        global_scales: factors of "nvfp4" weights, float32 [E, 3]; else None.
    """
    (tokens, d), k = x.shape, ids.shape[1]
    out = torch.empty((tokens, d), dtype=x.dtype, device=x.device)
    if not tokens:
        flush_stream_wait()
        return out
    w1, ids = projections[0], ids.contiguous()
    inner = w1.shape[0] if w1.count else 0
    inputs = ExpertInputs(
        x.contiguous(),
        ids,
        weights.contiguous(),
        *projections,
        weight_format,
        swiglu_limit,
        quantize_activations and weight_format in ("fp8", "mxfp4"),
        expert_offset,
        ExpertsShape(tokens, k, w1.count, inner, d),
        quant_block,
        None if global_scales is None else global_scales.contiguous(),
    )
    results = scratch((tokens * k, d), x.dtype, x.device)
    if k and w1.count:
        multiply(inputs, results)
    # No PDL if another CUDA stream may still be writing the shared expert's output.
    pdl = not has_deferred_wait() and (shared is None or shared.is_contiguous())
    flush_stream_wait()
    shared = None if shared is None else shared.contiguous()
    launch = _combination((tokens, d, k), expert_offset, w1.count, pdl, x.device)
    launch(results, ids, shared, out)
    return out


@functools.lru_cache(LAUNCHES)
def _combination(
    sizes: tuple[int, int, int], offset: int, experts: int, pdl: bool, device: torch.device
) -> PreparedLaunch:
    tokens, d, k = sizes
    return PreparedLaunch(
        combine_kernel,
        # Tokens come first, since only the first axis of a grid can exceed 65,535 CTAs.
        (tokens, cdiv(d, COMBINE_CHANNELS)),
        offset,
        experts,
        d,
        K=k,
        BLOCK=COMBINE_CHANNELS,
        **(pdl_launch(device) if pdl else {"PDL": False}),
    )

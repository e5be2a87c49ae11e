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
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

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


class Gemms(NamedTuple):
    """Grouped GEMMs of a backend.

    Attributes:
        multiply: function that writes results [P, D] of the inputs' pairs; pairs without an expert
            here are not read.
        weight_alignment: bytes that addresses of weights must be multiples of; others are copied.
        scale_alignment: bytes that addresses of scales must be multiples of.
    """

    multiply: Callable[[ExpertInputs, Tensor], None]
    weight_alignment: int = 1
    scale_alignment: int = 1


# Tensors of w1, w3, w2, s1, s3 and s2.
Projections: TypeAlias = Sequence[list[Tensor] | Tensor]


def run_experts(
    choose: Callable[[ExpertsShape, int, Projections], Gemms],
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
    """Run ``interface.experts`` with the GEMMs that ``choose`` names.

    It gets the sizes of the call, ``quant_block``, and the tensors of all projections.
    """
    (tokens, d), k = x.shape, ids.shape[1]
    out = torch.empty((tokens, d), dtype=x.dtype, device=x.device)
    if not tokens:
        flush_stream_wait()
        return out
    ids, count = ids.contiguous(), len(w1)
    shape = ExpertsShape(tokens, k, count, w1[0].shape[0] if count else 0, d)
    gemms = choose(shape, quant_block, (w1, w3, w2, s1, s3, s2))
    inputs = ExpertInputs(
        x.contiguous(),
        ids,
        weights.contiguous(),
        *(ExpertTensors(each, gemms.weight_alignment) for each in (w1, w3, w2)),
        *(ExpertTensors(each, gemms.scale_alignment) for each in (s1, s3, s2)),
        weight_format,
        swiglu_limit,
        quantize_activations and weight_format in ("fp8", "mxfp4"),
        expert_offset,
        shape,
        quant_block,
        None if global_scales is None else global_scales.contiguous(),
    )
    results = scratch((tokens * k, d), x.dtype, x.device)
    if k and count:
        gemms.multiply(inputs, results)
    # No PDL if another CUDA stream may still be writing the shared expert's output.
    pdl = not has_deferred_wait() and (shared is None or shared.is_contiguous())
    flush_stream_wait()
    shared = None if shared is None else shared.contiguous()
    launch = _combination((tokens, d, k), expert_offset, count, pdl, x.device)
    launch(results, ids, shared, out)
    return out


def _multiply(inputs: ExpertInputs, results: Tensor) -> None:
    config = choose_config(inputs.shape, inputs.formats, target_of(inputs.x.device))
    grouped_gemm(inputs, results, config)


experts = functools.partial(run_experts, lambda *_: Gemms(_multiply))


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

"""Launch the routed experts on Hopper: ``gluon_sm90_grouped_gemm`` for w1 and w3, then for w2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from anymla.ops._build import Build
from anymla.ops.device import Target, target_of
from anymla.ops.moe.config import Sm90Config, choose_sm90_config
from anymla.ops.moe.gluon_sm90_grouped_gemm import grouped_gemm_kernel
from anymla.ops.moe.inputs import ExpertInputs, ExpertTensors
from anymla.ops.moe.shapes import ExpertsShape, flash, pro
from anymla.ops.moe.triton_align import align_and_quantize
from anymla.ops.moe.triton_launch import run_experts
from anymla.ops.pdl import pdl_launch, target_has_pdl
from anymla.ops.streams import scratch


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: list[Tensor],
    w3: list[Tensor],
    w2: list[Tensor],
    s1: list[Tensor],
    s3: list[Tensor],
    s2: list[Tensor],
    *,
    weight_format: str,
    swiglu_limit: float,
    quantize_activations: bool,
    expert_offset: int = 0,
    shared: Tensor | None = None,
) -> Tensor:
    """See ``interface.experts``."""
    matrices = [ExpertTensors(each, alignment=16) for each in (w1, w3, w2)]
    scales = [ExpertTensors(each, alignment=4) for each in (s1, s3, s2)]
    return run_experts(
        _multiply, x, ids, weights, matrices + scales, weight_format=weight_format,
        swiglu_limit=swiglu_limit, quantize_activations=quantize_activations,
        expert_offset=expert_offset, shared=shared,
    )  # fmt: skip


def _multiply(inputs: ExpertInputs, results: Tensor) -> None:
    chosen = choose_sm90_config(inputs.shape)
    assert chosen is not None
    grouped_gemm(inputs, results, *chosen)


def grouped_gemm(inputs: ExpertInputs, results: Tensor, up: Sm90Config, down: Sm90Config) -> None:
    """Write what every pair's expert makes of its token to results [P, D].

    Args:
        inputs: of MXFP4 experts and activations that are quantised.
        results: contiguous; pairs without an expert here are not written.
        up: config of w1 and w3.
        down: config of w2, with the same blocks of pairs.
    """
    x, shape = inputs.x, inputs.shape
    operands, x_scales, aligned = align_and_quantize(
        x, inputs.ids, shape.experts, inputs.expert_offset, up.block_m
    )
    inner = scratch((shape.pairs, shape.inner), x.dtype, x.device)
    pdl, unit, sm_count = pdl_launch(x.device), inputs.unit, target_of(x.device).sm_count
    given = (inputs.weights, aligned.sorted_pairs, aligned.blocks)
    grouped_gemm_kernel[(sm_count * up.ctas_per_sm,)](
        operands, x_scales, *given, *inputs.gate_up_pointers, inner, aligned.count,
        float(inputs.swiglu_limit), K=shape.d, OUT=shape.inner,
        PER_TOKEN=shape.experts_per_token, UP=True, **_options(up, unit), **pdl,
    )  # fmt: skip
    grouped_gemm_kernel[(sm_count * down.ctas_per_sm,)](
        inner, None, *given, *inputs.down_pointers, *(None,) * 6, results, aligned.count, 0.0,
        K=shape.inner, OUT=shape.d, PER_TOKEN=1, UP=False, **_options(down, unit), **pdl,
    )  # fmt: skip


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
        "IN_FLIGHT": config.in_flight,
        "num_warps": config.block_n // 16,
    }


def builds(target: Target) -> Iterator[Build]:
    """Blocks of every width for Flash's and Pro's sizes, with tables and with strides."""
    if target.name != "sm_90":
        return
    seen: set[tuple[int, Sm90Config]] = set()
    for sized in (flash, pro):
        for tokens in (8, 32, 128):
            shape = sized(tokens, experts=32)
            for up, config in zip((True, False), choose_sm90_config(shape) or (), strict=False):
                width = shape.d if up else shape.inner
                if (width, config) not in seen:
                    yield _build(target, config, shape, up, tables=not seen)
                    seen.add((width, config))


def _build(
    target: Target, config: Sm90Config, shape: ExpertsShape, up: bool, tables: bool
) -> Build:
    matrices = ("w1", "s1", "w3", "s3") if up else ("w1", "s1")
    types = {
        "x": "*u8" if up else "*bf16",
        "sorted_pairs": "*i32",
        "blocks": "*i32",
        "out": "*bf16",
    }
    types |= {"weights": "*fp32", "count": "i32", "limit": "fp32"}
    types |= {"x_scales": "*fp32"} if up else {}
    for matrix in matrices:
        types |= {matrix: "*u8", f"{matrix}_stride": "i32"}
        types |= {f"{matrix}_table": "*i64"} if tables else {}
    sizes = {
        "K": shape.d if up else shape.inner,
        "OUT": shape.inner if up else shape.d,
        "PER_TOKEN": shape.experts_per_token if up else 1,
        "UP": up,
        "PDL": target_has_pdl(target),
        **_options(config, 16),
    }
    num_warps = sizes.pop("num_warps")
    names = grouped_gemm_kernel.arg_names
    absent = {name: None for name in names if name not in types and name not in sizes}
    return Build(
        f"{config.block_m} pairs, {sizes['K']} channels{', tables' if tables else ''}",
        grouped_gemm_kernel,
        types,
        absent | sizes,
        num_warps=num_warps,
        divisible=tuple(f"{matrix}_stride" for matrix in matrices),
        matrix="e4m3",
    )

"""Launch ``gluon_sm90_grouped_gemm``: w1 and w3, then w2."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from anymla.ops._build import Build
from anymla.ops.device import Target, target_of
from anymla.ops.moe.config import Sm90Config, sm90_configs
from anymla.ops.moe.gluon_sm90_grouped_gemm import grouped_gemm_kernel
from anymla.ops.moe.triton_experts import run_experts
from anymla.ops.moe.triton_prepare import prepare
from anymla.ops.moe.triton_stack import Call, places_of
from anymla.ops.pdl import pdl_launch, target_has_pdl
from anymla.ops.streams import scratch


def _multiply(call: Call, results: Tensor) -> None:
    chosen = sm90_configs(call.pairs, call.sizes)
    assert chosen is not None
    grouped_gemm(call, results, *chosen)


experts = functools.partial(run_experts, _multiply)


def grouped_gemm(call: Call, results: Tensor, up: Sm90Config, down: Sm90Config) -> None:
    """Write what every pair's expert makes of its token to results [P, D].

    Args:
        call: of MXFP4 experts and activations that are quantised.
        results: contiguous; pairs without an expert here are not written.
        up: config of w1 and w3.
        down: config of w2, with as many columns.
    """
    _, width, d = call.sizes
    operands, x_scales, plan = prepare(call, up.columns)
    places = places_of(call)
    inner = scratch((call.pairs, width), call.x.dtype, call.x.device)
    early = pdl_launch(call.x.device)
    processors = target_of(call.x.device).sm_count
    given = (call.weights, plan.order, plan.table)
    grouped_gemm_kernel[(processors * up.ctas_per_sm,)](
        operands, x_scales, *given, *places.up, inner, plan.most, float(call.swiglu_limit),
        K=d, OUT=width, PER_TOKEN=call.ids.shape[1], UP=True,
        **_options(up, places.unit), **early,
    )  # fmt: skip
    grouped_gemm_kernel[(processors * down.ctas_per_sm,)](
        inner, None, *given, *places.down, *(None,) * 6, results, plan.most, 0.0,
        K=width, OUT=d, PER_TOKEN=1, UP=False, **_options(down, places.unit),
        **early,
    )  # fmt: skip


def _options(config: Sm90Config, unit: int) -> dict[str, Any]:
    return {
        "M": config.rows,
        "N": config.columns,
        "CHUNK": config.channels,
        "STAGES": config.stages,
        "W_UNIT": unit,
        "WARPS": config.rows // 16,
        "TOGETHER": config.ctas_per_sm,
        "BATCH": config.batch,
        "LATER": config.later,
        "num_warps": config.rows // 16,
    }


def builds(target: Target) -> Iterator[Build]:
    """Blocks of every width for Flash's and Pro's sizes, with lists and with stacks."""
    if target.name != "sm_90":
        return
    seen: set[tuple[int, Sm90Config]] = set()
    for inner, d in ((2048, 4096), (3072, 7168)):
        for pairs in (48, 192, 768):
            chosen = sm90_configs(pairs, (32, inner, d))
            for up, config in zip((True, False), chosen or (), strict=False):
                if (d if up else inner, config) not in seen:
                    yield _build(target, config, inner, d, up, lists=not seen)
                    seen.add((d if up else inner, config))


def _build(target: Target, config: Sm90Config, inner: int, d: int, up: bool, lists: bool) -> Build:
    matrices = ("w1", "s1", "w3", "s3") if up else ("w1", "s1")
    types = {"x": "*u8" if up else "*bf16", "order": "*i32", "blocks": "*i32", "out": "*bf16"}
    types |= {"weights": "*fp32", "count": "i32", "limit": "fp32"}
    types |= {"x_scales": "*fp32"} if up else {}
    for matrix in matrices:
        types |= {matrix: "*u8", f"{matrix}_stride": "i32"}
        types |= {f"{matrix}_table": "*i64"} if lists else {}
    sizes = {
        "K": d if up else inner,
        "OUT": inner if up else d,
        "PER_TOKEN": 6 if up else 1,
        "UP": up,
        "PDL": target_has_pdl(target),
        **_options(config, 16),
    }
    num_warps = sizes.pop("num_warps")
    names = grouped_gemm_kernel.arg_names
    absent = {name: None for name in names if name not in types and name not in sizes}
    return Build(
        f"{config.columns} pairs, {sizes['K']} channels{', lists' if lists else ''}",
        grouped_gemm_kernel,
        types,
        absent | sizes,
        num_warps=num_warps,
        divisible=tuple(f"{matrix}_stride" for matrix in matrices),
        matrix="e4m3",
    )

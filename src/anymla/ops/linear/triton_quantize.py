"""Quantise activations for GEMMs whose scales are MN-major; builds of the kernels that quantise."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from anymla.formats.fp8_block import ACTIVATION_AMAX_FLOOR, FP8_BLOCK
from anymla.ops._build import Build
from anymla.ops._triton_gemm import operand_rows_kernel
from anymla.ops._triton_quantize import (
    BLOCKS,
    FEW_BLOCKS,
    launch_quantize_rows,
    quantize_rows_kernel,
)
from anymla.ops.device import Target
from anymla.ops.pdl import target_has_pdl
from anymla.ops.streams import scratch


def quantize_rows_mn_major(x: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """As ``quantize_rows``, with MN-major scales.

    There are rows up to a multiple of ``step``; those beyond x are anything. The scales
    [rows, ceil(K/128)] have the rows last in memory.
    """
    rows, width = x.shape
    padded = triton.cdiv(rows, step) * step
    codes = scratch((padded, width), torch.uint8, x.device)
    scales = scratch((triton.cdiv(width, FP8_BLOCK), padded), torch.float32, x.device)
    launch_quantize_rows(x, codes, scales, padded)
    return codes, scales.t()


def builds(target: Target) -> Iterator[Build]:
    """Every dtype, both conversions, and every operand that the target's products have."""
    for dtype in ("bf16", "fp16", "fp32"):
        for blocks in (FEW_BLOCKS, BLOCKS):
            for native in {False, target.native_e4m3}:
                yield _build(target, dtype, blocks, native, False)
    yield _build(target, "bf16", BLOCKS, target.native_e4m3, True)
    kinds = [("fp16", 2, True), ("bf16", 2, True), ("bf16", 2, False)]
    kinds += [("u8", 1, True), ("fp16", 0, True)] if target.dot_e4m3 else [("fp16", 0, True)]
    for stored, order, quantize in kinds:
        for dtype in ("bf16", "fp16", "fp32") if quantize else ("bf16",):
            for blocks in (FEW_BLOCKS, BLOCKS) if dtype == "bf16" else (BLOCKS,):
                yield _operand_build(target, dtype, stored, order, quantize, blocks)


def _build(target: Target, dtype: str, blocks: int, native: bool, mn_major: bool) -> Build:
    label = f"{dtype}, {blocks} quant blocks, {'native' if native else 'bits'}"
    return Build(
        label + ", MN-major scales" * mn_major,
        quantize_rows_kernel,
        {
            "x": f"*{dtype}",
            "codes": "*u8",
            "scales": "*fp32",
            "rows": "i32",
            "width": "i32",
            "row_blocks": "i32",
            "column": "i32",
        },
        {
            "FLOOR": ACTIVATION_AMAX_FLOOR,
            "WIDTH": FP8_BLOCK,
            "BLOCKS": blocks,
            "NATIVE": native,
            "MN_MAJOR": mn_major,
            "PDL": target_has_pdl(target),
        },
        divisible=("width",),
    )


def _operand_build(
    target: Target, dtype: str, stored: str, order: int, quantize: bool, blocks: int
) -> Build:
    types = {"x": f"*{dtype}", "operands": f"*{stored}", "rows": "i32", "width": "i32"}
    types["row_blocks"] = "i32"
    absent: dict[str, None] = {}
    if stored == "bf16":
        absent["scales"] = None
    else:
        types["scales"] = "*fp32"
    return Build(
        f"{dtype} to {stored}, order {order}, {'' if quantize else 'not '}quantised, "
        f"{blocks} quant blocks",
        operand_rows_kernel,
        types,
        {
            **absent,
            "FLOOR": ACTIVATION_AMAX_FLOOR,
            "BLOCKS": blocks,
            "BYTES": order,
            "QUANTIZE": quantize,
            "NATIVE": target.native_e4m3,
            "PDL": target_has_pdl(target),
        },
        divisible=("width",),
    )

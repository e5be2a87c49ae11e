"""Quantise activations for products whose scales are MN-major; builds of the kernel."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from anymla.formats.fp8_block import ACTIVATION_AMAX_FLOOR, FP8_BLOCK
from anymla.ops._build import Build
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
    """Every dtype, both conversions."""
    for dtype in ("bf16", "fp16", "fp32"):
        for blocks in (FEW_BLOCKS, BLOCKS):
            for native in {False, target.native_e4m3}:
                yield _build(target, dtype, blocks, native, False)
    yield _build(target, "bf16", BLOCKS, target.native_e4m3, True)


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

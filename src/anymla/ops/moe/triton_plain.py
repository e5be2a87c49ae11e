"""Grouped products of experts in any format and on any GPU.

    up        (blocks of I, blocks of pairs): gate and up, SwiGLU, routing weight -> inner [P, I]
    down      (blocks of D, blocks of pairs): inner -> out [P, D]

Up to ``_FEW_PAIRS`` pairs there is no plan: each pair is a block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._build import Build
from anymla.ops._gemm_config import TileConfig, choose_tile, operand_dtype
from anymla.ops._triton_gemm import TL_DTYPES, ActivationRows, WeightRows, gemm_tile
from anymla.ops._triton_quantize import quantize_rows
from anymla.ops.device import Target, target_of
from anymla.ops.moe.triton_grouped import Grouping, Product, grouped_products
from anymla.ops.moe.triton_plan import block_of
from anymla.ops.moe.triton_stack import Call, place_of
from anymla.ops.moe.triton_swiglu import gated

_FEW_PAIRS = 64
_MOST_ROWS = 64
# Whose matrix instructions read the decoded weight from shared memory.
_OPERANDS_IN_SHARED = ("sm_90", "sm_100")


def expert_tile(pairs: int, experts: int, kind: torch.dtype, target: Target) -> TileConfig:
    """The tile for pairs spread evenly over the experts."""
    rows = 1 if pairs <= _FEW_PAIRS else min(_MOST_ROWS, pairs // max(1, experts))
    chosen = choose_tile(rows, kind, target)
    if chosen.block_m == _MOST_ROWS and target.name not in _OPERANDS_IN_SHARED:
        # Operands pass through registers there, and decoding takes more of them.
        return dataclasses.replace(chosen, block_k=32)
    return chosen


@triton.jit(do_not_specialize=["count", "offset"])
def up_kernel(
    x,
    x_scales,
    ids,
    weights,
    order,
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
    inner,
    count,
    offset,
    experts,
    per_token,
    width,
    n,
    limit,
    FORMAT: tl.constexpr,
    CODED: tl.constexpr,
    OPERAND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr,
    W_UNIT: tl.constexpr,
):
    """A tile of w2's input."""
    expert, pair, inside = block_of(ids, order, blocks, count, offset, experts, ROWS)
    if expert >= 0:
        token = pair // per_token
        column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
        exists = column < n
        w1 += place_of(expert, w1_stride, w1_table, W_UNIT)
        w3 += place_of(expert, w3_stride, w3_table, W_UNIT)
        if FORMAT != "plain":
            s1 += place_of(expert, s1_stride, s1_table, 1)
            s3 += place_of(expert, s3_stride, s3_table, 1)
        runs = tl.cdiv(width, 128)
        given = ActivationRows(x, x_scales, token, inside, width, runs)
        gate = gemm_tile(
            given, WeightRows(w1, s1, column, exists), 0, width, width,
            FORMAT, CODED, OPERAND, BLOCK_K, NATIVE,
        )  # fmt: skip
        up = gemm_tile(
            given, WeightRows(w3, s3, column, exists), 0, width, width,
            FORMAT, CODED, OPERAND, BLOCK_K, NATIVE,
        )  # fmt: skip
        dtype = inner.dtype.element_ty
        value = gated(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), limit)
        value *= tl.load(weights + pair, inside, other=0.0)[:, None]
        at = (pair * n)[:, None] + column[None, :]
        tl.store(inner + at, value.to(dtype), inside[:, None] & exists[None, :])


@triton.jit(do_not_specialize=["count", "offset"])
def down_kernel(
    inner,
    inner_scales,
    ids,
    order,
    blocks,
    w2,
    w2_stride,
    w2_table,
    s2,
    s2_stride,
    s2_table,
    out,
    count,
    offset,
    experts,
    width,
    n,
    FORMAT: tl.constexpr,
    CODED: tl.constexpr,
    OPERAND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr,
    W_UNIT: tl.constexpr,
):
    """A tile of the pairs' results."""
    expert, pair, inside = block_of(ids, order, blocks, count, offset, experts, ROWS)
    if expert >= 0:
        column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
        exists = column < n
        w2 += place_of(expert, w2_stride, w2_table, W_UNIT)
        if FORMAT != "plain":
            s2 += place_of(expert, s2_stride, s2_table, 1)
        runs = tl.cdiv(width, 128)
        value = gemm_tile(
            ActivationRows(inner, inner_scales, pair, inside, width, runs),
            WeightRows(w2, s2, column, exists), 0, width, width,
            FORMAT, CODED, OPERAND, BLOCK_K, NATIVE,
        )  # fmt: skip
        at = (pair * n)[:, None] + column[None, :]
        tl.store(out + at, value.to(out.dtype.element_ty), inside[:, None] & exists[None, :])


def plain_products(call: Call, results: Tensor) -> None:
    """Write what every pair's expert makes of its token to results [P, D]."""
    target = target_of(call.x.device)
    stored = call.matrices[0][0].dtype
    kind = operand_dtype(call.x.dtype, call.weight_format, stored, call.coded, target)
    chosen = expert_tile(call.pairs, call.sizes[0], kind, target)
    options = {
        "FORMAT": call.weight_format,
        "CODED": call.coded,
        "OPERAND": TL_DTYPES[kind],
        "ROWS": chosen.block_m,
        "COLUMNS": chosen.block_n,
        "BLOCK_K": chosen.block_k,
        "NATIVE": target.native_e4m3,
        "num_warps": chosen.num_warps,
        "num_stages": chosen.num_stages,
    }
    grouped_products(
        call,
        results,
        Product(up_kernel, chosen.block_n),
        Product(down_kernel, chosen.block_n),
        Grouping(
            chosen.block_m,
            call.pairs > _FEW_PAIRS,
            quantize_rows if call.coded else lambda rows: (rows, None),
            options,
        ),
    )


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def builds(target: Target) -> Iterator[Build]:
    """Every format, with few pairs and lists, and with many and stacks."""
    for weight_format in ("plain", "fp8", "mxfp4"):
        for dtype, coded in (("bf16", True), ("bf16", False), ("fp16", False), ("fp32", False)):
            if coded and weight_format == "plain":
                continue
            for pairs in (6, 4096 * 6):
                for kernel in (up_kernel, down_kernel):
                    yield _build(target, kernel, weight_format, dtype, coded, pairs)


def _build(
    target: Target,
    kernel: triton.JITFunction,
    weight_format: str,
    dtype: str,
    coded: bool,
    pairs: int,
) -> Build:
    plain, planned = weight_format == "plain", pairs > _FEW_PAIRS
    stored = _DTYPES[dtype] if plain else torch.uint8
    kind = operand_dtype(_DTYPES[dtype], weight_format, stored, coded, target)
    chosen = expert_tile(pairs, 256, kind, target)
    given, result = ("x", "inner") if kernel is up_kernel else ("inner", "out")
    code, number = f"*{dtype}" if plain else "*u8", f"*{dtype}"
    types = {given: "*u8" if coded else number, "ids": "*i32", "weights": "*fp32", result: number}
    types |= dict.fromkeys(("count", "offset", "experts", "per_token", "width", "n"), "i32")
    types["limit"] = "fp32"
    if coded:
        types[f"{given}_scales"] = "*fp32"
    if planned:
        types |= {"order": "*i32", "blocks": "*i32"}
    for matrix in ("w1", "w3", "w2", *(() if plain else ("s1", "s3", "s2"))):
        types[matrix] = code if matrix[0] == "w" else "*u8"
        types[f"{matrix}_stride"] = "i32"
        if not planned:
            types[f"{matrix}_table"] = "*i64"
    types = {name: kind_ for name, kind_ in types.items() if name in kernel.arg_names}
    sizes = {
        "FORMAT": weight_format,
        "CODED": coded,
        "OPERAND": TL_DTYPES[kind],
        "ROWS": chosen.block_m,
        "COLUMNS": chosen.block_n,
        "BLOCK_K": chosen.block_k,
        "NATIVE": target.native_e4m3,
        "W_UNIT": 16,
    }
    absent = {name: None for name in kernel.arg_names if name not in types and name not in sizes}
    strides = tuple(name for name in types if name.endswith("_stride"))
    activations = "e4m3" if coded else dtype
    return Build(
        f"{weight_format}, {activations} activations, {chosen.block_m} rows",
        kernel,
        types,
        absent | sizes,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        divisible=("width", "n", *strides),
        matrix=kind != torch.float32,
        # Operands that pass through registers leave some of the up kernels a few short.
        spills=56 if target.narrow else 0 if target.name in _OPERANDS_IN_SHARED else 8,
    )

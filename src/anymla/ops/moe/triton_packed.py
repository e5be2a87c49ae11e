"""Grouped products of packed experts: swap-AB, ``_triton_gemm.gemm_tile_swap_ab``.

    up        (blocks of I / (ROWS / 2), blocks of pairs): a tile is half w1's rows and half w3's
              [ROWS, COLUMNS]; SwiGLU, routing weight -> inner [P, I]
    down      (blocks of D / ROWS, blocks of pairs): a tile of w2's rows -> out [P, D]

A tile passes over all channels, so every byte of a visited expert is read once for up to COLUMNS
pairs, by programs of which there are several a multiprocessor even for one token.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._build import Build
from anymla.ops._triton_gemm import TL_DTYPES, gemm_tile_swap_ab, operand_rows
from anymla.ops.device import Target, target_of
from anymla.ops.moe.packed_tiles import PackedTile, packed_tile
from anymla.ops.moe.triton_grouped import Grouping, Product, grouped_products
from anymla.ops.moe.triton_plan import block_of
from anymla.ops.moe.triton_stack import Call, place_of
from anymla.ops.moe.triton_swiglu import gated


@triton.jit(do_not_specialize=["count", "offset"])
def packed_up_kernel(
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
    w_row,
    s_row,
    n,
    limit,
    FORMAT: tl.constexpr,
    OPERAND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr,
    W_UNIT: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A tile of w2's input."""
    expert, pair, inside = block_of(ids, order, blocks, count, offset, experts, COLUMNS)
    if expert >= 0:
        HALF: tl.constexpr = ROWS // 2
        lane = tl.arange(0, ROWS)
        row = (tl.program_id(0) * HALF + lane % HALF).to(tl.int64)
        block = row // 128 if FORMAT == "fp8" else row
        w1 += place_of(expert, w1_stride, w1_table, W_UNIT)
        w3 += place_of(expert, w3_stride, w3_table, W_UNIT)
        s1 += place_of(expert, s1_stride, s1_table, 1)
        s3 += place_of(expert, s3_stride, s3_table, 1)
        token = pair // per_token
        runs = width // 128
        total = gemm_tile_swap_ab(
            tl.where(lane < HALF, w1, w3) + row * w_row,
            tl.where(lane < HALF, s1, s3) + block * s_row,
            x + token * width,
            None if x_scales is None else x_scales + token * runs,
            inside, runs, FORMAT, OPERAND, NATIVE, BLOCK_K, STAGES, False, WIDE,
        )  # fmt: skip
        halves = tl.permute(tl.reshape(total, (2, HALF, COLUMNS)), (1, 2, 0))
        gate, up = tl.split(halves)
        dtype = inner.dtype.element_ty
        value = gated(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), limit)
        value *= tl.load(weights + pair, inside, other=0.0)[None, :]
        column = tl.program_id(0) * HALF + tl.arange(0, HALF)
        at = column[:, None] + (pair * n)[None, :]
        tl.store(inner + at, value.to(dtype), inside[None, :])


@triton.jit(do_not_specialize=["count", "offset"])
def packed_down_kernel(
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
    w_row,
    s_row,
    n,
    FORMAT: tl.constexpr,
    OPERAND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr,
    W_UNIT: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A tile of the pairs' results."""
    expert, pair, inside = block_of(ids, order, blocks, count, offset, experts, COLUMNS)
    if expert >= 0:
        row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        block = row // 128 if FORMAT == "fp8" else row
        w2 += place_of(expert, w2_stride, w2_table, W_UNIT)
        s2 += place_of(expert, s2_stride, s2_table, 1)
        runs = width // 128
        total = gemm_tile_swap_ab(
            w2 + row * w_row,
            s2 + block * s_row,
            inner + pair * width,
            None if inner_scales is None else inner_scales + pair * runs,
            inside, runs, FORMAT, OPERAND, NATIVE, BLOCK_K, STAGES, False, WIDE,
        )  # fmt: skip
        at = row[:, None] + (pair * n)[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), inside[None, :])


def packed_products(call: Call, results: Tensor, chosen: PackedTile) -> None:
    """Write what every pair's expert makes of its token to results [P, D].

    Args:
        call: as ``packed_support`` wants it.
        results: contiguous; pairs without an expert here are not written.
        chosen: the tile.
    """
    strides = [
        (matrix[0].shape[1], scale[0].shape[1])
        for matrix, scale in zip(call.matrices, call.scales, strict=True)
    ]
    options = {
        "FORMAT": call.weight_format,
        "OPERAND": TL_DTYPES[chosen.operand],
        "ROWS": chosen.rows,
        "COLUMNS": chosen.columns,
        "BLOCK_K": chosen.channels,
        "NATIVE": target_of(call.x.device).native_e4m3,
        "STAGES": chosen.stages,
        "WIDE": chosen.wide,
        "num_warps": chosen.num_warps,
    }
    given = {"weight_format": call.weight_format, "quantize": call.coded}
    grouped_products(
        call,
        results,
        Product(packed_up_kernel, chosen.rows // 2, strides[0]),
        Product(packed_down_kernel, chosen.rows, strides[2]),
        Grouping(
            chosen.columns,
            len(call.x) > 1,
            functools.partial(operand_rows, operand=chosen.operand, **given),
            options,
        ),
    )


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def builds(target: Target) -> Iterator[Build]:
    """Every tile with lists and with stacks, for what the activations may be."""
    for weight_format, coded in (("mxfp4", True), ("mxfp4", False), ("fp8", True)):
        if weight_format == "fp8" and target.narrow:
            continue
        seen: set[PackedTile] = set()
        shares = itertools.product((6, 48, 1536, 4096, 24576), (2048, 128))
        for pairs, inner in shares:
            chosen = packed_tile(pairs, (256, inner, 4096), weight_format, coded, target)
            if chosen in seen:
                continue
            for dtype in _DTYPES if coded and not seen else ("bf16",):
                for kernel in (packed_up_kernel, packed_down_kernel):
                    yield _build(target, kernel, weight_format, dtype, chosen, not seen)
            seen.add(chosen)


def _build(
    target: Target,
    kernel: triton.JITFunction,
    weight_format: str,
    dtype: str,
    chosen: PackedTile,
    lists: bool,
) -> Build:
    given, result = ("x", "inner") if kernel is packed_up_kernel else ("inner", "out")
    operands = {torch.float8_e4m3fn: "*u8", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
    coded = chosen.operand != torch.bfloat16
    types = {result: f"*{dtype}", given: operands[chosen.operand], "ids": "*i32"}
    types |= {"weights": "*fp32", "limit": "fp32", "order": "*i32", "blocks": "*i32"}
    integers = ("count", "offset", "experts", "per_token", "width", "w_row", "s_row", "n")
    types |= dict.fromkeys(integers, "i32")
    if coded:
        types[f"{given}_scales"] = "*fp32"
    for matrix in ("w1", "w3", "w2", "s1", "s3", "s2"):
        types[matrix] = "*u8"
        types[f"{matrix}_stride"] = "i32"
        if lists:
            types[f"{matrix}_table"] = "*i64"
    types = {name: kind for name, kind in types.items() if name in kernel.arg_names}
    sizes = {
        "FORMAT": weight_format,
        "OPERAND": TL_DTYPES[chosen.operand],
        "ROWS": chosen.rows,
        "COLUMNS": chosen.columns,
        "BLOCK_K": chosen.channels,
        "NATIVE": target.native_e4m3,
        "W_UNIT": 16,
        "STAGES": chosen.stages,
        "WIDE": chosen.wide,
    }
    absent = {name: None for name in kernel.arg_names if name not in types and name not in sizes}
    strides = tuple(name for name in types if name.endswith("_stride"))
    return Build(
        f"{weight_format} as {TL_DTYPES[chosen.operand]}, {dtype}, {chosen.columns} columns"
        + ", lists" * lists,
        kernel,
        types,
        absent | sizes,
        num_warps=chosen.num_warps,
        divisible=("width", "w_row", "s_row", "n", *strides),
        matrix=True,
        # Triton 3.9 is a few registers short of this tile; 3.6, which it was timed with, is not.
        spills=25 if chosen.wide and chosen.rows == 128 else 0,
    )

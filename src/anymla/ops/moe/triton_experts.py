"""Routed experts: pairs grouped by expert, two grouped products, one sum.

    plan      pairs (t, j) by expert, in blocks of at most ROWS
    up        (blocks of I, blocks of pairs): gate and up, SwiGLU, routing weight -> inner [P, I]
    down      (blocks of D, blocks of pairs): inner -> out [P, D]
    combine   (blocks of D, tokens): out of the token's pairs in the order of its columns, shared

Up to ``_FEW_PAIRS`` pairs there is no plan: each pair is a block. Workspace: inner and out, and
with quantised activations the codes of x and inner. An expert's matrices are found by one stride if
the lists are slices of one tensor, otherwise by a table of distances from the first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._triton import Build, Target, target_of
from anymla.ops.late import wait_for_arguments
from anymla.ops.linear.triton_product import Tile, operand, product, tile
from anymla.ops.linear.triton_quantize import quantize_rows
from anymla.ops.moe.triton_packed import packed_products, packed_support, packed_tile
from anymla.ops.moe.triton_plan import block_of, make_plan
from anymla.ops.moe.triton_stack import common_unit, place_of, stacked
from anymla.ops.moe.triton_swiglu import gated
from anymla.ops.workspace import scratch

_FEW_PAIRS = 64
_MOST_ROWS = 64
_COMBINED = 1024
# Whose matrix instructions read the decoded weight from shared memory.
_OPERANDS_IN_SHARED = ("sm_90", "sm_100")


def expert_tile(pairs: int, experts: int, kind: tl.dtype, target: Target) -> Tile:
    """The tile for pairs spread evenly over the experts."""
    rows = 1 if pairs <= _FEW_PAIRS else min(_MOST_ROWS, pairs // max(1, experts))
    chosen = tile(rows, kind, target)
    if chosen.rows == _MOST_ROWS and target.name not in _OPERANDS_IN_SHARED:
        # Operands pass through registers there, and decoding takes more of them.
        return dataclasses.replace(chosen, channels=32)
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
    UNIT: tl.constexpr,
):
    """A tile of w2's input."""
    expert, pair, inside = block_of(ids, order, blocks, count, offset, experts, ROWS)
    if expert >= 0:
        token = pair // per_token
        column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
        exists = column < n
        w1 += place_of(expert, w1_stride, w1_table, UNIT)
        w3 += place_of(expert, w3_stride, w3_table, UNIT)
        if FORMAT != "plain":
            s1 += place_of(expert, s1_stride, s1_table, 1)
            s3 += place_of(expert, s3_stride, s3_table, 1)
        runs = tl.cdiv(width, 128)
        gate = product(
            x, x_scales, token, inside, width, runs, w1, s1, column, exists, 0, width, width,
            FORMAT, CODED, OPERAND, BLOCK_K, NATIVE,
        )  # fmt: skip
        up = product(
            x, x_scales, token, inside, width, runs, w3, s3, column, exists, 0, width, width,
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
    UNIT: tl.constexpr,
):
    """A tile of the pairs' results."""
    expert, pair, inside = block_of(ids, order, blocks, count, offset, experts, ROWS)
    if expert >= 0:
        column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
        exists = column < n
        w2 += place_of(expert, w2_stride, w2_table, UNIT)
        if FORMAT != "plain":
            s2 += place_of(expert, s2_stride, s2_table, 1)
        runs = tl.cdiv(width, 128)
        value = product(
            inner, inner_scales, pair, inside, width, runs, w2, s2, column, exists, 0, width,
            width, FORMAT, CODED, OPERAND, BLOCK_K, NATIVE,
        )  # fmt: skip
        at = (pair * n)[:, None] + column[None, :]
        tl.store(out + at, value.to(out.dtype.element_ty), inside[:, None] & exists[None, :])


@triton.jit(do_not_specialize=["offset"])
def combine_kernel(
    pairs, ids, shared, out, offset, experts, n, K: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK channels of one token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < n
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        local = tl.load(ids + token * K + j).to(tl.int64) - offset
        written = tl.where((local >= 0) & (local < experts), n, 0)
        value = tl.load(pairs + (token * K + j) * n + column, column < written, other=0.0)
        total += value.to(tl.float32)
    if shared is not None:
        total += tl.load(shared + token * n + column, exists, other=0.0).to(tl.float32)
    tl.store(out + token * n + column, total.to(out.dtype.element_ty), exists)


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
    (tokens, d), k = x.shape, ids.shape[1]
    out = torch.empty((tokens, d), dtype=x.dtype, device=x.device)
    if not tokens:
        wait_for_arguments()
        return out
    pairs, count = tokens * k, len(w1)
    ids = ids.contiguous()
    results = scratch((pairs, d), x.dtype, x.device)
    lists = [[each.contiguous() for each in given] for given in (w1, w3, w2, s1, s3, s2)]
    matrices, scales = lists[:3], lists[3:]
    coded = quantize_activations and weight_format != "plain"
    target = target_of(x.device)
    packed = None
    if pairs and count and packed_support(x.dtype, matrices, scales, weight_format, coded, target):
        sizes = (count, w1[0].shape[0], d)
        packed = packed_tile(pairs, sizes, weight_format, coded, target)
    if packed is not None:
        packed_products(
            x.contiguous(),
            ids,
            weights.contiguous(),
            matrices,
            scales,
            results,
            packed,
            weight_format=weight_format,
            swiglu_limit=swiglu_limit,
            coded=coded,
            expert_offset=expert_offset,
        )
    elif pairs and count:
        kind = operand(x.dtype, weight_format, w1[0].dtype, coded, target)
        chosen = expert_tile(pairs, count, kind, target)
        order, table, blocks = None, None, pairs
        if pairs > _FEW_PAIRS:
            plan = make_plan(ids, count, expert_offset, chosen.rows)
            order, table, blocks = plan.order, plan.blocks, plan.blocks.shape[1]
        unit = common_unit(*matrices)
        up1, up3, down = (stacked(each, unit) for each in matrices)
        up1_scales, up3_scales, down_scales = (stacked(each) for each in scales)
        width = matrices[0][0].shape[0]
        inner = scratch((pairs, width), x.dtype, x.device)
        options = {
            "FORMAT": weight_format,
            "CODED": coded,
            "OPERAND": kind,
            "ROWS": chosen.rows,
            "COLUMNS": chosen.columns,
            "BLOCK_K": chosen.channels,
            "NATIVE": target.native_e4m3,
            "UNIT": unit,
            "num_warps": chosen.num_warps,
            "num_stages": chosen.num_stages,
        }
        rows, row_scales = quantize_rows(x.contiguous()) if coded else (x.contiguous(), None)
        up_kernel[(triton.cdiv(width, chosen.columns), blocks)](
            rows,
            row_scales,
            ids,
            weights.contiguous(),
            order,
            table,
            *(up1.first, up1.stride, up1.table),
            *(up1_scales.first, up1_scales.stride, up1_scales.table),
            *(up3.first, up3.stride, up3.table),
            *(up3_scales.first, up3_scales.stride, up3_scales.table),
            inner,
            blocks,
            expert_offset,
            count,
            k,
            d,
            width,
            float(swiglu_limit),
            **options,
        )
        rows, row_scales = quantize_rows(inner) if coded else (inner, None)
        down_kernel[(triton.cdiv(d, chosen.columns), blocks)](
            rows,
            row_scales,
            ids,
            order,
            table,
            *(down.first, down.stride, down.table),
            *(down_scales.first, down_scales.stride, down_scales.table),
            results,
            blocks,
            expert_offset,
            count,
            width,
            d,
            **options,
        )
    wait_for_arguments()
    shared = None if shared is None else shared.contiguous()
    # Tokens first: only the first axis of a grid holds more than 65,535 programs.
    combine_kernel[(tokens, triton.cdiv(d, _COMBINED))](
        results, ids, shared, out, expert_offset, count, d, K=k, BLOCK=_COMBINED
    )
    return out


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def builds(target: Target) -> Iterator[Build]:
    """Every format, with few pairs and lists, and with many and stacks."""
    for dtype in _DTYPES:
        pointers = dict.fromkeys(("pairs", "shared", "out"), f"*{dtype}")
        integers = {"offset": "i32", "experts": "i32", "n": "i32"}
        types = {**pointers, "ids": "*i32", **integers}
        yield Build(dtype, combine_kernel, types, {"K": 6, "BLOCK": _COMBINED}, divisible=("n",))
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
    kind = operand(_DTYPES[dtype], weight_format, stored, coded, target)
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
        "OPERAND": kind,
        "ROWS": chosen.rows,
        "COLUMNS": chosen.columns,
        "BLOCK_K": chosen.channels,
        "NATIVE": target.native_e4m3,
        "UNIT": 16,
    }
    absent = {name: None for name in kernel.arg_names if name not in types and name not in sizes}
    strides = tuple(name for name in types if name.endswith("_stride"))
    activations = "e4m3" if coded else dtype
    return Build(
        f"{weight_format}, {activations} activations, {chosen.rows} rows",
        kernel,
        types,
        absent | sizes,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        divisible=("width", "n", *strides),
        matrix=kind != tl.float32,
        # Operands that pass through registers leave some of the up kernels a few short.
        spills=56 if target.narrow else 0 if target.name in _OPERANDS_IN_SHARED else 8,
    )

"""Activations as operands of ``triton_turned``: quantised, in the order of decoded weights.

Grid: blocks of runs; a row of K channels is K / 128 runs.

    RUNS x 128 values -> RUNS x 128 operands, and with e4m3 codes RUNS power-of-two scales

Codes become e4m3 or, where products of e4m3 are no instructions, the same numbers in float16.
Without scales operands are bfloat16: what the codes stand for, or the values themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.fp8_block import ACTIVATION_AMAX_FLOOR, FP8_BLOCK
from anymla.formats.triton_cast import e4m3_to_fp16
from anymla.formats.triton_words import channel_at
from anymla.ops._build import Build
from anymla.ops._triton_quantize import BLOCKS, FEW_BLOCKS, blocks_of_cta, quantize_blocks
from anymla.ops.device import Target, target_of
from anymla.ops.pdl import pdl_launch, target_has_pdl
from anymla.ops.streams import scratch

_STORED = {tl.float8e4nv: torch.uint8, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16}


@triton.jit(do_not_specialize=["rows"])
def operand_rows_kernel(
    x,
    operands,
    scales,
    rows,
    width,
    per_row,
    FLOOR: tl.constexpr,
    RUNS: tl.constexpr,
    BYTES: tl.constexpr,
    QUANTIZE: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """RUNS runs, in the order of decoded values of BYTES bytes (0: as they are)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    run = tl.program_id(0).to(tl.int64) * RUNS + tl.arange(0, RUNS)
    row = run // per_row
    place = tl.arange(0, 128)
    channel = channel_at(place, BYTES) if BYTES else place
    first = (row * width + (run - row * per_row) * 128)[:, None]
    inside = (row < rows)[:, None]
    value = tl.load(x + first + channel[None, :], inside, other=0.0)
    if QUANTIZE:
        codes, scale = quantize_blocks(value.to(tl.float32), FLOOR, NATIVE)
        if scales is not None:
            tl.store(scales + run, scale, row < rows)
        if operands.dtype.element_ty == tl.uint8:
            tl.store(operands + first + place[None, :], codes, inside)
        else:
            number = e4m3_to_fp16(codes, NATIVE)
            if scales is None:
                number = number.to(tl.float32) * scale[:, None]
            tl.store(
                operands + first + place[None, :], number.to(operands.dtype.element_ty), inside
            )
    else:
        tl.store(operands + first + place[None, :], value.to(operands.dtype.element_ty), inside)


def operand_rows(
    x: Tensor, operand: tl.dtype, *, weight_format: str, quantize: bool
) -> tuple[Tensor, Tensor | None]:
    """Operands of contiguous x [T, K], K a multiple of 128, in scratch memory.

    Args:
        x: bfloat16, or any 16 or 32 bits if quantised.
        operand: float8e4nv, float16 or bfloat16.
        weight_format: "mxfp4" or "fp8", what they meet.
        quantize: to e4m3 in runs of 128; always with float8e4nv and float16.

    Returns:
        The operands (e4m3 as uint8) and float32 scales [T, K / 128], none with bfloat16.
    """
    rows, width = x.shape
    per_row = width // FP8_BLOCK
    operands = scratch((rows, width), _STORED[operand], x.device)
    scales = None
    if operand != tl.bfloat16:
        scales = scratch((rows, per_row), torch.float32, x.device)
    runs = blocks_of_cta(rows * per_row)
    operand_rows_kernel[(triton.cdiv(rows * per_row, runs),)](
        x,
        operands,
        scales,
        rows,
        width,
        per_row,
        FLOOR=ACTIVATION_AMAX_FLOOR,
        RUNS=runs,
        BYTES=operands.element_size() if weight_format == "mxfp4" else 0,
        QUANTIZE=quantize,
        NATIVE=target_of(x.device).native_e4m3,
        **pdl_launch(x.device),
    )
    return operands, scales


def builds(target: Target) -> Iterator[Build]:
    """Every operand that the target's products have, from every dtype."""
    kinds = [("fp16", 2, True), ("bf16", 2, True), ("bf16", 2, False)]
    kinds += [("u8", 1, True), ("fp16", 0, True)] if target.dot_e4m3 else [("fp16", 0, True)]
    for stored, order, quantize in kinds:
        for dtype in ("bf16", "fp16", "fp32") if quantize else ("bf16",):
            for runs in (FEW_BLOCKS, BLOCKS) if dtype == "bf16" else (BLOCKS,):
                yield _build(target, dtype, stored, order, quantize, runs)


def _build(target: Target, dtype: str, stored: str, order: int, quantize: bool, runs: int) -> Build:
    types = {"x": f"*{dtype}", "operands": f"*{stored}", "rows": "i32", "width": "i32"}
    types["per_row"] = "i32"
    absent: dict[str, None] = {}
    if stored == "bf16":
        absent["scales"] = None
    else:
        types["scales"] = "*fp32"
    return Build(
        f"{dtype} to {stored}, order {order}, {'' if quantize else 'not '}quantised, {runs} runs",
        operand_rows_kernel,
        types,
        {
            **absent,
            "FLOOR": ACTIVATION_AMAX_FLOOR,
            "RUNS": runs,
            "BYTES": order,
            "QUANTIZE": quantize,
            "NATIVE": target.native_e4m3,
            "PDL": target_has_pdl(target),
        },
        divisible=("width",),
    )

"""Root-mean-square norms.

Grid: one program for ROWS consecutive rows; the tile is ROWS whole rows of PADDED >= WIDTH
channels. ``fused_q_kv_rmsnorm`` has two kinds of programs in one grid:

    program | 0 .. q_programs - 1: Q_ROWS rows of qr | the others: KV_ROWS rows of kv |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.fp8_block import ACTIVATION_AMAX_FLOOR
from anymla.ops._build import Build
from anymla.ops.device import Target, target_of
from anymla.ops.norm_rope.triton_rms import norm_rows
from anymla.ops.pdl import pdl_launch, target_has_pdl

_TILE = 4096
_MOST_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Config:
    """Rows of a program, channels of its tile, and its warps."""

    rows: int
    padded: int
    num_warps: int


def config(width: int, target: Target) -> Config:
    """Thirty-two elements a thread; a wider row gets more threads."""
    padded = triton.next_power_of_2(width)
    warps = max(_TILE, padded) // (32 * target.warp_size)
    return Config(min(_MOST_ROWS, max(1, _TILE // padded)), padded, min(16, warps))


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x,
    weight,
    out,
    rows,
    row_stride,
    column_stride,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm the rows of x [rows, WIDTH] into ``out``."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    norm_rows(
        x, weight, out, first, rows, row_stride, column_stride, None, None, 0, 0, eps,
        WIDTH, PADDED, ROWS, 0.0, False, PDL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "q_programs", "code_row_stride", "code_run_stride"])
def fused_kernel(
    qr,
    kv,
    q_weight,
    kv_weight,
    q_out,
    kv_out,
    codes,
    code_scales,
    rows,
    q_programs,
    q_row_stride,
    q_column_stride,
    kv_row_stride,
    kv_column_stride,
    code_row_stride,
    code_run_stride,
    eps,
    Q_WIDTH: tl.constexpr,
    Q_PADDED: tl.constexpr,
    Q_ROWS: tl.constexpr,
    KV_WIDTH: tl.constexpr,
    KV_PADDED: tl.constexpr,
    KV_ROWS: tl.constexpr,
    FLOOR: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm the rows of qr [rows, Q_WIDTH], whose ``codes`` there may be, and of kv."""
    program = tl.program_id(0)
    if program < q_programs:
        norm_rows(
            qr,
            q_weight,
            q_out,
            program.to(tl.int64) * Q_ROWS,
            rows,
            q_row_stride,
            q_column_stride,
            codes,
            code_scales,
            code_row_stride,
            code_run_stride,
            eps,
            Q_WIDTH,
            Q_PADDED,
            Q_ROWS,
            FLOOR,
            NATIVE,
            PDL,
        )
    else:
        norm_rows(
            kv,
            kv_weight,
            kv_out,
            (program - q_programs).to(tl.int64) * KV_ROWS,
            rows,
            kv_row_stride,
            kv_column_stride,
            None,
            None,
            0,
            0,
            eps,
            KV_WIDTH,
            KV_PADDED,
            KV_ROWS,
            FLOOR,
            NATIVE,
            PDL,
        )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``interface.rms_norm``."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    rows = x.reshape(-1, x.shape[-1])  # a view, unless the leading dims have unrelated strides
    chosen = config(rows.shape[1], target_of(x.device))
    rms_norm_kernel[(triton.cdiv(rows.shape[0], chosen.rows),)](
        rows,
        weight.contiguous(),
        out,
        rows.shape[0],
        rows.stride(0),
        rows.stride(1),
        eps,
        rows.shape[1],
        chosen.padded,
        chosen.rows,
        num_warps=chosen.num_warps,
        enable_fp_fusion=False,
        **pdl_launch(x.device, weight),
    )
    return out


def fused_q_kv_rmsnorm(
    qr: Tensor,
    kv: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    eps: float,
    *,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``interface.fused_q_kv_rmsnorm``."""
    q_out = torch.empty(qr.shape, dtype=qr.dtype, device=qr.device)
    kv_out = torch.empty(kv.shape, dtype=kv.dtype, device=kv.device)
    tokens = qr.shape[0]
    if not tokens:
        return q_out, kv_out
    target = target_of(qr.device)
    q_config, kv_config = config(qr.shape[1], target), config(kv.shape[1], target)
    q_programs = triton.cdiv(tokens, q_config.rows)
    fused_kernel[(q_programs + triton.cdiv(tokens, kv_config.rows),)](
        qr,
        kv,
        q_weight.contiguous(),
        kv_weight.contiguous(),
        q_out,
        kv_out,
        codes,
        code_scales,
        tokens,
        q_programs,
        qr.stride(0),
        qr.stride(1),
        kv.stride(0),
        kv.stride(1),
        *((0, 0) if code_scales is None else code_scales.stride()),
        eps,
        qr.shape[1],
        q_config.padded,
        q_config.rows,
        kv.shape[1],
        kv_config.padded,
        kv_config.rows,
        ACTIVATION_AMAX_FLOOR,
        target.native_e4m3,
        num_warps=max(q_config.num_warps, kv_config.num_warps),
        enable_fp_fusion=False,
        **pdl_launch(qr.device, q_weight, kv_weight),
    )
    return q_out, kv_out


# Hidden size, query rank and head dims of DeepSeek-V4 Flash and Pro.
_WIDTHS = (128, 512, 1024, 1536, 4096, 7168)


def builds(target: Target) -> Iterator[Build]:
    """Rows of every width of the models, in bfloat16 and float32."""
    strides = ("q_row_stride", "kv_row_stride")
    code_strides = ("code_row_stride", "code_run_stride")
    for dtype in ("bf16", "fp32"):
        for width in _WIDTHS:
            chosen = config(width, target)
            yield Build(
                label=f"{width} {dtype}",
                kernel=rms_norm_kernel,
                types={
                    "x": f"*{dtype}",
                    "weight": f"*{dtype}",
                    "out": f"*{dtype}",
                    "rows": "i32",
                    "row_stride": "i32",
                    "eps": "fp32",
                },
                constants={
                    "column_stride": 1,
                    "WIDTH": width,
                    "PADDED": chosen.padded,
                    "ROWS": chosen.rows,
                    "PDL": target_has_pdl(target),
                },
                num_warps=chosen.num_warps,
                fp_fusion=False,
                divisible=("row_stride",),
            )
        for rank, coded in ((1024, False), (1536, False), (1024, True), (1536, True)):
            if coded and dtype == "fp32":
                continue
            q_config, kv_config = config(rank, target), config(512, target)
            codes = {"codes": "*u8", "code_scales": "*fp32"} if coded else {}
            pointers = ("qr", "kv", "q_weight", "kv_weight", "q_out", "kv_out")
            yield Build(
                label=f"{rank} and 512 {dtype}{', codes' * coded}",
                kernel=fused_kernel,
                types={
                    **dict.fromkeys(pointers, f"*{dtype}"),
                    **codes,
                    **dict.fromkeys(("rows", "q_programs", *strides, *code_strides), "i32"),
                    "eps": "fp32",
                },
                constants={
                    **({} if coded else {"codes": None, "code_scales": None}),
                    "q_column_stride": 1,
                    "kv_column_stride": 1,
                    "Q_WIDTH": rank,
                    "Q_PADDED": q_config.padded,
                    "Q_ROWS": q_config.rows,
                    "KV_WIDTH": 512,
                    "KV_PADDED": kv_config.padded,
                    "KV_ROWS": kv_config.rows,
                    "FLOOR": ACTIVATION_AMAX_FLOOR,
                    "NATIVE": target.native_e4m3,
                    "PDL": target_has_pdl(target),
                },
                num_warps=max(q_config.num_warps, kv_config.num_warps),
                fp_fusion=False,
                divisible=strides,
            )

"""RMS norms of rows with a weight, in Triton.

Grid: one CTA for the rows of a tile; a tile is whole rows of PADDED >= WIDTH channels.
``fused_q_kv_rmsnorm`` has two kinds of CTAs in one grid:

    program id | 0 .. q_ctas - 1: rows of qr | from q_ctas on: rows of kv |
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.fp8_block import ACTIVATION_AMAX_FLOOR
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch, cdiv
from anymla.ops._triton_norm_rope import inverse_rms
from anymla.ops._triton_quantize import store_codes
from anymla.ops.device import target_of
from anymla.ops.norm_rope.config import choose_norm_config
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch

_FLOOR = tl.constexpr(ACTIVATION_AMAX_FLOOR)


@triton.jit
def norm_rows(
    x, strides, weight, out, first, rows, eps, CONFIG: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Norm rows from ``first`` on of x [rows, WIDTH] into ``out``; return the tile and its rows.

    ``out`` is contiguous.
    """
    WIDTH: tl.constexpr = getattr(CONFIG, "width")
    ROWS: tl.constexpr = getattr(CONFIG, "rows")
    PADDED: tl.constexpr = getattr(CONFIG, "padded")
    row = first + tl.arange(0, ROWS)
    channel = tl.arange(0, PADDED)
    mask = (row < rows)[:, None] & (channel < WIDTH)[None, :]
    at = x + row[:, None] * strides[0] + (channel * strides[1])[None, :]
    scale = tl.load(weight + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    y = (x * inverse_rms(x, eps, WIDTH) * scale[None, :]).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * WIDTH + channel[None, :], y, mask=mask)
    return y, row


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x,
    weight,
    out,
    rows,
    row_stride,
    column_stride,
    eps,
    CONFIG: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm the rows of x [rows, WIDTH] into ``out``."""
    ROWS: tl.constexpr = getattr(CONFIG, "rows")
    first = tl.program_id(0).to(tl.int64) * ROWS
    norm_rows(x, (row_stride, column_stride), weight, out, first, rows, eps, CONFIG, PDL)


@triton.jit(do_not_specialize=["rows", "q_ctas", "code_row_stride", "code_block_stride"])
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
    q_ctas,
    q_row_stride,
    q_column_stride,
    kv_row_stride,
    kv_column_stride,
    code_row_stride,
    code_block_stride,
    eps,
    Q_CONFIG: tl.constexpr,
    KV_CONFIG: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm the rows of qr, quantised into ``codes`` as well unless that is None, and of kv."""
    Q_ROWS: tl.constexpr = getattr(Q_CONFIG, "rows")
    Q_WIDTH: tl.constexpr = getattr(Q_CONFIG, "width")
    KV_ROWS: tl.constexpr = getattr(KV_CONFIG, "rows")
    cta = tl.program_id(0)
    if cta < q_ctas:
        first = cta.to(tl.int64) * Q_ROWS
        strides = (q_row_stride, q_column_stride)
        y, row = norm_rows(qr, strides, q_weight, q_out, first, rows, eps, Q_CONFIG, PDL)
        if codes is not None:
            store_codes(
                y, codes, code_scales, row, row < rows, 0, code_row_stride, code_block_stride,
                Q_WIDTH, _FLOOR, NATIVE,
            )  # fmt: skip
    else:
        first = (cta - q_ctas).to(tl.int64) * KV_ROWS
        strides = (kv_row_stride, kv_column_stride)
        norm_rows(kv, strides, kv_weight, kv_out, first, rows, eps, KV_CONFIG, PDL)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Backend of ``interface.rms_norm`` in Triton; see its contract."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    rows = x.reshape(-1, x.shape[-1])  # a view, unless the leading dims have unrelated strides
    config = choose_norm_config(rows.shape[1], target_of(x.device))
    rms_norm_kernel[(triton.cdiv(rows.shape[0], config.rows),)](
        rows,
        weight.contiguous(),
        out,
        rows.shape[0],
        rows.stride(0),
        rows.stride(1),
        eps,
        config,
        num_warps=config.num_warps,
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
    """Backend of ``interface.fused_q_kv_rmsnorm`` in Triton; see its contract."""
    q_out = torch.empty(qr.shape, dtype=qr.dtype, device=qr.device)
    kv_out = torch.empty(kv.shape, dtype=kv.dtype, device=kv.device)
    tokens = qr.shape[0]
    if not tokens:
        return q_out, kv_out
    pdl = q_weight.is_contiguous() and kv_weight.is_contiguous()
    if not pdl:
        q_weight, kv_weight = q_weight.contiguous(), kv_weight.contiguous()
    code_strides = (0, 0) if code_scales is None else code_scales.stride()
    strides = *qr.stride(), *kv.stride(), *code_strides
    launch = _fused(tokens, (qr.shape[1], kv.shape[1]), strides, eps, pdl, qr.device)
    launch(qr, kv, q_weight, kv_weight, q_out, kv_out, codes, code_scales)
    return q_out, kv_out


@functools.lru_cache(LAUNCHES)
def _fused(
    tokens: int,
    widths: tuple[int, int],
    strides: tuple[int, ...],
    eps: float,
    pdl: bool,
    device: torch.device,
) -> PreparedLaunch:
    target = target_of(device)
    q_config, kv_config = (choose_norm_config(width, target) for width in widths)
    q_ctas = cdiv(tokens, q_config.rows)
    return PreparedLaunch(
        fused_kernel,
        (q_ctas + cdiv(tokens, kv_config.rows),),
        tokens,
        q_ctas,
        *strides,
        eps,
        Q_CONFIG=q_config,
        KV_CONFIG=kv_config,
        NATIVE=target.native_e4m3,
        num_warps=max(q_config.num_warps, kv_config.num_warps),
        enable_fp_fusion=False,
        **(pdl_launch(device) if pdl else {"PDL": False}),
    )

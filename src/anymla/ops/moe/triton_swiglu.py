"""Clamped SwiGLU in Triton on a grid of (rows, blocks of a row)."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.fp8_block import ACTIVATION_AMAX_FLOOR
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch, cdiv
from anymla.ops._triton_quantize import store_row_codes
from anymla.ops.device import target_of
from anymla.ops.moe.config import SWIGLU_CHANNELS
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch


@triton.jit
def clamped_swiglu(gate, up, limit):
    """Compute silu(min(gate, limit)) * clamp(up, -limit, limit) of float32 values."""
    # NaN must not be clamped away.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate * tl.sigmoid(gate) * up


@triton.jit(do_not_specialize=["code_row_stride", "code_block_stride"])
def swiglu_kernel(
    gate,
    up,
    out,
    codes,
    code_scales,
    gate_stride,
    up_stride,
    width,
    limit,
    code_row_stride,
    code_block_stride,
    BLOCK: tl.constexpr,
    FLOOR: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BLOCK values of a row, and their codes if ``codes`` is given."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    g = tl.load(gate + row * gate_stride + at, mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + at, mask, other=0.0).to(tl.float32)
    value = clamped_swiglu(g, u, limit).to(out.dtype.element_ty)
    tl.store(out + row * width + at, value, mask)
    if codes is not None:
        store_row_codes(
            value,
            codes + row * width,
            code_scales + row * code_row_stride,
            tl.program_id(1) * BLOCK,
            code_block_stride,
            width,
            FLOOR,
            NATIVE,
        )


def _rows(x: Tensor) -> Tensor:
    """Return x as [n, width] with unit stride in a row; halves of wider rows are not copied."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def swiglu(
    gate: Tensor,
    up: Tensor,
    limit: float,
    *,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
) -> Tensor:
    """Backend of ``interface.swiglu`` in Triton; see its contract."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        gates, ups = _rows(gate), _rows(up)
        rows, width = gates.shape
        scales = (0, 0) if code_scales is None else code_scales.stride()
        strides = gates.stride(0), ups.stride(0), *scales
        _launch((rows, width), strides, limit, gate.device)(gates, ups, out, codes, code_scales)
    return out


@functools.lru_cache(LAUNCHES)
def _launch(
    shape: tuple[int, int], strides: tuple[int, ...], limit: float, device: torch.device
) -> PreparedLaunch:
    rows, width = shape
    gate, up, *scales = strides
    return PreparedLaunch(
        swiglu_kernel,
        (rows, cdiv(width, SWIGLU_CHANNELS)),
        gate,
        up,
        width,
        float(limit),
        *scales,
        BLOCK=SWIGLU_CHANNELS,
        FLOOR=ACTIVATION_AMAX_FLOOR,
        NATIVE=target_of(device).native_e4m3,
        **pdl_launch(device),
    )

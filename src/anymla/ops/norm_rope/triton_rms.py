"""Root-mean-square norms of rows inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from anymla.ops._triton_norm_rope import inverse_rms
from anymla.ops._triton_quantize import store_codes


@triton.jit
def norm_rows(
    x_at,
    weight,
    out,
    first,
    rows,
    row_stride,
    column_stride,
    codes,
    code_scales,
    code_row_stride,
    code_run_stride,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    FLOOR: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm rows ``first`` .. of x [rows, WIDTH] into contiguous ``out``, and ``codes`` if any."""
    row = first + tl.arange(0, ROWS)
    channel = tl.arange(0, PADDED)
    there = (row < rows)[:, None] & (channel < WIDTH)[None, :]
    at = x_at + row[:, None] * row_stride + (channel * column_stride)[None, :]
    scale = tl.load(weight + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(at, mask=there, other=0.0).to(tl.float32)
    y = (x * inverse_rms(x, eps, WIDTH) * scale[None, :]).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * WIDTH + channel[None, :], y, mask=there)
    if codes is not None:
        store_codes(
            y, codes, code_scales, row, row < rows, 0, code_row_stride, code_run_stride,
            WIDTH, FLOOR, NATIVE,
        )  # fmt: skip

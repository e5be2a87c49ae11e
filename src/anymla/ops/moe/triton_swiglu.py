"""Clamped SwiGLU. Grid: (rows, blocks of a row)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._triton import Build, Target

BLOCK = 2048


@triton.jit
def gated(gate, up, limit):
    """silu(min(gate, limit)) * clamp(up, -limit, limit) of float32 values."""
    # NaN must not be clamped away.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate * tl.sigmoid(gate) * up


@triton.jit
def swiglu_kernel(gate, up, out, gate_stride, up_stride, width, limit, BLOCK: tl.constexpr):
    """BLOCK values of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    g = tl.load(gate + row * gate_stride + at, mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + at, mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, gated(g, u, limit).to(out.dtype.element_ty), mask)


def _rows(x: Tensor) -> Tensor:
    """[n, width] with neighbours next to each other; halves of a wider row stay where they are."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """See ``interface.swiglu``."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        gates, ups = _rows(gate), _rows(up)
        rows, width = gates.shape
        swiglu_kernel[(rows, triton.cdiv(width, BLOCK))](
            gates, ups, out, gates.stride(0), ups.stride(0), width, float(limit), BLOCK=BLOCK
        )
    return out


def builds(target: Target) -> Iterator[Build]:
    """Every dtype; rows of whole groups of 16 values, and others."""
    sizes = dict.fromkeys(("gate_stride", "up_stride", "width"), "i32")
    for dtype in ("bf16", "fp16", "fp32"):
        pointers = dict.fromkeys(("gate", "up", "out"), f"*{dtype}")
        types = {**pointers, **sizes, "limit": "fp32"}
        for divisible in (tuple(sizes), ()):
            words = "16 together" if divisible else "any width"
            yield Build(
                f"{dtype}, {words}", swiglu_kernel, types, {"BLOCK": BLOCK}, divisible=divisible
            )

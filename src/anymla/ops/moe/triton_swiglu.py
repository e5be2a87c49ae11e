"""Clamped SwiGLU. Grid: blocks of values."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._triton import Build, Target

BLOCK = 1024


@triton.jit
def gated(gate, up, limit):
    """silu(min(gate, limit)) * clamp(up, -limit, limit) of float32 values."""
    # NaN must not be clamped away.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate * tl.sigmoid(gate) * up


@triton.jit(do_not_specialize=["count"])
def swiglu_kernel(gate, up, out, count, limit, BLOCK: tl.constexpr):
    """BLOCK values."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    g = tl.load(gate + at, mask, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask, other=0.0).to(tl.float32)
    tl.store(out + at, gated(g, u, limit).to(out.dtype.element_ty), mask)


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """See ``interface.swiglu``."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    count = out.numel()
    if count:
        grid = (triton.cdiv(count, BLOCK),)
        swiglu_kernel[grid](
            gate.contiguous(), up.contiguous(), out, count, float(limit), BLOCK=BLOCK
        )
    return out


def builds(target: Target) -> Iterator[Build]:
    """Every dtype."""
    for dtype in ("bf16", "fp16", "fp32"):
        pointers = dict.fromkeys(("gate", "up", "out"), f"*{dtype}")
        types = {**pointers, "count": "i64", "limit": "fp32"}
        yield Build(dtype, swiglu_kernel, types, {"BLOCK": BLOCK})

"""Clamped SwiGLU. Grid: blocks of values."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._triton import Build, Target

BLOCK = 2048
# Values that are masked together, so that they are loaded together: 16 bytes of bfloat16.
_TOGETHER = 8


@triton.jit
def gated(gate, up, limit):
    """silu(min(gate, limit)) * clamp(up, -limit, limit) of float32 values."""
    # NaN must not be clamped away.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate * tl.sigmoid(gate) * up


@triton.jit(do_not_specialize=["groups"])
def swiglu_kernel(gate, up, out, groups, limit, BLOCK: tl.constexpr, TOGETHER: tl.constexpr):
    """BLOCK values of groups of TOGETHER."""
    COUNT: tl.constexpr = BLOCK // TOGETHER
    group = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    at = group[:, None] * TOGETHER + tl.arange(0, TOGETHER)[None, :]
    mask = (group < groups)[:, None]
    g = tl.load(gate + at, mask, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask, other=0.0).to(tl.float32)
    tl.store(out + at, gated(g, u, limit).to(out.dtype.element_ty), mask)


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """See ``interface.swiglu``."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    count = out.numel()
    if count:
        together = 1 if count % _TOGETHER else _TOGETHER
        swiglu_kernel[(triton.cdiv(count, BLOCK),)](
            gate.contiguous(),
            up.contiguous(),
            out,
            count // together,
            float(limit),
            BLOCK=BLOCK,
            TOGETHER=together,
        )
    return out


def builds(target: Target) -> Iterator[Build]:
    """Every dtype; any number of values, and multiples of what is loaded together."""
    for dtype in ("bf16", "fp16", "fp32"):
        pointers = dict.fromkeys(("gate", "up", "out"), f"*{dtype}")
        types = {**pointers, "groups": "i64", "limit": "fp32"}
        for together in (_TOGETHER, 1):
            sizes = {"BLOCK": BLOCK, "TOGETHER": together}
            yield Build(f"{dtype}, {together} together", swiglu_kernel, types, sizes)

"""Reference of Engram in plain torch, in float32 (float64 for float64 streams)."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.e4m3 import decode_e4m3
from anymla.formats.ue8m0 import decode_ue8m0
from anymla.ops._check import wide_dtype

# Smallest magnitude under a gate's signed square root.
LEAST_DOT = 1e-6


def engram_rows(out: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Reference of ``interface.engram_rows``; see its contract."""
    each = decode_ue8m0(scales).repeat_interleave(codes.shape[2] // scales.shape[2], 2)
    out.copy_((decode_e4m3(codes) * each).flatten(1))


def engram_gate(h: Tensor, projected: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Reference of ``interface.engram_gate``; see its contract."""
    _, streams, hidden = h.shape
    state = h.to(wide_dtype(h.dtype))
    parts = projected.to(state.dtype).unflatten(1, (streams + 1, hidden))
    keys, value = parts[:, :streams], parts[:, streams:]
    normed = [x * torch.rsqrt(x.square().mean(2, keepdim=True) + eps) for x in (state, keys)]
    dot = (normed[0] * weight.to(state.dtype) * normed[1]).sum(2, keepdim=True) * hidden**-0.5
    root = dot.abs().clamp(min=LEAST_DOT).sqrt()
    gate = torch.sigmoid(torch.where(dot < 0, -root, root))
    return (state + gate * value).to(h.dtype)

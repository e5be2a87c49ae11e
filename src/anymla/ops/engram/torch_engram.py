"""Engram on any torch device, in a few dozen launches on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.e4m3 import decode_e4m3
from anymla.formats.ue8m0 import decode_ue8m0
from anymla.ops.engram.reference import LEAST_DOT


def engram_rows(out: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Backend of ``interface.engram_rows`` in torch; see its contract."""
    each = decode_ue8m0(scales, torch.float32).unsqueeze(-1)
    blocks = decode_e4m3(codes).unflatten(-1, (scales.shape[-1], -1))
    out.copy_((blocks * each).flatten(1))


def engram_gate(h: Tensor, projected: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Backend of ``interface.engram_gate`` in torch; see its contract."""
    streams, hidden = h.shape[1:]
    wide = torch.promote_types(h.dtype, torch.float32)
    projected = projected.to(wide).unflatten(1, (streams + 1, hidden))
    keys, value = projected[:, :streams], projected[:, streams:]
    state = h.to(wide)
    dot = (state * weight * keys).sum(-1) * hidden**-0.5
    for each in (state, keys):
        dot = dot * torch.rsqrt(each.square().mean(-1) + eps)
    # torch's sums begin with +0, so a dot product of zeros has that sign.
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp(min=LEAST_DOT).sqrt(), dot))
    return (state + gate.unsqueeze(-1) * value).to(h.dtype)

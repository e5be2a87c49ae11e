"""Root-mean-square norms through torch's own row norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from anymla.ops import _host

# Elements in flight on the host: 1 MiB of float32, which a core's own cache holds.
BLOCK_ELEMENTS = 1 << 18


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``interface.rms_norm``."""
    width = x.shape[-1]
    if x.numel() <= BLOCK_ELEMENTS or not _host.on_host(x):
        return _rms_norm(x, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, step = x.reshape(-1, width), max(1, BLOCK_ELEMENTS // width)
    for target, some in zip(out.view(-1, width).split(step), rows.split(step), strict=True):
        target.copy_(_rms_norm(some, weight, eps))
    return out


def fused_q_kv_rmsnorm(
    qr: Tensor, kv: Tensor, q_weight: Tensor, kv_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See ``interface.fused_q_kv_rmsnorm``."""
    return rms_norm(qr, q_weight, eps), rms_norm(kv, kv_weight, eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    width = (x.shape[-1],)
    if x.dtype == weight.dtype:
        return F.rms_norm(x, width, weight, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), width, weight.to(wide), eps).to(x.dtype)


def normed_heads(q: Tensor, dtype: torch.dtype, eps: float) -> Tensor:
    """Norm every head [T, H, D] without a weight, in ``dtype``; contiguous and freshly made."""
    if not _host.on_host(q):
        return F.rms_norm(q.to(dtype), (q.shape[-1],), None, eps)
    # One new buffer, where torch's norm makes several of its size.
    x = q.to(dtype, copy=True, memory_format=torch.contiguous_format)
    squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
    return x.mul_(squares.div_(q.shape[-1]).add_(eps).rsqrt_())

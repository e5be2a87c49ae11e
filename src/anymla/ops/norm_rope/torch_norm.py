"""Root-mean-square norms through torch's own row norm."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from anymla.ops import _host
from anymla.ops._quantized import fill_codes

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
    latent = rms_norm(qr, q_weight, eps)
    fill_codes(latent, codes, code_scales)
    return latent, rms_norm(kv, kv_weight, eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    if _host.on_host(x):
        return torch.mul(x, inverse_rms(x, wide, eps)).mul_(weight).to(x.dtype)
    width = (x.shape[-1],)
    if x.dtype == weight.dtype:
        return F.rms_norm(x, width, weight, eps)
    return F.rms_norm(x.to(wide), width, weight.to(wide), eps).to(x.dtype)


def normed_heads(q: Tensor, dtype: torch.dtype, eps: float) -> Tensor:
    """Norm every head [T, H, D] without a weight, in ``dtype``; contiguous and freshly made."""
    if not _host.on_host(q):
        return F.rms_norm(q.to(dtype), (q.shape[-1],), None, eps)
    return torch.mul(q.contiguous(), inverse_rms(q, dtype, eps))


def inverse_rms(x: Tensor, dtype: torch.dtype, eps: float) -> Tensor:
    """``1 / sqrt(mean(x^2) + eps)`` of rows [..., D] as [..., 1], computed in ``dtype``."""
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
    floor = _constant(eps, dtype, x.device)
    return torch.addcmul(floor, norms, norms, value=1 / x.shape[-1]).rsqrt_()


@functools.cache
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)

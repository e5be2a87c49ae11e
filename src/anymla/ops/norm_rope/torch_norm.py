"""Root-mean-square norms through torch's own row norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``interface.rms_norm``."""
    width = (x.shape[-1],)
    if x.dtype == weight.dtype:
        return F.rms_norm(x, width, weight, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), width, weight.to(wide), eps).to(x.dtype)


def fused_q_kv_rmsnorm(
    qr: Tensor, kv: Tensor, q_weight: Tensor, kv_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See ``interface.fused_q_kv_rmsnorm``."""
    return rms_norm(qr, q_weight, eps), rms_norm(kv, kv_weight, eps)

"""RMS norms of the two slices of the fused query/key-value projection, in torch."""

from __future__ import annotations

from torch import Tensor

from anymla.ops._quantized import fill_codes
from anymla.ops._torch_norm_rope import rms_norm


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

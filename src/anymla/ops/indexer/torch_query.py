"""Index queries in torch: RoPE, Hadamard transform, quantisation of each head."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.e4m3 import E4M3_MAX
from anymla.formats.hadamard import hadamard_transform
from anymla.formats.mxfp4 import quantize_mxfp4
from anymla.formats.records import KV_AMAX_FLOOR
from anymla.formats.ue8m0 import scale_exponent
from anymla.ops._torch_norm_rope import rope


def indexer_q_rope_quant(
    q: Tensor,
    weights: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    softmax_scale: float,
    head_scale: float,
    quant: str = "fp8",
    hadamard: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backend of ``interface.indexer_q_rope_quant`` in torch; see its contract."""
    q = rope(q, positions, cos_sin_cache)
    if quant != "none":
        q = q.bfloat16()
    if hadamard:
        q = hadamard_transform(q)
    wide = torch.promote_types(weights.dtype, torch.float32)
    scaled = weights.to(wide) * (softmax_scale * head_scale)
    no_scales = torch.empty(0, dtype=torch.uint8, device=q.device)
    if quant == "none":
        return q, no_scales, scaled
    if quant == "mxfp4":
        return *quantize_mxfp4(q), scaled
    codes, scale = _quantize_heads(q)
    return codes, no_scales, scaled.mul_(scale)


def _quantize_heads(q: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise q [T, H, D] to e4m3 with a power-of-two scale [T, H] for each head.

    The rule is that of ``quantize_fp8_rows``; multiplying by a power of two instead of calling
    ldexp on every element, and leaving NaN to the cast, is four times as fast on a CPU.
    """
    wide = q.float()
    exponent = scale_exponent(wide.abs().amax(-1), E4M3_MAX, KV_AMAX_FLOOR)
    one = torch.ones_like(exponent, dtype=torch.float32)
    inverse = torch.ldexp(one, -exponent).unsqueeze(-1)
    codes = wide.mul_(inverse).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes, torch.ldexp(one, exponent)

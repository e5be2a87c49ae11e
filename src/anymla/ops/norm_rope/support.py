"""Support checks of numba's norms and cache rows."""

from __future__ import annotations

from torch import Tensor

from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.formats.records import SplitFp8Layout
from anymla.ops._few_tokens import few_tokens_support
from anymla.ops.device import Support


def numba_norm_support(x: Tensor, weight: Tensor, eps: float) -> Support:
    """Return support of numba's ``rms_norm``: few tokens on a CPU."""
    return few_tokens_support(x.numel() // max(1, x.shape[-1]), (x,), (weight,))


def numba_norms_support(
    qr: Tensor,
    kv: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    eps: float,
    *,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
) -> Support:
    """Return support of numba's ``fused_q_kv_rmsnorm``: few tokens on a CPU."""
    if codes is not None:
        return Support(False, "rows that are not quantised as well")
    return few_tokens_support(len(qr), (qr, kv), (q_weight, kv_weight))


def numba_insert_support(
    q: Tensor,
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    *,
    layout: str = MAIN_FP8,
    out: Tensor | None = None,
) -> Support:
    """Return support of numba's ``qnorm_rope_kv_insert``: few tokens on a CPU, split FP8 rows."""
    rows = get_layout(layout)
    if not isinstance(rows, SplitFp8Layout) or rows.interleaved:
        return Support(False, f"e4m3 values in a plane of their own, got {layout}")
    return few_tokens_support(len(q), (q, kv), (cos_sin_cache,))

"""Support checks of numba's hyper-connections."""

from __future__ import annotations

from torch import Tensor

from anymla.ops._few_tokens import few_tokens_support
from anymla.ops.device import Support


def numba_site_support(
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_weight: Tensor | None = None,
    codes: Tensor | None = None,
    **_: object,
) -> Support:
    """Return support of numba's ``hc_pre`` and ``hc_head``: few tokens on a CPU."""
    if codes is not None:
        return Support(False, "rows that are not quantised as well")
    return few_tokens_support(len(h), (h,), (fn, base, scale, norm_weight))


def numba_post_support(u: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Support:
    """Return support of numba's ``hc_post``: few tokens on a CPU."""
    return few_tokens_support(len(h), (u, h), (post, comb))


def numba_both_support(
    u: Tensor,
    h: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    **options: object,
) -> Support:
    """Return support of numba's ``hc_post_pre_norm``: few tokens on a CPU."""
    support = numba_post_support(u, h, post, comb)
    codes = options.get("codes")
    assert codes is None or isinstance(codes, Tensor)
    return support and numba_site_support(h, fn, base, scale, norm_weight=norm_weight, codes=codes)

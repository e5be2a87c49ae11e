"""Gradients of hyper-connections on any torch device, in blocks of tokens that bound scratch."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.ops._check import wide_dtype
from anymla.ops.hyper_connection import reference


def hc_pre_backward(
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    dy: Tensor | None,
    dpre: Tensor | None,
    dpost: Tensor | None,
    dcomb: Tensor | None,
    *,
    norm_eps: float,
    hc_eps: float,
    iters: int,
    norm_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Backend of ``interface.hc_pre_backward`` in torch; see its contract."""
    wide = wide_dtype(h.dtype)
    dh = torch.empty_like(h, memory_format=torch.contiguous_format)
    norm = fn.new_empty(0) if norm_weight is None else norm_weight
    sums = [torch.zeros_like(x, dtype=wide) for x in (fn, base, scale, norm)]
    for part in reference.blocks(h):
        given = [None if x is None else x[part] for x in (dy, dpre, dpost, dcomb)]
        dh[part], *more = reference.site_grad(
            h[part], fn, base, scale, *given,
            norm_eps=norm_eps, hc_eps=hc_eps, iters=iters, norm_weight=norm_weight,
        )  # fmt: skip
        for total, each in zip(sums, more, strict=True):
            total += each
    dfn, dbase, dscale, dnorm = sums
    return dh, dfn.to(fn.dtype), dbase.to(fn.dtype), dscale.to(fn.dtype), dnorm.to(norm.dtype)


def hc_post_backward(
    dout: Tensor, u: Tensor, h: Tensor, post: Tensor, comb: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Backend of ``interface.hc_post_backward`` in torch; see its contract."""
    results = tuple(
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (u, h, post, comb)
    )
    for part in reference.blocks(h):
        found = reference.hc_post_backward(*(x[part] for x in (dout, u, h, post, comb)))
        for result, each in zip(results, found, strict=True):
            result[part] = each
    du, dh, dpost, dcomb = results
    return du, dh, dpost, dcomb

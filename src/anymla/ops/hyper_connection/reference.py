"""Reference of hyper-connections in plain torch, in float32 (float64 for float64 streams)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from anymla.ops._check import wide_dtype
from anymla.ops._quantized import fill_codes


def _mix(h: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    f = h.flatten(1).to(wide_dtype(h.dtype))
    normed = f * torch.rsqrt(f.square().mean(-1, keepdim=True) + norm_eps)
    return normed @ fn.to(f.dtype).T


def sinkhorn(logits: Tensor, *, eps: float, iters: int) -> Tensor:
    """Make nearly doubly stochastic matrices [T, N, N] of logits; the last step is on columns."""
    c = torch.softmax(logits, dim=-1) + eps
    c = c / (c.sum(dim=-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(dim=-1, keepdim=True) + eps)
        c = c / (c.sum(dim=-2, keepdim=True) + eps)
    return c


def _collapse(h: Tensor, pre: Tensor) -> Tensor:
    return (pre[:, :, None] * h.to(pre.dtype)).sum(dim=1).to(h.dtype)


def hc_pre(
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    iters: int,
    norm_weight: Tensor | None = None,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of ``interface.hc_pre``; see its contract."""
    pre, post, comb = hc_gates(h, fn, base, scale, norm_eps=norm_eps, hc_eps=hc_eps, iters=iters)
    collapsed = hc_collapse_norm(
        h, pre, norm_weight, norm_eps=norm_eps, codes=codes, code_scales=code_scales
    )
    return collapsed, post, comb


def hc_gates(
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of ``interface.hc_gates``; see its contract."""
    n = h.shape[1]
    mix = _mix(h, fn, norm_eps)
    pre, post, comb = mix.split([n, n, n * n], dim=1)
    pre_base, post_base, comb_base = base.to(mix.dtype).split([n, n, n * n])
    pre = torch.sigmoid(pre * scale[0] + pre_base) + hc_eps
    post = 2 * torch.sigmoid(post * scale[1] + post_base)
    comb = sinkhorn((comb * scale[2] + comb_base).unflatten(1, (n, n)), eps=hc_eps, iters=iters)
    return pre, post, comb


def hc_collapse_norm(
    h: Tensor,
    pre: Tensor,
    norm_weight: Tensor | None,
    *,
    norm_eps: float,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
) -> Tensor:
    """Reference of ``interface.hc_collapse_norm``; see its contract."""
    y = _collapse(h, pre)
    if norm_weight is not None:
        x = y.to(pre.dtype)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps)
        y = (x * norm_weight.to(x.dtype)).to(h.dtype)
    fill_codes(y, codes, code_scales)
    return y


def hc_post(u: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Reference of ``interface.hc_post``; see its contract."""
    expanded = post[:, :, None] * u.to(post.dtype)[:, None, :]
    mixed = (comb[:, :, :, None] * h.to(post.dtype)[:, :, None, :]).sum(dim=1)
    return (expanded + mixed).to(h.dtype)


def hc_head(
    h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, norm_eps: float, hc_eps: float
) -> Tensor:
    """Reference of ``interface.hc_head``; see its contract."""
    mix = _mix(h, fn, norm_eps)
    return _collapse(h, torch.sigmoid(mix * scale + base) + hc_eps)


def post_then_pre(
    hc_post: Callable[..., Tensor],
    hc_pre: Callable[..., tuple[Tensor, Tensor, Tensor]],
    u: Tensor,
    h: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    iters: int,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compose ``interface.hc_post_pre_norm`` of a backend's ``hc_post`` and its ``hc_pre``."""
    streams = hc_post(u, h, post, comb)
    return streams, *hc_pre(
        streams,
        fn,
        base,
        scale,
        norm_eps=norm_eps,
        hc_eps=hc_eps,
        iters=iters,
        norm_weight=norm_weight,
        codes=codes,
        code_scales=code_scales,
    )


hc_post_pre_norm = functools.partial(post_then_pre, hc_post, hc_pre)

"""Launch of hyper-connection sites in Triton: two launches, up to four for many tokens.

    mix       by slices of D: h' (if the previous site is left) and its partial mixes
    collapse  by tokens: y or RMSNorm(y), and the other gates in CTAs beside it

A token's gates depend on its whole row, so a single launch would need one CTA per token. That would
be slow for few tokens, as one SM would read all weights, and would read the weights once per token
for many.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.ops.hyper_connection.config import takes_many_tokens
from anymla.ops.hyper_connection.triton_collapse import launch_collapse
from anymla.ops.hyper_connection.triton_expand import hc_post
from anymla.ops.hyper_connection.triton_gates import placed
from anymla.ops.hyper_connection.triton_mix import launch_mix
from anymla.ops.hyper_connection.triton_mix_many_tokens import launch_many


def _enter(
    h: Tensor,
    partial: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    iters: int,
    codes: Tensor | None,
    code_scales: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, n, d = h.shape
    y = torch.empty((tokens, d), dtype=h.dtype, device=h.device)
    post = torch.empty((tokens, n), dtype=torch.float32, device=h.device)
    comb = torch.empty((tokens, n, n), dtype=torch.float32, device=h.device)
    launch_collapse(
        h, y, partial, base, scale, mixes=(2 + n) * n, norm_eps=norm_eps, hc_eps=hc_eps,
        norm_weight=norm_weight, post=post, comb=comb, codes=codes, code_scales=code_scales,
        iters=iters,
    )  # fmt: skip
    return y, post, comb


def _nothing(h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    tokens, n, d = h.shape
    gates = torch.empty((tokens, n, n), dtype=torch.float32, device=h.device)
    return h.new_empty((tokens, d)), gates[:, 0], gates


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
    """Backend of ``interface.hc_pre`` in Triton; see its contract."""
    if not h.numel():
        return _nothing(h)
    h = placed(h)
    partial = launch_many(h, fn) if takes_many_tokens(h) else launch_mix(h, fn)
    return _enter(h, partial, base, scale, norm_weight, norm_eps, hc_eps, iters, codes, code_scales)


def hc_post_pre_norm(
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
    """Backend of ``interface.hc_post_pre_norm`` in Triton; see its contract."""
    if takes_many_tokens(h) and h.numel():
        streams = hc_post(u, h, post, comb)
        partial = launch_many(streams, fn)
    else:
        streams = torch.empty_like(h, memory_format=torch.contiguous_format)
        if not h.numel():
            return streams, *_nothing(h)
        partial = launch_mix(
            placed(h),
            fn,
            u=u.contiguous(),
            post=post.contiguous(),
            comb=comb.contiguous(),
            out=streams,
        )
    return streams, *_enter(
        streams, partial, base, scale, norm_weight, norm_eps, hc_eps, iters, codes, code_scales
    )


def hc_head(
    h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, norm_eps: float, hc_eps: float
) -> Tensor:
    """Backend of ``interface.hc_head`` in Triton; see its contract."""
    tokens, n, d = h.shape
    y = torch.empty((tokens, d), dtype=h.dtype, device=h.device)
    if not h.numel():
        return y
    h = placed(h)
    partial = launch_many(h, fn) if takes_many_tokens(h) else launch_mix(h, fn)
    launch_collapse(h, y, partial, base, scale, mixes=n, norm_eps=norm_eps, hc_eps=hc_eps)
    return y

"""Reference of hyper-connections in plain torch, in float32 (float64 for float64 streams)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from anymla.ops._check import wide_dtype
from anymla.ops._quantized import fill_codes

# Elements of the streams that are differentiated at a time, in float32.
_CPU_BLOCK = 1 << 22
_DEVICE_BLOCK = 1 << 26


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


def sinkhorn_grad(logits: Tensor, dcomb: Tensor, *, eps: float, iters: int) -> Tensor:
    """Differentiate ``sinkhorn`` through all of its 2 iters - 1 divisions by sums.

    One step y = x / (s + eps), s the sum of x over an axis, has

        dx = (dy - sum(dy y)) / (s + eps)          over the same axis.

    The sums are kept on the way forward; on the way back x = y (s + eps) rebuilds the matrix. The
    gradient of the iteration's limit is another: 20 iterations have often not converged.

    Args:
        logits: logits of the mixing matrices, [T, N, N] float32 or float64.
        dcomb: gradient of the balanced matrices, [T, N, N] of the same dtype.
        eps: number added to the softmax and to every sum.
        iters: number of iterations, at least 1.

    Returns:
        Gradient of the logits, [T, N, N].
    """
    p = logits.softmax(-1)
    # Tokens last: a sum over N of them is N - 1 vector additions.
    x, sums = (p + eps).permute(1, 2, 0).contiguous(), []
    for step in range(2 * iters - 1):
        total = x.sum(step % 2, keepdim=True) + eps
        x = x / total
        sums.append(total)
    g = dcomb.permute(1, 2, 0).contiguous()
    for step in reversed(range(2 * iters - 1)):
        g = (g - (g * x).sum(step % 2, keepdim=True)) / sums[step]
        x = x * sums[step]
    g = g.permute(2, 0, 1)
    return p * (g - (g * p).sum(-1, keepdim=True))


def blocks(h: Tensor) -> list[slice]:
    """Return slices of tokens of streams [T, N, D], few enough for scratch to be bounded."""
    elements = _CPU_BLOCK if h.device.type == "cpu" else _DEVICE_BLOCK
    step = max(1, elements // max(1, h.shape[1] * h.shape[2]))
    return [slice(start, start + step) for start in range(0, len(h), step)]


def collapse_grad(
    h: Tensor, pre: Tensor, dy: Tensor, norm_weight: Tensor | None, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate ``hc_collapse_norm``.

    Returns:
        Gradients of h [T, N, D], pre [T, N], and the norm's weight [D] (empty without one), of
        pre's dtype.
    """
    streams, g, dnorm = h.to(pre.dtype), dy.to(pre.dtype), pre.new_empty(0)
    if norm_weight is not None:
        y = _collapse(h, pre).to(pre.dtype)
        inverse = torch.rsqrt(y.square().mean(-1, keepdim=True) + norm_eps)
        normed = y * inverse
        dnorm = (g * normed).sum(0)
        g = g * norm_weight.to(g.dtype)
        g = inverse * (g - normed * (g * normed).mean(-1, keepdim=True))
    dpre = torch.bmm(streams, g.unsqueeze(2)).squeeze(2)
    return pre.unsqueeze(2) * g.unsqueeze(1), dpre, dnorm


def site_grad(
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
    """Compute the results of ``hc_pre_backward`` in the dtype of the sums."""
    n, wide = h.shape[1], wide_dtype(h.dtype)
    fn, base, scale = fn.to(wide), base.to(wide), scale.to(wide)
    sizes = [n] if len(fn) == n else [n, n, n * n]
    f = h.flatten(1).to(wide)
    inverse = torch.rsqrt(f.square().mean(-1, keepdim=True) + norm_eps)
    mix = (f @ fn.T) * inverse
    factors = torch.cat([one.expand(size) for one, size in zip(scale, sizes, strict=True)])
    logits = torch.addcmul(base, mix, factors).split(sizes, -1)
    s = logits[0].sigmoid()
    dh, dnorm = None, f.new_empty(0)
    if dy is not None:
        dh, through, dnorm = collapse_grad(h, s + hc_eps, dy, norm_weight, norm_eps)
        dpre = through if dpre is None else through + dpre
    assert dpre is not None
    parts = [dpre * s * (1 - s)]
    if dpost is not None and dcomb is not None:
        s = logits[1].sigmoid()
        parts.append(2 * dpost * s * (1 - s))
        square = logits[2].unflatten(-1, (n, n))
        parts.append(sinkhorn_grad(square, dcomb, eps=hc_eps, iters=iters).flatten(1))
    g = torch.cat(parts, -1)
    dscale = torch.stack([one.sum() for one in (g * mix).sum(0).split(sizes)])
    # mix = raw n with n = 1 / sqrt(mean(f^2) + eps), and dn / df = -n^3 f / (N D).
    dmix = g * factors
    draw = dmix * inverse
    pull = (dmix * mix).sum(-1, keepdim=True) * inverse.square() / f.shape[1]
    df = (draw @ fn - f * pull).view_as(h)
    return df if dh is None else df + dh, draw.T @ f, g.sum(0), dscale, dnorm


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
    """Reference of ``interface.hc_pre_backward``; see its contract."""
    dh, dfn, dbase, dscale, dnorm = site_grad(
        h, fn, base, scale, dy, dpre, dpost, dcomb,
        norm_eps=norm_eps, hc_eps=hc_eps, iters=iters, norm_weight=norm_weight,
    )  # fmt: skip
    like = fn if norm_weight is None else norm_weight
    return (
        dh.to(h.dtype), dfn.to(fn.dtype), dbase.to(fn.dtype), dscale.to(fn.dtype),
        dnorm.to(like.dtype),
    )  # fmt: skip


def hc_post_backward(
    dout: Tensor, u: Tensor, h: Tensor, post: Tensor, comb: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reference of ``interface.hc_post_backward``; see its contract."""
    g = dout.to(post.dtype)
    du = torch.bmm(post.unsqueeze(1), g).squeeze(1)
    dpost = torch.bmm(g, u.to(g.dtype).unsqueeze(2)).squeeze(2)
    dcomb = torch.bmm(h.to(g.dtype), g.transpose(1, 2))
    return du.to(u.dtype), torch.bmm(comb, g).to(h.dtype), dpost, dcomb


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

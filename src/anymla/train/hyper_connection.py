"""Hyper-connections with gradients: gates of a site, collapse and expansion of the streams.

The forward pass is the operation that serves (``ops.hyper_connection``); the backward pass keeps
the inputs only and goes through all Sinkhorn steps. Letters: T tokens, N streams, D hidden size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from anymla.ops.hyper_connection import hc_collapse_norm, hc_gates, hc_head, hc_post, hc_pre
from anymla.ops.registry import wide_dtype
from anymla.train.norm_rope import rms_norm_grad
from anymla.train.operator import Gradients, differentiable

# Elements of the streams that are differentiated at a time, in float32.
_CPU_BLOCK = 1 << 22
_DEVICE_BLOCK = 1 << 26


def hyper_pre(
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    iters: int,
    norm_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Collapse the streams to a sublayer's input and compute the gates that expand it again.

    Formula, shapes and results are those of ``ops.hyper_connection.hc_pre``. Gradients reach h,
    fn, base, scale and norm_weight.

    Args:
        h: residual streams, [T, N, D] floating point.
        fn: weight of the gates' mixes, [(2 + N) N, N D] float32 (or float64).
        base: offsets of the gates, [(2 + N) N] of fn's dtype.
        scale: factors of the mixes for pre, post and comb, [3] of fn's dtype.
        norm_eps: number added to the mean squares.
        hc_eps: number added to pre, to the softmax and to every Sinkhorn sum.
        iters: number of Sinkhorn iterations, at least 1.
        norm_weight: weight of the sublayer's RMSNorm, [D]; None to return the sum itself.

    Returns:
        Collapsed streams y [T, D] in h's dtype, post [T, N] and comb [T, N, N].

    Raises:
        TypeError, ValueError: a dtype or shape differs from the above.
    """
    found: tuple[Tensor, Tensor, Tensor] = _pre(
        h, fn, base, scale, norm_weight, norm_eps, hc_eps, iters
    )
    return found


def hyper_gates(
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a site's gates pre, post and comb as ``hyper_pre`` does, without collapsing.

    For V4.1, whose sublayers read the streams through the gates of the site before. Arguments are
    those of ``hyper_pre``; returns pre [T, N], post [T, N] and comb [T, N, N].
    """
    found: tuple[Tensor, Tensor, Tensor] = _gates(h, fn, base, scale, norm_eps, hc_eps, iters)
    return found


def hyper_collapse(
    h: Tensor, pre: Tensor, norm_weight: Tensor | None, *, norm_eps: float
) -> Tensor:
    """Collapse the streams with given gates and normalise: RMSNorm(sum_i pre_i h_i).

    Args:
        h: residual streams, [T, N, D] floating point.
        pre: gates from ``hyper_gates``, [T, N] float32 (or float64).
        norm_weight: weight of the RMSNorm, [D]; None to return the sum itself.
        norm_eps: number added to the mean square of the sum.

    Returns:
        [T, D] in h's dtype. Gradients reach h, pre and norm_weight.
    """
    collapsed: Tensor = _collapse(h, pre, norm_weight, norm_eps)
    return collapsed


def hyper_post(u: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Expand a sublayer's output into the streams: h'_j = post_j u + sum_i comb_ij h_i.

    Args:
        u: output of the sublayer, [T, D] of h's dtype.
        h: streams that ``hyper_pre`` collapsed, [T, N, D] floating point.
        post: gates from ``hyper_pre``, [T, N] float32 (or float64).
        comb: mixing matrices from ``hyper_pre``, [T, N, N] of post's dtype.

    Returns:
        New streams [T, N, D] in h's dtype. Gradients reach all four arguments.
    """
    expanded: Tensor = _post(u, h, post, comb)
    return expanded


def hyper_head(
    h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, norm_eps: float, hc_eps: float
) -> Tensor:
    """Collapse the streams after the last layer, as ``ops.hyper_connection.hc_head`` does.

    Args:
        h: residual streams, [T, N, D] floating point.
        fn: weight of the gates' mixes, [N, N D] float32 (or float64).
        base: offsets of the gates, [N] of fn's dtype.
        scale: factor of the mixes, [1] of fn's dtype.
        norm_eps: number added to the mean square of the flattened streams.
        hc_eps: number added to the gates.

    Returns:
        [T, D] in h's dtype. Gradients reach h, fn, base and scale.
    """
    collapsed: Tensor = _head(h, fn, base, scale, norm_eps, hc_eps)
    return collapsed


@dataclasses.dataclass(frozen=True)
class _Options:
    """Constants of a site; ``iters`` counts Sinkhorn iterations."""

    norm_eps: float
    hc_eps: float
    iters: int


def sinkhorn_grad(logits: Tensor, dcomb: Tensor, *, eps: float, iters: int) -> Tensor:
    """Differentiate ``softmax(logits) + eps`` after 2 iters - 1 divisions by sums.

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


class _Site:
    """The backward pass of a site's gates, a block of tokens at a time."""

    def __init__(self, h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, options: _Options):
        self.h, self.fn, self.base, self.scale, self.options = h, fn, base, scale, options
        self.wide = wide_dtype(h.dtype)
        rows, streams = len(fn), h.shape[1]
        sizes = [streams] if rows == streams else [streams, streams, streams * streams]
        self.sizes = sizes
        self.dh = torch.empty_like(h, memory_format=torch.contiguous_format)
        self.dfn, self.dbase = (torch.zeros_like(x, dtype=self.wide) for x in (fn, base))
        self.dscale = torch.zeros_like(scale, dtype=self.wide)

    def blocks(self) -> list[slice]:
        """Return slices of tokens."""
        return _blocks(self.h)

    def gates(self, part: slice) -> None:
        """Recompute the logits of some tokens; kept until ``add``."""
        self.f = self.h[part].flatten(1).to(self.wide)
        self.inverse = (self.f.square().mean(-1, keepdim=True) + self.options.norm_eps).rsqrt()
        self.mix = (self.f @ self.fn.to(self.wide).T) * self.inverse
        scales = torch.cat(
            [each.expand(size) for each, size in zip(self.scale, self.sizes, strict=True)]
        )
        self.scales = scales.to(self.wide)
        logits = torch.addcmul(self.base.to(self.wide), self.mix, self.scales)
        self.logits = logits.split(self.sizes, -1)

    def pre(self) -> Tensor:
        """Return the gates pre of these tokens."""
        return self.logits[0].sigmoid() + self.options.hc_eps

    def add(
        self,
        part: slice,
        dpre: Tensor,
        dpost: Tensor | None,
        dcomb: Tensor | None,
        dh: Tensor | None,
    ) -> None:
        """Go back from the gates' gradients to the streams' and the weights'.

        ``dh`` [t, N, D] is what reaches these tokens' streams in other ways.
        """
        s = self.logits[0].sigmoid()
        parts = [dpre * s * (1 - s)]
        if dpost is not None and dcomb is not None:
            s = self.logits[1].sigmoid()
            parts.append(2 * dpost * s * (1 - s))
            eps, iters = self.options.hc_eps, self.options.iters
            square = self.logits[2].unflatten(-1, dcomb.shape[1:])
            parts.append(sinkhorn_grad(square, dcomb, eps=eps, iters=iters).flatten(1))
        dlogits = torch.cat(parts, -1)
        self.dbase += dlogits.sum(0)
        by_row = (dlogits * self.mix).sum(0)
        self.dscale += torch.stack([each.sum() for each in by_row.split(self.sizes)])
        dmix = dlogits * self.scales
        # mix = raw n with n = 1 / sqrt(mean(f^2) + eps), and dn / df = -n^3 f / (N D).
        draw = dmix * self.inverse
        pull = (dmix * self.mix).sum(-1, keepdim=True) * self.inverse.square() / self.f.shape[1]
        df = draw @ self.fn.to(self.wide) - self.f * pull
        self.dfn += draw.T @ self.f
        df = df.view_as(self.h[part])
        self.dh[part] = df if dh is None else df + dh

    def gradients(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of h, fn, base and scale."""
        return (
            self.dh,
            self.dfn.to(self.fn.dtype),
            self.dbase.to(self.base.dtype),
            self.dscale.to(self.scale.dtype),
        )


def _blocks(h: Tensor) -> list[slice]:
    elements = _CPU_BLOCK if h.device.type == "cpu" else _DEVICE_BLOCK
    step = max(1, elements // max(1, h.shape[1] * h.shape[2]))
    return [slice(start, start + step) for start in range(0, len(h), step)]


def _collapse_grad(
    h: Tensor, pre: Tensor, dy: Tensor, norm_weight: Tensor | None, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Differentiate RMSNorm(sum_i pre_i h_i): gradients of h, pre and the norm's weight."""
    wide = pre.dtype
    g, dweight = dy.to(wide), None
    streams = h.to(wide)
    if norm_weight is not None:
        y = torch.bmm(pre.unsqueeze(1), streams).squeeze(1).to(h.dtype).to(wide)
        g, dweight = rms_norm_grad(y, norm_weight, norm_eps, g)
    dpre = torch.bmm(streams, g.unsqueeze(2)).squeeze(2)
    return pre.unsqueeze(2) * g.unsqueeze(1), dpre, dweight


def _hyper_pre(
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return hc_pre(
        h, fn, base, scale, norm_weight=norm_weight, norm_eps=norm_eps, hc_eps=hc_eps, iters=iters
    )


def _hyper_pre_backward(
    grads: list[Tensor],
    needs: list[bool],
    kept: list[Tensor],
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor | None,
    *constants: Any,
) -> Gradients:
    dy, dpost, dcomb = grads
    options = _Options(*constants)
    site = _Site(h, fn, base, scale, options)
    dnorm = None if norm_weight is None else torch.zeros_like(norm_weight, dtype=site.wide)
    for part in site.blocks():
        site.gates(part)
        dh, dpre, more = _collapse_grad(
            h[part], site.pre(), dy[part], norm_weight, options.norm_eps
        )
        if dnorm is not None and more is not None:
            dnorm += more
        site.add(part, dpre, dpost[part], dcomb[part], dh)
    if norm_weight is None or dnorm is None:
        return *site.gradients(), None
    return *site.gradients(), dnorm.to(norm_weight.dtype)


def _hyper_pre_fake(h: Tensor, fn: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    tokens, streams, width = h.shape
    return (
        h.new_empty(tokens, width),
        fn.new_empty(tokens, streams),
        fn.new_empty(tokens, streams, streams),
    )


def _hyper_gates(
    h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    return hc_gates(h, fn, base, scale, norm_eps=norm_eps, hc_eps=hc_eps, iters=iters)


def _hyper_gates_backward(
    grads: list[Tensor],
    needs: list[bool],
    kept: list[Tensor],
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *constants: Any,
) -> Gradients:
    dpre, dpost, dcomb = grads
    site = _Site(h, fn, base, scale, _Options(*constants))
    for part in site.blocks():
        site.gates(part)
        site.add(part, dpre[part], dpost[part], dcomb[part], None)
    return site.gradients()


def _hyper_gates_fake(h: Tensor, fn: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    tokens, streams, _width = h.shape
    pre, post = fn.new_empty(tokens, streams), fn.new_empty(tokens, streams)
    return pre, post, fn.new_empty(tokens, streams, streams)


def _hyper_head(
    h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float
) -> Tensor:
    return hc_head(h, fn, base, scale, norm_eps=norm_eps, hc_eps=hc_eps)


def _hyper_head_backward(
    grads: list[Tensor],
    needs: list[bool],
    kept: list[Tensor],
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_eps: float,
    hc_eps: float,
) -> Gradients:
    site = _Site(h, fn, base, scale, _Options(norm_eps, hc_eps, 1))
    for part in site.blocks():
        site.gates(part)
        dh, dpre, _ = _collapse_grad(h[part], site.pre(), grads[0][part], None, 0.0)
        site.add(part, dpre, None, None, dh)
    return site.gradients()


def _hyper_collapse(h: Tensor, pre: Tensor, norm_weight: Tensor | None, norm_eps: float) -> Tensor:
    return hc_collapse_norm(h, pre, norm_weight, norm_eps=norm_eps)


def _hyper_collapse_backward(
    grads: list[Tensor],
    needs: list[bool],
    kept: list[Tensor],
    h: Tensor,
    pre: Tensor,
    norm_weight: Tensor | None,
    norm_eps: float,
) -> Gradients:
    dh = torch.empty_like(h, memory_format=torch.contiguous_format)
    dpre = torch.empty_like(pre)
    dnorm = None if norm_weight is None else torch.zeros_like(norm_weight, dtype=pre.dtype)
    for part in _blocks(h):
        dh[part], dpre[part], more = _collapse_grad(
            h[part], pre[part], grads[0][part], norm_weight, norm_eps
        )
        if dnorm is not None and more is not None:
            dnorm += more
    if norm_weight is None or dnorm is None:
        return dh, dpre, None
    return dh, dpre, dnorm.to(norm_weight.dtype)


def _collapsed_fake(h: Tensor, *_: Any) -> Tensor:
    return h.new_empty(h.shape[0], h.shape[2])


def _hyper_post(u: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return hc_post(u, h, post, comb)


def _hyper_post_backward(
    grads: list[Tensor],
    needs: list[bool],
    kept: list[Tensor],
    u: Tensor,
    h: Tensor,
    post: Tensor,
    comb: Tensor,
) -> Gradients:
    du, dpost, dcomb = map(torch.empty_like, (u, post, comb))
    dh = torch.empty_like(h, memory_format=torch.contiguous_format)
    for part in _blocks(h):
        g = grads[0][part].to(post.dtype)
        du[part] = torch.bmm(post[part].unsqueeze(1), g).squeeze(1)
        dpost[part] = torch.bmm(g, u[part].to(g.dtype).unsqueeze(2)).squeeze(2)
        dcomb[part] = torch.bmm(h[part].to(g.dtype), g.transpose(1, 2))
        dh[part] = torch.bmm(comb[part], g)
    return du, dh, dpost, dcomb


def _hyper_post_fake(u: Tensor, h: Tensor, *_: Tensor) -> Tensor:
    return h.new_empty(h.shape)


_pre = differentiable(_hyper_pre, _hyper_pre_backward, _hyper_pre_fake, learns=5, results=3)
_gates = differentiable(_hyper_gates, _hyper_gates_backward, _hyper_gates_fake, learns=4, results=3)
_head = differentiable(_hyper_head, _hyper_head_backward, _collapsed_fake, learns=4)
_collapse = differentiable(_hyper_collapse, _hyper_collapse_backward, _collapsed_fake, learns=3)
_post = differentiable(_hyper_post, _hyper_post_backward, _hyper_post_fake, learns=4)

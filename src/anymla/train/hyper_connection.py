"""Hyper-connections with gradients: gates of a site, collapse and expansion of the streams.

Both passes are operations of ``ops.hyper_connection``, the forward pass the one that serves. The
backward pass keeps the inputs only and goes through all Sinkhorn steps. Letters: T tokens, N
streams, D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anymla.ops.hyper_connection import (
    hc_collapse_norm,
    hc_gates,
    hc_head,
    hc_post,
    hc_post_backward,
    hc_pre,
    hc_pre_backward,
)
from anymla.ops.hyper_connection.reference import blocks, collapse_grad
from anymla.train.operator import Gradients, differentiable


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
    norm_eps, hc_eps, iters = constants
    *found, dnorm = hc_pre_backward(
        h, fn, base, scale, dy, None, dpost, dcomb,
        norm_eps=norm_eps, hc_eps=hc_eps, iters=iters, norm_weight=norm_weight,
    )  # fmt: skip
    return *found, None if norm_weight is None else dnorm


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
    norm_eps, hc_eps, iters = constants
    return hc_pre_backward(
        h, fn, base, scale, None, dpre, dpost, dcomb, norm_eps=norm_eps, hc_eps=hc_eps, iters=iters
    )[:4]


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
    nothing = grads[0], None, None, None
    return hc_pre_backward(h, fn, base, scale, *nothing, norm_eps=norm_eps, hc_eps=hc_eps, iters=1)[
        :4
    ]


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
    for part in blocks(h):
        dh[part], dpre[part], more = collapse_grad(
            h[part], pre[part], grads[0][part], norm_weight, norm_eps
        )
        if dnorm is not None:
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
    return hc_post_backward(grads[0], u, h, post, comb)


def _hyper_post_fake(u: Tensor, h: Tensor, *_: Tensor) -> Tensor:
    return h.new_empty(h.shape)


_pre = differentiable(_hyper_pre, _hyper_pre_backward, _hyper_pre_fake, learns=5, results=3)
_gates = differentiable(_hyper_gates, _hyper_gates_backward, _hyper_gates_fake, learns=4, results=3)
_head = differentiable(_hyper_head, _hyper_head_backward, _collapsed_fake, learns=4)
_collapse = differentiable(_hyper_collapse, _hyper_collapse_backward, _collapsed_fake, learns=3)
_post = differentiable(_hyper_post, _hyper_post_backward, _hyper_post_fake, learns=4)

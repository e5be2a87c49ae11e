"""Contracts of the hyper-connection operations.

The residual of a DeepSeek-V4 model is a state h of N streams (hc_mult, 4). Around each sublayer F
(attention or MoE) a site computes three gates from the state, collapses the streams to one, and
afterwards expands and mixes them again:

    y, post, comb = hc_pre(h, ...)          y = sum_i pre_i h_i
    u             = F(RMSNorm(y))
    h'            = hc_post(u, h, post, comb)      h'_j = post_j u + sum_i comb_ij h_i

Source: DeepSeek-V4 reference, inference/model.py; Xie et al., "mHC: Manifold-Constrained
Hyper-Connections". Letters: T tokens, N streams, D hidden size.
"""

import torch
from torch import Tensor

from anymla.ops._quantized import check_codes
from anymla.ops.device import float32_support, has_numba
from anymla.ops.hyper_connection.support import (
    numba_both_support,
    numba_post_support,
    numba_site_support,
)
from anymla.ops.registry import FLOAT32_UP, FLOATS, check, operation, require, wide_dtype


def _gates_like(h: Tensor, fn: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
    tokens, n, d = h.shape
    wide = wide_dtype(h.dtype)
    return (
        h.new_empty((tokens, d)),
        h.new_empty((tokens, n), dtype=wide),
        h.new_empty((tokens, n, n), dtype=wide),
    )


def _check_gates(name: str, tensors: dict[str, tuple[object, str, object]], iters: int) -> None:
    h = tensors["h"][0]
    assert isinstance(h, Tensor)
    n, d = (h.shape[1], h.shape[2]) if h.ndim == 3 else (0, 0)
    check(name, dims={"G": (2 + n) * n, "F": n * d}, **tensors)  # type: ignore[arg-type]
    require(iters >= 1, name, "iters", "at least 1", iters)


@operation(mutates=("codes", "code_scales"), outputs=_gates_like)
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
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Collapse the streams to a sublayer's input, and compute the gates that expand it again.

    With f = flatten(h) and m = (f @ fn^T) / sqrt(mean(f^2) + norm_eps), split into pre [N],
    post [N] and comb [N, N]::

        pre  = sigmoid(m_pre * scale[0] + base_pre) + hc_eps
        post = 2 sigmoid(m_post * scale[1] + base_post)
        comb = softmax(m_comb * scale[2] + base_comb, last axis) + hc_eps; then divided by its
               (column sums + hc_eps), and iters - 1 times by (row sums + hc_eps) and by
               (column sums + hc_eps), where row i sums comb_ij over j
        y    = sum_i pre_i h_i, rounded once to h's dtype

    Args:
        h: [T, N, D] any float dtype; tokens and streams anywhere, so that equal streams can be one.
        fn: [(2 + N) N, N D] float32 (float64 allowed), rows pre, post, comb.
        base: [(2 + N) N] like fn.
        scale: [3] like fn: of pre, post and comb.
        norm_eps: added to the mean square of f, and to that of y.
        hc_eps: added to pre, to the softmax and to every sum of the Sinkhorn iteration.
        iters: Sinkhorn iterations, at least 1 (20 in the released models).
        norm_weight: [D] any float dtype, weight of the sublayer's RMSNorm, or None for y as it is.
        codes: the y that is returned, quantised (see ``formats.quantized_rows``), or None.
        code_scales: its scales, with ``codes``.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        y or RMSNorm(y) [T, D] in h's dtype, rounded once each; post [T, N] and comb [T, N, N] in
        float32 (float64 if h is).

    Raises:
        TypeError: a dtype differs from the above.
        ValueError: a shape differs from the above, or iters < 1.
    """
    _check_gates(
        "hc_pre",
        {
            "h": (h, "T N D", FLOATS),
            "fn": (fn, "G F", FLOAT32_UP),
            "base": (base, "G", FLOAT32_UP),
            "scale": (scale, "3", FLOAT32_UP),
            "norm_weight": (norm_weight, "D", FLOATS),
        },
        iters,
    )
    check_codes("hc_pre", h[:, 0], codes, code_scales)


def _stream_like(u: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> tuple[Tensor, ...]:
    return (torch.empty_like(h, memory_format=torch.contiguous_format),)


@operation(outputs=_stream_like)
def hc_post(
    u: Tensor, h: Tensor, post: Tensor, comb: Tensor, *, backend: str | None = None
) -> Tensor:
    """Expand a sublayer's output into the streams: h'_j = post_j u + sum_i comb_ij h_i.

    The sum is over comb's first index (comb transposed times h).

    Args:
        u: [T, D] output of the sublayer, h's dtype.
        h: [T, N, D] the streams that hc_pre collapsed.
        post: [T, N] float32 or float64, from hc_pre.
        comb: [T, N, N] like post, from hc_pre.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        [T, N, D] in h's dtype, rounded once.

    Raises:
        TypeError: a dtype differs from the above.
        ValueError: a shape differs from the above.
    """
    check(
        "hc_post",
        h=(h, "T N D", FLOATS),
        u=(u, "T D", h.dtype),
        post=(post, "T N", FLOAT32_UP),
        comb=(comb, "T N N", post.dtype),
    )


def _coefficients_like(h: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
    tokens, n, _ = h.shape
    wide = wide_dtype(h.dtype)
    return (
        h.new_empty((tokens, n), dtype=wide),
        h.new_empty((tokens, n), dtype=wide),
        h.new_empty((tokens, n, n), dtype=wide),
    )


@operation(outputs=_coefficients_like)
def hc_gates(
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    iters: int,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gates of a site, without collapsing the streams: pre, post and comb of ``hc_pre``.

    For models whose sublayers read the streams through the gates of the site before.

    Args:
        h: [T, N, D] any float dtype, as in hc_pre.
        fn: [(2 + N) N, N D] float32 (float64 allowed), rows pre, post, comb.
        base: [(2 + N) N] like fn.
        scale: [3] like fn.
        norm_eps: added to the mean square of the flattened streams.
        hc_eps: as in hc_pre.
        iters: as in hc_pre.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        pre [T, N], post [T, N] and comb [T, N, N] in float32 (float64 if h is).

    Raises:
        TypeError: a dtype differs from the above.
        ValueError: a shape differs from the above, or iters < 1.

    Source: DeepSeek-V4.1 reference, inference/model.py.
    """
    _check_gates(
        "hc_gates",
        {
            "h": (h, "T N D", FLOATS),
            "fn": (fn, "G F", FLOAT32_UP),
            "base": (base, "G", FLOAT32_UP),
            "scale": (scale, "3", FLOAT32_UP),
        },
        iters,
    )


def _head_like(h: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
    return (h.new_empty((h.shape[0], h.shape[2])),)


@operation(outputs=_head_like)
def hc_head(
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    backend: str | None = None,
) -> Tensor:
    """Collapse the streams after the last layer: y = sum_i pre_i h_i.

    pre = sigmoid(m * scale + base) + hc_eps with m as in ``hc_pre``.

    Args:
        h: [T, N, D] any float dtype.
        fn: [N, N D] float32 (float64 allowed).
        base: [N] like fn.
        scale: [1] like fn.
        norm_eps: added to the mean square of the flattened streams.
        hc_eps: added to pre.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        [T, D] in h's dtype, rounded once.

    Raises:
        TypeError: a dtype differs from the above.
        ValueError: a shape differs from the above.
    """
    n, d = (h.shape[1], h.shape[2]) if h.ndim == 3 else (0, 0)
    check(
        "hc_head",
        dims={"F": n * d},
        h=(h, "T N D", FLOATS),
        fn=(fn, "N F", FLOAT32_UP),
        base=(base, "N", FLOAT32_UP),
        scale=(scale, "1", FLOAT32_UP),
    )


@operation(mutates=("codes", "code_scales"), outputs=_head_like)
def hc_collapse_norm(
    h: Tensor,
    pre: Tensor,
    norm_weight: Tensor | None,
    *,
    norm_eps: float,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Collapse the streams with given gates, and normalise: RMSNorm(sum_i pre_i h_i).

    Args:
        h: [T, N, D] any float dtype.
        pre: [T, N] float32 or float64, from ``hc_gates``.
        norm_weight: [D] any float dtype, or None for the sum as it is.
        norm_eps: added to the mean square of the sum.
        codes: as in hc_pre, of the result.
        code_scales: likewise.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        [T, D] in h's dtype; the sum is rounded to it once, and so is the result.

    Raises:
        TypeError: a dtype differs from the above.
        ValueError: a shape differs from the above.

    Source: DeepSeek-V4.1 reference, inference/model.py.
    """
    check(
        "hc_collapse_norm",
        h=(h, "T N D", FLOATS),
        pre=(pre, "T N", FLOAT32_UP),
        norm_weight=(norm_weight, "D", FLOATS),
    )
    check_codes("hc_collapse_norm", h[:, 0], codes, code_scales)


def _fused_like(u: Tensor, h: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
    return (*_stream_like(u, h, u, u), *_gates_like(h, u))


@operation(mutates=("codes", "code_scales"), outputs=_fused_like)
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
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Leave one site and enter the next: hc_post, then hc_pre and the sublayer's RMSNorm.

    Rounds where the separate operations round: h' once, y once, the normed y once.

    Args:
        u: [T, D] output of the sublayer of the site that is left.
        h: [T, N, D] streams before that sublayer, as in hc_pre.
        post: [T, N] gates of that site.
        comb: [T, N, N] gates of that site.
        fn: [(2 + N) N, N D] weights of the site that is entered, as in hc_pre.
        base: [(2 + N) N] likewise.
        scale: [3] likewise.
        norm_weight: [D] any float dtype, weight of the RMSNorm before the next sublayer.
        norm_eps: of both the stream norm and that RMSNorm.
        hc_eps: as in hc_pre.
        iters: as in hc_pre.
        codes: as in hc_pre, of the normed y.
        code_scales: likewise.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        h' [T, N, D] and RMSNorm(y) [T, D] in h's dtype, post' [T, N], comb' [T, N, N].

    Raises:
        TypeError: a dtype differs from the above.
        ValueError: a shape differs from the above, or iters < 1.
    """
    _check_gates(
        "hc_post_pre_norm",
        {
            "h": (h, "T N D", FLOATS),
            "u": (u, "T D", h.dtype),
            "post": (post, "T N", FLOAT32_UP),
            "comb": (comb, "T N N", post.dtype),
            "fn": (fn, "G F", FLOAT32_UP),
            "base": (base, "G", FLOAT32_UP),
            "scale": (scale, "3", FLOAT32_UP),
            "norm_weight": (norm_weight, "D", FLOATS),
        },
        iters,
    )
    check_codes("hc_post_pre_norm", u, codes, code_scales)


_FAMILY = "anymla.ops.hyper_connection"
for _operation in (hc_pre, hc_post, hc_head, hc_post_pre_norm, hc_gates, hc_collapse_norm):
    _operation.register_lazy("reference", f"{_FAMILY}.reference")
    _operation.register_lazy("torch", f"{_FAMILY}.torch_streams")
for _operation, _supports in (
    (hc_pre, numba_site_support),
    (hc_head, numba_site_support),
    (hc_post, numba_post_support),
    (hc_post_pre_norm, numba_both_support),
):
    _operation.register_lazy(
        "numba",
        f"{_FAMILY}.numba_streams",
        supports=_supports,
        automatic=has_numba(),
        by_kind=True,
    )
_TRITON = f"{_FAMILY}.triton_"
for _operation in (hc_pre, hc_head, hc_post_pre_norm):
    _operation.register_lazy("triton", f"{_TRITON}launch", supports=float32_support)
hc_post.register_lazy("triton", f"{_TRITON}expand", supports=float32_support)
for _operation in (hc_gates, hc_collapse_norm):
    _operation.register_lazy("triton", f"{_TRITON}delayed", supports=float32_support)

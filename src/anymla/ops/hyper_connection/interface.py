"""Contracts of the hyper-connection operations.

The residual of a DeepSeek-V4 model is a state h of N streams (hc_mult, 4). Around each sublayer F
(attention or MoE), a site computes three gates from the state, collapses the streams to one, and
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
from anymla.ops.device import float32_support
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
        h: residual streams, [T, N, D] any float dtype; any token and stream strides, so equal
            streams can share memory.
        fn: weight of the gates' mixes, [(2 + N) N, N D] float32 (float64 allowed), rows pre, post,
            comb.
        base: offsets of the gates, [(2 + N) N] of fn's dtype.
        scale: factors of the mixes for pre, post and comb, [3] of fn's dtype.
        norm_eps: number added to the mean square of f, and to that of y.
        hc_eps: number added to pre, to the softmax and to every sum of the Sinkhorn iteration.
        iters: number of Sinkhorn iterations, at least 1 (20 in the released models).
        norm_weight: weight of the sublayer's RMSNorm, [D] any float dtype; None to return y itself.
        codes: buffer for the returned y quantised to FP8 (see ``formats.quantized_rows``), or None.
        code_scales: buffer for the scales of ``codes``, given if and only if ``codes`` is.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        y or RMSNorm(y) [T, D] in h's dtype, each rounded once; post [T, N] and comb [T, N, N] in
        float32 (float64 if h is).

    Raises:
        TypeError: if an argument has another dtype than above.
        ValueError: if an argument has another shape than above, or iters < 1.
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

    The sum runs over comb's first index (comb transposed times h).

    Args:
        u: output of the sublayer, [T, D] of h's dtype.
        h: streams that hc_pre collapsed, [T, N, D] any float dtype.
        post: gates from hc_pre, [T, N] float32 or float64.
        comb: mixing matrices from hc_pre, [T, N, N] of post's dtype.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        New streams, [T, N, D] in h's dtype, rounded once.

    Raises:
        TypeError: if an argument has another dtype than above.
        ValueError: if an argument has another shape than above.
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
    """Compute a site's gates pre, post and comb as ``hc_pre`` does, without collapsing the streams.

    For models whose sublayers read the streams through the gates of the site before.

    Args:
        h: residual streams as in hc_pre, [T, N, D] any float dtype.
        fn: weight of the gates' mixes, [(2 + N) N, N D] float32 (float64 allowed), rows pre, post,
            comb.
        base: offsets of the gates, [(2 + N) N] of fn's dtype.
        scale: factors of the mixes for pre, post and comb, [3] of fn's dtype.
        norm_eps: number added to the mean square of the flattened streams.
        hc_eps: number added to pre, to the softmax and to every Sinkhorn sum.
        iters: number of Sinkhorn iterations, at least 1.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Gates pre [T, N], post [T, N] and comb [T, N, N] in float32 (float64 if h is).

    Raises:
        TypeError: if an argument has another dtype than above.
        ValueError: if an argument has another shape than above, or iters < 1.

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
        h: residual streams after the last layer, [T, N, D] any float dtype.
        fn: weight of the gates' mixes, [N, N D] float32 (float64 allowed).
        base: offsets of the gates, [N] of fn's dtype.
        scale: factor of the mixes, [1] of fn's dtype.
        norm_eps: number added to the mean square of the flattened streams.
        hc_eps: number added to the gates pre.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Collapsed streams y, [T, D] in h's dtype, rounded once.

    Raises:
        TypeError: if an argument has another dtype than above.
        ValueError: if an argument has another shape than above.
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
        h: residual streams to collapse, [T, N, D] any float dtype.
        pre: gates from ``hc_gates``, [T, N] float32 or float64.
        norm_weight: weight of the RMSNorm, [D] any float dtype; None to return the sum itself.
        norm_eps: number added to the mean square of the sum.
        codes: buffer for the result quantised to FP8 (see ``formats.quantized_rows``), or None.
        code_scales: buffer for the scales of ``codes``, given if and only if ``codes`` is.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Normalised sum [T, D] in h's dtype; the sum is rounded to it once, and so is the result.

    Raises:
        TypeError: if an argument has another dtype than above.
        ValueError: if an argument has another shape than above.

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

    Rounds where the separate operations do: h' once, y once, the normed y once.

    Args:
        u: output of the sublayer of the site that is left, [T, D] of h's dtype.
        h: streams before that sublayer, [T, N, D] as in hc_pre.
        post: gates post of the site that is left, [T, N].
        comb: mixing matrices of the site that is left, [T, N, N].
        fn: weight of the entered site's mixes, [(2 + N) N, N D] as in hc_pre.
        base: offsets of the entered site's gates, [(2 + N) N] of fn's dtype.
        scale: factors of the entered site's mixes, [3] of fn's dtype.
        norm_weight: weight of the RMSNorm before the next sublayer, [D] any float dtype.
        norm_eps: number added to the mean squares of the stream norm and of that RMSNorm.
        hc_eps: number added to pre, to the softmax and to every Sinkhorn sum.
        iters: number of Sinkhorn iterations, at least 1.
        codes: buffer for the normed y quantised to FP8 (see ``formats.quantized_rows``), or None.
        code_scales: buffer for the scales of ``codes``, given if and only if ``codes`` is.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        New streams h' [T, N, D] and RMSNorm(y) [T, D] in h's dtype, post' [T, N], comb' [T, N, N].

    Raises:
        TypeError: if an argument has another dtype than above.
        ValueError: if an argument has another shape than above, or iters < 1.
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


def _pre_gradients(
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *_: object,
    norm_weight: Tensor | None = None,
    **__: object,
) -> tuple[Tensor, ...]:
    norm = fn.new_empty(0) if norm_weight is None else torch.empty_like(norm_weight)
    dh = torch.empty_like(h, memory_format=torch.contiguous_format)
    return dh, *(torch.empty_like(x) for x in (fn, base, scale)), norm


@operation(outputs=_pre_gradients)
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
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of ``hc_pre``, ``hc_gates`` or ``hc_head``.

    The gates are computed again, and the gradient goes back through every step of the Sinkhorn
    iteration. It always has the same bits in every run.

    Args:
        h: residual streams as for ``hc_pre``, [T, N, D] any float dtype.
        fn: weight of the gates' mixes as for ``hc_pre``, [(2 + N) N, N D] float32 or float64; for
            ``hc_head`` [N, N D].
        base: offsets of the gates, [(2 + N) N], or [N], of fn's dtype.
        scale: factors of the mixes, [3], or [1], of fn's dtype.
        dy: gradient of the collapsed streams, [T, D] of h's dtype; None for ``hc_gates``.
        dpre: gradient of the gates pre, [T, N] float32 (float64 if h is); None if nothing but y
            depends on them.
        dpost: gradient of post, [T, N] of dpre's dtype; None for ``hc_head``.
        dcomb: gradient of comb, [T, N, N] of dpre's dtype; None for ``hc_head``.
        norm_eps: number added to the mean square of the flattened streams, and to that of y.
        hc_eps: number added to pre, to the softmax and to every Sinkhorn sum.
        iters: number of Sinkhorn iterations, at least 1.
        norm_weight: weight of the sublayer's RMSNorm, [D] any float dtype; None without a norm.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Gradients of h, fn, base, scale and norm_weight, each of its shape and dtype; that of
        norm_weight is empty without a norm.

    Raises:
        TypeError: if an argument has another dtype than above.
        ValueError: if an argument has another shape than above, iters < 1, or a gradient is
            missing.
    """
    name = "hc_pre_backward"
    n, d = (h.shape[1], h.shape[2]) if h.ndim == 3 else (0, 0)
    gates, wide = n if scale.numel() == 1 else (2 + n) * n, wide_dtype(h.dtype)
    check(
        name,
        dims={"G": gates, "F": n * d, "S": 1 if scale.numel() == 1 else 3},
        h=(h, "T N D", FLOATS),
        fn=(fn, "G F", FLOAT32_UP),
        base=(base, "G", FLOAT32_UP),
        scale=(scale, "S", FLOAT32_UP),
        dy=(dy, "T D", h.dtype),
        dpre=(dpre, "T N", wide),
        dpost=(dpost, "T N", wide),
        dcomb=(dcomb, "T N N", wide),
        norm_weight=(norm_weight, "D", FLOATS),
    )
    require(iters >= 1, name, "iters", "at least 1", iters)
    require(dy is not None or dpre is not None, name, "dy", "given without dpre", dy)
    whole = gates != n or n == 0
    for argument, value in (("dpost", dpost), ("dcomb", dcomb)):
        require((value is not None) == whole, name, argument, "given unless fn has N rows", value)


def _post_gradients(dout: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in given)


@operation(outputs=_post_gradients)
def hc_post_backward(
    dout: Tensor,
    u: Tensor,
    h: Tensor,
    post: Tensor,
    comb: Tensor,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of ``hc_post``, with the same bits in every run.

        du = sum_j post_j g_j       dh_i = sum_j comb_ij g_j       dpost_j = <u, g_j>
        dcomb_ij = <h_i, g_j>

    Args:
        dout: gradient g of the new streams, [T, N, D] of h's dtype.
        u: output of the sublayer, [T, D] of h's dtype.
        h: streams as for ``hc_post``, [T, N, D] any float dtype.
        post: gates from ``hc_pre``, [T, N] float32 or float64.
        comb: mixing matrices from ``hc_pre``, [T, N, N] of post's dtype.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Gradients of u, h, post and comb, each of its shape and dtype.

    Raises:
        TypeError: if an argument has another dtype than above.
        ValueError: if an argument has another shape than above.
    """
    check(
        "hc_post_backward",
        h=(h, "T N D", FLOATS),
        dout=(dout, "T N D", h.dtype),
        u=(u, "T D", h.dtype),
        post=(post, "T N", FLOAT32_UP),
        comb=(comb, "T N N", post.dtype),
    )


_FAMILY = "anymla.ops.hyper_connection"
for _operation in (hc_pre, hc_post, hc_head, hc_post_pre_norm, hc_gates, hc_collapse_norm):
    _operation.register_lazy("reference", f"{_FAMILY}.reference")
    _operation.register_lazy("torch", f"{_FAMILY}.torch_streams")
_TRITON = f"{_FAMILY}.triton_"
for _operation in (hc_pre, hc_head, hc_post_pre_norm):
    _operation.register_lazy("triton", f"{_TRITON}launch", supports=float32_support)
hc_post.register_lazy("triton", f"{_TRITON}expand", supports=float32_support)
for _operation in (hc_gates, hc_collapse_norm):
    _operation.register_lazy("triton", f"{_TRITON}delayed", supports=float32_support)


for _gradient in (hc_pre_backward, hc_post_backward):
    _gradient.register_lazy("reference", f"{_FAMILY}.reference")
    _gradient.register_lazy("torch", f"{_FAMILY}.torch_backward")
    _gradient.register_lazy("triton", f"{_TRITON}backward", supports=float32_support)

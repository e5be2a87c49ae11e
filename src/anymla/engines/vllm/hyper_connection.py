"""vLLM's hyper-connection (mHC) functions and layers on anymla's operations.

The functions have vLLM's parameters; shapes are [.., N, D] for streams, [.., D] for a sublayer's
input and output, [.., N, 1] and [.., N, N] for the gates.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.layers.mhc import HCHeadOp, MHCFusedPostPreOp, MHCPostOp, MHCPreOp

from anymla.engines.vllm import codes
from anymla.formats.quantized_rows import QuantizedRows
from anymla.layers.codes import as_kwargs
from anymla.layers.hyper_connection import HyperConnectionOptions, collapsed
from anymla.ops.hyper_connection import (
    hc_collapse_norm,
    hc_gates,
    hc_head,
    hc_post,
    hc_post_pre_norm,
    hc_pre,
)


def pre(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gates, and collapse the streams to a sublayer's input, normed given a weight."""
    _check_numbers(rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, norm_weight, norm_eps)
    flat = residual.flatten(0, -3)
    rows = codes.allocate(fn, flat)
    y, gate, comb = hc_pre(
        flat,
        fn,
        hc_base,
        hc_scale,
        norm_eps=rms_eps,
        hc_eps=hc_pre_eps,
        iters=sinkhorn_repeat,
        norm_weight=norm_weight,
        backend=None,
        **as_kwargs(rows),
    )
    return _like_vllm(residual, y, gate, comb, rows)


def _like_vllm(
    residual: Tensor, y: Tensor, gate: Tensor, comb: Tensor, rows: QuantizedRows | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gates and a sublayer's input in vLLM's shapes and order; attach the quantised rows."""
    outer = residual.shape[:-2]
    x = codes.attach(y.view(*outer, -1), rows)
    return gate.view(*outer, -1, 1), comb.view(*outer, *comb.shape[1:]), x


def pre_broadcast(
    residual: Tensor, fn: Tensor, *args: Any, fn_broadcast: Any = None, **kwargs: Any
) -> tuple[Tensor, ...]:
    """Run ``pre`` for the first layer, whose streams all equal the embedding [T, D]."""
    streams = fn.shape[1] // residual.shape[-1]
    residual = residual.unsqueeze(-2).repeat_interleave(streams, dim=-2)
    return (residual, *pre(residual, fn, *args, **kwargs))


def post(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor) -> Tensor:
    """Return the streams after a sublayer."""
    streams, width = residual.shape[-2:]
    flat = residual.reshape(-1, streams, width)
    gates = post_layer_mix.reshape(-1, streams), comb_res_mix.reshape(-1, streams, streams)
    return hc_post(x.reshape(-1, width), flat, *gates).view(residual.shape)


def post_pre(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    tile_n: int = 1,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
) -> tuple[Tensor, ...]:
    """Run ``post``, then ``pre`` of the next sublayer; one operation if that has a norm."""
    _check_numbers(rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, norm_weight, norm_eps)
    if norm_weight is None:
        numbers = rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat
        residual = post(x, residual, post_layer_mix, comb_res_mix)
        return (residual, *pre(residual, fn, hc_scale, hc_base, *numbers))
    streams, width = residual.shape[-2:]
    flat = x.reshape(-1, width)
    rows = codes.allocate(fn, flat)
    h, y, gate, comb = hc_post_pre_norm(
        flat,
        residual.reshape(-1, streams, width),
        post_layer_mix.reshape(-1, streams),
        comb_res_mix.reshape(-1, streams, streams),
        fn,
        hc_base,
        hc_scale,
        norm_weight,
        norm_eps=rms_eps,
        hc_eps=hc_pre_eps,
        iters=sinkhorn_repeat,
        backend=None,
        **as_kwargs(rows),
    )
    return (h.view(residual.shape), *_like_vllm(residual, y, gate, comb, rows))


def _check_numbers(
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    norm_weight: Tensor | None,
    norm_eps: float,
) -> None:
    """Check that the epsilons of a kind agree and the factor is 2, as the operations need."""
    assert hc_pre_eps == hc_sinkhorn_eps
    assert hc_post_mult_value == 2.0
    assert norm_weight is None or norm_eps == rms_eps


def head(
    hidden_states: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_norm_eps: float,
    hc_eps: float,
) -> Tensor:
    """Collapse the streams after the last layer."""
    flat = hidden_states.flatten(0, -3)
    y = hc_head(flat, hc_fn, hc_base, hc_scale, norm_eps=rms_norm_eps, hc_eps=hc_eps)
    return y.view(*hidden_states.shape[:-2], -1)


def pre_delayed(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    pre_mix: Tensor | None = None,
    x: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gates of a V4.1 site, and its input through the gates of the site before.

    The first site's ``fn`` is whole here (``v41_model``), so the embedding ``x``, which all
    streams equal, is not needed.

    Returns:
        The weights that return the output to the streams, and mix the streams; the normed input;
        the gates through which the next site reads.
    """
    _check_numbers(rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, norm_weight, norm_eps)
    pre, gate, comb = hc_gates(
        residual,
        fn,
        hc_base,
        hc_scale,
        norm_eps=rms_eps,
        hc_eps=hc_pre_eps,
        iters=sinkhorn_repeat,
    )
    options = HyperConnectionOptions(rms_eps, hc_pre_eps, sinkhorn_repeat, delayed=True)
    return gate.unsqueeze(-1), comb, collapsed(residual, pre_mix, norm_weight, options, None), pre


def shifted_post_pre(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    *site: Any,
    capture_aux: bool = False,
    stream: Any = None,
    reduce_results: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    """Run ``post``, then ``pre_delayed`` of the next sublayer; return the mean if requested."""
    assert isinstance(x, Tensor)  # no sum is left to the all-reduce of a later kernel
    assert not reduce_results
    assert stream is None
    residual = post(x, residual, post_layer_mix, comb_res_mix)
    aux = residual.mean(dim=1) if capture_aux else residual.new_empty(0, residual.shape[-1])
    return (residual, *pre_delayed(residual, *site, **kwargs), aux)


def collapse(x: Tensor, pre_mix: Tensor) -> Tensor:
    """Read streams [T, N, D] through the last site's gates."""
    y: Tensor = hc_collapse_norm(x, pre_mix, None, norm_eps=0.0)
    return y


# Functions that V4.1's model calls.
V41_FUNCTIONS = {
    "mhc_pre_delayed_tilelang": pre_delayed,
    "mhc_shifted_post_pre": shifted_post_pre,
    "mhc_post_tilelang": post,
    "hc_collapse_triton": collapse,
}
FUNCTIONS = {
    "mhc_pre_tilelang": pre,
    "mhc_pre_broadcast_tilelang": pre_broadcast,
    "mhc_post_tilelang": post,
    "mhc_fused_post_pre_tilelang": post_pre,
    "hc_head_fused_kernel_tilelang": head,
}
_PAIRS = (MHCPreOp, pre), (MHCPostOp, post), (MHCFusedPostPreOp, post_pre), (HCHeadOp, head)
LAYERS = {
    base.__name__: type(f"Anymla{base.__name__}", (base,), {"forward": staticmethod(function)})
    for base, function in _PAIRS
}

"""Delayed sites in Triton: the gates of streams, and a collapse with gates that are known.

    gates           a CTA for each token, or TOGETHER tokens: partial mixes -> pre, post, comb
    collapse_known  a CTA for each token: y = sum_i pre_i h_i, with an RMSNorm after it

The two are independent, since a site reads the streams through the gates of the previous site.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.fp8_block import ACTIVATION_AMAX_FLOOR
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch, cdiv
from anymla.ops.device import target_of
from anymla.ops.hyper_connection.config import (
    MANY_TOKENS,
    TOGETHER_MANY,
    collapse_columns,
    collapse_lanes,
    takes_many_tokens,
)
from anymla.ops.hyper_connection.triton_collapse import (
    Collapsed,
    finish_gates,
    load_channels,
    load_norm_weight,
    store_collapsed,
)
from anymla.ops.hyper_connection.triton_gates import (
    PartialMixes,
    Site,
    load_columns,
    placed,
)
from anymla.ops.hyper_connection.triton_mix import launch_mix
from anymla.ops.hyper_connection.triton_mix_many_tokens import launch_many
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch


@triton.jit(do_not_specialize=["tokens", "iters", "partial_token", "partial_slice", "partial_mix"])
def gates_kernel(
    partial,
    base,
    scale,
    pre,
    post,
    comb,
    tokens,
    norm_eps,
    hc_eps,
    iters,
    partial_token,
    partial_slice,
    partial_mix,
    N: tl.constexpr,
    D: tl.constexpr,
    MIXES: tl.constexpr,
    P: tl.constexpr,
    SLICES: tl.constexpr,
    LANES: tl.constexpr,
    TOGETHER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the gates of a token, or of TOGETHER tokens side by side."""
    finish_gates(
        PartialMixes(partial, partial_token, partial_slice, partial_mix),
        Site(base, scale, norm_eps, hc_eps), pre, post, comb, tokens, iters,
        N, D, MIXES, P, SLICES, LANES, TOGETHER, False, PDL,
    )  # fmt: skip


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
    """Backend of ``interface.hc_gates`` in Triton; see its contract."""
    tokens, n, _ = h.shape
    pre = torch.empty((tokens, n), dtype=torch.float32, device=h.device)
    post = torch.empty_like(pre)
    comb = torch.empty((tokens, n, n), dtype=torch.float32, device=h.device)
    if not h.numel():
        return pre, post, comb
    h = placed(h)
    partial = launch_many(h, fn) if takes_many_tokens(h) else launch_mix(h, fn)
    # With PDL, tensors that are read before the wait must not be copies just being made.
    pdl = base.is_contiguous() and scale.is_contiguous()
    numbers = norm_eps, hc_eps, iters, pdl
    launch = _gates(tuple(h.shape), (partial.shape, partial.stride()), numbers, h.device)
    launch(partial, base.contiguous(), scale.contiguous(), pre, post, comb)
    return pre, post, comb


@functools.lru_cache(LAUNCHES)
def _gates(
    shape: tuple[int, ...],
    partial: tuple[tuple[int, ...], tuple[int, ...]],
    numbers: tuple[float, float, int, bool],
    device: torch.device,
) -> PreparedLaunch:
    """Prepare a launch for a shape of streams, and shape and strides of partial mixes."""
    tokens, n, d = shape
    (_, slices, width), strides = partial
    norm_eps, hc_eps, iters, pdl = numbers
    many = tokens >= MANY_TOKENS
    together = TOGETHER_MANY if many else 1
    return PreparedLaunch(
        gates_kernel,
        (cdiv(tokens, together),),
        tokens,
        norm_eps,
        hc_eps,
        iters,
        *strides,
        N=n,
        D=d,
        MIXES=(2 + n) * n,
        P=width,
        SLICES=slices,
        LANES=collapse_lanes(slices, many),
        TOGETHER=together,
        num_warps=4,
        **(pdl_launch(device) if pdl else {"PDL": False}),
    )


@triton.jit(do_not_specialize=["row_stride", "block_stride"])
def collapse_known_kernel(
    h,
    pre,
    norm_weight,
    y,
    codes,
    code_scales,
    norm_eps,
    token_stride,
    stream_stride,
    row_stride,
    block_stride,
    N: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    FLOOR: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute a token's y, normed if there is a norm_weight."""
    row = tl.program_id(0).to(tl.int64)
    weight = norm_weight
    if norm_weight is not None:
        weight = load_norm_weight(norm_weight, 0, D, COLUMNS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    h += row * token_stride
    loaded = None
    if COLUMNS >= D:
        loaded = load_channels(h, 0, stream_stride, N, D, COLUMNS)
    if codes is not None:
        codes += row * D
        code_scales += row * row_stride
    gates = load_columns(pre, row, row >= 0, N)
    store_collapsed(
        loaded, weight, h, stream_stride, gates, y + row * D,
        Collapsed(y, norm_weight, codes, code_scales, row_stride, block_stride),
        codes, code_scales, norm_eps,
        N, D, COLUMNS, FLOOR, NATIVE,
    )  # fmt: skip


def hc_collapse_norm(
    h: Tensor,
    pre: Tensor,
    norm_weight: Tensor | None,
    *,
    norm_eps: float,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
) -> Tensor:
    """Backend of ``interface.hc_collapse_norm`` in Triton; see its contract."""
    tokens, _, d = h.shape
    y = torch.empty((tokens, d), dtype=h.dtype, device=h.device)
    if not h.numel():
        return y
    h = placed(h)
    pdl = norm_weight is None or norm_weight.is_contiguous()
    weight = None if norm_weight is None else norm_weight.contiguous()
    rows = (0, 0) if code_scales is None else code_scales.stride()
    launch = _collapse_known((tuple(h.shape), h.stride(), rows), norm_eps, pdl, h.device)
    launch(h, pre.contiguous(), weight, y, codes, code_scales)
    return y


@functools.lru_cache(LAUNCHES)
def _collapse_known(
    layout: tuple[tuple[int, ...], ...], norm_eps: float, pdl: bool, device: torch.device
) -> PreparedLaunch:
    """Prepare a launch for shape and strides of streams, and strides of scales."""
    (tokens, n, d), strides, row_strides = layout
    target = target_of(device)
    columns, num_warps = collapse_columns(d, tokens >= MANY_TOKENS, target)
    return PreparedLaunch(
        collapse_known_kernel,
        (tokens,),
        norm_eps,
        *strides[:2],
        *row_strides,
        N=n,
        D=d,
        COLUMNS=columns,
        FLOOR=ACTIVATION_AMAX_FLOOR,
        NATIVE=target.native_e4m3,
        num_warps=num_warps,
        **(pdl_launch(device) if pdl else {"PDL": False}),
    )

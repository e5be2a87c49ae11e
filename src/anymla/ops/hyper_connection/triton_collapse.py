"""Collapse the streams to one, y = sum_i pre_i h_i, with the RMSNorm that may follow.

Grid: programs for the tokens' other gates, with GATES, and one for every token's y, the last token
first: what a kernel before wrote last is still cached.

    COLUMNS of each of the N streams -> y, and its codes; all of D at once up to 8192 channels

Gates are a long chain of operations on little, and y is memory: side by side they hide each other.
All threads of a program have its token's gates, and none waits for another: redundant, but few
tokens have processors to spare. Of many tokens TOGETHER are lanes of a program for their gates.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.fp8_block import ACTIVATION_AMAX_FLOOR
from anymla.ops._build import Build
from anymla.ops.device import Target, target_of
from anymla.ops.hyper_connection.mix_tile import MANY_TOKENS, SLICES, late
from anymla.ops.hyper_connection.triton_tiles import STREAM_STRIDES
from anymla.ops.hyper_connection.triton_token import collapse_token, finish_gates
from anymla.ops.pdl import pdl_launch, target_has_pdl

_WIDEST = 8192
# Slices of a token that are summed at a time, of few tokens and of many.
_FEW_LANES, _MANY_LANES = 128, 32
# Of so many tokens one program finds the gates, where there are many.
_TOGETHER = 128


def columns_of(d: int, many: bool) -> tuple[int, int]:
    """Channels of a tile and warps."""
    columns = min(_WIDEST, triton.next_power_of_2(d))
    return columns, 4 if columns <= 4096 and not many else 8


def lanes_of(slices: int, many: bool) -> int:
    """How many slices of a token are summed at a time."""
    return min(_MANY_LANES if many else _FEW_LANES, triton.next_power_of_2(slices))


@triton.jit(
    do_not_specialize=["tokens", "iters", "partial_token", "partial_slice", "partial_mix",
                       "gate_programs", "row_stride", "run_stride"]
)  # fmt: skip
def collapse_kernel(
    h,
    partial,
    base,
    scale,
    norm_weight,
    y,
    post,
    comb,
    codes,
    code_scales,
    tokens,
    gate_programs,
    norm_eps,
    hc_eps,
    iters,
    token_stride,
    stream_stride,
    partial_token,
    partial_slice,
    partial_mix,
    row_stride,
    run_stride,
    N: tl.constexpr,
    D: tl.constexpr,
    MIXES: tl.constexpr,
    P: tl.constexpr,
    SLICES: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATES: tl.constexpr,
    TOGETHER: tl.constexpr,
    FLOOR: tl.constexpr,
    NATIVE: tl.constexpr,
    LATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tokens' other gates with GATES, or a token's y, normalised if there is a norm_weight.

    With LATE, the next kernel begins when this one has ended.
    """
    if GATES and tl.program_id(0) < gate_programs:
        finish_gates(
            partial, base, scale, post, comb, tokens, norm_eps, hc_eps, iters,
            partial_token, partial_slice, partial_mix,
            N, D, MIXES, P, SLICES, LANES, TOGETHER, LATE, PDL,
        )  # fmt: skip
    else:
        collapse_token(
            h, partial, base, scale, norm_weight, y, codes, code_scales,
            norm_eps, hc_eps, token_stride, stream_stride,
            partial_token, partial_slice, partial_mix, row_stride, run_stride,
            N, D, MIXES, P, SLICES, LANES, COLUMNS, TOGETHER > 1, FLOOR, NATIVE, LATE, PDL,
        )  # fmt: skip


def launch_collapse(
    h: Tensor,
    y: Tensor,
    partial: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    mixes: int,
    norm_eps: float,
    hc_eps: float,
    norm_weight: Tensor | None = None,
    post: Tensor | None = None,
    comb: Tensor | None = None,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
    iters: int = 1,
) -> None:
    """Fill y [T, D], and what else is given, from ``placed`` h [T, N, D] and partial mixes."""
    tokens, n, d = h.shape
    many = tokens >= MANY_TOKENS
    columns, num_warps = columns_of(d, many)
    slices, target = partial.shape[1], target_of(h.device)
    together = _TOGETHER if many else 1
    gate_programs = 0 if post is None else triton.cdiv(tokens, together)
    collapse_kernel[(gate_programs + tokens,)](
        h,
        partial,
        base.contiguous(),
        scale.contiguous(),
        None if norm_weight is None else norm_weight.contiguous(),
        y,
        post,
        comb,
        codes,
        code_scales,
        tokens,
        gate_programs,
        norm_eps,
        hc_eps,
        iters,
        *h.stride()[:2],
        *partial.stride(),
        *((0, 0) if code_scales is None else code_scales.stride()),
        N=n,
        D=d,
        MIXES=mixes,
        P=partial.shape[2],
        SLICES=slices,
        LANES=lanes_of(slices, many),
        COLUMNS=columns,
        GATES=post is not None,
        TOGETHER=together,
        FLOOR=ACTIVATION_AMAX_FLOOR,
        NATIVE=target.native_e4m3,
        LATE=late(tokens, target),
        num_warps=num_warps,
        **pdl_launch(h.device, base, scale, norm_weight),
    )


def builds(target: Target) -> Iterator[Build]:
    """Flash and Pro, few and many tokens: with a norm or without, and the head."""
    for d in (4096, 7168):
        for dtype in ("bf16", "fp16", "fp32") if d == 4096 else ("bf16", "fp32"):
            for mixes, norm in ((24, False), (24, True), (4, False)):
                # How many slices there are is of no consequence for the tile.
                for width in SLICES if dtype == "bf16" else SLICES[:1]:
                    yield _build(target, d, dtype, mixes, norm, d // width)
                if target_has_pdl(target):
                    yield _build(target, d, dtype, mixes, norm, d // SLICES[0], last=True)
                if dtype == "bf16":
                    yield _build(target, d, dtype, mixes, norm, 4, many=True)
        for many, last in ((False, False), (False, True), (True, False)):
            slices = 4 if many else d // SLICES[0]
            if last and not target_has_pdl(target):
                continue
            yield _build(target, d, "bf16", 24, True, slices, many=many, coded=True, last=last)


def _build(
    target: Target,
    d: int,
    dtype: str,
    mixes: int,
    norm: bool,
    slices: int,
    *,
    many: bool = False,
    coded: bool = False,
    last: bool = False,
) -> Build:
    columns, num_warps = columns_of(d, many)
    strides = ("partial_token", "partial_slice", "partial_mix", "row_stride", "run_stride")
    numbers = {
        "norm_eps": "fp32",
        "hc_eps": "fp32",
        "iters": "i32",
        **dict.fromkeys(("tokens", "gate_programs", *STREAM_STRIDES, *strides), "i32"),
    }
    types = {"h": f"*{dtype}", "y": f"*{dtype}", **numbers}
    if norm:
        types["norm_weight"] = f"*{dtype}"
    given = ("partial", "base", "scale")
    results: tuple[str, ...] = ("post", "comb") if mixes > 4 else ()
    types |= dict.fromkeys((*given, *results), "*fp32")
    if coded:
        types |= {"codes": "*u8", "code_scales": "*fp32"}
    pointers = ("partial", "base", "scale", "norm_weight", "post", "comb")
    pointers += ("codes", "code_scales")
    sizes = {
        "N": 4,
        "D": d,
        "MIXES": mixes,
        "P": max(16, triton.next_power_of_2(mixes + 1)),
        "SLICES": slices,
        "LANES": lanes_of(slices, many),
        "COLUMNS": columns,
        "GATES": "post" in types,
        "TOGETHER": _TOGETHER if many else 1,
        "FLOOR": ACTIVATION_AMAX_FLOOR,
        "NATIVE": target.native_e4m3,
        "LATE": last,
        "PDL": target_has_pdl(target),
    }
    marks = ", norm" * norm + ", many" * many + ", codes" * coded + ", late" * last
    return Build(
        f"{dtype} D {d}, {mixes} mixes of {slices} slices{marks}",
        collapse_kernel,
        types,
        {name: None for name in pointers if name not in types} | sizes,
        num_warps=num_warps,
        divisible=STREAM_STRIDES,
        spills=4 if dtype == "fp32" else 0,
    )

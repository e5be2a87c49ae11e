"""Routed experts: pairs grouped by expert, two grouped products, one sum.

    plan      pairs (t, j) by expert, in blocks
    up        gate and up, SwiGLU, routing weight -> inner [P, I]
    down      inner -> results [P, D]
    combine   (tokens, blocks of D): results of the token's pairs in the order of its columns,
              shared

The products are those of ``triton_packed`` where they are faster, otherwise of ``triton_plain``;
``gluon_sm90_launch`` puts its own in their place.
Workspace: inner and results, and with quantised activations the codes of x and inner.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._build import Build
from anymla.ops.device import Target, target_of
from anymla.ops.moe.packed_tiles import packed_support, packed_tile
from anymla.ops.moe.triton_packed import packed_products
from anymla.ops.moe.triton_plain import plain_products
from anymla.ops.moe.triton_stack import Call
from anymla.ops.pdl import pdl_launch, target_has_pdl
from anymla.ops.streams import flush_stream_wait, has_deferred_wait, scratch

_COMBINED = 1024


@triton.jit(do_not_specialize=["offset"])
def combine_kernel(
    pairs,
    ids,
    shared,
    out,
    offset,
    experts,
    n,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK channels of one token."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < n
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        local = tl.load(ids + token * K + j).to(tl.int64) - offset
        written = tl.where((local >= 0) & (local < experts), n, 0)
        value = tl.load(pairs + (token * K + j) * n + column, column < written, other=0.0)
        total += value.to(tl.float32)
    if shared is not None:
        total += tl.load(shared + token * n + column, exists, other=0.0).to(tl.float32)
    tl.store(out + token * n + column, total.to(out.dtype.element_ty), exists)


def _multiply(call: Call, results: Tensor) -> None:
    target = target_of(call.x.device)
    if packed_support(call, target):
        tile = packed_tile(call.pairs, call.sizes, call.weight_format, call.coded, target)
        packed_products(call, results, tile)
    else:
        plain_products(call, results)


def run_experts(
    multiply: Callable[[Call, Tensor], None],
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: list[Tensor],
    w3: list[Tensor],
    w2: list[Tensor],
    s1: list[Tensor],
    s3: list[Tensor],
    s2: list[Tensor],
    *,
    weight_format: str,
    swiglu_limit: float,
    quantize_activations: bool,
    expert_offset: int = 0,
    shared: Tensor | None = None,
) -> Tensor:
    """``interface.experts`` with ``multiply`` for what every pair's expert makes of its token."""
    (tokens, d), k = x.shape, ids.shape[1]
    out = torch.empty((tokens, d), dtype=x.dtype, device=x.device)
    if not tokens:
        flush_stream_wait()
        return out
    lists = [[each.contiguous() for each in given] for given in (w1, w3, w2, s1, s3, s2)]
    call = Call(
        x.contiguous(),
        ids.contiguous(),
        weights.contiguous(),
        lists[:3],
        lists[3:],
        weight_format,
        swiglu_limit,
        quantize_activations and weight_format != "plain",
        expert_offset,
    )
    results = scratch((call.pairs, d), x.dtype, x.device)
    if call.pairs and w1:
        multiply(call, results)
    # Whether what is added last is still in the making on another CUDA stream.
    early = {"PDL": False} if has_deferred_wait() else pdl_launch(x.device, shared)
    flush_stream_wait()
    shared = None if shared is None else shared.contiguous()
    # Tokens first: only the first axis of a grid holds more than 65,535 programs.
    combine_kernel[(tokens, triton.cdiv(d, _COMBINED))](
        results,
        call.ids,
        shared,
        out,
        expert_offset,
        len(w1),
        d,
        K=k,
        BLOCK=_COMBINED,
        **early,
    )
    return out


experts = functools.partial(run_experts, _multiply)


def builds(target: Target) -> Iterator[Build]:
    """Every dtype."""
    for dtype in ("bf16", "fp16", "fp32"):
        pointers = dict.fromkeys(("pairs", "shared", "out"), f"*{dtype}")
        integers = {"offset": "i32", "experts": "i32", "n": "i32"}
        yield Build(
            dtype,
            combine_kernel,
            {**pointers, "ids": "*i32", **integers},
            {"K": 6, "BLOCK": _COMBINED, "PDL": target_has_pdl(target)},
            divisible=("n",),
        )

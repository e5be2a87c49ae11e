"""Routers: float32 scores of all experts, then the best of them, or those of a table.

Grids:

    logits    (blocks of experts, blocks of tokens, splits of D) -> partial [splits, T, E]
    select    blocks of ROWS tokens: splits added in order, K rounds of the maximum in registers
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.triton_dot import exact_dot
from anymla.ops._triton import Build, Target
from anymla.ops.early import early_launch, launches_early
from anymla.ops.moe.reference import SUM_FLOOR
from anymla.ops.workspace import scratch

# Programs of ``logits`` that are enough for a small product, and the shortest split of D.
_PROGRAMS = 256
_SHORTEST = 256
_ELEMENTS = 2048
# A few registers too many on sm_80, outside of loops.
_SPILLS = 8
_LOWEST = tl.constexpr(-(2**31))


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """Tokens, experts and channels of a product's tile; tokens of a selection."""

    rows: int
    experts: int
    channels: int
    selected: int


def config(tokens: int, experts: int, whole: bool) -> RouterConfig:
    """Tiles; ``whole`` if both operands go into matrix instructions as they are."""
    selected = max(1, min(16, _ELEMENTS // triton.next_power_of_2(experts)))
    if not whole:
        return RouterConfig(16, 32, 32, selected)
    return RouterConfig(16 if tokens <= 16 else 64, 32 if tokens <= 16 else 64, 64, selected)


@triton.jit(do_not_specialize=["tokens"])
def logits_kernel(
    x, gate, partial, tokens, experts, width, split,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile of x @ gate^T over one split of the channels."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    expert = (tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)).to(tl.int64)
    first = tl.program_id(2) * split
    total = tl.zeros((ROWS, EXPERTS), tl.float32)
    for k in range(first, tl.minimum(first + split, width), BLOCK_K):
        channel = k + tl.arange(0, BLOCK_K)
        known = (channel < width)[None, :]
        a = tl.load(
            x + (row * width)[:, None] + channel[None, :], (row < tokens)[:, None] & known, other=0
        )
        b = tl.load(
            gate + (expert * width)[:, None] + channel[None, :],
            (expert < experts)[:, None] & known,
            other=0,
        )
        total = exact_dot(a, b, total)
    at = ((tl.program_id(2).to(tl.int64) * tokens + row) * experts)[:, None] + expert[None, :]
    tl.store(partial + at, total, (row < tokens)[:, None] & (expert < experts)[None, :])


@triton.jit
def _score(logit):
    """sqrt(log(1 + exp(logit))), exact to the last bits where the exponential is small."""
    power = tl.exp(-tl.abs(logit))
    above = 1.0 + power
    # log(above) is as wrong as above's rounding; the second factor takes that back.
    log1p = tl.where(above == 1.0, power, tl.log(above) * (power / (above - 1.0)))
    return tl.sqrt(tl.maximum(logit, 0.0) + log1p)


@triton.jit
def _ordered(score):
    """int32 that sort as float32 scores do, NaN above all."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit(do_not_specialize=["tokens", "vocabulary", "splits"])
def route_kernel(
    partial,
    bias,
    is_valid,
    token_ids,
    table,
    ids,
    weights,
    tokens,
    experts,
    vocabulary,
    splits,
    factor,
    K: tl.constexpr,
    FLOOR: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """ROWS tokens: their experts and weights; by the ``bias``, or else by the ``table``."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = row < tokens
    expert = tl.arange(0, EXPERTS)
    mask = inside[:, None] & (expert < experts)[None, :]
    logit = tl.zeros((ROWS, EXPERTS), tl.float32)
    here = partial + (row * experts)[:, None] + expert[None, :]
    for _ in range(splits):
        logit += tl.load(here, mask, other=0.0)
        here += tokens.to(tl.int64) * experts
    score = _score(logit)
    known = inside
    if bias is not None:
        offset = tl.load(bias + expert, expert < experts, other=0.0)
        key = _ordered(score + offset[None, :])
        key = tl.where((expert < experts)[None, :], key, _LOWEST)
        if is_valid is not None:
            known = inside & (tl.load(is_valid + row, inside, other=0) != 0)
    else:
        token = tl.load(token_ids + row, inside, other=-1)
        known = inside & (token >= 0) & (token < vocabulary)
    chosen = ()
    scores = ()
    total = tl.zeros((ROWS,), tl.float32)
    for j in tl.static_range(K):
        if bias is not None:
            best = tl.argmax(key, 1, tie_break_left=True)
            key = tl.where(expert[None, :] == best[:, None], _LOWEST, key)
        else:
            best = tl.load(table + token * K + j, known, other=0).to(tl.int32)
        mine = tl.sum(tl.where(expert[None, :] == best[:, None], score, 0.0), 1)
        chosen += (best,)
        scores += (mine,)
        total += mine
    for j in tl.static_range(K):
        weight = scores[j] / (total + FLOOR) * factor
        tl.store(ids + row * K + j, tl.where(known, chosen[j], -1), inside)
        tl.store(weights + row * K + j, tl.where(known, weight, 0.0), inside)


def _whole(x: torch.dtype, gate: torch.dtype) -> bool:
    return x == gate and x != torch.float32


def _route(
    x: Tensor,
    gate: Tensor,
    k: int,
    scale: float,
    *,
    bias: Tensor | None = None,
    is_valid: Tensor | None = None,
    token_ids: Tensor | None = None,
    table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    (tokens, width), experts = x.shape, gate.shape[0]
    ids = torch.empty((tokens, k), dtype=torch.int32, device=x.device)
    weights = torch.empty((tokens, k), dtype=torch.float32, device=x.device)
    if not ids.numel():
        return ids, weights
    chosen = config(tokens, experts, _whole(x.dtype, gate.dtype))
    grid = (triton.cdiv(experts, chosen.experts), triton.cdiv(tokens, chosen.rows))
    splits = max(1, min(_PROGRAMS // (grid[0] * grid[1]), width // _SHORTEST))
    split = triton.cdiv(triton.cdiv(width, splits), chosen.channels) * chosen.channels
    splits = triton.cdiv(width, split)
    early = early_launch(x.device)
    partial = scratch((splits, tokens, experts), torch.float32, x.device)
    logits_kernel[(*grid, splits)](
        x.contiguous(),
        gate.contiguous(),
        partial,
        tokens,
        experts,
        width,
        split,
        ROWS=chosen.rows,
        EXPERTS=chosen.experts,
        BLOCK_K=chosen.channels,
        **early,
    )
    route_kernel[(triton.cdiv(tokens, chosen.selected),)](
        partial,
        bias,
        is_valid,
        token_ids,
        table,
        ids,
        weights,
        tokens,
        experts,
        0 if table is None else table.shape[0],
        splits,
        float(scale),
        K=k,
        FLOOR=SUM_FLOOR,
        ROWS=chosen.selected,
        EXPERTS=triton.next_power_of_2(experts),
        **early,
    )
    return ids, weights


def route_hash(
    x: Tensor, gate: Tensor, token_ids: Tensor, tid2eid: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """See ``interface.route_hash``."""
    table, k = tid2eid.contiguous(), tid2eid.shape[1]
    return _route(x, gate, k, scale, token_ids=token_ids.contiguous(), table=table)


def route_biased(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    *,
    k: int,
    scale: float,
    is_valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``interface.route_biased``."""
    if is_valid is not None:
        is_valid = is_valid.contiguous().view(torch.uint8)
    return _route(x, gate, k, scale, bias=bias.contiguous(), is_valid=is_valid)


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def builds(target: Target) -> Iterator[Build]:
    """Flash and Pro: 256 and 384 experts, few and many tokens, both ways to select."""
    for dtype, gate in (("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "bf16"), ("fp32", "fp32")):
        for tokens in (1, 64):
            whole = _whole(_DTYPES[dtype], _DTYPES[gate])
            chosen = config(tokens, 256, whole)
            types = {"x": f"*{dtype}", "gate": f"*{gate}", "partial": "*fp32"}
            integers = dict.fromkeys(("tokens", "experts", "width", "split"), "i32")
            yield Build(
                f"{dtype} x {gate}, {chosen.rows} tokens",
                logits_kernel,
                types | integers,
                {
                    "ROWS": chosen.rows,
                    "EXPERTS": chosen.experts,
                    "BLOCK_K": chosen.channels,
                    "EARLY": launches_early(target),
                },
                divisible=("width", "split", "experts"),
                matrix=whole,
                spills=_SPILLS,
            )
    for experts in (256, 384):
        for by_table, padded in ((False, False), (False, True), (True, False)):
            yield _selection(target, experts, by_table, padded)


def _selection(target: Target, experts: int, by_table: bool, padded: bool) -> Build:
    integers = dict.fromkeys(("tokens", "experts", "vocabulary", "splits"), "i32")
    types = {"partial": "*fp32", "ids": "*i32", "weights": "*fp32", "factor": "fp32", **integers}
    if by_table:
        types |= {"token_ids": "*i64", "table": "*i64"}
    else:
        types |= {"bias": "*fp32"} | ({"is_valid": "*u8"} if padded else {})
    pointers = ("bias", "is_valid", "token_ids", "table")
    return Build(
        f"{experts} experts by {'table' if by_table else 'bias'}{', padded' if padded else ''}",
        route_kernel,
        types,
        {
            **{name: None for name in pointers if name not in types},
            "K": 6,
            "FLOOR": SUM_FLOOR,
            "ROWS": config(1, experts, True).selected,
            "EXPERTS": triton.next_power_of_2(experts),
            "EARLY": launches_early(target),
        },
        spills=_SPILLS,
    )

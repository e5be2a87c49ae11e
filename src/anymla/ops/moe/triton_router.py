"""Routers in Triton: float32 scores of all experts, then each token's top-k or table experts.

Grids:

    logits    (blocks of experts, blocks of tokens, splits of D) -> partial sums [splits, T, E]
    route     blocks of TOKENS tokens: add the splits in order, then take the maximum K times in
              registers
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.triton_dot import exact_dot
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch, cdiv
from anymla.ops.device import target_of
from anymla.ops.moe.config import choose_router_config
from anymla.ops.moe.reference import SUM_FLOOR
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch
from anymla.ops.streams import scratch

_LOWEST = tl.constexpr(-(2**31))


@triton.jit(do_not_specialize=["tokens"])
def logits_kernel(
    x, gate, partial, tokens, experts, width, split,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute a tile of x @ gate^T over one split of the channels."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    expert = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    first = tl.program_id(2) * split
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
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
        total = exact_dot(a, b, total, WIDE)
    at = ((tl.program_id(2).to(tl.int64) * tokens + row) * experts)[:, None] + expert[None, :]
    tl.store(partial + at, total, (row < tokens)[:, None] & (expert < experts)[None, :])


@triton.jit
def _score(logit):
    """Compute sqrt(log(1 + exp(logit))), exact to the last bits where the exponential is small."""
    power = tl.exp(-tl.abs(logit))
    above = 1.0 + power
    # log(above) errs by the rounding of ``above``; the second factor cancels that error.
    log1p = tl.where(above == 1.0, power, tl.log(above) * (power / (above - 1.0)))
    return tl.sqrt(tl.maximum(logit, 0.0) + log1p)


@triton.jit
def _ordered(score):
    """Map float32 scores to int32 that sort in the same order, NaN above all."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _better(key, expert, score, other_key, other, other_score):
    """Choose the higher key and its expert and score; of equal keys, the lower expert."""
    first = (key > other_key) | ((key == other_key) & (expert < other))
    return (
        tl.where(first, key, other_key),
        tl.where(first, expert, other),
        tl.where(first, score, other_score),
    )


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
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    UNROLL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose experts and weights of TOKENS tokens, by the ``bias`` or else by the ``table``."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    inside = row < tokens
    expert = tl.arange(0, EXPERTS)
    mask = inside[:, None] & (expert < experts)[None, :]
    logit = tl.zeros((TOKENS, EXPERTS), tl.float32)
    here = partial + (row * experts)[:, None] + expert[None, :]
    # Load splits UNROLL at a time: for a few tokens, loading them one by one takes most of the
    # time.
    for _ in tl.range(0, splits, loop_unroll_factor=UNROLL):
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
    total = tl.zeros((TOKENS,), tl.float32)
    for j in tl.static_range(K):
        if bias is not None:
            everyone = tl.broadcast_to(expert[None, :], (TOKENS, EXPERTS))
            _, best, mine = tl.reduce((key, everyone, score), 1, _better)
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


def _same_dtype(x: torch.dtype, gate: torch.dtype) -> bool:
    """Return True if matrix instructions take both operands of the scores unconverted."""
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
    sizes = tokens, experts, width, k, 0 if table is None else table.shape[0]
    logits, route, splits = _routing(sizes, _same_dtype(x.dtype, gate.dtype), scale, x.device)
    partial = scratch((splits, tokens, experts), torch.float32, x.device)
    logits(x.contiguous(), gate.contiguous(), partial)
    route(partial, bias, is_valid, token_ids, table, ids, weights)
    return ids, weights


@functools.lru_cache(LAUNCHES)
def _routing(
    sizes: tuple[int, int, int, int, int], same_dtype: bool, scale: float, device: torch.device
) -> tuple[PreparedLaunch, PreparedLaunch, int]:
    """Prepare both launches for (tokens, experts, channels, K, table rows); return also splits."""
    tokens, experts, width, k, listed = sizes
    target = target_of(device)
    config = choose_router_config(tokens, experts, width, same_dtype, target)
    pdl = pdl_launch(device)
    tiles = cdiv(experts, config.block_n), cdiv(tokens, config.block_m)
    logits = PreparedLaunch(
        logits_kernel,
        (*tiles, config.splits),
        tokens,
        experts,
        width,
        config.split,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        WIDE=target.arc_a,
        num_warps=config.warps,
        **pdl,
    )
    route = PreparedLaunch(
        route_kernel,
        (cdiv(tokens, config.route_tokens),),
        tokens,
        experts,
        listed,
        config.splits,
        float(scale),
        K=k,
        FLOOR=SUM_FLOOR,
        TOKENS=config.route_tokens,
        EXPERTS=config.experts,
        UNROLL=config.unroll,
        num_warps=config.route_warps,
        **pdl,
    )
    return logits, route, config.splits


def route_hash(
    x: Tensor, gate: Tensor, token_ids: Tensor, tid2eid: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Backend of ``interface.route_hash`` in Triton; see its contract."""
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
    """Backend of ``interface.route_biased`` in Triton; see its contract."""
    if is_valid is not None:
        is_valid = is_valid.contiguous().view(torch.uint8)
    return _route(x, gate, k, scale, bias=bias.contiguous(), is_valid=is_valid)

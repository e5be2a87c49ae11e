"""The experts of every token: those that score best, or those of a table, and their weights.

Grid: blocks of ROWS tokens; splits of scores are added in order, then K rounds of the maximum in
registers.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from anymla.ops._build import Build
from anymla.ops.device import Target
from anymla.ops.moe.reference import SUM_FLOOR
from anymla.ops.pdl import target_has_pdl

# Up to here a token is a warp's, whose threads find the best by themselves.
FEW_TOKENS = 512
# Scores of a program of many tokens.
_ELEMENTS = 2048
_LOWEST = tl.constexpr(-(2**31))


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


@triton.jit
def _better(key, expert, score, other_key, other, other_score):
    """The higher key's, of equal ones the lower expert's."""
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
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    UNROLL: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS tokens: their experts and weights; by the ``bias``, or else by the ``table``."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = row < tokens
    expert = tl.arange(0, EXPERTS)
    mask = inside[:, None] & (expert < experts)[None, :]
    logit = tl.zeros((ROWS, EXPERTS), tl.float32)
    here = partial + (row * experts)[:, None] + expert[None, :]
    # Of few tokens UNROLL are asked for at once: one by one they take most of the kernel's time.
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
    total = tl.zeros((ROWS,), tl.float32)
    for j in tl.static_range(K):
        if bias is not None:
            everyone = tl.broadcast_to(expert[None, :], (ROWS, EXPERTS))
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


def sizes(tokens: int, experts: int) -> dict[str, int]:
    """Constants of ``route_kernel``, and its warps."""
    block = triton.next_power_of_2(experts)
    if tokens <= FEW_TOKENS:
        unroll = 8 if block <= 256 else 4
        return {"ROWS": 1, "EXPERTS": block, "UNROLL": unroll, "num_warps": 1}
    rows = max(1, min(16, _ELEMENTS // block))
    return {"ROWS": rows, "EXPERTS": block, "UNROLL": 1, "num_warps": 4}


def builds(target: Target) -> Iterator[Build]:
    """Flash and Pro: 256 and 384 experts, few and many tokens, both ways to select."""
    for experts in (256, 384):
        for by_table, padded in ((False, False), (False, True), (True, False)):
            yield _build(target, experts, by_table, padded, 1)
        yield _build(target, experts, False, True, FEW_TOKENS + 1)


def _build(target: Target, experts: int, by_table: bool, padded: bool, tokens: int) -> Build:
    integers = dict.fromkeys(("tokens", "experts", "vocabulary", "splits"), "i32")
    types = {"partial": "*fp32", "ids": "*i32", "weights": "*fp32", "factor": "fp32", **integers}
    if by_table:
        types |= {"token_ids": "*i64", "table": "*i64"}
    else:
        types |= {"bias": "*fp32"} | ({"is_valid": "*u8"} if padded else {})
    pointers = ("bias", "is_valid", "token_ids", "table")
    constants = sizes(tokens, experts)
    num_warps = constants.pop("num_warps")
    label = f"{experts} experts by {'table' if by_table else 'bias'}{', padded' if padded else ''}"
    return Build(
        f"{label}{', many tokens' if tokens > 1 else ''}",
        route_kernel,
        types,
        {
            **{name: None for name in pointers if name not in types},
            "K": 6,
            "FLOOR": SUM_FLOOR,
            "PDL": target_has_pdl(target),
            **constants,
        },
        num_warps=num_warps,
        divisible=("experts",),
    )

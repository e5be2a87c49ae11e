"""Routers: float32 scores of all experts, then the best of them, or those of a table.

Grids:

    logits    (blocks of experts, blocks of tokens, splits of D) -> partial [splits, T, E]
    route     see ``triton_choice``
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.triton_dot import exact_dot
from anymla.ops._build import Build
from anymla.ops.device import Target
from anymla.ops.moe.reference import SUM_FLOOR
from anymla.ops.moe.triton_choice import route_kernel, sizes
from anymla.ops.pdl import pdl_launch, target_has_pdl
from anymla.ops.streams import scratch

# Programs of ``logits`` that are enough for a small product, and the shortest split of D.
_PROGRAMS = 256
_SHORTEST = 256
# A few registers too many on sm_80, outside of loops.
_SPILLS = 8


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """Tokens, experts and channels of a product's tile."""

    rows: int
    experts: int
    channels: int


def config(tokens: int, whole: bool) -> RouterConfig:
    """Tiles; ``whole`` if both operands go into matrix instructions as they are."""
    if not whole:
        return RouterConfig(16, 32, 32)
    return RouterConfig(16, 32, 64) if tokens <= 16 else RouterConfig(64, 64, 64)


@triton.jit(do_not_specialize=["tokens"])
def logits_kernel(
    x, gate, partial, tokens, experts, width, split,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of x @ gate^T over one split of the channels."""
    if PDL:
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
    chosen = config(tokens, _whole(x.dtype, gate.dtype))
    grid = (triton.cdiv(experts, chosen.experts), triton.cdiv(tokens, chosen.rows))
    splits = max(1, min(_PROGRAMS // (grid[0] * grid[1]), width // _SHORTEST))
    split = triton.cdiv(triton.cdiv(width, splits), chosen.channels) * chosen.channels
    splits = triton.cdiv(width, split)
    early = pdl_launch(x.device)
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
    constants = sizes(tokens, experts)
    route_kernel[(triton.cdiv(tokens, constants["ROWS"]),)](
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
        **constants,
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
            chosen = config(tokens, whole)
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
                    "PDL": target_has_pdl(target),
                },
                divisible=("width", "split", "experts"),
                matrix=whole,
                spills=_SPILLS,
            )

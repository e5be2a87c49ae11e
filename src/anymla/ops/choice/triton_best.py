"""Greedy choice in Triton: each row's largest logit, its token, and the log-sum of exponentials.

    chunk_kernel    a row's chunk of CHUNK logits                       -> parts [T, chunks]
    product_kernel  all rows' chunk, with a low-rank term added         -> parts [T, chunks]
    merge_kernel    a row's parts                                       -> results [T]

The weights of a chunk's low-rank term are read once for all rows.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch, cdiv
from anymla.ops.choice.config import ChoiceConfig, choose_config
from anymla.ops.device import target_of
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch

# Largest number of a row's parts that one warp merges; more would spill.
_PARTS_OF_A_WARP = 1024
_NO_TOKEN = tl.constexpr(torch.iinfo(torch.int32).max)


@triton.jit
def largest(values, tokens, axis: tl.constexpr):
    """Return the largest value and the lowest of its tokens; a NaN is larger than all.

    Tokens are of either integer type, below the largest int32.
    """
    is_nan = values != values
    numbers = tl.where(is_nan, float("-inf"), values)
    best = tl.max(numbers, axis, keep_dims=True)
    has_nan = tl.max(is_nan.to(tl.int32), axis, keep_dims=True) > 0
    is_best = tl.where(has_nan, is_nan, numbers == best)
    token = tl.min(tl.where(is_best, tokens, _NO_TOKEN), axis, keep_dims=True)
    return tl.where(has_nan, float("nan"), best), token


@triton.jit
def log_sum_exp(values, best, axis: tl.constexpr):
    """Compute log(sum(exp(values))) from the values and the largest of them."""
    # A difference of infinities would be NaN.
    shift = tl.where(tl.abs(best) < float("inf"), best, 0.0)
    return shift + tl.log(tl.sum(tl.exp(values - shift), axis, keep_dims=True))


@triton.jit(do_not_specialize=["vocab"])
def chunk_kernel(
    logits,
    values,
    tokens,
    log_sums,
    vocab,
    row_stride,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Reduce one chunk of a row to a part; the grid is (chunks, rows)."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    given = tl.load(logits + row * row_stride + at, at < vocab, other=float("-inf"))
    given = given.to(tl.float32)
    best, token = largest(given, at, 0)
    part = row * tl.num_programs(0) + tl.program_id(0) + tl.arange(0, 1)
    tl.store(values + part, best)
    tl.store(tokens + part, token)
    tl.store(log_sums + part, log_sum_exp(given, best, 0))


@triton.jit(do_not_specialize=["rows", "vocab"])
def product_kernel(
    logits,
    x,
    weight,
    values,
    tokens,
    log_sums,
    rows,
    vocab,
    row_stride,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    K_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Reduce one chunk of ROWS rows to parts; the grid is (chunks, groups of rows).

    WIDE products are computed in float32. 16-bit weights are one tile, which is loaded before the
    rows of x are ready.
    """
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    k = tl.arange(0, K_TILE)
    here = (at < vocab)[None, :]
    there = (row < rows)[:, None]
    of_weight = weight + at.to(tl.int64)[None, :] * K + k[:, None]
    of_x = x + row[:, None] * K + k[None, :]
    if WIDE:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        term = tl.zeros((ROWS, CHUNK), tl.float32)
        for first in tl.range(0, K, K_TILE):
            inside = first + k < K
            given = tl.load(of_x + first, there & inside[None, :], other=0.0).to(tl.float32)
            factor = tl.load(of_weight + first, here & inside[:, None], other=0.0).to(tl.float32)
            term += tl.dot(given, factor, input_precision="ieee")
    else:
        factor = tl.load(of_weight, here & (k < K)[:, None], other=0.0)
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        term = tl.dot(tl.load(of_x, there & (k < K)[None, :], other=0.0), factor)
    added = logits + row.to(tl.int64)[:, None] * row_stride + at[None, :]
    total = tl.load(added, there & here, other=float("-inf")).to(tl.float32) + term
    best, token = largest(total, at[None, :], 1)
    part = row[:, None].to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(values + part, best, there)
    tl.store(tokens + part, token, there)
    tl.store(log_sums + part, log_sum_exp(total, best, 1), there)


@triton.jit
def merge_kernel(
    values,
    tokens,
    log_sums,
    best_values,
    best_tokens,
    total_log_sums,
    CHUNKS: tl.constexpr,
    CHUNKS_2: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the parts of one row."""
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS_2)
    part = row * CHUNKS + chunk
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    each = tl.load(values + part, chunk < CHUNKS, other=float("-inf"))
    of_each = tl.load(tokens + part, chunk < CHUNKS, other=_NO_TOKEN)
    sums = tl.load(log_sums + part, chunk < CHUNKS, other=float("-inf"))
    best, token = largest(each, of_each, 0)
    out = row + tl.arange(0, 1)
    tl.store(best_values + out, best)
    tl.store(best_tokens + out, token)
    tl.store(total_log_sums + out, log_sum_exp(sums, tl.max(sums, 0, keep_dims=True), 0))


def best_logits(
    logits: Tensor, x: Tensor | None = None, weight: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Backend of ``interface.best_logits`` in Triton; see its contract."""
    rows, vocab = logits.shape
    device = logits.device
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    wide = (
        x is not None and weight is not None and not (x.dtype == weight.dtype and x.itemsize == 2)
    )
    rank = 0 if x is None else x.shape[1]
    config = choose_config(vocab, rank, wide, target_of(device))
    chunks = cdiv(vocab, config.chunk)
    values, log_sums = torch.empty((2, rows, chunks), device=device).unbind()
    tokens = torch.empty((rows, chunks), dtype=torch.int64, device=device)
    best_values, total = torch.empty((2, rows), device=device).unbind()
    best_tokens = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return best_values, best_tokens, total
    shape = rows, vocab, logits.stride(0)
    if x is None or weight is None:
        _chunks(shape, config.chunk, config.num_warps, device)(logits, values, tokens, log_sums)
    else:
        launch = _products(shape, rank, config, wide, weight.is_contiguous(), device)
        launch(logits, x.contiguous(), weight.contiguous(), values, tokens, log_sums)
    _merge(rows, chunks, device)(values, tokens, log_sums, best_values, best_tokens, total)
    return best_values, best_tokens, total


@functools.lru_cache(LAUNCHES)
def _chunks(
    shape: tuple[int, int, int], chunk: int, num_warps: int, device: torch.device
) -> PreparedLaunch:
    rows, vocab, stride = shape
    return PreparedLaunch(
        chunk_kernel,
        (cdiv(vocab, chunk), rows),
        vocab,
        stride,
        CHUNK=chunk,
        num_warps=num_warps,
        **pdl_launch(device),
    )


@functools.lru_cache(LAUNCHES)
def _products(
    shape: tuple[int, int, int],
    rank: int,
    config: ChoiceConfig,
    wide: bool,
    pdl: bool,
    device: torch.device,
) -> PreparedLaunch:
    """Prepare a launch; ``pdl`` is False if the weight, read first, is a copy just being made."""
    rows, vocab, stride = shape
    return PreparedLaunch(
        product_kernel,
        (cdiv(vocab, config.chunk), cdiv(rows, config.rows)),
        rows,
        vocab,
        stride,
        ROWS=config.rows,
        K=rank,
        K_TILE=config.k_tile,
        CHUNK=config.chunk,
        WIDE=wide,
        num_warps=config.num_warps,
        **(pdl_launch(device) if pdl else {"PDL": False}),
    )


@functools.lru_cache(LAUNCHES)
def _merge(rows: int, chunks: int, device: torch.device) -> PreparedLaunch:
    padded = triton.next_power_of_2(chunks)
    return PreparedLaunch(
        merge_kernel,
        (rows,),
        CHUNKS=chunks,
        CHUNKS_2=padded,
        num_warps=max(1, min(padded // _PARTS_OF_A_WARP, 8)),
        **pdl_launch(device),
    )

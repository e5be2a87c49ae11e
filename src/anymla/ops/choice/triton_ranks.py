"""Greedy choice over ranks in Triton, where each rank has a part of the vocabulary's logits.

The grid is rows. A row's value, token and log-sum of exponentials are words of one exchange.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._inboxes import Inboxes
from anymla.ops._triton_inboxes import exchange, load_inboxes
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch
from anymla.ops.choice.triton_best import largest, log_sum_exp
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch

# Number of words that each row exchanges.
WORDS = 4


@triton.jit
def _sent(value, BLANK: tl.constexpr):
    """Return a float32 number's bits as a word that is never blank."""
    word = value.to(tl.int32, bitcast=True)
    return tl.where(word == BLANK, 0, word)


@triton.jit
def _column(words, place, COLUMN: tl.constexpr):
    return tl.sum(tl.where(place == COLUMN, words, 0), 1)


@triton.jit(do_not_specialize=["first", "vocab"])
def ranks_best_kernel(
    values,
    tokens,
    log_sums,
    best_tokens,
    logprobs,
    addresses,
    turns,
    first,
    vocab,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_2: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLANK: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose a row's best token of the whole vocabulary, or ``vocab``, and its log-probability."""
    row = tl.program_id(0)
    place = tl.arange(0, WORDS)
    inboxes = load_inboxes(addresses, RANKS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(values + row)
    token = tl.load(tokens + row).to(tl.int32) + first
    log_sum = tl.load(log_sums + row)
    words = tl.where(place == 0, _sent(value, BLANK), tl.where(place == 1, token, 0))
    words = tl.where(place == 2, _sent(log_sum, BLANK), words)
    turn = tl.load(turns + row)
    offset = row * WORDS + place
    arrived = exchange(words, inboxes, turn, offset, None, RANK, RANKS, RANKS_2, CAPACITY, BLANK)
    there = tl.arange(0, RANKS_2) < RANKS
    column = place[None, :]
    of_ranks = _column(arrived, column, 0).to(tl.float32, bitcast=True)
    sums = _column(arrived, column, 2).to(tl.float32, bitcast=True)
    of_ranks = tl.where(there, of_ranks, float("-inf"))
    sums = tl.where(there, sums, float("-inf"))
    best, chosen = largest(of_ranks, _column(arrived, column, 1).to(tl.int64), 0)
    total = log_sum_exp(sums, tl.max(sums, 0, keep_dims=True), 0)
    out = row + tl.arange(0, 1)
    tl.store(best_tokens + out, tl.where(tl.abs(best) < float("inf"), chosen, vocab))
    tl.store(logprobs + out, best - total)
    tl.store(turns + row, (turn + 1) % 3)


def best_over_ranks(
    best: tuple[Tensor, Tensor, Tensor], inboxes: Inboxes, *, first: int, vocab: int
) -> tuple[Tensor, Tensor]:
    """Choose among the ranks' best tokens; every rank must call it with as many rows.

    Args:
        best: results of ``best_logits`` for this rank's logits, in float32.
        inboxes: inboxes of int32 words, WORDS of them for each program and row.
        first: token of this rank's first logit.
        vocab: number of tokens over all ranks.

    Returns:
        Tokens [T] int64, ``vocab`` for a row without a finite largest logit, and their
        log-probabilities [T] float32; the same bits on all ranks.
    """
    tokens = torch.empty_like(best[1])
    logprobs = torch.empty_like(best[0])
    if rows := len(tokens):
        numbers = first, vocab, inboxes.size, inboxes.rank, inboxes.capacity
        launch = _ranks_best(rows, numbers, tokens.device)
        launch(*best, tokens, logprobs, inboxes.addresses, inboxes.turns)
    return tokens, logprobs


@functools.lru_cache(LAUNCHES)
def _ranks_best(
    rows: int, numbers: tuple[int, int, int, int, int], device: torch.device
) -> PreparedLaunch:
    first, vocab, size, rank, capacity = numbers
    return PreparedLaunch(
        ranks_best_kernel,
        (rows,),
        first,
        vocab,
        RANK=rank,
        RANKS=size,
        RANKS_2=triton.next_power_of_2(size),
        CAPACITY=capacity,
        BLANK=-(1 << 31),
        WORDS=WORDS,
        num_warps=1,
        **pdl_launch(device),
    )

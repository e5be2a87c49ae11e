"""Greedy-choice calls whose kernels are built; no build may spill."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from anymla.ops._inboxes import Inboxes, word_dtype
from anymla.ops._triton_rank_sum import SLICE, sum_over_ranks
from anymla.ops.choice.interface import best_logits
from anymla.ops.choice.shapes import HIDDEN, MARKOV_RANK, RANKS, ROWS, VOCAB
from anymla.ops.choice.triton_ranks import WORDS, best_over_ranks
from anymla.ops.device import Target
from lab.build import Build, Judgement, dtype_name, empty, float32, int32, int64


def calls(target: Target) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield named calls, with tensors on the meta device."""
    for ranks, rows in ((ranks, rows) for ranks in RANKS for rows in ROWS):
        yield f"{rows} rows, 1/{ranks} of V4's tokens", functools.partial(_choose, ranks, rows)
    for dtype in (torch.float16, torch.float32):
        label = f"a Markov term of {dtype_name(dtype)}"
        yield label, functools.partial(_choose, 1, 1, dtype)
    # Only ranks on NVIDIA GPUs exchange words through their memory.
    if target.backend == "cuda":
        for ranks, dtype in ((r, d) for r in RANKS[1:] for d in (torch.bfloat16, torch.float32)):
            yield f"{ranks} ranks", functools.partial(_exchange, ranks, dtype)


def _choose(ranks: int, rows: int, dtype: torch.dtype = torch.bfloat16) -> None:
    logits = float32((rows, VOCAB // ranks))
    best_logits(logits)
    term = empty((VOCAB // ranks, MARKOV_RANK), dtype=dtype)
    best_logits(logits, empty((rows, MARKOV_RANK), dtype=dtype), term)


def _exchange(ranks: int, dtype: torch.dtype) -> None:
    rows = max(ROWS)
    best = float32(rows), int64(rows), float32(rows)
    best_over_ranks(best, _inboxes(ranks, WORDS, rows, torch.float32), first=0, vocab=VOCAB)
    slices = rows * HIDDEN // SLICE
    sum_over_ranks(empty((rows, HIDDEN), dtype=dtype), _inboxes(ranks, SLICE, slices, dtype))


def _inboxes(ranks: int, step: int, programs: int, dtype: torch.dtype) -> Inboxes:
    return Inboxes(int64(ranks), int32(programs), step * programs, ranks - 1, word_dtype(dtype))


def judgement(build: Build, target: Target) -> Judgement:
    """Require matrix instructions for the low-rank term if its operands are 16 bits wide."""
    matrix = build.name == "product_kernel" and not build.constants["WIDE"]
    return Judgement(matrix=matrix)

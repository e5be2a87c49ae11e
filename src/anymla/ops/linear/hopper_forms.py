"""Which kernel and tile multiplies so many tokens on Hopper."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

# Tiles over multiprocessors: nearly two rounds, not so nearly, more than one, nearly one, and most
# of one.
_TWO_ROUNDS, _HALF_OF_TWO, _MORE_THAN_ONE, _ONE_ROUND, _MOST_OF_ONE = 1.8, 1.6, 1.2, 0.9, 0.65
# Up to here a tile's sums are soon exchanged, which warps with rows of their own need not do; from
# there on what a deep ring gains is more than what the next kernel does, which has no room then;
# with more than 64 tokens sooner.
_FEW_RUNS, _MANY_RUNS, _RUNS_OF_MANY_TOKENS = 16, 48, 32


@dataclasses.dataclass(frozen=True)
class Form:
    """A kernel and its tile.

    Attributes:
        kernel: "runs" and "rows", which multiply float16, or "tens", e4m3.
        rows: of the weight.
        columns: tokens.
        warps: that multiply.
        stages: of the ring.
        programs: of a multiprocessor at a time. With one, a program of the next kernel has room
            beside it, and asks for its weights.
        registers: of a thread on average.
        at_once: products under way ("tens").
    """

    kernel: str
    rows: int
    columns: int
    warps: int
    stages: int
    programs: int
    registers: int
    at_once: int = 1


def form(tokens: int, groups: int, n: int, runs: int, processors: int) -> Form:
    """The one for so many tokens.

    Args:
        tokens: 1 to 128.
        groups: products of one launch.
        n: rows of a group's weight, a multiple of 64.
        runs: its channels over 128.
        processors: of the device.
    """

    def rounds(rows: int) -> float:
        return groups * n / rows / processors if n % rows == 0 else 0.0

    chosen = (_exact if tokens <= 32 else _rounded)(tokens, runs, rounds)
    fewest = 0.5 if tokens <= 32 else _MOST_OF_ONE
    while chosen.rows > 16 and rounds(chosen.rows) < fewest:
        chosen = dataclasses.replace(chosen, rows=chosen.rows // 2)
    return chosen


def _exact(tokens: int, runs: int, rounds: Callable[[int], float]) -> Form:
    short = runs <= _FEW_RUNS and rounds(128) > _TWO_ROUNDS
    if tokens <= 8:
        if short and runs % 8:
            return Form("runs", 64, 8, 4, 3, 1, 104)
        if _MORE_THAN_ONE < rounds(32) < _HALF_OF_TWO:
            return Form("runs", 16, 8, 8, 4, 1, 64)
        return Form("runs", 32, 8, 8, 2, 1, 64)
    if tokens <= 16:
        if short:
            return Form("runs", 64, 16, 4, 3, 1, 128)
        return Form("runs", 32, 16, 8, 2, 1, 80)
    if short:
        return Form("rows", 128, 32, 4, 2, 2, 96)
    if rounds(32) > _MORE_THAN_ONE:
        return Form("runs", 32, 32, 4, 3, 2, 104)
    return Form("runs", 32, 32, 8, 2, 1, 128)


def _rounded(tokens: int, runs: int, rounds: Callable[[int], float]) -> Form:
    """Rings of long tiles take what there is of shared memory."""
    wide, long = rounds(128) > _TWO_ROUNDS, runs >= _MANY_RUNS
    if tokens <= 64:
        if wide:
            return Form("tens", 128, 64, 4, 4, 1, 128, 2)
        if long and rounds(64) > _MOST_OF_ONE:
            return Form("tens", 64, 64, 4, 12, 1, 128, 4)
        if rounds(64) > _ONE_ROUND:
            return Form("tens", 64, 64, 4, 6, 1, 96, 2)
        if long and rounds(32) > _MOST_OF_ONE:
            return Form("tens", 32, 64, 4, 14, 1, 96, 4)
        return Form("tens", 32, 64, 4, 8, 1, 80, 4)
    if wide:
        return Form("tens", 128, 128, 8, 4, 1, 168, 2)
    if runs < _RUNS_OF_MANY_TOKENS:
        return Form("tens", 64, 128, 8, 4, 1, 96, 2)
    if rounds(64) > _MOST_OF_ONE:
        return Form("tens", 64, 128, 8, 8, 1, 168, 4)
    return Form("tens", 32, 128, 8, 8, 1, 96, 4)


def plain_form(tokens: int) -> Form:
    """For bfloat16 products of up to 32 tokens."""
    if tokens <= 8:
        return Form("runs", 16, 8, 8, 4, 2, 64)
    return Form("runs", 16, 32, 4, 4, 2, 104)

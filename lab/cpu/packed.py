"""Products with packed weights beside copying: how fast the weights of a few tokens are read."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anymla.bench.random_weights import random_e4m3
from anymla.bench.report import Result
from anymla.formats.fp8_block import FP8_BLOCK
from anymla.formats.mxfp4 import MXFP4_BLOCK
from anymla.ops.linear import fp8_block_linear, linear, mxfp4_linear
from anymla.ops.moe import experts
from anymla.ops.registry import Operation
from lab.cpu.ceilings import COPY_BYTES, MATMUL_FLOPS, copy, product
from lab.timing import interleaved, median

PART = "weights read by products of few tokens, bf16"
TOKENS = (1, 2, 4, 8, 16)
_TARGET = 0.5
# Rows and columns of a weight of V4-Flash's layers, and copies of it, so that none is in the caches
# at its turn; then its experts, some of the 256, and those of one token.
_ROWS, _COLUMNS, _WEIGHTS = 4096, 4096, 6
_INNER, _EXPERTS, _CHOSEN = 2048, 24, 6


@dataclasses.dataclass(frozen=True)
class _Work:
    """One call to time, with what it reads and computes.

    Attributes:
        run: function that makes one call; weights take turns.
        backend: name of the backend that the call takes.
        nbytes: bytes of weights and scales that a call reads.
        flops: floating-point operations of a call.
    """

    run: Callable[[], object]
    backend: str
    nbytes: int
    flops: int


def packed(rounds: int) -> list[Result]:
    """Time FP8 and MXFP4 products and experts of 1 to 16 tokens, beside copies and products.

    The fastest of all calls counts. With one thread it is processor time, which excludes the
    machine's other work; with several threads it is wall time.
    """
    size = f"{_COLUMNS} -> {_ROWS}"
    results = []
    for kind in ("bf16", "fp8", "mxfp4"):
        weights = [_weight(kind, _ROWS, _COLUMNS) for _ in range(_WEIGHTS)]
        for tokens in TOKENS if kind != "bf16" else TOKENS[:1]:
            results.append(
                _timed(f"{kind}, {size}", tokens, _product(kind, weights, tokens), rounds)
            )
    for kind in ("fp8", "mxfp4"):
        shapes = ((_INNER, _COLUMNS), (_INNER, _COLUMNS), (_COLUMNS, _INNER))
        bank = [[_weight(kind, *shape) for _ in range(_EXPERTS)] for shape in shapes]
        name = f"{kind} experts, {_CHOSEN} of {_EXPERTS} a token, {_COLUMNS} -> {_INNER}"
        for tokens in TOKENS:
            results.append(_timed(name, tokens, _mixture(kind, bank, tokens), rounds))
    return results


def _weight(kind: str, rows: int, columns: int) -> tuple[Tensor, ...]:
    """Draw random codes, and scales near 2^-8."""
    if kind == "bf16":
        return (torch.randn(rows, columns).bfloat16(),)
    if kind == "fp8":
        codes = random_e4m3(rows, columns)
        shape = rows // FP8_BLOCK, columns // FP8_BLOCK
    else:
        codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
        shape = rows, columns // MXFP4_BLOCK
    return codes, torch.randint(117, 121, shape, dtype=torch.uint8)


def _product(kind: str, weights: list[tuple[Tensor, ...]], tokens: int) -> _Work:
    x = torch.randn(tokens, _COLUMNS).bfloat16()
    operations: dict[str, Operation[..., Tensor]] = {
        "bf16": linear,
        "fp8": fp8_block_linear,
        "mxfp4": mxfp4_linear,
    }
    operation = operations[kind]
    how: dict[str, Any] = {} if kind == "bf16" else {"quantize_activations": True}
    turn = itertools.cycle(weights)
    backend = operation.resolve(x, *weights[0], **how).name
    nbytes = sum(each.nbytes for each in weights[0])
    flops = 2 * tokens * _ROWS * _COLUMNS
    return _Work(lambda: operation(x, *next(turn), **how), backend, nbytes, flops)


def _mixture(kind: str, bank: list[list[tuple[Tensor, ...]]], tokens: int) -> _Work:
    x, weights = torch.randn(tokens, _COLUMNS).bfloat16(), torch.rand(tokens, _CHOSEN)
    draws = [torch.rand(tokens, _EXPERTS).argsort(1)[:, :_CHOSEN].int() for _ in range(_WEIGHTS)]
    matrices = [[pair[0] for pair in each] for each in bank]
    scales = [[pair[1] for pair in each] for each in bank]
    names = ("w1", "w3", "w2", "s1", "s3", "s2")
    stored: dict[str, Any] = dict(zip(names, matrices + scales, strict=True))
    call: functools.partial[Tensor] = functools.partial(
        experts, weights=weights, **stored,
        weight_format=kind, swiglu_limit=10.0, quantize_activations=True,
    )  # fmt: skip
    chosen = [len(ids.unique()) for ids in draws]
    one = sum(each.nbytes for stack in bank for each in stack[0])
    turn = itertools.cycle(draws)
    backend = experts.resolve(x, draws[0], **call.keywords).name
    flops = 2 * tokens * _CHOSEN * 3 * _INNER * _COLUMNS
    # Count the bytes of the draw with the fewest experts, which is the fastest.
    return _Work(lambda: call(x, next(turn)), backend, min(chosen) * one, flops)


def _timed(name: str, tokens: int, work: _Work, rounds: int) -> Result:
    functions = {"call": work.run, "copy": copy(), "product": product(torch.bfloat16)}
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times = interleaved(functions, rounds=rounds, block=_WEIGHTS, clock=clock)
    best = {key: min(each) for key, each in times.items()}
    rate, copied = work.nbytes / best["call"] / 1e9, 2 * COPY_BYTES / best["copy"] / 1e9
    share = rate / copied
    asked = not name.startswith("bf16")
    return Result(
        PART,
        f"{name}, {tokens} token{'s' * (tokens > 1)}",
        {
            "backend": work.backend,
            "clock": clock.__name__,
            "ms": best["call"] * 1e3,
            "ms_median": median(times["call"]) * 1e3,
            "gb_per_s": rate,
            "copy_gb_per_s": copied,
            "share_of_copy": share,
            "share_of_bf16_product": work.flops / best["call"] * best["product"] / MATMUL_FLOPS,
        },
        target=f"{_TARGET:g} of copy" if asked else None,
        met=share >= _TARGET if asked else None,
    )

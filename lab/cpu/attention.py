"""Decode attention from the FP8 cache against the machine's own matrix products."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io

import torch
from torch import Tensor

from anymla.bench.random_caches import random_rows
from anymla.bench.report import Result
from anymla.formats.page_layout import MAIN_FP8
from anymla.ops.attention import CacheRows, sparse_attention
from anymla.ops.attention.decode_shapes import (
    FLASH_DECODE,
    PRO_DECODE,
    WINDOW_DECODE,
    AttentionShape,
)
from anymla.testing.tolerance import accumulation, assert_close, ulps
from lab.cpu.ceilings import MATMUL_FLOPS, square
from lab.timing import interleaved, median, ratio_by_round, spread

PART = "decode attention, FP8 cache, bf16"
_TARGET = 0.30
_CASES = {"flash": FLASH_DECODE, "pro": PRO_DECODE, "window only": WINDOW_DECODE}


def attention(rounds: int) -> list[Result]:
    """Time the shapes of decoding, after comparing each result with float64.

    Raises:
        AssertionError: a result is wrong.
    """
    results = []
    for name, shape in _CASES.items():
        call = _Call.draw(shape)
        call.verify()
        matrix = square(torch.bfloat16)
        product = functools.partial(torch.matmul, matrix, matrix)
        times = interleaved({"attention": call.run, "product": product}, rounds=rounds, block=5)
        taken = median(times["attention"])
        low, high = spread(times["attention"])
        # Rate of the attention over rate of the product.
        share = ratio_by_round(times["product"], times["attention"], rounds)
        share *= shape.flops / MATMUL_FLOPS
        results.append(
            Result(
                PART,
                f"{name}: {shape.tokens} tokens x {shape.heads} heads x {shape.slots} slots",
                {
                    "ms": taken * 1e3,
                    "ms_p10": low * 1e3,
                    "ms_p90": high * 1e3,
                    "gflops": shape.flops / taken / 1e9,
                    "share_of_bf16_product": share,
                },
                target=f"share >= {_TARGET}" if shape is FLASH_DECODE else None,
                met=share >= _TARGET if shape is FLASH_DECODE else None,
            )
        )
    return results


@dataclasses.dataclass(frozen=True)
class _Call:
    """Arguments of ``sparse_attention``."""

    q: Tensor
    rows: list[CacheRows]
    sink: Tensor

    @classmethod
    def draw(cls, shape: AttentionShape) -> _Call:
        widths = [width for width in (shape.window, shape.entries) if width]
        rows = [_rows(shape.tokens, width) for width in widths]
        q = torch.randn(shape.tokens, shape.heads, shape.dim).bfloat16()
        return cls(q, rows, torch.randn(shape.heads))

    def run(self, q: Tensor | None = None, backend: str | None = None) -> tuple[Tensor, Tensor]:
        q = self.q if q is None else q
        return sparse_attention(q, self.rows, sink=self.sink, backend=backend)

    def verify(self) -> None:
        """Compare with float64: p and the output are each rounded to bfloat16 once."""
        out, lse = self.run()
        want, want_lse = self.run(self.q.double(), backend="reference")
        error = ulps(torch.bfloat16, 1) + accumulation(512, torch.float32)
        magnitude = want.abs().amax((1, 2), keepdim=True)
        slack = accumulation(512, torch.float32, c=4.0)
        with contextlib.redirect_stdout(io.StringIO()):  # the observed errors are for tests
            assert_close(out, want, atol=error, rtol=error, scale=magnitude, name="attention")
            assert_close(lse, want_lse, atol=slack, rtol=slack, scale=8.0, name="lse")


def _rows(tokens: int, slots: int) -> CacheRows:
    """Draw lists of rows from a cache of four times the rows that a token lists."""
    cache = random_rows(MAIN_FP8, 4 * slots, 64)
    lists = [torch.randperm(len(cache) * 64)[:slots] for _ in range(tokens)]
    return CacheRows(cache, MAIN_FP8, torch.stack(lists).int())

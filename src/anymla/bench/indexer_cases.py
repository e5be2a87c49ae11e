"""Cases of the indexer's times: shapes, and queries over a pool of random pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from anymla.bench.gpu_timing import copies_for
from anymla.ops.indexer.shapes import V4_FLASH, SelectShape

HEADS, WIDTH, PAGE = V4_FLASH.heads, V4_FLASH.channels, V4_FLASH.page_size
TOPK, RATIO = V4_FLASH.topk, V4_FLASH.ratio
_PAGE_BYTES = PAGE * (WIDTH + 4)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """One set of arguments; all sets of a shape share the pool of pages."""

    q: Tensor
    weights: Tensor
    lengths: Tensor
    table: Tensor
    cache: Tensor


class Pool:
    """Pages of random keys."""

    def __init__(self, pages: int) -> None:
        self.cache = torch.empty(pages, PAGE, WIDTH + 4, dtype=torch.uint8, device="cuda")
        flat = self.cache.view(pages, -1)
        for first in range(0, pages, 1 << 15):
            part = flat[first : first + (1 << 15)]
            keys = torch.randn(len(part), PAGE * WIDTH, device="cuda").to(torch.float8_e4m3fn)
            part[:, : PAGE * WIDTH] = keys.view(torch.uint8)
            scales = torch.rand(len(part), PAGE, device="cuda") + 0.5
            part[:, PAGE * WIDTH :] = scales.view(torch.uint8)

    def inputs(self, shape: SelectShape, copies: int) -> list[Inputs]:
        """Sets of inputs that read different pages."""
        each = shape.requests * shape.keys // PAGE
        order = torch.randperm(len(self.cache), device="cuda").int()
        sets = []
        for copy in range(copies):
            first = copy * each % (len(self.cache) - each + 1)
            table = order[first : first + each].view(shape.requests, -1)
            q = torch.randn(shape.rows, HEADS, WIDTH, device="cuda").to(torch.float8_e4m3fn)
            weights = torch.randn(shape.rows, HEADS, device="cuda")
            lengths = torch.full((shape.rows,), shape.keys, dtype=torch.int32, device="cuda")
            if shape.prefill:
                last = torch.arange(1, shape.rows + 1, device="cuda") - shape.rows
                lengths = ((last + RATIO * shape.keys) // RATIO).int()
            sets.append(Inputs(q, weights, lengths, table, self.cache))
        return sets


def pages_needed(shapes: Sequence[SelectShape]) -> int:
    """Pages of a pool from which every shape can take cold inputs."""
    cold = copies_for(1) * 64
    return max([cold, (512 << 20) // _PAGE_BYTES, *(s.requests * s.keys // PAGE for s in shapes)])

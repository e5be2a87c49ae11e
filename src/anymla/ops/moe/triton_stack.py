"""Where experts' tensors lie: one stride if they are slices of one tensor, otherwise a table."""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Stack:
    """Equal tensors, one an expert: the first, and how far the others are in its elements.

    Attributes:
        first: the first tensor, None if there is none.
        stride: the distance between successive ones, 0 with a table.
        table: int64 distances from the first in units, or None.
    """

    first: Tensor | None
    stride: int
    table: Tensor | None


def common_unit(*stacks: list[Tensor]) -> int:
    """Elements that distances of these stacks are multiples of, as far as loads profit: 16 or 1."""
    apart = (
        (tensor.data_ptr() - stack[0].data_ptr()) % (16 * tensor.element_size())
        for stack in stacks
        for tensor in stack
    )
    return 1 if any(apart) else 16


def aligned(tensors: list[Tensor], size: int) -> bool:
    """Whether all begin at multiples of so many bytes."""
    return not any(tensor.data_ptr() % size for tensor in tensors)


def stacked(tensors: list[Tensor], unit: int = 1) -> Stack:
    """Distances of a table are in units of so many elements."""
    if not tensors:
        return Stack(None, 0, None)
    first = tensors[0]
    starts = tuple(tensor.data_ptr() - first.data_ptr() for tensor in tensors)
    step = starts[1] if len(starts) > 1 else 0
    if all(start == e * step for e, start in enumerate(starts)):
        return Stack(first, step // first.element_size(), None)
    return Stack(first, 0, _distances(starts, first.element_size() * unit, first.device))


@functools.lru_cache(maxsize=4096)
def _distances(starts: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    return torch.tensor([start // size for start in starts], dtype=torch.int64, device=device)


@triton.jit
def place_of(expert, stride, table, UNIT: tl.constexpr):
    """Elements from the first expert's tensor to this one's; a table's are in units."""
    here = expert.to(tl.int64)
    return tl.load(table + expert) * UNIT if table is not None else here * stride

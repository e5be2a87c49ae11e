"""A call of the experts, and where their tensors lie.

That is one stride if they are slices of one tensor, otherwise a table.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

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

    @property
    def arguments(self) -> tuple[Tensor | None, int, Tensor | None]:
        """What a kernel is given."""
        return self.first, self.stride, self.table


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


@dataclasses.dataclass(frozen=True)
class Call:
    """What all ways to multiply by experts are given.

    Attributes:
        x: contiguous [T, D].
        ids: contiguous [T, K].
        weights: contiguous [T, K].
        matrices: w1, w3, w2, contiguous.
        scales: s1, s3, s2, likewise; empty lists if there are none.
        weight_format: see ``interface.experts``, as the others.
        swiglu_limit: of SwiGLU.
        coded: activations are quantised.
        expert_offset: id of the first expert.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    matrices: list[list[Tensor]]
    scales: list[list[Tensor]]
    weight_format: str
    swiglu_limit: float
    coded: bool
    expert_offset: int

    @property
    def pairs(self) -> int:
        """Tokens times experts of a token."""
        return self.ids.numel()

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Experts, their inner size, hidden size."""
        return len(self.matrices[0]), self.matrices[0][0].shape[0], self.x.shape[1]


@dataclasses.dataclass(frozen=True)
class Places:
    """Where the experts of a call lie.

    Attributes:
        up: arguments of a kernel: first tensor, stride and table of w1, s1, w3, s3.
        down: likewise of w2, s2.
        unit: of the matrices' tables.
    """

    up: tuple[Any, ...]
    down: tuple[Any, ...]
    unit: int


def places_of(call: Call) -> Places:
    """Where its matrices and scales are."""
    unit = common_unit(*call.matrices)
    w1, w3, w2 = (stacked(each, unit).arguments for each in call.matrices)
    s1, s3, s2 = (stacked(each).arguments for each in call.scales)
    return Places((*w1, *s1, *w3, *s3), (*w2, *s2), unit)


@functools.lru_cache(maxsize=4096)
def _distances(starts: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    return torch.tensor([start // size for start in starts], dtype=torch.int64, device=device)


@triton.jit
def place_of(expert, stride, table, UNIT: tl.constexpr):
    """Elements from the first expert's tensor to this one's; a table's are in units."""
    here = expert.to(tl.int64)
    return tl.load(table + expert) * UNIT if table is not None else here * stride

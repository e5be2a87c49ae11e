"""The cases of one step as places in one block of bytes, which the judge receives at once.

An engine's adapter gathers tensors on the device and plans which of them form a case. No value is
read, converted or split before the bytes have left the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from anymla.audit.case import Case

_ALIGNMENT = 16  # bytes, alignment of a tensor in the block


class Held(NamedTuple):
    """Place of a tensor in a block of bytes.

    Attributes:
        offset: offset of its first element, in bytes.
        dtype: dtype of its elements.
        shape: shape of the tensor.
        stride: strides in elements.
        mark: index of the step number that says if it was recorded; -1 if it always is.
    """

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    mark: int = -1

    def narrow(self, dim: int, start: int, length: int) -> Held:
        """Narrow a dimension, as ``Tensor.narrow`` does."""
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return self._replace(offset=self._at(dim, start), shape=shape)

    def select(self, dim: int, index: int) -> Held:
        """Select an index, as ``Tensor.select`` does."""
        shape = self.shape[:dim] + self.shape[dim + 1 :]
        stride = self.stride[:dim] + self.stride[dim + 1 :]
        return self._replace(offset=self._at(dim, index), shape=shape, stride=stride)

    def rows(self, *shape: int) -> Held:
        """Keep the first dimension, and reshape the others to ``shape``."""
        return self._replace(
            shape=(self.shape[0], *shape), stride=(self.stride[0], *contiguous(shape))
        )

    def seen_as(self, dtype: torch.dtype) -> Held:
        """Reinterpret the elements as a dtype of the same size, as ``Tensor.view`` does."""
        return self._replace(dtype=dtype)

    def of(self, block: Tensor) -> Tensor:
        """Return the tensor itself, a view of uint8 ``block``."""
        size = self.dtype.itemsize
        start, count = self.offset, 1
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype, device=block.device)
        for length, step in zip(self.shape, self.stride, strict=True):
            count += (length - 1) * step
        flat = block[start : start + count * size].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)

    def _at(self, dim: int, index: int) -> int:
        return self.offset + index * self.stride[dim] * self.dtype.itemsize


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(1, length)
    return tuple(reversed(strides))


class Planned(NamedTuple):
    """A ``Case`` whose tensors are still places in a block."""

    method: str
    layer: str
    requests: list[str]
    positions: list[int]
    tensors: dict[str, Held]
    numbers: dict[str, float | int | str]


@dataclasses.dataclass
class Packed:
    """The cases of a step, on the CPU.

    Attributes:
        planned: cases whose tensors are places in ``block``.
        block: uint8 bytes of all of their tensors.
        step: number of the engine's step.
        marks: int64 [..], step in which each recorded tensor was written; None if all are new.
        made_by: versions and device, as in a case.
    """

    planned: list[Planned]
    block: Tensor
    step: int = 0
    marks: Held | None = None
    made_by: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, case: Case) -> Packed:
        """Pack one case, whose tensors are on the CPU and not written by others."""
        packet = Packet()
        held = {name: packet.hold(each) for name, each in case.tensors.items()}
        packet.plan(case.method, case.layer, case.requests, case.positions, held, **case.numbers)
        return cls(packet.planned, packet.block(torch.device("cpu")), case.step)

    def case(self, index: int) -> Case:
        """Return the case with that index; its tensors are views of the block."""
        each = self.planned[index]
        tensors = {name: held.of(self.block) for name, held in each.tensors.items()}
        names, numbers = list(each.requests), dict(each.numbers)
        return Case(
            each.method,
            each.layer,
            names,
            list(each.positions),
            tensors,
            numbers,
            self.step,
            self.made_by,
        )

    def cases(self) -> Iterator[Case | None]:
        """Yield all cases; None for one with a tensor that this step has not written."""
        marks = None if self.marks is None else self.marks.of(self.block).tolist()
        for index, each in enumerate(self.planned):
            held = each.tensors.values()
            new = marks is None or all(marks[h.mark] == self.step for h in held if h.mark >= 0)
            yield self.case(index) if new else None


class Packet:
    """Tensors and cases of a step while they are collected.

    Attributes:
        planned: cases so far.
        nbytes: bytes of the tensors so far.
    """

    def __init__(self) -> None:
        """Start without tensors and cases."""
        self.planned: list[Planned] = []
        self.nbytes = 0
        self._parts: list[Tensor] = []

    def hold(self, tensor: Tensor) -> Held:
        """Add a tensor. Its values are read when ``block`` is called."""
        held = Held(self.nbytes, tensor.dtype, tuple(tensor.shape), contiguous(tuple(tensor.shape)))
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        self._parts.append(flat)
        rest = -len(flat) % _ALIGNMENT
        if rest:
            self._parts.append(flat.new_empty(rest))
        self.nbytes += len(flat) + rest
        return held

    def plan(
        self,
        method: str,
        layer: str,
        requests: list[str],
        positions: list[int],
        tensors: dict[str, Held],
        **numbers: float | int | str,
    ) -> None:
        """Plan a case from tensors of the packet."""
        self.planned.append(Planned(method, layer, requests, positions, tensors, numbers))

    def block(self, device: torch.device) -> Tensor:
        """Return all tensors side by side: uint8 [nbytes] on ``device``."""
        if not self._parts:
            return torch.empty(0, dtype=torch.uint8, device=device)
        return torch.cat(self._parts)

"""Recorder that copies chosen rows of an engine's tensors, in captured graphs as well.

A captured step runs no Python. So a hook's notes during the capture become one launch in the graph,
which every replay repeats. The launch reads from the device which rows are wanted, and if this
layer is looked at in this step at all. If not, it ends at once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anymla.audit.packet import Held, Packet, contiguous

_ALIGNMENT = 16
_WORD = 4  # bytes; rows are copied in words
_BLOCK = 4096  # words that a program copies at a time
_NAMES = 96  # most names of a section
_CAPTURED = 1 << 17  # tensors that all graphs together may record
_FIELDS = 6  # fields of a tensor in the kernel's table; the last one is not used


class _Place(NamedTuple):
    offset: int  # bytes within the section's part of the arena
    dtype: torch.dtype
    shape: tuple[int, ...]  # shape of a row
    mark: int


class RowRecorder:
    """Rows of tensors, by section (a layer) and name.

    Attributes:
        rows: number of rows of each tensor that are kept.
        tokens: least number of rows of the step's tensors; shorter tensors are ignored.
    """

    def __init__(
        self, device: torch.device, rows: int, sections: Sequence[str], capacity: int
    ) -> None:
        """Reserve memory without choosing rows.

        Args:
            device: device of the tensors.
            rows: number of rows of each tensor that are kept.
            sections: names of the sections.
            capacity: bytes of a section, enough for ``rows`` rows of all its tensors.
        """
        self.rows, self.tokens = rows, 0
        self._device = device
        self._capacity = -(-capacity // _ALIGNMENT) * _ALIGNMENT
        self._index = {name: index for index, name in enumerate(sections)}
        self._asked: frozenset[str] = frozenset()
        self._chosen: list[int] = [0] * rows
        self._places: dict[str, dict[str, _Place]] = {name: {} for name in sections}
        self._used = dict.fromkeys(sections, 0)
        self._arena = torch.empty(len(sections), self._capacity, dtype=torch.uint8, device=device)
        self._marks = torch.full((len(sections) * _NAMES,), -1, dtype=torch.int64, device=device)
        self._count = 0  # number of marks in use
        self._control = torch.zeros(1 + rows + len(sections), dtype=torch.int64, device=device)
        self._waiting: list[tuple[str, _Place, Tensor]] = []
        # Tables that graphs have recorded: their addresses on the device must not change.
        size = _CAPTURED if device.type == "cuda" else 0
        self._table = torch.zeros(size, _FIELDS, dtype=torch.int64, device=device)
        self._entries: list[list[int]] = []
        self._written = 0
        if device.type == "cuda":  # no kernel can be compiled while a graph is captured
            self._launch_kernel(self._table[:1], 0)

    def choose(self, step: int, rows: Sequence[int], sections: Collection[str]) -> None:
        """Choose rows of the tensors of sections, from now on.

        Args:
            step: step number that is kept with the recorded rows.
            rows: row numbers, one to ``self.rows`` of them; fewer are padded with the last one.
            sections: names of the sections; others record nothing.
        """
        self._chosen = [*rows, *[rows[-1]] * (self.rows - len(rows))]
        self._asked = frozenset(sections)
        flags = [int(name in self._asked) for name in self._index]
        self._send(self._control, [step, *self._chosen, *flags])
        fresh = self._entries[self._written :]
        if fresh:
            self._send(self._table[self._written : len(self._entries)], fresh)
            self._written = len(self._entries)

    def release(self) -> None:
        """Choose no rows."""
        self._asked = frozenset()
        self._control[1 + self.rows :].zero_()

    @property
    def captured(self) -> bool:
        """True if a graph is being captured on this stream."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def wants(self, section: str) -> bool:
        """True if tensors of the section are recorded, in this step or in a graph's replays."""
        return section in self._index and (section in self._asked or self.captured)

    def note(self, section: str, name: str, tensor: Tensor) -> None:
        """Record the chosen rows of a tensor [tokens, ..] at the next ``flush``.

        A name with another shape or dtype than before takes another place; rows that graphs write
        to the old place are ignored.

        Raises:
            ValueError: there is no room, or rows are no multiple of four bytes.
        """
        if len(tensor) < max(1, self.tokens):
            return
        shape = tuple(tensor.shape[1:])
        if tensor.stride()[1:] != contiguous(shape):
            tensor = tensor.contiguous()
        place = self._places[section].get(name)
        if place is None or (place.dtype, place.shape) != (tensor.dtype, shape):
            place = self._place(section, name, tensor.dtype, shape)
        self._waiting.append((section, place, tensor.detach()))

    @property
    def pending(self) -> int:
        """Number of noted tensors that the next ``flush`` will copy."""
        return len(self._waiting)

    def flush(self) -> None:
        """Copy the noted tensors' rows, on the current stream."""
        waiting, self._waiting = self._waiting, []
        for section in dict.fromkeys(section for section, _, _ in waiting):
            noted = [(place, tensor) for each, place, tensor in waiting if each == section]
            if self._device.type == "cuda":
                self._launch(section, noted)
                continue
            if section not in self._asked:
                continue
            chosen = torch.tensor(self._chosen)
            for place, tensor in noted:
                self._view(section, place).copy_(tensor[chosen])
                self._marks[place.mark] = self._control[0]

    def last(self, section: str, name: str) -> Tensor | None:
        """Return the rows recorded last, on the device: [rows, ..]; None if there are none."""
        place = self._places[section].get(name)
        return None if place is None else self._view(section, place)

    def hold(self, packet: Packet, section: str) -> dict[str, Held]:
        """Add a section to a packet, and return the place of each name's rows."""
        index = self._index[section]
        start = packet.hold(self._arena[index, : self._used[section]]).offset
        found = {}
        for name, place in self._places[section].items():
            shape = (self.rows, *place.shape)
            offset = start + place.offset
            found[name] = Held(offset, place.dtype, shape, contiguous(shape), place.mark)
        return found

    def hold_marks(self, packet: Packet) -> Held:
        """Add the step numbers of all places to a packet."""
        return packet.hold(self._marks[: self._count])

    def _place(self, section: str, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> _Place:
        size = math.prod(shape) * dtype.itemsize
        if size % _WORD:
            raise ValueError(f"rows of {name} have {size} bytes, no multiple of {_WORD}")
        offset = self._used[section]
        end = offset + -(-size * self.rows // _ALIGNMENT) * _ALIGNMENT
        if end > self._capacity or self._count == len(self._marks):
            raise ValueError(f"no room for {size * self.rows} bytes of {name}")
        place = _Place(offset, dtype, shape, self._count)
        self._used[section], self._count = end, self._count + 1
        self._places[section][name] = place
        return place

    def _view(self, section: str, place: _Place) -> Tensor:
        count = math.prod(place.shape) * self.rows * place.dtype.itemsize
        part = self._arena[self._index[section], place.offset : place.offset + count]
        return part.view(place.dtype).view(self.rows, *place.shape)

    def _launch(self, section: str, noted: list[tuple[_Place, Tensor]]) -> None:
        first = self._index[section] * self._capacity // _WORD
        entries = []
        for place, tensor in noted:
            if tensor.data_ptr() % _WORD:
                raise ValueError("rows that begin between words")
            stride = tensor.stride(0) * tensor.itemsize // _WORD
            length = math.prod(place.shape) * tensor.itemsize // _WORD
            target = first + place.offset // _WORD
            entries.append([tensor.data_ptr(), stride, length, target, place.mark, 0])
        if self.captured:
            start = len(self._entries)
            if start + len(entries) > len(self._table):
                raise ValueError("graphs record more tensors than there is room for")
            self._entries += entries
            table = self._table[start : len(self._entries)]
        else:
            table = torch.empty(len(entries), _FIELDS, dtype=torch.int64, device=self._device)
            self._send(table, entries)
        self._launch_kernel(table, self._index[section])

    def _launch_kernel(self, table: Tensor, section: int) -> None:
        from anymla.audit.triton_rows import copy_rows_kernel
        from anymla.ops.pdl import pdl_launch

        copy_rows_kernel[(len(table), self.rows)](
            table,
            self._control,
            self._arena.view(torch.int32),
            self._marks,
            section,
            ROWS=self.rows,
            BLOCK=_BLOCK,
            num_warps=8,
            **pdl_launch(self._device),
        )

    def _send(self, target: Tensor, values: Sequence[int] | Sequence[Sequence[int]]) -> None:
        """Copy host values to the device without waiting."""
        pinned = self._device.type == "cuda"
        held = torch.tensor(values, dtype=torch.int64, pin_memory=pinned)
        target.copy_(held, non_blocking=pinned)

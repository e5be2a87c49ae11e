"""LDS, the memory that a work-group's waves share, and a judge of how they use it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from crossrun.amd.errors import Fault, UnknownInstruction
from crossrun.amd.memory import Access, atomic
from crossrun.amd.operands import Modifiers, Operand, modifiers, reader, split
from crossrun.amd.program import Program
from crossrun.amd.waves import EXEC, Array, Waves

U32, I64 = np.uint32, np.int64
_NOBODY, _SEVERAL = -1, -2


class Lds:
    """Memory of a batch's work-groups, with who wrote and read each word since the last barrier.

    Addresses are those of the batch: a work-group's begin at its index times ``bytes``.
    """

    def __init__(self, groups: int, size: int, group_of: Array) -> None:
        """Make memory that nobody has written.

        Args:
            groups: number of work-groups.
            size: bytes of each.
            group_of: ``[waves]`` each wave's work-group.
        """
        self.bytes = -(-max(size, 4) // 16) * 16
        self._group_of = group_of
        self._shared = np.bincount(group_of, minlength=groups)[group_of] > 1
        total = groups * self.bytes
        self._memory = np.full(total, 0xA5, np.uint8)
        self._words = self._memory.view(U32)
        self._written = np.zeros(total, np.uint8)
        self._epoch = np.zeros(groups, np.int32)
        self._writer = np.full(total // 4, _NOBODY, np.int32)
        self._reader = np.full(total // 4, _NOBODY, np.int32)
        self._write_epoch = np.full(total // 4, -1, np.int32)
        self._read_epoch = np.full(total // 4, -1, np.int32)

    def barrier(self, groups: Array) -> None:
        """Note that the waves of work-groups have met."""
        self._epoch[groups] += 1

    def place(self, waves: Array, addresses: Array, size: int) -> Array:
        """Return where an access of each lane is in the batch's memory.

        Args:
            waves: each lane's wave.
            addresses: each lane's address in its work-group's LDS.
            size: bytes of the access.

        Raises:
            Fault: an address is outside or misaligned.
        """
        if addresses.size and (addresses.min() < 0 or addresses.max() + size > self.bytes):
            worst = max(addresses.max(), -addresses.min())
            raise Fault(f"LDS at {worst}, which has {self.bytes} bytes")
        align = min(size & -size, 4)
        if align > 1 and (addresses & (align - 1)).any():
            raise Fault(f"{size} bytes of LDS at a misaligned address")
        return addresses + self._group_of[waves] * self.bytes

    def load(self, waves: Array, at: Array, size: int) -> Array:
        """Return uint32 words ``[words, lanes]``.

        Raises:
            Fault: nobody has written them, or another wave has since the last barrier.
        """
        for word in range(0, size, 4):
            self._note_read(waves, at + word, min(size, 4))
        if size < 4:
            low = self._memory[at].astype(U32)
            return (low | self._memory[at + 1].astype(U32) << U32(8) if size == 2 else low)[None]
        return np.stack([self._words[at // 4 + word] for word in range(size // 4)])

    def store(self, waves: Array, at: Array, size: int, words: list[Array]) -> None:
        """Write words of each lane.

        Raises:
            Fault: waves write different values, or what another one has read, without a barrier
                between them.
        """
        for word in range(0, max(size, 1), 4):
            place, value = at + word, words[word // 4]
            if self._shared[waves].any():
                self._note_write(waves, place, min(size, 4), value)
            if size >= 4:
                self._words[place // 4] = value
                self._written.view(U32)[place // 4] = 0x01010101
            else:
                for byte in range(size):
                    self._memory[place + byte] = (value >> U32(8 * byte)).astype(np.uint8)
                    self._written[place + byte] = 1
            if size >= 4 and self._shared[waves].any():
                # Where lanes write one word in one instruction, the last lane's value stays.
                clash = (self._writer[place // 4] != waves) & (self._words[place // 4] != value)
                if clash.any():
                    raise Fault("two waves write different values to one word of LDS")

    def change(self, at: int, function: Callable[[Any, Any], Any], given: Array) -> Any:
        """Replace a word by a function of it and a value; return the old one. It is no race."""
        if self._written.view(U32)[at // 4] != 0x01010101:
            raise Fault("LDS is changed that nobody has written")
        old = self._words[at // 4 : at // 4 + 1].copy()
        self._words[at // 4] = np.asarray(function(old, given))[0]
        return old[0]

    def _note_read(self, waves: Array, at: Array, size: int) -> None:
        if size == 4:
            written = self._written.view(U32)[at // 4] == 0x01010101
        else:
            written = self._written[at] & self._written[at + size - 1] != 0
        if not written.all():
            lanes = np.flatnonzero(~written)
            raise Fault(f"LDS is read that nobody has written, by {len(lanes)} lanes")
        if not self._shared[waves].any():
            return
        word, epoch = at // 4, self._epoch[self._group_of[waves]]
        if ((self._write_epoch[word] == epoch) & (self._writer[word] != waves)).any():
            raise Fault("LDS is read that another wave wrote without a barrier between them")
        others = (self._read_epoch[word] == epoch) & (self._reader[word] != waves)
        readers = np.where(others, _SEVERAL, waves)
        self._reader[word], self._read_epoch[word] = readers, epoch
        # Lanes of several waves may read one word in one instruction.
        several = self._reader[word] != waves
        self._reader[word[several]] = _SEVERAL

    def _note_write(self, waves: Array, at: Array, size: int, value: Array) -> None:
        word, epoch = at // 4, self._epoch[self._group_of[waves]]
        if size == 4:
            changes = self._words[word] != value
        else:
            old = sum(self._memory[at + b].astype(U32) << U32(8 * b) for b in range(size))
            changes = old != value & U32(2 ** (8 * size) - 1)
        # Neighbours that are narrower than a word share its record, so only whole words are judged.
        if size == 4:
            if (changes & (self._write_epoch[word] == epoch) & (self._writer[word] != waves)).any():
                raise Fault("two waves write different values to one word of LDS")
            if (changes & (self._read_epoch[word] == epoch) & (self._reader[word] != waves)).any():
                raise Fault("LDS is written that another wave read without a barrier between them")
        self._writer[word], self._write_epoch[word] = waves, epoch


class LdsUnit:
    """Makes functions of a program's instructions that begin with ``ds_``."""

    def __init__(self, program: Program) -> None:
        """Serve a program's lanes; ``lds`` is set for each batch."""
        self._lanes = program.lanes
        self.lds: Lds

    def decode(self, name: str, rest: str) -> Callable[[Waves], None]:
        """Return the function of an instruction ``ds_name rest``.

        Raises:
            UnknownInstruction: the instruction or its form is not known.
        """
        operands, mods = [Operand(text) for text in split(rest)], modifiers(rest)
        if name in ("bpermute_b32", "permute_b32"):
            return self._permute(name, operands, mods.get("offset", 0))
        if name == "swizzle_b32":
            return self._swizzle(operands, mods)
        found = re.fullmatch(
            r"(read|load|write|store)(2st64|2|_2addr_stride64|_2addr)?_(b64_tr_b16|\w+)", name
        )
        if not found:
            return self._atomic(name, operands, mods.get("offset", 0))
        loads, two, kind = found[1] in ("read", "load"), found[2], found[3]
        if kind == "b64_tr_b16":
            return self._load_transposed(operands, mods.get("offset", 0))
        access = Access.of(kind)
        if two:
            unit = access.size * (64 if "64" in two else 1)
            offsets = [mods.get("offset0", 0) * unit, mods.get("offset1", 0) * unit]
        else:
            offsets = [mods.get("offset", 0)]
        address = reader(operands[0 if not loads else 1], "u32")
        data = (
            [operands[0].index + place * access.words for place in range(len(offsets))]
            if loads
            else [operand.index for operand in operands[1:]]
        )

        def execute(w: Waves) -> None:
            mask = w.mask
            if not mask.any():
                return
            waves = np.nonzero(mask)[0]
            base = np.broadcast_to(address(w), mask.shape)[mask].astype(I64)
            places = [self.lds.place(waves, base + offset, access.size) for offset in offsets]
            if loads:
                loaded = [self.lds.load(waves, at, access.size) for at in places]
                for register, words in zip(data, loaded, strict=True):
                    access.loaded(w, register, words, mask)
            else:
                for register, at in zip(data, places, strict=True):
                    self.lds.store(waves, at, access.size, access.stored(w, register, mask))

        return execute

    def _load_transposed(self, operands: list[Operand], offset: int) -> Callable[[Waves], None]:
        """Load columns of 16 rows of four halves, which 16 lanes point at."""
        into, address = operands[0].index, reader(operands[1], "u32")
        lane = np.arange(self._lanes)
        first, place = lane & ~15, lane & 15

        def execute(w: Waves) -> None:
            if not w.lanes_of(EXEC)[w.running].all():
                raise Fault("a transposed load with lanes that are off")
            mask = w.mask
            waves = np.nonzero(mask)[0]
            at = self.lds.place(waves, address(w)[mask].astype(I64) + offset, 8)
            words = self.lds.load(waves, at, 8).reshape(2, -1, self._lanes)
            low, high = words & U32(0xFFFF), words >> U32(16)
            halves = np.stack([low[0], high[0], low[1], high[1]])
            row, column = place // 4, place % 4
            taken = [halves[column, :, first + 4 * part + row].T for part in range(4)]
            for word in range(2):
                w.vector[into + word][w.running] = taken[2 * word] | (
                    taken[2 * word + 1] << U32(16)
                )

        return execute

    def _permute(self, name: str, operands: list[Operand], offset: int) -> Callable[[Waves], None]:
        into, address, value = operands[0].index, *(reader(each, "u32") for each in operands[1:3])

        def execute(w: Waves) -> None:
            lane = ((np.broadcast_to(address(w), w.mask.shape) + U32(offset)) >> U32(2)).astype(I64)
            lane %= self._lanes
            values = np.broadcast_to(value(w), w.mask.shape)
            on = w.lanes_of(EXEC)
            if name == "bpermute_b32":
                # Lanes that are off give zeros.
                moved = np.take_along_axis(np.where(on, values, U32(0)), lane, 1)
            else:
                # Where several lanes send to one, the highest counts.
                moved = np.zeros_like(values)
                waves, senders = np.nonzero(on)
                moved[waves, lane[waves, senders]] = values[waves, senders]
            w.set_vector(into, moved)

        return execute

    def _swizzle(self, operands: list[Operand], mods: Modifiers) -> Callable[[Waves], None]:
        into, value = operands[0].index, reader(operands[1], "u32")
        lane = _swizzled(np.arange(self._lanes), mods.get("swizzle"), mods.get("offset", 0))

        def execute(w: Waves) -> None:
            values = np.where(w.lanes_of(EXEC), value(w), U32(0))
            w.set_vector(into, values[:, lane])

        return execute

    def _atomic(self, name: str, operands: list[Operand], offset: int) -> Callable[[Waves], None]:
        returns = "_rtn_" in name
        function = atomic(name.replace("_rtn_", "_"))
        if function is None:
            raise UnknownInstruction("atomic")
        returned = operands.pop(0).index if returns else -1
        address, value = (reader(each, "u32") for each in operands[:2])

        def execute(w: Waves) -> None:
            mask = w.mask
            addresses = np.broadcast_to(address(w), mask.shape)
            values = np.broadcast_to(value(w), mask.shape)
            for wave, lane in zip(*np.nonzero(mask), strict=True):
                at = self.lds.place(
                    np.array([wave]), addresses[wave, lane : lane + 1].astype(I64) + offset, 4
                )
                given = values[wave, lane : lane + 1]
                old = self.lds.change(int(at[0]), function, given)
                if returns:
                    w.vector[returned][wave, lane] = old

        return execute


def _swizzled(lane: Array, named: list[str] | None, offset: int) -> Array:
    """Return each lane's source of ``ds_swizzle_b32``, of its name or its offset's bits."""
    if named is None:
        if offset & 0x8000:
            return (lane & ~3) + np.array([offset >> (2 * j) & 3 for j in range(4)])[lane & 3]
        keep, set_, flip = offset & 31, offset >> 5 & 31, offset >> 10 & 31
        return (lane & ~31) | ((((lane & 31) & keep) | set_) ^ flip)
    kind, *numbers = named
    if kind == "BITMASK_PERM":
        source = lane & ~31
        for place, letter in enumerate(numbers[0]):
            bit = lane >> (4 - place) & 1
            bit = {"0": 0 * bit, "1": 0 * bit + 1, "p": bit, "i": 1 - bit}[letter]
            source = source | bit << (4 - place)
        return source
    given = [int(number) for number in numbers]
    if kind == "SWAP":
        return lane ^ given[0]
    if kind == "REVERSE":
        return lane ^ (given[0] - 1)
    if kind == "BROADCAST":
        return (lane & ~(given[0] - 1)) + given[1]
    if kind == "QUAD_PERM":
        return (lane & ~3) + np.array(given)[lane & 3]
    raise UnknownInstruction("swizzle")

"""Loads, stores and atomics on global, buffer and private memory."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from crossrun.amd.errors import Fault, UnknownInstruction
from crossrun.amd.operands import Operand, modifiers, reader, scalar_reader, split
from crossrun.amd.program import Program
from crossrun.amd.waves import Array, Waves

U32, U64, I64 = np.uint32, np.uint64, np.int64
# The first page is never mapped.
_FIRST_BYTE, _ADDRESSES = 4096, 1 << 47

_SIZES = {
    "dword": 4, "b32": 4, "dwordx2": 8, "b64": 8, "dwordx3": 12, "b96": 12, "dwordx4": 16,
    "b128": 16, "ubyte": 1, "sbyte": 1, "byte": 1, "u8": 1, "i8": 1, "b8": 1, "ushort": 2,
    "sshort": 2, "short": 2, "u16": 2, "i16": 2, "b16": 2,
}  # fmt: skip


class Access(NamedTuple):
    """One lane's load or store.

    Attributes:
        size: number of bytes.
        signed: a loaded byte or half repeats its sign.
        half: "low" or "high" if the value is one half of a register, which keeps the other.
    """

    size: int
    signed: bool
    half: str

    @classmethod
    def of(cls, kind: str) -> Access:
        """Read what follows "load_" or "store_": "dwordx4", "u8", "d16_hi_b16", ..."""
        parts = kind.split("_")
        base = [part for part in parts if part not in ("d16", "hi")]
        if len(base) != 1 or base[0] not in _SIZES:
            raise UnknownInstruction("access of this width")
        half = ("high" if "hi" in parts else "low") if "d16" in parts else ""
        return cls(_SIZES[base[0]], base[0] in ("sbyte", "i8", "sshort", "i16"), half)

    @property
    def words(self) -> int:
        """Number of registers that take part."""
        return max(self.size // 4, 1)

    def loaded(self, w: Waves, register: int, words: Array, mask: Array) -> None:
        """Write loaded words ``[words, lanes of the mask]`` into registers."""
        if self.signed:
            sign = U32(1 << (8 * self.size - 1))
            words = (words ^ sign) - sign
        if self.half:
            old = w.vector[register][mask]
            low, high = (words[0] & U32(0xFFFF), old) if self.half == "low" else (old, words[0])
            if self.half == "low":
                words = [(high & U32(0xFFFF0000)) | low]
            else:
                words = [(high << U32(16)) | (low & U32(0xFFFF))]
        for place in range(self.words):
            w.vector[register + place][mask] = words[place]

    def stored(self, w: Waves, register: int, mask: Array) -> list[Array]:
        """Return the words to store of the lanes of a mask."""
        words = [w.vector[register + place][mask] for place in range(self.words)]
        if self.half == "high":
            words = [words[0] >> U32(16)]
        return words


@functools.cache
def _everything() -> Array:
    """Return this process's memory as bytes, most of which must not be touched."""
    kind = ctypes.c_uint8 * (_ADDRESSES - _FIRST_BYTE)
    whole: Any = kind.from_address(_FIRST_BYTE)
    return np.frombuffer(whole, np.uint8)


class HostMemory:
    """Global memory: the ranges of this process's memory that a launch may touch.

    Attributes:
        ranges: (address, end) of each of them.
    """

    def __init__(self) -> None:
        """Start without any range."""
        self._bytes = _everything()
        self.allow(())

    def allow(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Replace the ranges that may be touched, each from an address to an end."""
        merged: list[list[int]] = []
        for start, end in sorted(ranges):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(end, merged[-1][1])
            else:
                merged.append([start, end])
        self.ranges = merged
        self._starts = np.array([start for start, _ in merged], U64)
        self._ends = np.array([end for _, end in merged], U64)

    def _check(self, addresses: Array, size: int) -> None:
        place = np.searchsorted(self._starts, addresses, side="right") - 1
        if not self.ranges:
            raise Fault("a launch without tensors touches memory")
        outside = (place < 0) | (addresses + U64(size) > self._ends[np.maximum(place, 0)])
        if outside.any():
            address = int(addresses[outside][0])
            nearest = min(self.ranges, key=lambda r: min(abs(address - r[0]), abs(address - r[1])))
            raise Fault(
                f"{size} bytes at {address:#x} ({outside.sum()} of {len(addresses)} lanes) are "
                f"outside of every tensor; the nearest has {nearest[1] - nearest[0]} bytes, and "
                f"this is {address - nearest[0]:+d} from its beginning"
            )
        align = min(size & -size, 4)
        if align > 1 and (addresses & U64(align - 1)).any():
            address = int(addresses[(addresses & U64(align - 1)) != 0][0])
            raise Fault(f"{size} bytes at {address:#x}, which is misaligned")

    def load(self, addresses: Array, size: int) -> Array:
        """Return uint32 words ``[words, addresses]`` of ``size`` bytes at each address.

        Raises:
            Fault: an address is outside of the ranges, or misaligned.
        """
        values, at = self._checked(addresses, size)
        return np.stack([values[at + place].astype(U32) for place in range(max(size // 4, 1))])

    def store(self, addresses: Array, size: int, words: list[Array]) -> None:
        """Write ``size`` bytes of words at each address.

        Raises:
            Fault: an address is outside of the ranges, or misaligned.
        """
        values, at = self._checked(addresses, size)
        for place in range(max(size // 4, 1)):
            values[at + place] = words[place].astype(values.dtype)

    def _checked(self, addresses: Array, size: int) -> tuple[Array, Array]:
        """Return memory in units of ``size`` bytes, at most 4, and the units at the addresses."""
        self._check(addresses, size)
        unit = min(size, 4)
        whole = self._bytes[: len(self._bytes) // 4 * 4]
        values = whole.view({1: np.uint8, 2: np.uint16, 4: U32}[unit])
        return values, ((addresses - U64(_FIRST_BYTE)) // U64(unit)).astype(I64)


# Read-modify-write operations: old and given values to new ones, as uint32 or uint64.
def _as(kind: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    def computed(old: Any, given: Any) -> Any:
        return np.asarray(function(old.view(kind), given.view(kind))).view(old.dtype)

    return computed


ATOMICS: dict[str, Callable[..., Any]] = {
    "add": lambda old, given: old + given, "sub": lambda old, given: old - given,
    "and": lambda old, given: old & given, "or": lambda old, given: old | given,
    "xor": lambda old, given: old ^ given, "swap": lambda old, given: given,
    "umax": max, "umin": min, "max_u": max, "min_u": min,
    "smax": _as(np.int32, max), "smin": _as(np.int32, min),
    "max_i": _as(np.int32, max), "min_i": _as(np.int32, min),
    "add_f": _as(np.float32, lambda old, given: old + given),
    "max_f": _as(np.float32, np.fmax), "min_f": _as(np.float32, np.fmin),
    "max_num_f": _as(np.float32, np.fmax), "min_num_f": _as(np.float32, np.fmin),
}  # fmt: skip


def atomic(name: str) -> Callable[..., Any] | None:
    """Return the function of an atomic of 32 bits; None for a compare and swap.

    Args:
        name: the mnemonic behind "atomic_" or "ds_": "add", "umax", "add_u32", "max_i32".

    Raises:
        UnknownInstruction: it is not known, or not of 32 bits.
    """
    if name in ("cmpswap", "cmpswap_b32"):
        return None
    found = re.fullmatch(r"(\w+?)(?:_([uibf])32)?", name)
    assert found
    if found[2]:
        name = found[1] if found[2] == "b" else f"{found[1]}_{found[2]}"
        name = {"add_u": "add", "sub_u": "sub"}.get(name, name)
    if name not in ATOMICS:
        raise UnknownInstruction("atomic")
    return ATOMICS[name]


class MemoryUnit:
    """Makes functions of a program's loads, stores and atomics outside of LDS."""

    def __init__(self, program: Program, memory: HostMemory) -> None:
        """Serve a program's architecture and lanes."""
        self._lanes, self._gfx12, self._memory = program.lanes, program.gfx12, memory

    def decode(self, name: str, rest: str) -> Callable[[Waves], None]:
        """Return the function of an instruction ``name rest``.

        Raises:
            UnknownInstruction: the instruction or its form is not known.
        """
        if re.fullmatch(r"(global|buffer)_(gl[01]_)?(inv|wb|wbinv|wbl2|wbinvl1|wbinvl1_vol)", name):
            return lambda w: None
        found = re.fullmatch(r"(global|buffer|scratch|flat)_(load|store|atomic)_(\w+)", name)
        texts, mods = split(rest), modifiers(rest)
        if not found or mods.get("lds") or mods.get("idxen") or "lds" in name:
            raise UnknownInstruction("access to memory")
        space, way, kind = found.groups()
        offset = mods.get("offset", 0)
        if way == "atomic":
            return self._atomic(
                space,
                kind,
                texts,
                offset,
                "glc" in mods or "sc0" in mods or "TH_ATOMIC_RETURN" in rest,
            )
        access = Access.of(kind)
        if space == "scratch":
            return self._scratch(way, access, texts, offset)
        data = Operand(texts[1] if way == "store" and space != "buffer" else texts[0])
        where = self._addresses(space, way, texts, offset)
        register = data.index

        def execute(w: Waves) -> None:
            addresses, inside = where(w, access.size)
            mask = w.mask
            addresses = np.broadcast_to(addresses, mask.shape)
            if inside is not None:
                beyond = mask & ~inside
                if way == "load" and beyond.any():
                    zeros = np.zeros((access.words, int(beyond.sum())), U32)
                    access.loaded(w, register, zeros, beyond)
                mask = mask & inside
            if not mask.any():
                return
            if way == "load":
                words = self._memory.load(addresses[mask], access.size)
                access.loaded(w, register, words, mask)
            else:
                self._memory.store(addresses[mask], access.size, access.stored(w, register, mask))

        return execute

    def _addresses(
        self, space: str, way: str, texts: list[str], offset: int
    ) -> Callable[[Waves, int], tuple[Array, Array | None]]:
        """Return a function that gives the lanes' addresses and which are inside a buffer."""
        added = U64(offset % 2**64)
        if space == "buffer":
            lane_text, resource, scalar = texts[1], Operand(texts[2]).index, texts[3]
            in_lane = reader(Operand(lane_text), "u32") if lane_text != "off" else lambda w: U32(0)
            in_scalar = scalar_reader(Operand(scalar))

            # A raw buffer: the base, flags without a stride, and the number of bytes.
            def within(w: Waves, size: int) -> tuple[Array, Array]:
                low, high = w.scalar[resource], w.scalar[resource + 1]
                if (high[w.running] & U32(0x3FFF0000)).any():
                    raise UnknownInstruction("a buffer with a stride")
                base = low.astype(U64) | ((high & U32(0xFFFF)).astype(U64) << U64(32))
                # 32 bits hold the sum of a lane's offset and the instruction's, up to gfx1250.
                distance = (np.asarray(in_lane(w), U64) + added) & U64(0xFFFFFFFF)
                distance = distance + np.asarray(in_scalar(w), U64)[..., None]
                limit = w.scalar[resource + 2].astype(U64)[:, None]
                return base[:, None] + distance, distance + U64(size) <= limit

            return within
        lane = texts[0] if way == "store" else texts[1]
        if space == "flat" or len(texts) < 3 or texts[2] == "off":
            wide = reader(Operand(lane), "u64")
            return lambda w, size: (wide(w) + added, None)
        base = Operand(texts[2]).index
        # On gfx12 the lane's part is signed.
        distance = reader(Operand(lane), "i32" if self._gfx12 else "u32")

        def from_scalar(w: Waves, size: int) -> tuple[Array, None]:
            part = np.asarray(distance(w)).astype(I64).view(U64)
            return w.scalar64(base)[:, None] + part + added, None

        return from_scalar

    def _scratch(
        self, way: str, access: Access, texts: list[str], offset: int
    ) -> Callable[[Waves], None]:
        lane, data = (texts[1], texts[0]) if way == "load" else (texts[0], texts[1])
        in_lane = reader(Operand(lane), "u32") if lane != "off" else lambda w: U32(0)
        scalar = texts[2] if len(texts) > 2 else "off"
        in_scalar = scalar_reader(Operand(scalar)) if scalar != "off" else lambda w: U32(0)
        register, size = Operand(data).index, access.size

        def execute(w: Waves) -> None:
            mask = w.mask
            at = np.asarray(in_lane(w), I64) + np.asarray(in_scalar(w), I64)[..., None] + offset
            at = np.broadcast_to(at, mask.shape)[mask]
            if not len(at):
                return
            if at.min() < 0 or at.max() + size > w.scratch.shape[2]:
                raise Fault(f"private memory at {at.max()} of {w.scratch.shape[2]} bytes")
            waves, lanes = np.nonzero(mask)
            unit = min(size, 4)
            if way == "store":
                words = access.stored(w, register, mask)
            for place in range(access.words):
                for byte in range(unit):
                    cell = waves, lanes, at + 4 * place + byte
                    if way == "store":
                        w.scratch[cell] = (words[place] >> U32(8 * byte)).astype(np.uint8)
            if way == "load":
                loaded = [
                    sum(
                        w.scratch[waves, lanes, at + 4 * place + byte].astype(U32) << U32(8 * byte)
                        for byte in range(unit)
                    )
                    for place in range(access.words)
                ]
                access.loaded(w, register, np.stack(loaded), mask)

        return execute

    def _atomic(
        self, space: str, name: str, texts: list[str], offset: int, returns: bool
    ) -> Callable[[Waves], None]:
        function = atomic(name)
        returned = -1
        if space == "buffer":
            data = returned = Operand(texts[0]).index
        else:
            if returns:
                returned, texts = Operand(texts[0]).index, texts[1:]
            data = Operand(texts[1]).index
        where = self._addresses(space, "store", texts, offset)

        def execute(w: Waves) -> None:
            addresses, inside = where(w, 4)
            mask = w.mask if inside is None else w.mask & inside
            addresses = np.broadcast_to(addresses, mask.shape)
            # One lane after the other: each sees what those before it wrote.
            for wave, lane in zip(*np.nonzero(mask), strict=True):
                address = addresses[wave, lane : lane + 1]
                old = self._memory.load(address, 4)[0]
                given = w.vector[data][wave, lane : lane + 1]
                if function is None:
                    expected = w.vector[data + 1][wave, lane]
                    new = given if old[0] == expected else old
                else:
                    new = np.asarray(function(old, given))
                self._memory.store(address, 4, [new])
                if returns:
                    w.vector[returned][wave, lane] = old[0]

        return execute

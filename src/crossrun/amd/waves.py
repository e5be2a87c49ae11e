"""Registers of a batch of waves that execute one program."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any

VCC, M0, EXEC = 106, 124, 126
_SCALARS = 128
# Registers that nobody has written: as a float it is negative, as an index it is far outside.
_UNWRITTEN = 0xDEADBEEF


class Waves:
    """Vector and scalar registers of ``count`` waves, and which of the waves execute at present.

    An instruction is executed for all waves that stand before it. The others are masked like lanes
    that are off.

    Attributes:
        lanes: number of lanes of a wave.
        vector: ``[registers, waves, lanes]`` uint32; accumulators begin at 256.
        scalar: ``[128, waves]`` uint32; VCC, M0 and EXEC have their places in it.
        scc: ``[waves]`` bool, the scalar condition code.
        clamps_fp8: ``[waves]`` bool, MODE.fp16_ovfl: conversions to FP8 saturate.
        active: ``[waves]`` bool, the waves that execute; None if all do.
        scratch: ``[waves, lanes, bytes]`` uint8, the private memory of each lane.
        group: ``[waves]`` index of each wave's work-group in the batch.
    """

    def __init__(self, count: int, lanes: int, registers: int, scratch: int, group: Array) -> None:
        """Make registers that nobody has written, with all lanes on."""
        self.count, self.lanes = count, lanes
        self.vector = np.full((registers, count, lanes), _UNWRITTEN, np.uint32)
        self.scalar = np.full((_SCALARS, count), _UNWRITTEN, np.uint32)
        self.scalar[EXEC : EXEC + 2] = 0xFFFFFFFF
        self.scc = np.zeros(count, bool)
        self.clamps_fp8 = np.zeros(count, bool)
        self.active: Array | None = None
        self.scratch = np.full((count, lanes, scratch), 0xA5, np.uint8)
        self.group = group
        self._mask: Array | None = None

    def activate(self, active: Array) -> None:
        """Let the waves of a ``[waves]`` mask execute what follows."""
        self.active = None if active.all() else active
        self._mask = None

    @property
    def mask(self) -> Array:
        """The lanes ``[waves, lanes]`` whose registers the present instruction writes."""
        if self._mask is None:
            lanes = self.lanes_of(EXEC)
            self._mask = lanes if self.active is None else lanes & self.active[:, None]
        return self._mask

    @property
    def running(self) -> Array:
        """Indices of the waves that execute."""
        return np.arange(self.count) if self.active is None else np.flatnonzero(self.active)

    def lanes_of(self, register: int) -> Array:
        """Return a lane mask in scalar registers as bool ``[waves, lanes]``."""
        words = np.ascontiguousarray(self.scalar[register : register + self.lanes // 32].T)
        return np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").view(bool)

    def set_lanes(self, register: int, lanes: Array) -> None:
        """Write bool ``[waves, lanes]`` into scalar registers, as bits of the lanes that are on."""
        lanes = np.broadcast_to(lanes, (self.count, self.lanes)) & self.lanes_of(EXEC)
        words = np.packbits(lanes, axis=1, bitorder="little").view(np.uint32)
        for place in range(words.shape[1]):
            self.set_scalar(register + place, words[:, place])

    def set_scalar(self, register: int, value: Array) -> None:
        """Write uint32 ``[waves]`` into a scalar register of the waves that execute."""
        if self.active is None:
            self.scalar[register] = value
        else:
            np.copyto(self.scalar[register], value, where=self.active)
        if register >= EXEC:
            self._mask = None

    def set_scalar64(self, register: int, value: Array) -> None:
        """Write uint64 ``[waves]`` into two scalar registers, the low word first."""
        self.set_scalar(register, (value & np.uint64(0xFFFFFFFF)).astype(np.uint32))
        self.set_scalar(register + 1, (value >> np.uint64(32)).astype(np.uint32))

    def scalar64(self, register: int) -> Array:
        """Return two scalar registers as uint64 ``[waves]``."""
        low, high = self.scalar[register], self.scalar[register + 1]
        return low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))

    def set_scc(self, value: Array) -> None:
        """Write the condition code of the waves that execute."""
        if self.active is None:
            self.scc[:] = value
        else:
            np.copyto(self.scc, value, where=self.active)

    def set_vector(self, register: int, value: Array, mask: Array | None = None) -> None:
        """Write uint32 values into the lanes of ``mask``, of ``self.mask`` without one."""
        np.copyto(self.vector[register], value, where=self.mask if mask is None else mask)

    def vector64(self, register: int) -> Array:
        """Return two vector registers as uint64 ``[waves, lanes]``."""
        low, high = self.vector[register], self.vector[register + 1]
        return low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))

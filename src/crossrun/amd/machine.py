"""Execution of a program by batches of waves."""

from __future__ import annotations

import collections
import ctypes
import re
from typing import NamedTuple

import numpy as np

from crossrun.amd.errors import Fault, UnknownInstruction
from crossrun.amd.lds import Lds, LdsUnit
from crossrun.amd.matrix import MatrixUnit
from crossrun.amd.memory import HostMemory, MemoryUnit
from crossrun.amd.operands import Operand
from crossrun.amd.program import Program
from crossrun.amd.scalar import ScalarUnit
from crossrun.amd.vector import Execute, VectorUnit, split_both
from crossrun.amd.waves import EXEC, VCC, Array, Waves

# Waves of a batch: more keep registers out of a core's caches.
_BATCH = 64
_ENDED = np.iinfo(np.int64).max
_TTMP = 108


class Branch(NamedTuple):
    """A branch to an instruction, taken by the waves for which the condition holds."""

    target: int
    condition: str


class Barrier(NamedTuple):
    """A meeting of a work-group's waves."""


class End(NamedTuple):
    """The end of a wave."""


Control = Branch | Barrier | End


class Machine:
    """A program with the functions of its instructions, which are decoded when first executed.

    Attributes:
        program: the kernel that is executed.
        memory: the launch's global memory.
    """

    def __init__(self, program: Program, memory: HostMemory) -> None:
        """Prepare a program that nobody has executed."""
        self.program, self.memory = program, memory
        self._scalar = ScalarUnit(memory)
        self._vector = VectorUnit(program)
        self._matrix = MatrixUnit(program)
        self._memory = MemoryUnit(program, memory)
        self._lds = LdsUnit(program)
        self._decoded: list[Execute | Control | None] = [None] * len(program.lines)
        self._times = np.zeros(len(program.lines), np.int64)

    @property
    def executed(self) -> collections.Counter[str]:
        """Count executions of each instruction by its name, once for each wave."""
        counted: collections.Counter[str] = collections.Counter()
        for line, times in zip(self.program.lines, self._times, strict=True):
            counted[line.split()[0]] += int(times)
        return counted

    def decode(self, place: int) -> Execute | Control:
        """Return an instruction as a function of waves, or as what it does to their order.

        Raises:
            UnknownInstruction: the message has the instruction's text.
        """
        line = self.program.lines[place]
        try:
            return self._decode(line)
        except UnknownInstruction as error:
            raise UnknownInstruction(f"{self._where(place)}: {error}") from None
        except (AssertionError, IndexError, KeyError, TypeError, ValueError) as error:
            raise UnknownInstruction(f"{self._where(place)}: {error!r}") from error

    def _where(self, place: int) -> str:
        program = self.program
        return f"{program.name}, {program.sources[place]}: {program.lines[place]!r}"

    def _decode(self, line: str) -> Execute | Control:
        if "::" in line:
            pair = [_named(part.strip().replace("v_dual_", "v_", 1)) for part in line.split("::")]
            return self._vector.dual(*((name[2:], rest) for name, rest in pair))
        name, rest = _named(line)
        unit, _, action = name.partition("_")
        if unit == "s":
            if action == "endpgm":
                return End()
            if action in ("barrier", "barrier_wait"):
                return Barrier()
            if action == "branch" or action.startswith("cbranch_"):
                return Branch(self.program.labels[rest.strip()], action.removeprefix("cbranch_"))
            return self._scalar.decode(action, rest)
        if unit == "v":
            if action.startswith(("mfma_", "wmma_", "smfmac_", "swmmac_")):
                texts, mods = split_both(rest)
                return self._matrix.decode(action, [Operand(text) for text in texts], mods)
            return self._vector.decode(action, rest)
        if unit == "ds":
            return self._lds.decode(action, rest)
        return self._memory.decode(name, rest)

    def run(self, arguments: int, grid: tuple[int, int, int], threads: int, lds_bytes: int) -> None:
        """Execute all work-groups of a launch.

        Args:
            arguments: address of the argument block.
            grid: number of work-groups along x, y and z.
            threads: threads of a work-group.
            lds_bytes: LDS of a work-group.

        Raises:
            Fault: the program did what no correct one does.
            UnknownInstruction: an instruction is not known.
        """
        x, y, z = grid
        groups = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
        waves = -(-threads // self.program.lanes)
        step = max(_BATCH // waves, 1)
        with np.errstate(all="ignore"):
            for first in range(0, len(groups), step):
                batch = np.array(groups[first : first + step], np.uint32)
                self._run_batch(arguments, batch, waves, lds_bytes)

    def _run_batch(self, arguments: int, groups: Array, waves: int, lds_bytes: int) -> None:
        program = self.program
        group_of = np.repeat(np.arange(len(groups)), waves)
        w = Waves(len(group_of), program.lanes, program.registers, program.scratch_bytes, group_of)
        wave = np.tile(np.arange(waves, dtype=np.uint32), len(groups))
        w.set_scalar64(program.argument_register, np.uint64(arguments))
        position = groups[group_of].T
        if program.gfx12:
            w.scalar[_TTMP + 9] = position[0]
            w.scalar[_TTMP + 7] = position[1] | position[2] << np.uint32(16)
            w.scalar[_TTMP + 8] = wave << np.uint32(25)
        else:
            for register, value in zip(program.work_group_registers, position, strict=True):
                if register is not None:
                    w.scalar[register] = value
        w.vector[0] = wave[:, None] * np.uint32(program.lanes) + np.arange(
            program.lanes, dtype=np.uint32
        )
        self._lds.lds = lds = Lds(len(groups), max(lds_bytes, program.lds_bytes), group_of)
        place = np.zeros(w.count, np.int64)
        waiting = np.zeros(w.count, bool)
        while True:
            ready = ~waiting & (place != _ENDED)
            if not ready.any():
                if waiting.any():
                    raise Fault(f"{program.name}: waves end while others wait at a barrier")
                return
            # Those furthest behind go first, until they reach the next ones.
            at = int(place[ready].min())
            active = ready & (place == at)
            others = ready & ~active
            limit = int(place[others].min()) if others.any() else _ENDED
            w.activate(active)
            self._run_until(w, at, limit, active, place, waiting, lds)

    def _run_until(
        self, w: Waves, at: int, limit: int, active: Array, place: Array, waiting: Array, lds: Lds
    ) -> None:
        """Execute until the waves part, meet others, wait or end; note where they are."""
        decoded, count = self._decoded, int(active.sum())
        while at < limit:
            step = decoded[at]
            if step is None:
                step = decoded[at] = self.decode(at)
            self._times[at] += count
            if not isinstance(step, tuple):
                try:
                    step(w)
                except (Fault, UnknownInstruction) as error:
                    raise type(error)(f"{self._where(at)}: {error}") from None
                at += 1
            elif isinstance(step, Branch):
                taken = _holds(w, step.condition)[active]
                if taken.all():
                    at = step.target
                elif not taken.any():
                    at += 1
                else:
                    place[active] = np.where(taken, step.target, at + 1)
                    return
            elif isinstance(step, End):
                place[active] = _ENDED
                return
            else:
                place[active] = at + 1
                waiting |= active
                waits = np.ones(len(lds._epoch), bool)
                waits[w.group[~waiting]] = False
                met = np.flatnonzero(waits)
                lds.barrier(met)
                waiting &= ~np.isin(w.group, met)
                return
        place[active] = at


def _named(line: str) -> tuple[str, str]:
    found = re.match(r"(\w+)\s*(.*)", line)
    assert found
    return found[1], found[2]


def _holds(w: Waves, condition: str) -> Array:
    if condition == "branch":
        return np.ones(w.count, bool)
    if condition in ("scc0", "scc1"):
        return w.scc == (condition == "scc1")
    register, wanted = (VCC, "vccz") if condition.startswith("vcc") else (EXEC, "execz")
    if condition not in ("vccz", "vccnz", "execz", "execnz"):
        raise UnknownInstruction(f"branch on {condition}")
    zero = w.scalar[register] == 0
    if w.lanes == 64:
        zero &= w.scalar[register + 1] == 0
    return zero == (condition == wanted)


def address_of(buffer: ctypes.Array[ctypes.c_char]) -> int:
    """Return where a buffer's bytes are, at a multiple of 256."""
    return (ctypes.addressof(buffer) + 255) & ~255

"""Triton's driver for kernels compiled for AMD that are interpreted, on CPU tensors."""

from __future__ import annotations

import ctypes
import struct
import weakref
from typing import Any

import torch
from triton.backends.compiler import GPUTarget

from crossrun.amd.errors import Fault
from crossrun.amd.machine import Machine, address_of
from crossrun.amd.memory import HostMemory
from crossrun.amd.program import Program
from crossrun.cpu_driver import CpuDriver

_NUMBERS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H",
    "u32": "I", "u64": "Q", "fp16": "e", "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
_THREADS = 1024


class Device:
    """The pretended GPU.

    Attributes:
        name: its architecture, "gfx942" for example.
        lanes: lanes of a wave.
        shared_bytes: LDS of a work-group.
        launches: number of kernels that were launched.
    """

    def __init__(self, name: str, lanes: int, shared_bytes: int, compute_units: int) -> None:
        """Describe a GPU; nothing was launched on it."""
        self.name, self.lanes = name, lanes
        self.shared_bytes, self.compute_units = shared_bytes, compute_units
        self.memory = HostMemory()
        self.launches = 0
        self._machines: list[Machine] = []
        self._beside: list[weakref.ref[torch.Tensor]] = []

    def reach(self, *tensors: torch.Tensor) -> None:
        """Allow kernels to touch tensors that they reach by addresses alone, while these live."""
        self._beside = [each for each in self._beside if each() is not None]
        self._beside += map(weakref.ref, tensors)

    @property
    def executed(self) -> dict[str, dict[str, int]]:
        """Executed instructions by kernel and instruction, each wave counted."""
        found: dict[str, dict[str, int]] = {}
        for machine in self._machines:
            of_kernel = found.setdefault(machine.program.name, {})
            for name, times in machine.executed.items():
                if times:
                    of_kernel[name] = of_kernel.get(name, 0) + times
        return found

    def load(self, text: str, name: str) -> Machine:
        """Read a kernel's assembly."""
        program = Program(text, name)
        assert program.architecture == self.name, (program.architecture, self.name)
        machine = Machine(program, self.memory)
        self._machines.append(machine)
        return machine

    def launch(
        self,
        machine: Machine,
        fields: list[bytes],
        ranges: list[tuple[int, int]],
        grid: tuple[int, int, int],
        threads: int,
        lds_bytes: int,
    ) -> None:
        """Execute a kernel.

        Args:
            machine: the kernel, from ``load``.
            fields: the kernel's arguments as bytes, in order.
            ranges: (address, end) of the memory it may touch beside what ``reach`` named.
            grid: number of work-groups along x, y and z.
            threads: threads of a work-group.
            lds_bytes: LDS of a work-group.

        Raises:
            Fault: the kernel did what no correct one does.
            UnknownInstruction: an instruction is not known.
        """
        program = machine.program
        size = program.argument_bytes
        block = ctypes.create_string_buffer(size + 320)
        at = address_of(block)
        hidden = {
            **{f"hidden_block_count_{axis}": n for axis, n in zip("xyz", grid, strict=True)},
            "hidden_group_size_x": threads, "hidden_group_size_y": 1, "hidden_group_size_z": 1,
            "hidden_grid_dims": 3, "hidden_dynamic_lds_size": lds_bytes,
        }  # fmt: skip
        given = iter(fields)
        for argument in program.arguments:
            if argument.kind.startswith("hidden_"):
                value = hidden.get(argument.kind, 0).to_bytes(argument.size, "little")
            else:
                # Triton's own scratch pointers come behind and are not used.
                value = next(given, bytes(argument.size))
            assert len(value) == argument.size, (program.name, argument, value)
            ctypes.memmove(at + argument.offset, value, argument.size)
        assert not list(given), program.name
        # Scalar loads take whole rows of words.
        beside = [_range_of(tensor) for each in self._beside if (tensor := each()) is not None]
        self.memory.allow([*ranges, *beside, (at, at + size + 64)])
        self.launches += 1
        machine.run(at, grid, threads, lds_bytes)


def _range_of(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def amd_driver(device: Device) -> CpuDriver:
    """Make Triton's driver of a pretended device."""

    def load(name: str, code: bytes) -> tuple[Any, ...]:
        return None, device.load(code.decode(), name), 0, 0, _THREADS

    def launch(
        kernel: Machine, given: list[tuple[str, Any]], grid: tuple[int, int, int], metadata: Any
    ) -> None:
        fields, ranges = [], []
        for kind, value in given:
            if kind.startswith("*"):
                fields.append(struct.pack("<Q", 0 if value is None else value.data_ptr()))
                if value is not None:
                    ranges.append(_range_of(value))
            elif kind not in _NUMBERS:
                raise Fault(f"an argument of type {kind} is not known")
            else:
                fields.append(struct.pack("<" + _NUMBERS[kind], value))
        threads = metadata.num_warps * device.lanes
        device.launch(kernel, fields, ranges, grid, threads, metadata.shared)

    properties = {
        "max_shared_mem": device.shared_bytes,
        "multiprocessor_count": device.compute_units,
        "warpSize": device.lanes,
        "arch": device.name,
    }
    return CpuDriver(GPUTarget("hip", device.name, device.lanes), properties, load, launch)

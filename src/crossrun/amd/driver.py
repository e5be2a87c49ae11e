"""Triton's driver for kernels compiled for AMD that are interpreted, on CPU tensors."""

from __future__ import annotations

import ctypes
import struct
import weakref
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from crossrun.amd.errors import Fault
from crossrun.amd.machine import Machine, address_of
from crossrun.amd.memory import HostMemory
from crossrun.amd.program import Program

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


class _Utils:
    """Functions that Triton calls on a device driver."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def get_device_properties(self, device: int) -> dict[str, Any]:
        """Return the limits of a launch."""
        return {
            "max_shared_mem": self._device.shared_bytes,
            "multiprocessor_count": self._device.compute_units,
            "warpSize": self._device.lanes,
            "arch": self._device.name,
        }

    def load_binary(self, name: str, module: bytes, *_: Any) -> tuple[Any, Any, int, int, int]:
        """Return module, kernel, registers, spills and the most threads of a work-group."""
        return None, self._device.load(module.decode(), name), 0, 0, _THREADS


def _launcher(device: Device) -> type:
    class Launcher:
        """Runs one compiled kernel to its end."""

        def __init__(self, source: Any, metadata: Any) -> None:
            self._kinds = list(source.signature.values())
            self._threads = metadata.num_warps * device.lanes
            self._lds = metadata.shared

        def __call__(self, x: int, y: int, z: int, stream: None, kernel: Any, *rest: Any) -> None:
            # The arguments behind are packed and launch metadata, two hooks, and the kernel's own
            # arguments.
            fields, ranges = [], []
            for kind, value in zip(self._kinds, rest[4:], strict=True):
                if kind.startswith("*"):
                    fields.append(struct.pack("<Q", 0 if value is None else value.data_ptr()))
                    if value is not None:
                        ranges.append(_range_of(value))
                elif kind != "constexpr":
                    if kind not in _NUMBERS:
                        raise Fault(f"an argument of type {kind} is not known")
                    fields.append(struct.pack("<" + _NUMBERS[kind], value))
            device.launch(kernel, fields, ranges, (x, y, z), self._threads, self._lds)

    return Launcher


class AmdDriver(DriverBase):  # type: ignore[misc]
    """One device, interpreted, and no streams."""

    def __init__(self, device: Device) -> None:
        """Drive a pretended device."""
        self.device = device
        self.utils = _Utils(device)
        self.launcher_cls = _launcher(device)

    @classmethod
    def is_active(cls) -> bool:
        """Return False: this driver is chosen explicitly, never detected."""
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Return the type as it is: no launcher is compiled."""
        return ty

    def get_current_device(self) -> int:
        """Return the only device, 0."""
        return 0

    def get_current_stream(self, device: int) -> None:
        """Return None, since kernels run when they are launched."""
        return None

    def get_current_target(self) -> GPUTarget:
        """Return the target that kernels are compiled for."""
        return GPUTarget("hip", self.device.name, self.device.lanes)

    def get_active_torch_device(self) -> torch.device:
        """Return torch's CPU device."""
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """Return torch's module of the device."""
        return torch.cpu

    def get_benchmarker(self) -> Any:
        """Raise an error, since there is no benchmarker."""
        raise NotImplementedError("times on this device mean nothing")

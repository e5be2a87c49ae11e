"""Triton's driver for kernels compiled by Intel's compiler that run on a CPU, on CPU tensors."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from crossrun.intel.runtime import Runtime

_NUMBERS = {
    "i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32,
    "i64": ctypes.c_int64, "u1": ctypes.c_uint8, "u8": ctypes.c_uint8, "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32, "u64": ctypes.c_uint64, "fp32": ctypes.c_float,
    "f32": ctypes.c_float, "fp64": ctypes.c_double,
}  # fmt: skip
# A CPU has no limit, so this is the limit of the largest targets.
_SHARED_BYTES = 128 * 1024
# The runtime refuses shared memory of fewer bytes.
_LEAST_SHARED_BYTES = 8


class _Utils:
    """Functions that Triton calls on a device driver."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Return the limits of a launch."""
        return {"max_shared_mem": _SHARED_BYTES, "multiprocessor_count": 1}

    def load_binary(self, name: str, module: bytes, *_: Any) -> tuple[Any, Any, int, int]:
        """Return program, kernel, registers and spills; a CPU does not report the latter two."""
        return None, self._runtime.kernel(module, name), 0, 0


def _launcher(runtime: Runtime) -> type:
    class Launcher:
        """Runs one compiled kernel and waits for it."""

        def __init__(self, source: Any, metadata: Any) -> None:
            self._kinds = list(source.signature.values())
            self._shared = metadata.shared and max(metadata.shared, _LEAST_SHARED_BYTES)
            self._lanes = metadata.num_warps * metadata.threads_per_warp

        def __call__(self, x: int, y: int, z: int, stream: None, kernel: Any, *rest: Any) -> None:
            # The arguments behind are packed and launch metadata, two hooks, and the kernel's own
            # arguments.
            given = rest[4:]
            arguments = [
                _argument(kind, value)
                for kind, value in zip(self._kinds, given, strict=True)
                if kind != "constexpr"
            ]
            runtime.run(kernel, arguments, self._shared, (x, y, z), self._lanes)

    return Launcher


def _argument(kind: str, value: Any) -> Any:
    if not kind.startswith("*"):
        return _NUMBERS[kind](value)
    if value is None:
        return 0
    assert value.device.type == "cpu", value.device
    return int(value.data_ptr())


class CpuDriver(DriverBase):  # type: ignore[misc]
    """One device, the CPU, and no streams."""

    def __init__(self, runtime: Runtime, properties: dict[str, Any]) -> None:
        """Drive a runtime; ``properties`` are those of the target that kernels are compiled for."""
        self.runtime = runtime
        self.utils = _Utils(runtime)
        self.launcher_cls = _launcher(runtime)
        self._properties = properties

    @classmethod
    def is_active(cls) -> bool:
        """Return False: this driver is chosen explicitly, never detected."""
        return False

    def get_current_device(self) -> int:
        """Return the only device, 0."""
        return 0

    def get_current_stream(self, device: int) -> None:
        """Return None, since kernels run when they are launched."""
        return None

    def get_current_target(self) -> GPUTarget:
        """Return the target that kernels are compiled for."""
        return GPUTarget("xpu", self._properties, 32)

    def get_active_torch_device(self) -> torch.device:
        """Return torch's CPU device."""
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """Return torch's module of the device."""
        return torch.cpu

    def get_benchmarker(self) -> Any:
        """Raise an error, since there is no benchmarker."""
        raise NotImplementedError("times on this device mean nothing")

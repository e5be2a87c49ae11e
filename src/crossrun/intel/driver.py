"""Triton's driver for kernels compiled by Intel's compiler that run on a CPU, on CPU tensors."""

from __future__ import annotations

import ctypes
from typing import Any

from triton.backends.compiler import GPUTarget

from crossrun.cpu_driver import CpuDriver
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


def intel_driver(runtime: Runtime, properties: dict[str, Any]) -> CpuDriver:
    """Make Triton's driver of a runtime; ``properties`` are those of the compiler's target."""

    def load(name: str, code: bytes) -> tuple[Any, ...]:
        return None, runtime.kernel(code, name), 0, 0

    def launch(
        kernel: Any, given: list[tuple[str, Any]], grid: tuple[int, int, int], metadata: Any
    ) -> None:
        shared = metadata.shared and max(metadata.shared, _LEAST_SHARED_BYTES)
        lanes = metadata.num_warps * metadata.threads_per_warp
        runtime.run(kernel, [_argument(*each) for each in given], shared, grid, lanes)

    limits = {"max_shared_mem": _SHARED_BYTES, "multiprocessor_count": 1}
    return CpuDriver(GPUTarget("xpu", properties, 32), limits, load, launch)


def _argument(kind: str, value: Any) -> Any:
    if not kind.startswith("*"):
        return _NUMBERS[kind](value)
    if value is None:
        return 0
    assert value.device.type == "cpu", value.device
    return int(value.data_ptr())

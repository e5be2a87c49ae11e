"""Intel's OpenCL runtime for CPUs: programs from SPIR-V, and kernels that run on host memory.

Kernels read and write the process's own memory (fine-grain system SVM), so that arguments are plain
addresses. Compiling takes this runtime from a second to minutes a kernel; compiled programs are
kept in a folder, by digests of all that they are made of.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import sys
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_ulong, c_void_p
from pathlib import Path
from typing import Any

from crossrun.intel.spirv import for_cpu

_LIBRARY = "libintelocl.so"
# Libraries that the runtime loads by name, and that the dynamic linker does not find in an
# environment.
_NEEDED = ("libimf.so", "libintlc.so.5", "libsvml.so", "libirng.so", "libtbb.so.12")
_CPU = 2
_VERSION, _NAME = 0x102F, 0x102B
_BUILD_LOG = 0x1183
_BINARY_SIZES, _BINARIES = 0x1165, 0x1166
_DPAS = Path(__file__).with_name("dpas.cl")


def _library_path() -> Path | None:
    """Return the path of this environment's runtime (package intel-opencl-rt), or None."""
    path = Path(sys.prefix) / "lib" / _LIBRARY
    return path if path.exists() else None


def missing() -> str:
    """Return why compiled kernels cannot run on this CPU; "" if they can."""
    if _library_path() is None:
        return "Intel's OpenCL runtime for CPUs (package intel-opencl-rt) is not installed"
    return ""


class OpenCLError(RuntimeError):
    """A call of OpenCL that failed, with what the compiler said."""


class Runtime:
    """The CPU as an OpenCL device, whose launches run one after the other."""

    def __init__(self, cache: Path) -> None:
        """Open the device.

        Args:
            cache: folder of compiled programs, made if needed.

        Raises:
            OpenCLError: there is no runtime, or no device.
        """
        path = _library_path()
        if path is None:
            raise OpenCLError(missing())
        os.environ.setdefault("OCL_ICD_FILENAMES", str(path))
        # The emulated products have memory for one work-group.
        os.environ["CL_CONFIG_CPU_TBB_NUM_WORKERS"] = "1"
        for name in _NEEDED:
            ctypes.CDLL(str(path.with_name(name)), mode=ctypes.RTLD_GLOBAL)
        self._cl = _declared(ctypes.CDLL(str(path)))
        self._cache = cache
        platform, device, status = c_void_p(), c_void_p(), c_int()
        count = c_uint()
        self._check(self._cl.clGetPlatformIDs(1, byref(platform), byref(count)), "platform")
        self._check(
            self._cl.clGetDeviceIDs(platform, _CPU, 1, byref(device), byref(count)), "device"
        )
        self._device = device
        self._context = c_void_p(
            self._cl.clCreateContext(None, 1, byref(device), None, None, byref(status))
        )
        self._check(status.value, "context")
        self._queue = c_void_p(
            self._cl.clCreateCommandQueueWithProperties(self._context, device, None, byref(status))
        )
        self._check(status.value, "queue")
        self._dpas: c_void_p | None = None
        #: Programs that were compiled, and not found in the cache.
        self.compiled = 0

    @functools.cached_property
    def version(self) -> str:
        """Version of runtime and device, such as "OpenCL 3.0 (Build 0) AMD EPYC ..."."""
        return f"{self._told(_VERSION)} {self._told(_NAME)}"

    def kernel(self, module: bytes, name: str) -> c_void_p:
        """Return a kernel of a SPIR-V module, whose DPAS instructions are emulated.

        Raises:
            OpenCLError: the module does not compile, or has no such kernel.
        """
        module = for_cpu(module)
        made_of = module + _DPAS.read_bytes() + self.version.encode() + sys.version.encode()
        place = self._cache / f"{hashlib.sha256(made_of).hexdigest()[:32]}.bin"
        program = self._loaded(place) or self._linked(module, name, place)
        status = c_int()
        kernel = c_void_p(self._cl.clCreateKernel(program, name.encode(), byref(status)))
        self._check(status.value, f"kernel {name}")
        return kernel

    def run(
        self,
        kernel: c_void_p,
        arguments: list[Any],
        local_bytes: int,
        groups: tuple[int, int, int],
        lanes: int,
    ) -> None:
        """Run a kernel on a grid and wait for it.

        Args:
            kernel: handle of the kernel, from ``kernel``.
            arguments: an int is an address; others are numbers as ctypes values.
            local_bytes: shared memory, the argument behind the others; 0 for none.
            groups: work-groups along each axis; with a 0 nothing runs.
            lanes: work-items of a group, all along the first axis.
        """
        if 0 in groups:
            return
        for place, value in enumerate(arguments):
            if isinstance(value, int):
                status = self._cl.clSetKernelArgSVMPointer(kernel, place, c_void_p(value))
            else:
                size = ctypes.sizeof(value)
                status = self._cl.clSetKernelArg(kernel, place, size, byref(value))
            self._check(status, f"argument {place}")
        if local_bytes:
            status = self._cl.clSetKernelArg(kernel, len(arguments), local_bytes, None)
            self._check(status, "shared memory")
        items = (c_size_t * 3)(groups[0] * lanes, *groups[1:])
        group = (c_size_t * 3)(lanes, 1, 1)
        self._check(
            self._cl.clEnqueueNDRangeKernel(
                self._queue, kernel, 3, None, items, group, 0, None, None
            ),
            "launch",
        )
        self._check(self._cl.clFinish(self._queue), "run")

    def _loaded(self, place: Path) -> c_void_p | None:
        if not place.exists():
            return None
        binary, status, loaded = place.read_bytes(), c_int(), c_int()
        size, data = c_size_t(len(binary)), c_char_p(binary)
        program = c_void_p(
            self._cl.clCreateProgramWithBinary(
                self._context, 1, byref(self._device), byref(size), byref(data), byref(loaded),
                byref(status),
            )
        )  # fmt: skip
        self._check(status.value, f"cached program {place.name}")
        self._check(
            self._cl.clBuildProgram(program, 1, byref(self._device), b"", None, None),
            f"cached program {place.name}",
        )
        return program

    def _linked(self, module: bytes, name: str, place: Path) -> c_void_p:
        self.compiled += 1
        status = c_int()
        program = c_void_p(
            self._cl.clCreateProgramWithIL(self._context, module, len(module), byref(status))
        )
        self._check(status.value, f"SPIR-V of {name}")
        self._compile(program, name)
        if self._dpas is None:
            source = c_char_p(_DPAS.read_bytes())
            self._dpas = c_void_p(
                self._cl.clCreateProgramWithSource(
                    self._context, 1, byref(source), None, byref(status)
                )
            )
            self._check(status.value, _DPAS.name)
            self._compile(self._dpas, _DPAS.name, b"-cl-std=CL2.0")
        parts = (c_void_p * 2)(program, self._dpas)
        linked = c_void_p(
            self._cl.clLinkProgram(
                self._context, 1, byref(self._device), b"", 2, parts, None, None, byref(status)
            )
        )
        self._check(status.value, f"link {name}: {self._log(linked)}")
        self._keep(linked, place)
        return linked

    def _compile(self, program: c_void_p, name: str, options: bytes = b"") -> None:
        status = self._cl.clCompileProgram(
            program, 1, byref(self._device), options, 0, None, None, None, None
        )
        self._check(status, f"compile {name}: {self._log(program) if status else ''}")

    def _keep(self, program: c_void_p, place: Path) -> None:
        size = c_size_t()
        self._check(
            self._cl.clGetProgramInfo(
                program, _BINARY_SIZES, ctypes.sizeof(size), byref(size), None
            ),
            "binary",
        )
        binary = ctypes.create_string_buffer(size.value)
        pointer = ctypes.cast(binary, c_void_p)
        self._check(
            self._cl.clGetProgramInfo(
                program, _BINARIES, ctypes.sizeof(pointer), byref(pointer), None
            ),
            "binary",
        )
        place.parent.mkdir(parents=True, exist_ok=True)
        part = place.with_suffix(f".{os.getpid()}")
        part.write_bytes(binary.raw)
        part.replace(place)

    def _log(self, program: c_void_p) -> str:
        size = c_size_t()
        if not program:
            return "no program"
        self._cl.clGetProgramBuildInfo(program, self._device, _BUILD_LOG, 0, None, byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._cl.clGetProgramBuildInfo(program, self._device, _BUILD_LOG, size, text, None)
        return text.value.decode(errors="replace")[-600:]

    def _told(self, what: int) -> str:
        text = ctypes.create_string_buffer(256)
        self._check(self._cl.clGetDeviceInfo(self._device, what, 256, text, None), "device")
        return text.value.decode()

    @staticmethod
    def _check(status: int, what: str) -> None:
        if status:
            raise OpenCLError(f"OpenCL error {status}: {what}")


def _declared(cl: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the types of arguments by the OpenCL specification; handles are pointers."""
    pointer, status = c_void_p, POINTER(c_int)
    handles = {
        "clCreateContext": [pointer, c_uint, pointer, pointer, pointer, status],
        "clCreateCommandQueueWithProperties": [pointer, pointer, pointer, status],
        "clCreateProgramWithIL": [pointer, c_char_p, c_size_t, status],
        "clCreateProgramWithSource": [pointer, c_uint, pointer, pointer, status],
        "clCreateProgramWithBinary": [pointer, c_uint] + 4 * [pointer] + [status],
        "clLinkProgram": [
            pointer, c_uint, pointer, c_char_p, c_uint, pointer, pointer, pointer, status,
        ],
        "clCreateKernel": [pointer, c_char_p, status],
    }  # fmt: skip
    codes = {
        "clGetPlatformIDs": [c_uint, pointer, pointer],
        "clGetDeviceIDs": [pointer, c_ulong, c_uint, pointer, pointer],
        "clGetDeviceInfo": [pointer, c_uint, c_size_t, pointer, pointer],
        "clBuildProgram": [pointer, c_uint, pointer, c_char_p, pointer, pointer],
        "clCompileProgram": [pointer, c_uint, pointer, c_char_p, c_uint] + 4 * [pointer],
        "clGetProgramInfo": [pointer, c_uint, c_size_t, pointer, pointer],
        "clGetProgramBuildInfo": [pointer, pointer, c_uint, c_size_t, pointer, pointer],
        "clSetKernelArg": [pointer, c_uint, c_size_t, pointer],
        "clSetKernelArgSVMPointer": [pointer, c_uint, pointer],
        "clEnqueueNDRangeKernel": (
            [pointer, pointer, c_uint] + 3 * [pointer] + [c_uint] + 2 * [pointer]
        ),
        "clFinish": [pointer],
    }  # fmt: skip
    for name, kinds in handles.items():
        getattr(cl, name).argtypes = kinds
        getattr(cl, name).restype = c_void_p
    for name, kinds in codes.items():
        getattr(cl, name).argtypes = kinds
        getattr(cl, name).restype = c_int
    return cl

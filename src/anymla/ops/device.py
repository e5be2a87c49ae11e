"""Properties of devices that kernels depend on, and tests whether Triton and Gluon run there.

Everything here works without triton installed; only ``pdl.py``, ``_gluon.py`` and the files named
``triton_*.py`` or ``gluon_*.py`` import it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Triton reads this once, at import, to decide whether kernels are interpreted; so does this.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

_KIB = 1024


@dataclasses.dataclass(frozen=True)
class Support:
    """Answer of a backend that was asked if it can run a call.

    Attributes:
        ok: True if the backend can run the call.
        reason: explanation for an error message if ``ok`` is False, else "".
        automatic: False if it may only run where it was named.
    """

    ok: bool
    reason: str = ""
    automatic: bool = True

    def __bool__(self) -> bool:
        return self.ok


@dataclasses.dataclass(frozen=True)
class Target:
    """Properties of a GPU architecture that kernels and tiles depend on.

    Attributes:
        name: name of the architecture: "sm_90", "gfx942", "xpu_bmg", ...
        backend: Triton's name of the vendor, "cuda", "hip" or "xpu".
        warp_size: number of threads of a warp, for building kernels; kernels do not depend on it.
            Intel's compiler makes it 16, or 8 where there are matrix products.
        shared_bytes: largest shared memory of one CTA, in bytes.
        native_e4m3: 1 if conversions from and to OCP e4m3 are instructions that beat bit
            manipulation, 2 if those to e4m3 also saturate and turn every NaN into 0x7F, else 0.
        dot_e4m3: True if matrix products of OCP e4m3 operands are instructions.
        sm_count: number of SMs (CUs, Xe cores), hence of CTAs that run at a time if each fills one.
            ``target_of`` gives the device's own number, TARGETS that of a common product.
    """

    name: str
    backend: str
    warp_size: int
    shared_bytes: int
    native_e4m3: int
    dot_e4m3: bool
    sm_count: int = 1

    @property
    def narrow(self) -> bool:
        """True for RDNA: warps of 32 threads, which keep everything in 256 registers."""
        return self.backend == "hip" and self.warp_size == 32

    @property
    def intel(self) -> bool:
        """True for Intel, whose threads have at most 256 registers; tiles must not spill."""
        return self.backend == "xpu"

    @property
    def arc_a(self) -> bool:
        """True for Arc A, whose registers of 32 bytes are half as wide as other Intel GPUs'.

        Triton's compiler for XPU has no matrix instruction for it: a product becomes
        multiplications and additions, before which a thread loads all channels of its operands.
        Products of bfloat16 operands lose exponents that float16 does not have, so operands are
        float32 instead (docs/intel.md).
        """
        return self.name == "xpu_dg2"


# Shared memory from the CUDA C++ programming guide (compute capabilities) and AMD's ISA manuals.
# sm_count of A100, A6000, L40, H100/H200, B200, RTX PRO 6000, GB10, MI300X, MI355X, 8060S, 9070 XT.
# native_e4m3 from instruction counts of built kernels; gfx942 and RDNA convert faster by bits.
# Intel: shared memory as OpenCL reports it; sm_count of one stack of a Max 1550, Arc A770, Arc
# B580, Arc 140V, Arc B390. Crescent Island's is not published; 32 is a placeholder.
TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 32, 163 * _KIB, False, False, 108),
        Target("sm_86", "cuda", 32, 99 * _KIB, False, False, 84),
        Target("sm_89", "cuda", 32, 99 * _KIB, 2, True, 142),
        Target("sm_90", "cuda", 32, 227 * _KIB, 2, True, 132),
        Target("sm_100", "cuda", 32, 227 * _KIB, 2, True, 148),
        Target("sm_120", "cuda", 32, 99 * _KIB, 2, True, 188),
        Target("sm_121", "cuda", 32, 99 * _KIB, 2, True, 48),
        Target("gfx942", "hip", 64, 64 * _KIB, False, False, 304),
        Target("gfx950", "hip", 64, 160 * _KIB, True, True, 256),
        Target("gfx1151", "hip", 32, 64 * _KIB, False, False, 40),
        Target("gfx1201", "hip", 32, 64 * _KIB, False, True, 64),
        Target("xpu_pvc", "xpu", 32, 128 * _KIB, False, False, 64),
        Target("xpu_dg2", "xpu", 32, 64 * _KIB, False, False, 32),
        Target("xpu_bmg", "xpu", 32, 128 * _KIB, False, False, 20),
        Target("xpu_lnl", "xpu", 32, 128 * _KIB, False, False, 8),
        Target("xpu_ptl", "xpu", 32, 128 * _KIB, False, False, 12),
        Target("xpu_cri", "xpu", 32, 128 * _KIB, False, False, 32),
    )
}
# CUDA architecture that is not listed: no FP8 instructions, the smallest shared memory.
UNKNOWN_CUDA = Target("cuda", "cuda", 32, 48 * _KIB, False, False)
UNKNOWN_HIP = Target("hip", "hip", 64, 64 * _KIB, False, False)
XPU = Target("xpu", "xpu", 32, 64 * _KIB, False, False)
# The CPU interpreter counts as a machine without special instructions.
CPU = Target("interpreter", "cpu", 32, 64 * _KIB, False, False)


@functools.cache
def target_of(device: torch.device) -> Target:
    """Return the architecture of a device, with its own number of SMs; ``CPU`` without a GPU."""
    if device.type == "xpu":
        return _xpu(torch.xpu.get_device_properties(device) if torch.xpu.is_available() else None)
    if device.type != "cuda":
        return CPU
    properties = torch.cuda.get_device_properties(device)
    return dataclasses.replace(
        _architecture(properties), sm_count=int(properties.multi_processor_count)
    )


def _architecture(properties: Any) -> Target:
    if torch.version.hip:
        name = str(properties.gcnArchName).split(":")[0]
        return TARGETS.get(name, UNKNOWN_HIP)
    found = TARGETS.get(f"sm_{properties.major}{properties.minor}")
    if found is not None:
        return found
    shared = getattr(properties, "shared_memory_per_block_optin", UNKNOWN_CUDA.shared_bytes)
    native = (properties.major, properties.minor) >= (8, 9)
    return dataclasses.replace(
        UNKNOWN_CUDA, shared_bytes=shared, native_e4m3=2 * native, dot_e4m3=native
    )


# Names by the first two numbers, architecture and release, of an Intel GPU's version (see ocloc).
_XPU_NAMES = {
    (12, 55): "xpu_dg2", (12, 56): "xpu_dg2", (12, 57): "xpu_dg2",
    (12, 60): "xpu_pvc", (12, 61): "xpu_pvc",
    (20, 1): "xpu_bmg", (20, 2): "xpu_bmg", (20, 4): "xpu_lnl",
    (30, 0): "xpu_ptl", (30, 1): "xpu_ptl", (35, 11): "xpu_cri",
}  # fmt: skip


def _xpu(properties: Any) -> Target:
    """Return the target of an Intel GPU from torch's device properties; a default for None."""
    # SYCL packs the version as 10 bits of architecture, 8 of release and 14 of revision.
    version = int(getattr(properties, "architecture", 0))
    name = _XPU_NAMES.get((version >> 22, version >> 14 & 0xFF), "")
    sm_count = int(getattr(properties, "gpu_subslice_count", 64))
    return dataclasses.replace(TARGETS.get(name, XPU), sm_count=sm_count)


def far_reaching(x: Tensor) -> Tensor:
    """Return a view of ``x`` from which an AMD kernel may compute addresses outside its storage.

    Triton for AMD addresses a tensor whose storage is below 2 GiB by 32-bit offsets, and any other
    offset reads zeros. Triton 3.7 also fails to compile a choice between two tensors, or two blocks
    of addresses, if such a small one is among them. The view's ``ptr_range`` makes it count as
    large. Elsewhere, ``x`` is returned as it is.
    """
    if target_of(x.device).backend != "hip":
        return x
    seen = x.view(x.shape)
    seen.ptr_range = _any_distance  # type: ignore[attr-defined]
    return seen


def _any_distance() -> int:
    """Return an upper bound of the bytes between a tensor's address and what a kernel reads."""
    return 1 << 62


# Oldest Triton that the kernels run on: with 3.5 most conformance cases fail.
LEAST_TRITON = (3, 6)


def triton_version() -> str | None:
    """Return the version of the installed triton, such as "3.7.1"; None without triton.

    The version is read from triton's file, since triton is only imported when kernels are, and
    other vendors distribute it under other names.
    """
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        return None
    line = re.search(r"^__version__ *= *['\"](.+?)['\"]", Path(found.origin).read_text(), re.M)
    return line[1] if line else "of no known version"


@functools.cache
def triton_problem() -> str:
    """Return why this installation cannot run Triton kernels; "" if it can."""
    version = triton_version()
    if version is None:
        elsewhere = "" if sys.platform == "linux" else ", which has wheels for Linux only"
        return f"triton is not installed{elsewhere}"
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < LEAST_TRITON:
        least = ".".join(map(str, LEAST_TRITON))
        return f"triton {version} is installed, and the kernels need {least} or newer"
    return ""


def has_triton() -> bool:
    """Return True if triton is installed in a version that the kernels run on."""
    return not triton_problem()


def has_gluon() -> bool:
    """Return True if the installed triton has Gluon, which Intel's of version 3.3 lacks."""
    return (
        triton_version() is not None and importlib.util.find_spec("triton.experimental") is not None
    )


def runs_gluon(device: torch.device) -> bool:
    """Return True if Hopper's Gluon kernels run on this device."""
    return device.type == "cuda" and target_of(device).name == "sm_90" and has_triton()


@functools.cache
def _support(device_type: str) -> Support:
    problem = triton_problem()
    if problem:
        return Support(False, problem)
    if device_type == "cpu" and INTERPRETED:
        return _interpreter_support()
    if device_type not in ("cuda", "xpu"):
        return Support(False, f"Triton kernels run on cuda and xpu tensors, got {device_type}")
    if INTERPRETED:
        return Support(False, "TRITON_INTERPRET=1 interprets kernels on CPU tensors only")
    return Support(True)


def _interpreter_support() -> Support:
    """Repair Triton's interpreter, which is silently wrong otherwise, and return its support."""
    try:
        importlib.import_module("crossrun.interpreter").install()
    except (ImportError, AttributeError) as error:
        version = importlib.metadata.version("triton")
        reason = f"the interpreter of triton {version} is wrong and cannot be repaired ({error})"
        return Support(False, f"{reason}; use another version, or a GPU")
    return Support(True, automatic=False)


# Oldest numba that compiles ``_numba_gemm``, which uses LLVM's untyped pointers.
LEAST_NUMBA = (0, 68)


@functools.cache
def numba_problem() -> str:
    """Return why numba compiles nothing with this installation; "" if it does."""
    try:
        version = importlib.metadata.version("numba")
    except importlib.metadata.PackageNotFoundError:
        return "numba is not installed: pip install '.[cpu]'"
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < LEAST_NUMBA:
        least = ".".join(map(str, LEAST_NUMBA))
        return f"numba {version} is installed, and {least} or newer is needed"
    return ""


def has_numba() -> bool:
    """Return True if numba is installed in a version that compiles our loops."""
    return not numba_problem()


def triton_support(*args: Any, **kwargs: Any) -> Support:
    """Return support of a Triton backend, from the device of the first tensor."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return _support(value.device.type)
        if isinstance(value, list) and value and isinstance(value[0], Tensor):
            return _support(value[0].device.type)
    return Support(False, "no tensor among the arguments")


def float32_support(*args: Any, **kwargs: Any) -> Support:
    """Return ``triton_support``, refusing float64 tensors: the kernels compute in float32."""
    for name, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, Tensor) and value.dtype == torch.float64:
            return Support(False, f"computes in float32, but argument {name} is float64")
    return triton_support(*args, **kwargs)

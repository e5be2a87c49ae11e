"""Execute the PTX of an older NVIDIA target on a newer NVIDIA GPU.

PTX is forward compatible: ptxas assembles PTX of ``.target sm_80`` for any later GPU, and refuses
an instruction that sm_80 lacks. After ``install("sm_80")``, torch and Triton report an A100's
compute capability, shared memory and number of SMs; Triton therefore compiles for sm_80, and its
PTX is assembled for the GPU at hand. This holds in every child process, too.

docs/crossrun/ptx.md says what such a run proves, and what it does not.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from crossrun.ptx.import_hook import after_import

VARIABLE = "CROSSRUN_PTX_TARGET"
ALL_SMS_VARIABLE = "CROSSRUN_PTX_ALL_SMS"
_STARTUP = str(Path(__file__).parent / "startup")  # the folder of sitecustomize.py


@dataclasses.dataclass(frozen=True)
class OlderTarget:
    """Facts of an NVIDIA target, which programs read from the device.

    Attributes:
        name: name of the target: "sm_80".
        shared_bytes: largest shared memory of one CTA, in bytes.
        shared_bytes_per_sm: shared memory of one SM, in bytes.
        threads_per_sm: largest number of threads that one SM holds.
        sm_count: number of SMs.
    """

    name: str
    shared_bytes: int
    shared_bytes_per_sm: int
    threads_per_sm: int
    sm_count: int

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability: (8, 0)."""
        return divmod(int(self.name[3:]), 10)


# From the CUDA C++ programming guide, "compute capabilities"; sm_count of A100, A6000, L40, H100.
TARGETS = {
    target.name: target
    for target in (
        OlderTarget("sm_80", 163 << 10, 164 << 10, 2048, 108),
        OlderTarget("sm_86", 99 << 10, 100 << 10, 1536, 84),
        OlderTarget("sm_89", 99 << 10, 100 << 10, 1536, 142),
        OlderTarget("sm_90", 227 << 10, 228 << 10, 2048, 132),
    )
}


class WrongTarget(RuntimeError):
    """The GPU cannot stand in for the target, or a kernel was compiled for another one."""


def installed() -> OlderTarget | None:
    """Return the target that this process and its children execute as; None for the GPU itself."""
    return TARGETS.get(os.environ.get(VARIABLE, ""))


def install(target: str, *, all_sms: bool = False) -> None:
    """Execute Triton's kernels as an older target, in this process and in those it starts.

    Call it before the first kernel is compiled; torch and Triton may be imported or not. Nothing
    is imported here. Repeated calls with the same target do nothing.

    Args:
        target: "sm_80", "sm_86", "sm_89" or "sm_90".
        all_sms: True to report the SMs of the GPU at hand instead of the target's number, for
            programs whose compiled CUDA operations size workspaces by it.

    Raises:
        ValueError: the target is not one of these.
        WrongTarget: another target is installed. A GPU that is not newer than the target raises
            it, too, when the device is first asked for its properties.
    """
    if target not in TARGETS:
        raise ValueError(f"the PTX target must be one of {', '.join(TARGETS)}, got {target!r}")
    before = os.environ.get(VARIABLE)
    if before not in (None, "", target):
        raise WrongTarget(f"this process executes as {before} already, and was asked for {target}")
    os.environ |= environment(target, all_sms=all_sms)
    _patch_once()


def require_newer_gpu() -> None:
    """Check that the GPU at hand can execute as the installed target.

    Raises:
        WrongTarget: torch sees no NVIDIA GPU, or one that is not newer than the target.
    """
    import torch

    if not torch.cuda.is_available() or torch.version.hip:
        raise WrongTarget(f"executing as {os.environ.get(VARIABLE)} needs an NVIDIA GPU")
    torch.cuda.get_device_properties()


def environment(target: str, *, all_sms: bool = False) -> dict[str, str]:
    """Return the environment variables by which a child process executes as an older target.

    ``PYTHONPATH`` leads Python to a ``sitecustomize`` that installs the target, and
    ``TRITON_CACHE_DIR`` names a folder of compiled kernels that no other target shares.
    """
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    cache = os.environ.get("TRITON_CACHE_DIR") or str(_default_cache())
    own = cache if cache.endswith(f"-as-{target}") else f"{cache}-as-{target}"
    return {
        VARIABLE: target,
        "PYTHONPATH": os.pathsep.join([_STARTUP, *(path for path in paths if path != _STARTUP)]),
        "TRITON_CACHE_DIR": own,
        **({ALL_SMS_VARIABLE: "1"} if all_sms else {}),
    }


def _default_cache() -> Path:
    return Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"


@functools.cache
def _patch_once() -> None:
    target = installed()
    assert target is not None
    after_import("torch.cuda", functools.partial(_patch_torch, target))
    after_import("triton.backends.nvidia.compiler", functools.partial(_patch_assembler, target))
    after_import("triton.backends.nvidia.driver", functools.partial(_patch_driver, target))
    after_import("triton.compiler.compiler", functools.partial(_patch_kernels, target))
    for nvml in ("pynvml", "vllm.third_party.pynvml"):
        after_import(nvml, functools.partial(_patch_nvml, target))


class DeviceProperties:
    """Properties of a GPU as torch reports them, with the older target's facts in their places."""

    def __init__(self, real: Any, target: OlderTarget) -> None:
        self._real = real
        self._facts = {
            "name": f"{real.name} as {target.name}",
            "major": target.capability[0],
            "minor": target.capability[1],
            "multi_processor_count": _sm_count(real.multi_processor_count, target),
            "max_threads_per_multi_processor": target.threads_per_sm,
            "shared_memory_per_block_optin": target.shared_bytes,
            "shared_memory_per_multiprocessor": target.shared_bytes_per_sm,
        }

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__["_facts"]
        return facts[name] if name in facts else getattr(self.__dict__["_real"], name)

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={value!r}" for name, value in self._facts.items())
        return f"DeviceProperties({facts}, of {self._real!r})"


def _patch_torch(target: OlderTarget, cuda: ModuleType) -> None:
    # torch's get_device_capability and get_device_name ask this function, and so do Triton's
    # driver and torch.compile.
    real = cuda.get_device_properties

    @functools.wraps(real)
    def get_device_properties(device: Any = None) -> DeviceProperties:
        properties = real(device)
        _require_newer(properties.name, (properties.major, properties.minor), target)
        return DeviceProperties(properties, target)

    get_device_properties.real = real  # type: ignore[attr-defined]
    cuda.get_device_properties = get_device_properties  # type: ignore[attr-defined]


def _sm_count(real: int, target: OlderTarget) -> int:
    # Compiled CUDA operations ask the driver, and refuse a workspace that was sized for fewer SMs.
    return real if os.environ.get(ALL_SMS_VARIABLE) == "1" else min(real, target.sm_count)


def _require_newer(name: str, capability: tuple[int, int], target: OlderTarget) -> None:
    if capability <= target.capability:
        raise WrongTarget(
            f"{name} is sm_{capability[0]}{capability[1]}, and PTX of {target.name} is executed "
            "on a newer GPU only"
        )


def _patch_assembler(target: OlderTarget, compiler: ModuleType) -> None:
    backend = compiler.CUDABackend
    assemble = backend.make_cubin

    @functools.wraps(assemble)
    def make_cubin(self: Any, src: str, metadata: Any, opt: Any, capability: int) -> Any:
        if capability != _number(target):
            raise WrongTarget(
                f"kernel {metadata.get('name')} is compiled for sm_{capability}, and this "
                f"process executes as {target.name}"
            )
        _require_target(src, str(metadata.get("name")), target)
        real = _real_capability()
        # A backend of the GPU at hand: newer GPUs have a ptxas of their own.
        return assemble(backend(type(self.target)("cuda", real, 32)), src, metadata, opt, real)

    backend.make_cubin = make_cubin


def _number(target: OlderTarget) -> int:
    return target.capability[0] * 10 + target.capability[1]


def _real_capability() -> int:
    import torch

    real = torch.cuda.get_device_properties.real()  # type: ignore[attr-defined]
    return int(real.major) * 10 + int(real.minor)


def ptx_target(ptx: str) -> str:
    """Return the target that a PTX program names, such as "sm_80"; "" if it names none."""
    line = re.search(r"^\s*\.target\s+(\w+)", ptx, re.M)
    return line[1] if line else ""


def _require_target(ptx: str, kernel: str, target: OlderTarget) -> None:
    found = ptx_target(ptx)
    if found != target.name:
        raise WrongTarget(
            f"the PTX of kernel {kernel} is of {found or 'no target'}, and this process executes "
            f"as {target.name}"
        )


def _patch_driver(target: OlderTarget, driver: ModuleType) -> None:
    # Triton reads the shared memory of a CTA from here, and raises OutOfResources beyond it.
    utilities = driver.CudaUtils
    start = utilities.__init__

    def limited(real: Any) -> Any:
        @functools.wraps(real)
        def get_device_properties(device: int) -> dict[str, int]:
            found = dict(real(device))
            found["max_shared_mem"] = min(found["max_shared_mem"], target.shared_bytes)
            found["multiprocessor_count"] = _sm_count(found["multiprocessor_count"], target)
            return found

        return get_device_properties

    @functools.wraps(start)
    def __init__(self: Any) -> None:
        start(self)
        self.get_device_properties = limited(self.get_device_properties)

    utilities.__init__ = __init__
    instance = getattr(utilities, "instance", None)
    if instance is not None:
        instance.get_device_properties = limited(instance.get_device_properties)


def _patch_kernels(target: OlderTarget, compiler: ModuleType) -> None:
    # Kernels of a cache come here as compiled ones do, before their first launch.
    kernel = compiler.CompiledKernel
    load = kernel._init_handles

    @functools.wraps(load)
    def _init_handles(self: Any) -> Any:
        if self.module is None:
            ptx = self.asm.get("ptx")
            _require_target(ptx if isinstance(ptx, str) else "", self.name, target)
        return load(self)

    kernel._init_handles = _init_handles
    cached = getattr(compiler.max_shared_mem, "cache_clear", None)
    if cached is not None:
        cached()


def _patch_nvml(target: OlderTarget, nvml: ModuleType) -> None:
    def capability(handle: Any) -> tuple[int, int]:
        return target.capability

    nvml.nvmlDeviceGetCudaComputeCapability = capability  # type: ignore[attr-defined]

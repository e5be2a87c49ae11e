"""Describe the machine: device, driver, versions, memory on chip and instruction sets."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import torch

from anymla.bench import xpu_code
from anymla.bench.environment import cpu_model, environment
from anymla.ops.device import TARGETS, target_of, triton_version
from anymla.testing import intel_on_cpu
from crossrun.targets import backend_problem

_CPU_FLAGS = {
    "amx_bf16": "AMX bf16",
    "avx512_bf16": "AVX512 bf16",
    "avx512f": "AVX512",
    "avx2": "AVX2",
    "asimd": "NEON",
    "bf16": "NEON bf16",
    "sve": "SVE",
}


def machine(device: torch.device) -> dict[str, Any]:
    """Return facts in the order in which they are shown; None for unknown ones."""
    facts = environment("anymla doctor")
    shown = {
        "device": cpu_model(),
        "kind": "CPU",
        "driver": None,
        "runtime": None,
        "shared_memory_bytes": None,
        "memory_bytes": None,
        "fp8": "software: converted by torch's tables and integer operations",
        "matrix": _cpu_instructions(),
        "intel": None if torch.xpu.is_available() else _intel_without_a_card(),
    }
    if device.type == "cuda":
        shown |= _cuda(device)
    elif device.type == "xpu":
        shown |= _xpu(device)
    return shown | {
        "torch": torch.__version__,
        "triton": triton_version() or "not installed",
        "python": facts["python"],
        "threads": torch.get_num_threads(),
        "busy": _busy(facts["load"], facts["cores"]) if device.type == "cpu" else None,
        "cpu": facts["cpu"],
        "anymla": facts["anymla"],
        "commit": facts["commit"],
        "date": facts["date"],
        "command": facts["command"],
    }


def _cuda(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    target = target_of(device)
    amd = torch.version.hip is not None
    known = target.name in TARGETS
    convert = "conversions" if target.native_e4m3 else ""
    dots = "matrix products" if target.dot_e4m3 else ""
    native = " and ".join(each for each in (convert, dots) if each)
    return {
        "device": properties.name,
        "kind": f"{'AMD' if amd else 'NVIDIA'} GPU, {target.name}"
        + ("" if known else " (not a listed target: treated as the plainest)"),
        "driver": None if amd else _nvidia_driver(),
        "runtime": f"HIP {torch.version.hip}" if amd else f"CUDA {torch.version.cuda}",
        "shared_memory_bytes": target.shared_bytes,
        "memory_bytes": properties.total_memory,
        "fp8": f"OCP e4m3 {native} by instructions"
        if native
        else "software: e4m3 is converted by integer operations",
        "matrix": _gpu_matrix(target.name, properties),
        "multiprocessors": properties.multi_processor_count,
    }


def _gpu_matrix(name: str, properties: Any) -> str:
    if name.startswith("gfx9"):
        return "MFMA (bf16, fp16)"
    if name.startswith("gfx"):
        return "WMMA (bf16, fp16)"
    major = int(properties.major)
    if major == 9:
        return "WGMMA (bf16, fp16, fp8)"
    if major == 10:
        return "tcgen05 (bf16, fp16, fp8, fp4)"
    return "MMA (bf16, fp16)" if major >= 8 else "MMA (fp16): no bf16"


def _xpu(device: torch.device) -> dict[str, Any]:
    properties = torch.xpu.get_device_properties(device)
    target = target_of(device)
    units = getattr(properties, "gpu_eu_count", None)
    lanes = getattr(properties, "sub_group_sizes", None)
    # Devices that do not say are taken to have it, as Triton's compiler does.
    dpas = getattr(properties, "has_subgroup_matrix_multiply_accumulate", True)
    known = f", {target.name}" if target.name in TARGETS else " (not a listed target)"
    return {
        "device": properties.name,
        "kind": f"Intel GPU{known}" + (f", {units} vector engines" if units else ""),
        "driver": getattr(properties, "driver_version", None),
        "shared_memory_bytes": getattr(properties, "local_mem_size", target.shared_bytes),
        "memory_bytes": properties.total_memory,
        "fp8": "software: e4m3 is converted by integer operations",
        "matrix": ("DPAS (bf16, fp16)" if dpas else "none")
        + (f"; sub-groups of {', '.join(map(str, lanes))}" if lanes else ""),
        "multiprocessors": target.sm_count,
    }


def _intel_without_a_card() -> str | None:
    """Say what can be done here for Intel's GPUs; None if Triton's compiler for them is missing."""
    if backend_problem("xpu"):
        return None
    names = ", ".join(name for name, target in TARGETS.items() if target.backend == "xpu")
    built = f"machine code is built for {names}"
    cannot = xpu_code.missing()
    runs = intel_on_cpu.missing()
    return "; ".join(
        (
            f"no machine code: {cannot}" if cannot else built,
            f"kernels do not run: {runs}" if runs else "kernels run on this CPU, compiled",
        )
    )


def _busy(load: float | None, cores: int | None) -> str | None:
    """Say so if other processes have lately run on more than half of the cores."""
    if load is None or cores is None or load <= cores / 2:
        return None
    return f"other processes use {load:g} of {cores} cores"


def _cpu_instructions() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    lines = [line for line in text.splitlines() if line.startswith(("flags", "Features"))]
    flags = set(lines[0].split()) if lines else set()
    found = [name for flag, name in _CPU_FLAGS.items() if flag in flags]
    return ", ".join(found) or torch.backends.cpu.get_cpu_capability()


def _nvidia_driver() -> str | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            check=True,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip() if done.stdout else None

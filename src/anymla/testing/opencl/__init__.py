"""Triton kernels compiled by Intel's compiler and run on any x86 CPU, in place of interpreted ones.

Intel's Triton makes SPIR-V for its GPUs without having one; Intel's OpenCL runtime for CPUs runs
that SPIR-V on host memory. After ``install()`` the operations' Triton backends take CPU tensors:

    from anymla.testing.opencl import install
    install()                                        # before the first kernel
    rms_norm(x, weight, 1e-6, backend="triton")      # compiled, on a CPU

Kernels are compiled and tiled as for Arc A, whose products are multiplications and additions as on
a CPU. What runs is what the compiler's front end and its passes for XPU made: layouts, shared
memory, barriers, reductions between lanes. What it does not show: the machine code for a GPU, the
order of memory there, time. ``docs/intel.md`` says how the parts are installed.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any
from unittest import mock

from anymla.ops import device as device_facts
from anymla.ops.device import INTERPRETED
from anymla.ops.registry import Support
from anymla.testing.opencl.runtime import missing as _missing_runtime
from anymla.testing.triton_targets import backend_problem, xpu_properties

__all__ = ["install", "missing"]

# Of Intel's compiler, whose front end the kernels are written for as well.
_TRITON = (3, 3)
_CACHE = Path(os.environ.get("ANYMLA_OPENCL_CACHE", "~/.cache/anymla/opencl"))


def missing() -> str:
    """Why compiled kernels cannot run here; "" if they can."""
    if INTERPRETED:
        return "TRITON_INTERPRET=1 interprets kernels"
    return backend_problem("xpu") or _missing_runtime()


@functools.cache
def install(*, dpas: bool = False, cache: Path = _CACHE) -> Any:
    """Run this process's Triton kernels compiled, on CPU tensors; further calls do nothing.

    Args:
        dpas: compile matrix products to DPAS, which is emulated, instead of to multiplications and
            additions. Takes the compiler many times as long.
        cache: folder of compiled programs.

    Returns:
        The ``Runtime``.

    Raises:
        RuntimeError: something is not installed.
    """
    problem = missing()
    if problem:
        raise RuntimeError(problem)
    import triton
    from triton.backends import backends

    from anymla.testing.opencl.driver import CpuDriver
    from anymla.testing.opencl.runtime import Runtime

    target = device_facts.TARGETS["xpu_bmg" if dpas else "xpu_dg2"]
    properties = xpu_properties(target) | {
        "has_subgroup_matrix_multiply_accumulate": dpas,
        "has_subgroup_matrix_multiply_accumulate_tensor_float32": False,
        "has_subgroup_2d_block_io": False,
    }
    unknown = mock.Mock(parse_device_arch=lambda architecture: "")
    compiler = backends["intel"].compiler.__init__.__globals__
    compiler["compile_module_from_src"] = lambda *given, **named: unknown
    runtime = Runtime(cache.expanduser())
    triton.runtime.driver.set_active(CpuDriver(runtime, properties))
    _admit_cpu_tensors()
    device_facts.LEAST_TRITON = _TRITON
    device_facts.triton_problem.cache_clear()
    # The choices of tiles, which on Arc A are for products that are additions.
    device_facts.CPU = target
    device_facts.target_of.cache_clear()
    return runtime


def _admit_cpu_tensors() -> None:
    supported = device_facts._support

    def support(device_type: str) -> Support:
        return Support(True, automatic=False) if device_type == "cpu" else supported(device_type)

    support.cache_clear = supported.cache_clear  # type: ignore[attr-defined]
    device_facts._support = support  # type: ignore[assignment]

"""Triton kernels compiled by Intel's compiler and run on any x86 CPU.

Intel's Triton makes SPIR-V for its GPUs without having one; Intel's OpenCL runtime for CPUs runs
that SPIR-V on host memory. After ``install()`` kernels take CPU tensors:

    from crossrun.intel import install
    install()                                   # before the first kernel
    add_kernel[(4,)](x, y, out, len(x), BLOCK=256)

Kernels are compiled as for Arc A, whose products are multiplications and additions as on a CPU.
What runs is what the compiler's front end and its passes for XPU made: layouts, shared memory,
barriers, reductions between lanes. What it does not show: the machine code for a GPU, the order of
memory there, time. ``docs/crossrun/intel.md`` says how the parts are installed.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any
from unittest import mock

from crossrun.intel.runtime import missing as _missing_runtime
from crossrun.targets import backend_problem, xpu_properties

__all__ = ["install", "missing"]

_CACHE = Path("~/.cache/crossrun/intel")
# Arc A770 and Arc B580, with their Xe cores.
_ARC_A, _ARC_B = ("xpu_dg2", 32), ("xpu_bmg", 20)


def missing() -> str:
    """Return why compiled kernels cannot run here; "" if they can."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 interprets kernels"
    return backend_problem("xpu") or _missing_runtime()


@functools.cache
def install(*, dpas: bool = False, cache: Path = _CACHE) -> Any:
    """Run this process's Triton kernels compiled, on CPU tensors; further calls do nothing.

    Args:
        dpas: compile matrix products to DPAS, which is emulated, instead of to multiplications and
            additions. Takes the compiler many times as long.
        cache: folder of compiled programs, made if needed.

    Returns:
        The ``Runtime`` that runs the kernels.

    Raises:
        RuntimeError: if a part of the runtime is not installed.
    """
    problem = missing()
    if problem:
        raise RuntimeError(problem)
    import triton
    from triton.backends import backends

    from crossrun.intel.driver import intel_driver
    from crossrun.intel.runtime import Runtime

    properties = xpu_properties(*(_ARC_B if dpas else _ARC_A)) | {
        "has_subgroup_matrix_multiply_accumulate": dpas,
        "has_subgroup_matrix_multiply_accumulate_tensor_float32": False,
        "has_subgroup_2d_block_io": False,
    }
    unknown = mock.Mock(parse_device_arch=lambda architecture: "")
    compiler = backends["intel"].compiler.__init__.__globals__
    compiler["compile_module_from_src"] = lambda *given, **named: unknown
    runtime = Runtime(cache.expanduser())
    triton.runtime.driver.set_active(intel_driver(runtime, properties))
    return runtime

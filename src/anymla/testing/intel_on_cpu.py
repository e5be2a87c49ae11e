"""The operations' Triton backends, compiled by Intel's compiler and run on CPU tensors.

``crossrun.intel`` executes the kernels; ``install()`` here tells the operations as well, which
choose their tiles as for Arc A and take CPU tensors from then on:

    from anymla.testing.intel_on_cpu import install
    install()                                        # before the first kernel
    rms_norm(x, weight, 1e-6, backend="triton")      # compiled, on a CPU
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from anymla.ops import device as device_facts
from anymla.testing.device_bridge import admit_cpu_tensors
from crossrun import intel
from crossrun.intel import missing

__all__ = ["install", "missing"]

# Intel's Triton, whose front end the kernels are written for as well.
_TRITON = (3, 3)


@functools.cache
def install(*, dpas: bool = False) -> Any:
    """Run the Triton backends of this process compiled, on a CPU; further calls do nothing.

    The environment variable ANYMLA_OPENCL_CACHE names the folder of compiled programs.

    Args:
        dpas: compile matrix products to DPAS, which is emulated; see ``crossrun.intel.install``.

    Returns:
        The ``Runtime`` of ``crossrun.intel``.

    Raises:
        RuntimeError: something is not installed.
    """
    cache = Path(os.environ.get("ANYMLA_OPENCL_CACHE", "~/.cache/anymla/opencl"))
    runtime = intel.install(dpas=dpas, cache=cache)
    device_facts.LEAST_TRITON = _TRITON
    device_facts.triton_problem.cache_clear()
    # The choices of tiles, which on Arc A are for products that are additions.
    admit_cpu_tensors("xpu_bmg" if dpas else "xpu_dg2")
    return runtime

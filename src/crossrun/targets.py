"""Compile Triton's kernels for GPUs that this machine lacks."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol
from unittest import mock


class Target(Protocol):
    """A GPU architecture, as far as compiling for it goes."""

    @property
    def name(self) -> str:
        """Name of the architecture: "sm_90", "gfx942", "xpu_bmg", ..."""

    @property
    def backend(self) -> str:
        """Triton's name of the vendor: "cuda", "hip" or "xpu"."""

    @property
    def warp_size(self) -> int:
        """Number of threads in a warp."""

    @property
    def sm_count(self) -> int:
        """Number of SMs, CUs or Xe cores."""


@functools.cache
def backend_problem(backend: str) -> str:
    """Return why the installed Triton cannot compile for "cuda", "hip" or "xpu"; "" if it can.

    Triton's folders are read, so nothing is imported.
    """
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        return "triton is not installed"
    name = {"cuda": "nvidia", "hip": "amd", "xpu": "intel"}[backend]
    there = (Path(found.origin).parent / "backends" / name / "compiler.py").exists()
    return "" if there else f"the installed Triton has no back end for {name}"


@contextlib.contextmanager
def triton_target(target: Target) -> Iterator[Any]:
    """Yield Triton's ``GPUTarget``, for which ``triton.compile`` compiles inside the context.

    Args:
        target: architecture to compile for; no device of it is needed.
    """
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget

    if target.backend != "xpu":
        architecture: Any = target.name if target.backend == "hip" else int(target.name[3:])
        yield GPUTarget(target.backend, architecture, target.warp_size)
        return
    # The compiler identifies a device by a C++ program that it builds for the purpose. Here it gets
    # an unknown device and takes the given properties.
    unknown = mock.Mock(parse_device_arch=lambda architecture: "")
    compiler = backends["intel"].compiler.__init__.__globals__
    with mock.patch.dict(compiler, compile_module_from_src=lambda *given, **named: unknown):
        properties = xpu_properties(target.name, target.sm_count)
        yield GPUTarget("xpu", properties, target.warp_size)


def xpu_properties(name: str, cores: int) -> dict[str, Any]:
    """Return the properties of an Intel GPU that Triton's compiler asks a device for.

    They are those of ``ocloc query CL_DEVICE_EXTENSIONS``, and the vendor's sub-group sizes.

    Args:
        name: name of the architecture: "xpu_pvc", "xpu_dg2", "xpu_bmg", ...
        cores: number of Xe cores.
    """
    arc_a = name == "xpu_dg2"
    return {
        "name": name,
        "gpu_subslice_count": cores,
        "max_work_group_size": 1024,
        "max_num_sub_groups": 128 if arc_a else 64,
        "sub_group_sizes": [8, 16, 32] if arc_a else [16, 32],
        "has_fp64": not arc_a,
        "has_subgroup_matrix_multiply_accumulate": True,
        "has_subgroup_matrix_multiply_accumulate_tensor_float32": not arc_a,
        "has_subgroup_2d_block_io": not arc_a,
        "has_bfloat16_conversions": True,
        "architecture": 0,
    }

"""Targets as Triton names them, on a machine without such a device."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from anymla.ops.device import Target


@functools.cache
def backend_problem(backend: str) -> str:
    """Why the installed Triton cannot compile for "cuda", "hip" or "xpu"; "" if it can.

    Read from its folders, so that nothing is imported.
    """
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        return "triton is not installed"
    name = {"cuda": "nvidia", "hip": "amd", "xpu": "intel"}[backend]
    there = (Path(found.origin).parent / "backends" / name / "compiler.py").exists()
    return "" if there else f"the installed Triton has no back end for {name}"


@contextlib.contextmanager
def triton_target(target: Target) -> Iterator[Any]:
    """Triton's ``GPUTarget``, for which it compiles inside."""
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget

    if target.backend != "xpu":
        architecture: Any = target.name if target.backend == "hip" else int(target.name[3:])
        yield GPUTarget(target.backend, architecture, target.warp_size)
        return
    # The compiler asks a device what it is by a program of C++ that it builds for that. Here it is
    # told that the device is none of those whose properties it knows, and takes these.
    unknown = mock.Mock(parse_device_arch=lambda architecture: "")
    compiler = backends["intel"].compiler.__init__.__globals__
    with mock.patch.dict(compiler, compile_module_from_src=lambda *given, **named: unknown):
        yield GPUTarget("xpu", xpu_properties(target), target.warp_size)


def xpu_properties(target: Target) -> dict[str, Any]:
    """As ``ocloc query CL_DEVICE_EXTENSIONS`` has them, and vendor's facts of sub-groups."""
    arc_a = target.name == "xpu_dg2"
    return {
        "name": target.name,
        "gpu_subslice_count": target.sm_count,
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

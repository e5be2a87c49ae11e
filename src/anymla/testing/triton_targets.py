"""Triton's names of targets, on a machine without such a device."""

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
    """Yield Triton's ``GPUTarget``; compilations inside the block are for it."""
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
        yield GPUTarget("xpu", xpu_properties(target), target.warp_size)


def xpu_properties(target: Target) -> dict[str, Any]:
    """Return properties as in ``ocloc query CL_DEVICE_EXTENSIONS``, and sub-group sizes."""
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

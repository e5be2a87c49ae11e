"""Triton kernels compiled for AMD's GPUs, interpreted on any CPU.

Triton leaves the assembly beside each code object. After ``install()`` kernels take CPU tensors,
are compiled for an AMD GPU that is not there, and their assembly is interpreted:

    from crossrun import amd
    device = amd.install("gfx942")              # before the first kernel
    add_kernel[(4,)](x, y, out, len(x), BLOCK=256)

A launch raises ``Fault`` where the code touches what is not its own, reads LDS that nobody wrote,
races, or is misaligned, and ``UnknownInstruction`` where the interpreter would have to guess.
``docs/crossrun/amd.md`` says what this shows and what not.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from crossrun.amd.errors import Fault, UnknownInstruction
from crossrun.targets import backend_problem

__all__ = ["TARGETS", "Fault", "UnknownInstruction", "install", "missing"]

# Lanes of a wave, LDS of a work-group in bytes and compute units of MI300X, MI355X, Radeon 8060S
# and RX 9070 XT.
TARGETS = {
    "gfx942": (64, 64 << 10, 304),
    "gfx950": (64, 160 << 10, 256),
    "gfx1151": (32, 64 << 10, 40),
    "gfx1201": (32, 64 << 10, 64),
}
_installed: dict[str, Any] = {}


def missing() -> str:
    """Return why AMD's kernels cannot be interpreted here; "" if they can."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 interprets kernels before they are compiled"
    import numpy

    if int(numpy.__version__.split(".")[0]) < 2:
        return "numpy is older than 2.0"
    return backend_problem("hip")


def install(name: str) -> Any:
    """Run this process's Triton kernels compiled for an AMD GPU, on CPU tensors.

    Args:
        name: one of ``TARGETS``. A process has one; further calls for it do nothing.

    Returns:
        The ``Device``: ``reach(*tensors)`` for what kernels reach by addresses alone, ``executed``
        with counts of instructions.

    Raises:
        RuntimeError: something is not installed, or the process has another target.
        ValueError: the name is not known.
    """
    problem = missing()
    if problem:
        raise RuntimeError(problem)
    if name not in TARGETS:
        raise ValueError(f"install: name must be one of {', '.join(TARGETS)}, got {name!r}")
    if _installed and name not in _installed:
        raise RuntimeError(f"this process interprets kernels for {next(iter(_installed))}")
    if name not in _installed:
        import triton
        from triton.backends import backends

        from crossrun.amd.driver import Device, amd_driver

        compiler = backends["amd"].compiler

        class AssemblyCompiler(compiler):  # type: ignore[misc, valid-type]
            """Triton's compiler for AMD up to the text, which it keeps apart from code objects."""

            def __init__(self, target: Any) -> None:
                super().__init__(target)
                self.binary_ext = "amdgcn"

            def add_stages(self, stages: dict[str, Any], *given: Any) -> None:
                super().add_stages(stages, *given)
                del stages["hsaco"]

            def hash(self) -> str:
                return f"{super().hash()}-text"

        backends["amd"] = dataclasses.replace(backends["amd"], compiler=AssemblyCompiler)
        _installed[name] = Device(name, *TARGETS[name])
        triton.runtime.driver.set_active(amd_driver(_installed[name]))
    return _installed[name]

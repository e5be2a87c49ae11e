"""Files of Triton and Gluon kernels, and the family of operations that each belongs to."""

from __future__ import annotations

import functools
import importlib
import pkgutil

import anymla.ops
from anymla.ops.device import has_gluon

# Stands in the place of a family's name for files that families share.
SHARED = "shared"


def kernel_modules() -> dict[str, list[str]]:
    """List dotted names of all files of Triton and Gluon kernels by family, or by SHARED."""
    prefixes = ("triton_", "gluon_") if has_gluon() else ("triton_",)
    found, shared = {}, []
    for each in pkgutil.iter_modules(anymla.ops.__path__):
        path = f"anymla.ops.{each.name}"
        if each.ispkg:
            found[each.name] = [
                f"{path}.{module.name}"
                for module in pkgutil.iter_modules(importlib.import_module(path).__path__)
                if module.name.startswith(prefixes)
            ]
        elif each.name.startswith("_triton_"):
            shared.append(path)
    return {**found, SHARED: shared}


def family_of(kernel: str) -> str:
    """Return a kernel's family of operations; "torch" for torch's and the vendor's kernels."""
    return _families().get(kernel, "torch")


@functools.cache
def _families() -> dict[str, str]:
    """Return the family of every kernel of a family's own files, by the kernel's name."""
    found: dict[str, str] = {}
    for family, modules in kernel_modules().items():
        for module in modules if family != SHARED else ():
            for name in vars(importlib.import_module(module)):
                if name.endswith("_kernel"):
                    found.setdefault(name, family)
    return found

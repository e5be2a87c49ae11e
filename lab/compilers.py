"""Imports of a process that builds kernels, made once before processes are forked."""

from __future__ import annotations

import importlib
import os

# Kernels are to be compiled, whatever the tests of this machine do with them.
os.environ.pop("TRITON_INTERPRET", None)

import triton.backends.compiler
import triton.compiler

from lab import build_matrix
from lab.kernel_files import kernel_modules

# The targets' back ends are loaded when the first kernel is built.
for names in kernel_modules().values():
    for name in names:
        importlib.import_module(name)

__all__ = ["build_matrix", "triton"]

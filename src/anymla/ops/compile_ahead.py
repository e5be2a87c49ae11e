"""Compiling Triton kernels in parallel, before they are needed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from anymla.ops.device import INTERPRETED, has_triton


@contextlib.contextmanager
def compiled_together(threads: int | None = None) -> Iterator[bool]:
    """Inside, launching a kernel only has it compiled; at the end all code is there.

    Most of the time goes to compiler passes and to the assembler, which run beside each other.
    What kernels would have written is garbage, so nothing inside may depend on it.

    Args:
        threads: compilations at a time; None for one a core.

    Yields:
        Whether kernels are compiled here; if not (no triton, or its interpreter), they run.
    """
    if not has_triton() or INTERPRETED:
        yield False
        return
    from triton.runtime import _async_compile, jit

    run = jit.JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        try:
            with _async_compile.AsyncCompileMode(pool):
                jit.JITFunction.run = only_compile
                try:
                    yield True
                finally:
                    jit.JITFunction.run = run
        finally:
            # Triton leaves it set when a compilation fails.
            _async_compile.active_mode.set(None)

"""Compiling Triton kernels in parallel, before they are needed."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

from anymla.ops.device import INTERPRETED, has_triton


@contextlib.contextmanager
def compiled_together(
    threads: int | None = None, *, rank: int = 0, ranks: int = 1
) -> Iterator[bool]:
    """Inside, launching a kernel only has it compiled; at the end all code is there.

    Most of the time goes to compiler passes and to the assembler, which run beside each other.
    What kernels would have written is garbage, so nothing inside may depend on it.

    Processes that launch the same kernels share them out: each begins with its own, and finds most
    of the others' in Triton's cache when it comes to them. None waits for another.

    Args:
        threads: compilations at a time; None for one a core.
        rank: number of this process among those that launch the same kernels.
        ranks: how many these are.

    Yields:
        Whether kernels are compiled here; if not (no triton, or its interpreter), they run.
    """
    if not has_triton() or INTERPRETED:
        yield False
        return
    from triton.runtime import jit

    run = jit.JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    with ThreadPoolExecutor(threads or os.cpu_count()) as pool, _in_turn(pool, rank, ranks):
        jit.JITFunction.run = only_compile
        try:
            yield True
        finally:
            jit.JITFunction.run = run


def _in_turn(pool: ThreadPoolExecutor, rank: int, ranks: int) -> Any:
    """Triton's mode that compiles in a pool, this rank's kernels first, then the next one's."""
    from triton.runtime._async_compile import AsyncCompileMode, FutureKernel, active_mode

    class InTurn(AsyncCompileMode):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(pool)
            self.later: list[tuple[int, str, Any]] = []

        def submit(self, key: str, compile_fn: Any, finalize_fn: Any) -> Any:
            turn = (zlib.crc32(key.encode()) - rank) % ranks
            if turn == 0 or key in self.future_kernels:
                return super().submit(key, compile_fn, finalize_fn)
            # Who asks for it before its turn compiles it.
            asked = SimpleNamespace(result=compile_fn)
            self.future_kernels[key] = FutureKernel(finalize_fn, asked)
            self.later.append((turn, key, compile_fn))
            return self.future_kernels[key]

        def __exit__(self, *raised: Any) -> None:
            for _, key, compile_fn in sorted(self.later, key=itemgetter(0)):
                future: Any = pool.submit(compile_fn)
                future._key = key
                self.future_kernels[key].future = future
                self.raw_futures.append(future)
            try:
                super().__exit__(*raised)
            finally:
                active_mode.set(None)  # Triton leaves it set when a compilation fails

    return InTurn()

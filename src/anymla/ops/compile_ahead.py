"""Compiling Triton kernels in parallel, before they are needed."""

from __future__ import annotations

import contextlib
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
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


class _Later(Future[Any]):
    """A compilation that waits for its turn; who asks for its result before that does it."""

    def __init__(self, compile_kernel: Callable[[], Any]) -> None:
        super().__init__()
        self._compile, self._free = compile_kernel, threading.Lock()

    def run(self) -> None:
        if self._free.acquire(blocking=False):
            try:
                self.set_result(self._compile())
            except Exception as error:
                self.set_exception(error)

    def result(self, timeout: float | None = None) -> Any:
        self.run()
        return super().result(timeout)


def _in_turn(pool: Executor, rank: int, ranks: int) -> Any:
    """Triton's mode that compiles in a pool, this rank's kernels first, then the next one's."""
    from triton.runtime._async_compile import AsyncCompileMode, active_mode

    class InTurn(AsyncCompileMode):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(SimpleNamespace(submit=self._queue))
            self._turn = 0
            self._later: list[tuple[int, _Later]] = []

        def submit(self, key: str, *functions: Any) -> Any:
            self._turn = (zlib.crc32(key.encode()) - rank) % ranks
            return super().submit(key, *functions)

        def _queue(self, compile_kernel: Callable[[], Any]) -> Future[Any]:
            if not self._turn:
                return pool.submit(compile_kernel)
            later = _Later(compile_kernel)
            self._later.append((self._turn, later))
            return later

        def __exit__(self, *raised: Any) -> None:
            for _, later in sorted(self._later, key=itemgetter(0)):
                pool.submit(later.run)
            try:
                super().__exit__(*raised)
            finally:
                active_mode.set(None)  # Triton may leave it set when a compilation fails

    return InTurn()

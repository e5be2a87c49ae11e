"""Parallel compilation of Triton kernels before they are needed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

from anymla.ops.device import INTERPRETED, has_triton


@dataclasses.dataclass
class Compiling:
    """Fate of the kernels that are launched in a context; true if they are compiled.

    Attributes:
        happens: True if kernels are compiled; False if they run.
        hashes: Triton's hashes of those that are compiled, or were before, at the context's end.
    """

    happens: bool
    hashes: set[str] = dataclasses.field(default_factory=set)

    def __bool__(self) -> bool:
        return self.happens


@contextlib.contextmanager
def compiled_together(
    threads: int | None = None, *, rank: int = 0, ranks: int = 1
) -> Iterator[Compiling]:
    """Compile the kernels launched inside the context instead of running them.

    At the end of the context all of them are compiled.

    Most time goes to compiler passes and the assembler, which run in parallel. Kernels write
    nothing, so their outputs are garbage and nothing inside the context may depend on them.

    Processes that launch the same kernels share them: each compiles its own share first and finds
    most others in Triton's cache later. No process waits for another.

    Args:
        threads: number of compilations at a time; None for one per core that the process may use.
        rank: index of this process among those that launch the same kernels.
        ranks: number of processes that launch the same kernels.

    Yields:
        The kernels' fate: without triton, or in its interpreter, they run.
    """
    if not has_triton() or INTERPRETED:
        yield Compiling(False)
        return
    from triton.runtime import jit

    run = jit.JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    compiling, launchers = Compiling(True), Launchers()

    def noted(kernel: Any) -> None:
        compiling.hashes.add(kernel.hash)
        launchers.build(kernel)

    with (
        ThreadPoolExecutor(threads or _cores()) as pool,
        _in_turn(pool, rank, ranks, noted),
    ):
        jit.JITFunction.run = only_compile
        try:
            yield compiling
        finally:
            jit.JITFunction.run = run


def builds_launchers() -> bool:
    """True if Triton compiles a host library for each signature of a kernel, as it does up to 3.6.

    It does so when a kernel is first launched, by a C compiler that takes 0.1 to 0.3 s.
    """
    from triton.backends import backends

    # Not every release registers a back end's module by its name.
    modules = (getattr(each.driver.__init__, "__globals__", {}) for each in backends.values())
    return any("make_launcher" in names for names in modules)


class Launchers:
    """Host libraries of kernels, which are built into Triton's cache once for each signature."""

    def __init__(self) -> None:
        """Build nothing yet."""
        self._needed = builds_launchers()
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def build(self, kernel: Any) -> None:
        """Build the library of a compiled kernel, on the thread that calls."""
        from triton.runtime import driver

        if not self._needed:
            return
        described = str(getattr(kernel.metadata, "tensordesc_meta", None))
        signature = f"{kernel.src.signature} {described}"
        with self._lock:
            if signature in self._known:
                return
            self._known.add(signature)
        with contextlib.suppress(Exception):  # a launch tries again, and raises
            driver.active.launcher_cls(kernel.src, kernel.metadata)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Later(Future[Any]):
    """Compilation that waits for its turn; the first caller of ``result`` runs it earlier."""

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


def _in_turn(pool: Executor, rank: int, ranks: int, noted: Callable[[Any], None]) -> Any:
    """Return Triton's compile mode that uses a pool: this rank's kernels first, then the next's.

    Args:
        pool: threads that compile.
        rank: index of this process.
        ranks: number of processes that compile the same kernels.
        noted: callback with each kernel, from any of the threads.
    """
    from triton.runtime._async_compile import AsyncCompileMode, active_mode

    class InTurn(AsyncCompileMode):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(SimpleNamespace(submit=self._queue))
            self._turn = 0
            self._later: list[tuple[int, _Later]] = []

        def submit(self, key: str, compile_kernel: Callable[[], Any], *functions: Any) -> Any:
            def compiled() -> Any:
                kernel = compile_kernel()
                noted(kernel)
                return kernel

            self._turn = (zlib.crc32(key.encode()) - rank) % ranks
            return super().submit(key, compiled, *functions)

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
                active_mode.set(None)  # Triton may leave it set after a failed compilation

    return InTurn()

"""When the compile watch begins in a worker of vLLM: ``watched.py ANSWER.json``.

vLLM activates its monitor when its start has ended, and with it the watch. A kernel is compiled for
a GPU that is not there.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
import triton.language as tl


@triton.jit
def clear(x, WIDTH: tl.constexpr):
    """Write zeros."""
    tl.store(x + tl.arange(0, WIDTH), tl.zeros((WIDTH,), tl.float32))


def compiled(width: int) -> int:
    """Compile a form of the kernel; return how many the watch has counted."""
    from triton.backends.compiler import GPUTarget

    from anymla.ops.compile_watch import WATCH

    types = {"x": "*fp32", "WIDTH": "constexpr"}
    source = triton.compiler.ASTSource(clear, types, {"WIDTH": width})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
    return WATCH.compiled


def main(answer: Path) -> None:
    """Compile before and after vLLM's start has ended."""
    from vllm.utils import jit_monitor

    from anymla.engines.vllm import compile_watch
    from anymla.ops.compile_watch import WATCH

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    compile_watch._LOG.addHandler(handler)
    compile_watch._LOG.setLevel(logging.INFO)
    compile_watch.install()
    compile_watch.install()
    found: dict[str, Any] = {"before": [WATCH.active, compiled(64)]}
    jit_monitor.activate(mode="warn", verbose=False)  # as ``Worker._maybe_activate_jit_monitor``
    found["after"] = [WATCH.active, compiled(128), compiled(64), compiled(128)]
    answer.write_text(json.dumps(found | {"lines": lines}))


if __name__ == "__main__":
    os.environ["ANYMLA_COMPILE_WATCH"] = "warn"
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        main(Path(sys.argv[1]))

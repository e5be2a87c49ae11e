"""Start of the compile watch in vLLM's workers: when vLLM's own start-up has compiled all it will.

That is where vLLM activates its monitor of kernels (``vllm.utils.jit_monitor``), which names a
kernel once, also where it was only read from Triton's cache, and counts nothing.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from vllm.logger import init_logger

from anymla.engines import server_metrics
from anymla.engines.vllm.pinned import MONITOR_MODULE
from anymla.ops.compile_watch import WATCH, mode

_LOG = init_logger("vllm.plugins.anymla")


@functools.cache
def install() -> None:
    """Begin the watch of this process with vLLM's monitor, if the environment asks for it."""
    if mode() == "off":
        return
    monitor: Any = importlib.import_module(MONITOR_MODULE)
    activate = monitor.activate

    @functools.wraps(activate)
    def activated(*args: Any, **kwargs: Any) -> None:
        activate(*args, **kwargs)
        if WATCH.begin(_LOG):
            server_metrics.count_compiled()
            _LOG.info("anymla: kernels compiled from here on are named and counted")

    monitor.activate = activated

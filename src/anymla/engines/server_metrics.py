"""Counters of a server's workers in its Prometheus metrics.

Audits and watches run in the processes of the engine, metrics are read in that of the API server.
``prometheus_client`` shares counters through memory-mapped files in the folder that
PROMETHEUS_MULTIPROC_DIR names, and a server of several processes collects them from there. vLLM has
no such folder with one API server: that process then makes one of its own, names it to the
processes that it starts, and collects it beside its own metrics.

Each worker writes totals to a file of its own; what is collected is their sum. Nothing is imported
where ``prometheus_client`` is absent.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from anymla.audit.checks import CHECKS
from anymla.ops.compile_watch import WATCH

if TYPE_CHECKING:
    from anymla.audit.auditor import Auditor

DIRECTORY = "ANYMLA_METRICS_DIR"
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
# Help texts by the counters' names.
_HELP = {
    "anymla_audit_steps": "Steps of the engine that were audited.",
    "anymla_audit_cases": "Cases that an audit has judged, by method.",
    "anymla_audit_alarms": "Cases that an audit found wrong, by method.",
    "anymla_audit_skipped": "Steps and cases that an audit could not judge.",
    "anymla_kernels_compiled": "Kernels that Triton compiled after the warm-up.",
}


@functools.cache
def share() -> None:
    """Add the counters of processes that this one starts to its metrics.

    Nothing happens in a child process, nor where servers share their metrics already.
    """
    if multiprocessing.parent_process() is not None or MULTIPROCESS in os.environ:
        return
    try:
        from prometheus_client import REGISTRY
        from prometheus_client.multiprocess import MultiProcessCollector
    except ImportError:
        return
    folder = tempfile.mkdtemp(prefix="anymla-metrics-")
    atexit.register(_remove, folder, os.getpid())
    os.environ[DIRECTORY] = folder
    MultiProcessCollector(REGISTRY, path=folder)


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # a process that was forked holds the same list of exits
        shutil.rmtree(folder, ignore_errors=True)


class Counters:
    """Counters of this process, in a file that a server's metrics are collected from."""

    def __init__(self, values: Any, key: Callable[..., str]) -> None:
        """Use a mapping of ``prometheus_client``, which its function ``key`` makes keys for."""
        self._values, self._key = values, key
        self._writing = threading.Lock()

    def set(self, name: str, total: int, **labels: str) -> None:
        """Set a counter, which must never decrease.

        Args:
            name: name of a counter in the metrics, without the suffix "_total".
            total: number of events in this process so far.
            labels: values of the counter's labels.
        """
        key = self._key(name, f"{name}_total", list(labels), list(labels.values()), _HELP[name])
        with self._writing:
            self._values.write_value(key, float(total), 0.0)


@functools.cache
def counters() -> Counters | None:
    """Return the counters of this process; None if no server collects them."""
    folder = os.environ.get(MULTIPROCESS) or os.environ.get(DIRECTORY)
    if not folder:
        return None
    try:
        from prometheus_client.mmap_dict import MmapedDict, mmap_key

        file = os.path.join(folder, f"counter_anymla-{os.getpid()}.db")
        return Counters(MmapedDict(file), mmap_key)
    except (ImportError, OSError):  # no package, or a server that has ended
        return None


def count_audit(auditor: Auditor) -> None:
    """Keep an audit's figures in the counters of this process."""
    found = counters()
    if found is None:
        return

    def changed() -> None:
        found.set("anymla_audit_steps", auditor.audited)
        found.set("anymla_audit_skipped", auditor.skipped)
        for method, tally in list(auditor.tallies.items()):  # other threads add to them
            found.set("anymla_audit_cases", tally.judged, method=method)
            found.set("anymla_audit_alarms", tally.alarms, method=method)

    changed()
    for method in CHECKS:  # an alarm of a method must be an increase
        found.set("anymla_audit_alarms", 0, method=method)
    auditor.changed = changed


def count_compiled() -> None:
    """Keep the number of kernels that were compiled in service in the counters of this process."""
    found = counters()
    if found is not None:
        found.set("anymla_kernels_compiled", WATCH.compiled)
        WATCH.noticed.append(lambda _: found.set("anymla_kernels_compiled", WATCH.compiled))

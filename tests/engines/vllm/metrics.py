"""Counters of workers in vLLM's metrics: ``metrics.py one|several``, the number of API servers.

Prints the folder of the counters, then the metrics. Workers are processes of their own, as those of
the engine are; each audits steps with a list of slots, wrong in some of them.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Callable

import torch

from anymla.audit.auditor import Auditor
from anymla.audit.case import Case
from anymla.audit.settings import Settings
from anymla.engines import server_metrics
from anymla.ops.compile_watch import WATCH


def case(*, wrong: bool) -> Case:
    """Five places of a request's window, of which the last is listed wrongly."""
    listed = torch.tensor([64, 65, 66, 67, 68 + wrong])
    numbers = {"page_size": 64, "first": 0, "last": 5, "what": "window"}
    tensors = {"table": torch.tensor([1]), "listed": listed}
    return Case("slots", "layer 0", ["a"], [4], tensors, numbers)


def work(steps: int, alarms: int) -> None:
    """Audit steps, and compile a kernel where there are alarms."""
    log = logging.getLogger("audit")
    log.disabled = True
    auditor = Auditor(Settings(every=1), log, {})
    server_metrics.count_audit(auditor)
    for step in range(steps):
        auditor.begin()
        auditor.submit(case(wrong=step < alarms))
        auditor.drain()
        auditor.end(1)
    if alarms:
        server_metrics.count_compiled()
        WATCH.compiled += 1
        for noticed in WATCH.noticed:
            noticed("a kernel")
        auditor.submit_step(fails)
        auditor.drain()


def fails() -> None:
    """Stand for a step that the device does not give."""
    raise RuntimeError


def main(several: bool) -> None:
    """Serve as vLLM does: its plugin is loaded before processes are started."""
    from vllm.v1.metrics.prometheus import (
        get_prometheus_registry,
        setup_multiprocess_prometheus,
    )

    if several:
        setup_multiprocess_prometheus()
    server_metrics.share()
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR") or os.environ[server_metrics.DIRECTORY]
    spawned = multiprocessing.get_context("spawn")
    target: Callable[[int, int], None] = work
    workers = [spawned.Process(target=target, args=each) for each in ((2, 0), (3, 2))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert not worker.exitcode
    import prometheus_client

    print(folder)
    print(prometheus_client.generate_latest(get_prometheus_registry()).decode())


if __name__ == "__main__":
    main(sys.argv[1] == "several")

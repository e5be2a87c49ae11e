"""Runs cases in processes of their own, so that a crash or a hang is one case's outcome.

After a CUDA error a process can run nothing else: the worker ends itself and another one takes the
remaining cases.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from anymla.child_process import python_command
from anymla.testing.conformance.registry import Case, load_cases
from anymla.testing.conformance.runner import FAILED, Outcome, run_case
from anymla.testing.conformance.setup import subject_of
from anymla.testing.devices import prepare

_POLL_S = 0.05
_START_S = 120  # seconds for imports and the device's start on a busy machine
_DEVICE_ERRORS = ("CUDA error", "illegal memory access", "misaligned address", "device-side")


@dataclasses.dataclass(frozen=True)
class Request:
    """Arguments of a worker, in the command line's words.

    Attributes:
        backend: value of ``--backend``.
        against: value of ``--against``.
        device: value of ``--device``.
        compiled: True if ``--compiled`` is given.
        cases: ids of the cases, in order.
    """

    backend: str | None
    against: str | None
    device: str
    compiled: bool
    cases: tuple[str, ...]


class _Worker:
    """A worker process and the file that it reports to."""

    def __init__(self, request: Request, place: Path, timeout_s: float) -> None:
        self._request = request
        self._left = list(request.cases)
        self._place = place
        self._timeout_s = timeout_s
        self._start()

    def _start(self) -> None:
        self._place.write_text("", encoding="utf-8")
        self._errors = self._place.with_suffix(".err")
        self._read = 0
        self._running: str | None = None
        self._since = time.monotonic()
        told = dataclasses.replace(self._request, cases=tuple(self._left))
        with self._errors.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                python_command(
                    "-m", __name__, json.dumps(dataclasses.asdict(told)), str(self._place)
                ),
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # TRITON_INTERPRET is inherited, as it is read at import
            )

    @property
    def busy(self) -> bool:
        return bool(self._left)

    def poll(self, cases: dict[str, Case], subject: str) -> Iterator[Outcome]:
        """Return outcomes since the last call; restart the process if it died or hung."""
        ended = self._process.poll() is not None
        for line in self._lines():
            self._since = time.monotonic()
            if "running" in line:
                self._running = str(line["running"])
                continue
            outcome = Outcome(**{**line, "notes": tuple(line["notes"])})
            self._left.remove(outcome.case_id)
            self._running = None
            yield outcome
        if not self._left:
            return
        allowed = self._timeout_s + (0 if self._running else _START_S)
        hung = time.monotonic() - self._since > allowed
        if not ended and not hung:
            return
        self.stop()
        case_id = self._running or self._left[0]
        self._left.remove(case_id)
        why = f"no answer in {self._timeout_s:g} s" if hung else self._how_it_ended()
        yield Outcome(case_id, cases[case_id].story, subject, FAILED, why)
        if self._left:
            self._start()

    def stop(self) -> None:
        """End the process and its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        self._process.wait()

    def _how_it_ended(self) -> str:
        code = self._process.returncode
        how = f"died of signal {-code}" if code < 0 else f"ended with {code}"
        said = self._errors.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(said) if line.strip()), "")
        return f"the process {how}" + (f": {last[:200]}" if last else "")

    def _lines(self) -> list[dict[str, Any]]:
        with self._place.open(encoding="utf-8") as file:
            file.seek(self._read)
            text = file.read()
        whole, _, _ = text.rpartition("\n")
        self._read += len(whole.encode()) + 1 if whole else 0
        return [json.loads(line) for line in whole.splitlines()]


def run_isolated(
    cases: Sequence[Case], request: Request, subject: str, *, jobs: int, timeout_s: float
) -> Iterator[Outcome]:
    """Run cases in ``jobs`` processes at a time; yield outcomes as they are known.

    Args:
        cases: cases to run.
        request: arguments of the workers; its ``cases`` are ignored.
        subject: name of the judged subject in the outcomes.
        jobs: number of processes.
        timeout_s: time limit of a case in seconds; a slower case is killed and fails.
    """
    by_id = {case.case_id: case for case in cases}
    shares = [tuple(list(by_id)[start::jobs]) for start in range(jobs)]
    with tempfile.TemporaryDirectory(prefix="anymla-conformance-") as directory:
        workers = [
            _Worker(dataclasses.replace(request, cases=share), Path(directory) / str(i), timeout_s)
            for i, share in enumerate(shares)
            if share
        ]
        try:
            while any(worker.busy for worker in workers):
                for worker in workers:
                    yield from worker.poll(by_id, subject)
                time.sleep(_POLL_S)
        finally:
            for worker in workers:
                worker.stop()


def _end_with_parent() -> None:
    """End this process once its parent has ended, however that happened."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(4)

    threading.Thread(target=watch, daemon=True).start()


def _main(told: str, place: str) -> None:
    _end_with_parent()
    words = json.loads(told)
    request = Request(**{**words, "cases": tuple(words["cases"])})
    prepare(request.device, compiled=request.compiled)
    torch.set_num_threads(1)  # as without processes: threads of small calls wait for each other
    subject = subject_of(request.backend, request.against, request.device)
    known = load_cases()
    with Path(place).open("a", encoding="utf-8") as file:
        for case_id in request.cases:
            print(json.dumps({"running": case_id}), file=file, flush=True)
            outcome = run_case(known[case_id], subject)
            print(json.dumps(dataclasses.asdict(outcome)), file=file, flush=True)
            if any(words in outcome.detail for words in _DEVICE_ERRORS):
                os._exit(3)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2])

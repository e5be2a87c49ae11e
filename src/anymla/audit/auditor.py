"""The auditor: selects steps, has cases judged beside the engine, and reports the findings."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import logging
import multiprocessing.util
import os
import queue
import random
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from anymla.audit.case import Case, save_case, write_private
from anymla.audit.checks import Finding
from anymla.audit.packet import Packed
from anymla.audit.process import Answer, JudgeProcess, judge_here
from anymla.audit.settings import Settings
from anymla.ops.compile_watch import WATCH

Judge = Callable[[Packed], Sequence[Answer]]
_WAITING = 16  # steps that may wait for a judge; further ones are counted but dropped
_KEPT = 64  # number of alarms whose cases stay in memory
_NAMES = 100  # file names that are tried for a dump
_CLOSING = 3.0  # seconds that an engine's end may wait for judges; vLLM kills it after five


@dataclasses.dataclass
class Tally:
    """Findings of one method.

    Attributes:
        judged: number of cases.
        tokens: number of tokens in the cases.
        alarms: number of cases that exceeded their bounds.
        worst: largest error in units of the allowed error.
        mean: largest root mean square of a case's errors, in the same units.
    """

    judged: int = 0
    tokens: int = 0
    alarms: int = 0
    worst: float = 0.0
    mean: float = 0.0


class Auditor:
    """Audit of one engine; the engine's adapter calls it, from one thread.

    Attributes:
        settings: settings of the audit.
        active: True if the running step is audited.
        step: number of steps so far.
        audited: number of audited steps so far.
        skipped: number of cases, or steps, that were not judged because too many waited, or the
            judge failed.
        tallies: findings by method.
        alarms: the latest findings that exceeded their bounds.
        changed: function that is called when figures have changed, from any of the threads.
    """

    def __init__(
        self,
        settings: Settings,
        log: logging.Logger,
        made_by: dict[str, str],
        judges: Sequence[Judge] = (judge_here,),
    ) -> None:
        """Start the threads that have cases judged.

        Args:
            settings: settings of the audit.
            log: logger of alarms, as errors, and of summaries, as information.
            made_by: versions and device, kept with dumps.
            judges: functions that judge the cases of a step, each called from a thread of its own;
                ``JudgeProcess`` leaves the interpreter lock to the engine.
        """
        self.settings, self.log, self.made_by = settings, log, made_by
        self.active = False
        self.step = self.audited = self.skipped = 0
        self.tallies: dict[str, Tally] = collections.defaultdict(Tally)
        self.alarms: collections.deque[tuple[Case, Finding]] = collections.deque(maxlen=_KEPT)
        self.changed: Callable[[], None] = lambda: None
        self._dumped = 0
        self._started = time.monotonic()
        self._seen = 0
        self._noting = threading.Lock()
        self._steps: queue.Queue[Callable[[], Packed] | None] = queue.Queue(_WAITING * len(judges))
        self._judges, self._closed = judges, False
        self._threads = [
            threading.Thread(target=self._run, args=(each,), name="anymla-audit", daemon=True)
            for each in judges
        ]
        for thread in self._threads:
            thread.start()
        # Also runs at the end of a child of multiprocessing, where no function of atexit does.
        multiprocessing.util.Finalize(None, self._end_process, exitpriority=1)

    def _end_process(self) -> None:
        """Close, and let the interpreter end without looking for cycles.

        It would do so twice among all objects, 3.4 s of an engine's 6.1 with vLLM 0.33, which kills
        one after five. What is left is freed with the process.
        """
        self.close()
        gc.freeze()

    def next_is_audited(self) -> bool:
        """True if the next step is audited."""
        return (self.step + 1) % self.settings.every == 0

    def begin(self) -> None:
        """Begin a step."""
        self.step += 1
        self.active = self.step % self.settings.every == 0
        self.audited += self.active

    def end(self, tokens: int) -> None:
        """End the step, which had ``tokens`` tokens."""
        self._seen += tokens
        if self.active and self.audited % 100 == 0:
            self.log.info("%s", self.summary())
        if self.active:
            self._tell()
        self.active = False

    def skip(self) -> None:
        """Drop the running step from the audit."""
        self.skipped += self.active
        self.audited -= self.active
        self.active = False

    def random(self, what: str) -> random.Random:
        """Return a random generator for a choice in this step; its seed is reproducible."""
        return random.Random(f"{self.settings.seed} {self.step} {what}")

    def turn(self, layers: Sequence[str]) -> list[str]:
        """Return the layers, of some of a kind, that this step looks at."""
        if not layers:
            return []
        count = min(self.settings.layers, len(layers))
        first = (self.audited - 1) * count
        return [layers[(first + i) % len(layers)] for i in range(count)]

    @property
    def full(self) -> bool:
        """True if so many steps wait that another one would be skipped."""
        return self._steps.full()

    def submit(self, case: Case) -> None:
        """Submit a case for judgement; its values are copied now."""
        packed = Packed.of(case)
        self.submit_step(lambda: packed)

    def submit_step(self, made: Callable[[], Packed]) -> None:
        """Submit the step's cases; ``made`` runs in a judge's thread and may wait for a device."""
        step = self.step
        if self._closed:
            return

        def stamped() -> Packed:
            packed = made()
            packed.step, packed.made_by = step, self.made_by
            return packed

        try:
            self._steps.put_nowait(stamped)
        except queue.Full:
            self.skipped += 1

    def close(self, seconds: float = _CLOSING) -> None:
        """End the threads and judges; steps that wait are dropped.

        A thread within torch must not outlive the interpreter: it would abort the process, and a
        server would report that its engine died.

        Args:
            seconds: longest time to wait for the threads.
        """
        if self._closed:
            return
        self._closed, deadline = True, time.monotonic() + seconds
        if self.audited:
            self.log.info("%s", self.summary())
        with contextlib.suppress(queue.Empty):
            while True:
                self._steps.get_nowait()
                self._steps.task_done()
        for judge in self._judges:
            with contextlib.suppress(queue.Full):
                self._steps.put_nowait(None)
            if isinstance(judge, JudgeProcess):
                judge.kill()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def drain(self) -> None:
        """Wait until everything is judged."""
        self._steps.join()

    def summary(self) -> str:
        """Summarise steps, cases by method, the worst of each, and alarms in one line."""
        parts = [
            f"{method} {tally.judged} ({tally.worst:.2g} of its bound)"
            for method, tally in sorted(self.tallies.items())
        ]
        count = sum(tally.alarms for tally in self.tallies.values())
        looked = max((tally.tokens for tally in self.tallies.values()), default=0)
        rate = looked / max(time.monotonic() - self._started, 1e-9)
        compiled = f"{WATCH.compiled} kernels compiled in service; " if WATCH.active else ""
        every = f"a fault in one token of a million shows after {1e6 / rate:.0f} s" if rate else ""
        return (
            f"audit: {self.audited} of {self.step} steps, {count} alarms, {self.skipped} skipped; "
            f"{', '.join(parts) or 'nothing judged'}; {compiled}{every}"
        )

    def _run(self, judge: Judge) -> None:
        while True:
            made = self._steps.get()
            if made is None:
                self._steps.task_done()
                return
            try:
                packed = made()
                answers = judge(packed)
                with self._noting:
                    for index, answer in enumerate(answers):
                        self._note(packed, index, answer)
            except Exception:  # a fault of the audit must never stop the engine
                self.skipped += 1
                if not self._closed:
                    self.log.exception("audit: a step cannot be judged")
            finally:
                self._tell()
                self._steps.task_done()

    def _tell(self) -> None:
        """Call ``changed``; a fault of it must stop neither the engine nor the audit."""
        try:
            self.changed()
        except Exception:
            self.changed = lambda: None
            self.log.exception("audit: its figures are not published from here on")

    def _note(self, packed: Packed, index: int, answer: Answer) -> None:
        planned = packed.planned[index]
        if answer is None:
            return
        if isinstance(answer, str):
            self.skipped += 1
            self.log.error("audit: a case of %s cannot be judged: %s", planned.method, answer)
            return
        tally = self.tallies[planned.method]
        tally.judged += 1
        tally.tokens += len(planned.positions)
        tally.worst, tally.mean = max(tally.worst, answer.worst), max(tally.mean, answer.mean)
        if answer.ok:
            return
        tally.alarms += 1
        case = packed.case(index).apart()
        self.alarms.append((case, answer))
        dump, why = self._dump(case, answer)
        self.log.error("audit: %s", "\n  ".join(report(case, answer, dump, why)))

    def _dump(self, case: Case, found: Finding) -> tuple[Path | None, str]:
        """Write a case and its report; return the case's file, or None and the reason."""
        if not self.settings.directory:
            return None, "ANYMLA_AUDIT=directory=DIR keeps what can be replayed"
        if self._dumped >= self.settings.dumps:
            return None, f"not dumped: {self._dumped} are"
        if case.nbytes > self.settings.mebibytes << 20:
            return None, f"not dumped: {case.nbytes >> 20} MiB"
        self._dumped += 1
        directory = Path(self.settings.directory)
        words = dataclasses.asdict(found) | {"worst": str(found.worst)}
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            directory.mkdir(mode=0o700, exist_ok=True)
            for number in range(self._dumped, self._dumped + _NAMES):
                name = f"{case.method}-step{case.step}-{os.getpid()}-{number}.safetensors"
                # A restarted server may have the same process number.
                with contextlib.suppress(FileExistsError):
                    save_case(directory / name, case, words)
                    self._write_report(directory / name, case, found)
                    return directory / name, ""
            raise FileExistsError(f"{directory / name} and others exist")
        except OSError as error:
            return None, f"not dumped: {error}"

    def _write_report(self, dump: Path, case: Case, found: Finding) -> None:
        """Write the lines of an alarm beside its dump."""
        made_by = ", ".join(f"{name} {value}" for name, value in case.made_by.items())
        lines = [*report(case, found, dump), f"inputs {case.digest()}, made by {made_by}"]
        write_private(dump.with_suffix(".txt"), "\n".join([*lines, ""]).encode())


def report(case: Case, found: Finding, dump: Path | None, why: str = "") -> list[str]:
    """Return the lines of an alarm: the fault, its first value, its looks, and how to repeat it.

    Args:
        case: case that is wrong.
        found: finding of its check.
        dump: file of the case; None if there is none.
        why: reason for which there is none.
    """
    lines = [describe(case, found)]
    if found.first:
        lines.append(f"first: {found.first}")
    if found.looks:
        lines.append(f"looks: {found.looks}")
    repeat = why if dump is None else f"anymla replay {shlex.quote(str(dump))}"
    return [*lines, f"repeat: {repeat}"] if repeat else lines


def describe(case: Case, found: Finding) -> str:
    """Describe in one line where the first wrong value is and what it should be."""
    where = f"{found.method} of {case.layer}"
    if case.positions:
        token = min(found.token, len(case.positions) - 1)
        where += f", request {case.requests[token]}, position {case.positions[token]}"
    return f"{where}, step {case.step}: {found.what} ({found.worst:.3g} of what is allowed)"

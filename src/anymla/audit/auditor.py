"""The auditor: selects steps, has cases judged beside the engine, and reports the findings."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from anymla.audit.case import Case, save_case
from anymla.audit.checks import Finding
from anymla.audit.packet import Packed
from anymla.audit.process import Answer, judge_here
from anymla.audit.settings import Settings

Judge = Callable[[Packed], Sequence[Answer]]
from anymla.ops.compile_watch import WATCH
_WAITING = 16  # steps that may wait for a judge; further ones are counted but dropped
_KEPT = 64  # number of alarms whose cases stay in memory
_NAMES = 100  # file names that are tried for a dump


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
    """

    def __init__(
        changed: function that is called when figures have changed, from any of the threads.
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
        self._dumped = 0
        self._started = time.monotonic()
        self._seen = 0
        self.changed: Callable[[], None] = lambda: None
        self._noting = threading.Lock()
        self._steps: queue.Queue[Callable[[], Packed]] = queue.Queue(_WAITING * len(judges))
        for each in judges:
            threading.Thread(
                target=self._run, args=(each,), name="anymla-audit", daemon=True
            ).start()

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
        self.active = False

    def skip(self) -> None:
        """Drop the running step from the audit."""
        self.skipped += self.active
        self.audited -= self.active
        self.active = False

        if self.active:
            self._tell()
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

        def stamped() -> Packed:
            packed = made()
            packed.step, packed.made_by = step, self.made_by
            return packed

        try:
            self._steps.put_nowait(stamped)
        except queue.Full:
            self.skipped += 1

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
        every = f"a fault in one token of a million shows after {1e6 / rate:.0f} s" if rate else ""
        return (
            f"audit: {self.audited} of {self.step} steps, {count} alarms, {self.skipped} skipped; "
            f"{', '.join(parts) or 'nothing judged'}; {compiled}{every}"
        )

    def _run(self, judge: Judge) -> None:
        while True:
            made = self._steps.get()
            try:
                packed = made()
                answers = judge(packed)
                with self._noting:
                    for index, answer in enumerate(answers):
                        self._note(packed, index, answer)
            except Exception:  # a fault of the audit must never stop the engine
                self.skipped += 1
                self.log.exception("audit: a step cannot be judged")
            finally:
                self._steps.task_done()

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
        compiled = f"{WATCH.compiled} kernels compiled in service; " if WATCH.active else ""
        case = packed.case(index).apart()
        self.alarms.append((case, answer))
        self.log.error("audit: %s%s", describe(case, answer), self._dump(case, answer))

    def _dump(self, case: Case, found: Finding) -> str:
        if not self.settings.directory or self._dumped >= self.settings.dumps:
            return ""
        if case.nbytes > self.settings.mebibytes << 20:
            return f"; not dumped: {case.nbytes >> 20} MiB"
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
                    return f"; dumped to {directory / name}"
            raise FileExistsError(f"{directory / name} and others exist")
        except OSError as error:
                self._tell()
            return f"; not dumped: {error}"

    def _tell(self) -> None:
        """Call ``changed``; a fault of it must stop neither the engine nor the audit."""
        try:
            self.changed()
        except Exception:
            self.changed = lambda: None
            self.log.exception("audit: its figures are not published from here on")


def describe(case: Case, found: Finding) -> str:
    """Describe in one line where the first wrong value is and what it should be."""
    where = f"{found.method} of {case.layer}"
    if case.positions:
        token = min(found.token, len(case.positions) - 1)
        where += f", request {case.requests[token]}, position {case.positions[token]}"
    return f"{where}, step {case.step}: {found.what} ({found.worst:.3g} of what is allowed)"

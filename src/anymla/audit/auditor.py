"""Decides what is looked at, judges it beside the engine, and tells what was found."""

from __future__ import annotations

import collections
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
from anymla.audit.checks import Finding, judge
from anymla.audit.settings import Settings

_WAITING = 4096  # cases that may wait for the judge; further ones are counted, not kept
_KEPT = 64  # alarms whose cases stay in memory


@dataclasses.dataclass
class Tally:
    """What was found of one method.

    Attributes:
        judged: cases.
        tokens: in them.
        alarms: cases that were not within their bounds.
        worst: the largest error in units of what is allowed.
        mean: the largest root mean square of a case's errors, in the same units.
    """

    judged: int = 0
    tokens: int = 0
    alarms: int = 0
    worst: float = 0.0
    mean: float = 0.0


class Auditor:
    """One engine's audit; an engine's adapter calls it, from one thread.

    Attributes:
        settings: what was asked for.
        active: whether the step that runs now is audited.
        step: number of steps so far.
        audited: how many of them were audited.
        skipped: cases that were not judged because too many waited, or the judge failed.
        tallies: by method.
        alarms: the last of what was found.
    """

    def __init__(
        self,
        settings: Settings,
        log: logging.Logger,
        made_by: dict[str, str],
        judge: Callable[[Case], Finding] = judge,
    ) -> None:
        """Start the thread that has cases judged.

        Args:
            settings: what to look at.
            log: where alarms go, as errors, and summaries, as information.
            made_by: versions and device, kept with dumps.
            judge: of a case; ``JudgeProcess`` leaves the interpreter to the engine.
        """
        self.settings, self.log, self.made_by = settings, log, made_by
        self._judge = judge
        self.active = False
        self.step = self.audited = self.skipped = 0
        self.tallies: dict[str, Tally] = collections.defaultdict(Tally)
        self.alarms: collections.deque[tuple[Case, Finding]] = collections.deque(maxlen=_KEPT)
        self._dumped = 0
        self._started = time.monotonic()
        self._seen = 0
        self._cases: queue.Queue[Callable[[], Case]] = queue.Queue(_WAITING)
        threading.Thread(target=self._run, name="anymla-audit", daemon=True).start()

    def next_is_audited(self) -> bool:
        """Whether the next step is audited."""
        return (self.step + 1) % self.settings.every == 0

    def begin(self) -> None:
        """A step begins."""
        self.step += 1
        self.active = self.step % self.settings.every == 0
        self.audited += self.active

    def end(self, tokens: int) -> None:
        """The step ends; it had ``tokens`` tokens."""
        self._seen += tokens
        if self.active and self.audited % 100 == 0:
            self.log.info("%s", self.summary())
        self.active = False

    def random(self, what: str) -> random.Random:
        """Numbers for a choice in this step, the same whenever it is made."""
        return random.Random(f"{self.settings.seed} {self.step} {what}")

    def turn(self, layers: Sequence[str]) -> list[str]:
        """The layers, of some of a kind, that are looked at in this step."""
        if not layers:
            return []
        count = min(self.settings.layers, len(layers))
        first = (self.audited - 1) * count
        return [layers[(first + i) % len(layers)] for i in range(count)]

    def submit(self, case: Case) -> None:
        """Have a case judged; it must not share memory with the engine."""
        self.submit_later(lambda: case)

    def submit_later(self, made: Callable[[], Case]) -> None:
        """Have a case judged that is made in the judge's thread, as from copies on a device."""
        step = self.step

        def stamped() -> Case:
            case = made()
            case.step, case.made_by = step, self.made_by
            return case

        try:
            self._cases.put_nowait(stamped)
        except queue.Full:
            self.skipped += 1

    def drain(self) -> None:
        """Wait until everything is judged."""
        self._cases.join()

    def summary(self) -> str:
        """One line: steps, cases by method, the worst of each, alarms."""
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
            f"{', '.join(parts) or 'nothing judged'}; {every}"
        )

    def _run(self) -> None:
        while True:
            made = self._cases.get()
            try:
                case = made()
                self._note(case, self._judge(case))
            except Exception:  # a fault of the audit must never stop the engine
                self.skipped += 1
                self.log.exception("audit: a case cannot be judged")
            finally:
                self._cases.task_done()

    def _note(self, case: Case, found: Finding) -> None:
        tally = self.tallies[case.method]
        tally.judged += 1
        tally.tokens += len(case.positions)
        tally.worst, tally.mean = max(tally.worst, found.worst), max(tally.mean, found.mean)
        if found.ok:
            return
        tally.alarms += 1
        self.alarms.append((case, found))
        self.log.error("audit: %s%s", describe(case, found), self._dump(case, found))

    def _dump(self, case: Case, found: Finding) -> str:
        if not self.settings.directory or self._dumped >= self.settings.dumps:
            return ""
        if case.nbytes > self.settings.mebibytes << 20:
            return f"; not dumped: {case.nbytes >> 20} MiB"
        self._dumped += 1
        name = f"{case.method}-step{case.step}-{os.getpid()}-{self._dumped}.safetensors"
        path = Path(self.settings.directory) / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_case(path, case, dataclasses.asdict(found) | {"worst": str(found.worst)})
        except OSError as error:
            return f"; not dumped: {error}"
        return f"; dumped to {path}"


def describe(case: Case, found: Finding) -> str:
    """One line: where the first wrong value is and what it should be."""
    where = f"{found.method} of {case.layer}"
    if case.positions:
        token = min(found.token, len(case.positions) - 1)
        where += f", request {case.requests[token]}, position {case.positions[token]}"
    return f"{where}, step {case.step}: {found.what} ({found.worst:.3g} of what is allowed)"

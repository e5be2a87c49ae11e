"""What is ordered before what: clocks of partitions and asynchronous operations.

An actor is a partition, or the operations of one kind that a partition has under way, or the
copies that a barrier counts. What an actor does has a time of its own; a clock says up to which
time of every actor something is known to be done. Waits join clocks; an access is ordered after
another if its partition's clock has reached that one's time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

Actor = Hashable
Times = dict[Actor, int]


@dataclasses.dataclass
class Clock:
    """What is known to be done.

    Attributes:
        known: of every actor, the time up to which.
        fenced: likewise, what a fence since then has made visible to the other proxy: TMA and
            matrix instructions read and write shared memory by the asynchronous proxy, threads by
            the generic one.
    """

    known: Times = dataclasses.field(default_factory=dict)
    fenced: Times = dataclasses.field(default_factory=dict)

    def copy(self) -> Clock:
        """Another one of the same times."""
        return Clock(dict(self.known), dict(self.fenced))

    def join(self, other: Clock) -> None:
        """What either knows."""
        _join(self.known, other.known)
        _join(self.fenced, other.fenced)

    def fence(self) -> None:
        """What is known is visible to both proxies."""
        self.fenced = dict(self.known)


def _join(into: Times, other: Times) -> None:
    for actor, time in other.items():
        if into.get(actor, 0) < time:
            into[actor] = time


@dataclasses.dataclass(frozen=True)
class Access:
    """A read or a write of shared memory.

    Attributes:
        actor: who.
        time: of the actor's.
        generic: by threads, not by TMA or a matrix instruction.
        who: for messages.
    """

    actor: Actor
    time: int
    generic: bool
    who: str

    def before(self, clock: Clock, *, generic: bool) -> str:
        """Why an access that knows ``clock`` may not follow this one; nothing if it may."""
        if clock.known.get(self.actor, 0) < self.time:
            return "nothing orders it after"
        if self.generic and not generic and clock.fenced.get(self.actor, 0) < self.time:
            return "no fence_async_shared orders it after"
        return ""

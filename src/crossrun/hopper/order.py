"""Order of operations: clocks of partitions and of asynchronous operations.

An actor is a partition, the operations of one kind that a partition has in flight, or the copies
that a barrier counts. Each actor's operations have times of its own; a clock says, for every actor,
up to which time operations are known to be complete. Waits join clocks. An access is ordered after
another if its partition's clock has reached the other's time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

Actor = Hashable
Times = dict[Actor, int]


@dataclasses.dataclass
class Clock:
    """Operations that are known to be complete.

    Attributes:
        known: time up to which each actor's operations are known to be complete.
        fenced: time up to which a fence has made them visible to the other proxy. TMA and matrix
            instructions access shared memory by the asynchronous proxy, threads by the generic one.
    """

    known: Times = dataclasses.field(default_factory=dict)
    fenced: Times = dataclasses.field(default_factory=dict)

    def copy(self) -> Clock:
        """Return a copy with the same times."""
        return Clock(dict(self.known), dict(self.fenced))

    def join(self, other: Clock) -> None:
        """Add everything that another clock knows."""
        _join(self.known, other.known)
        _join(self.fenced, other.fenced)

    def fence(self) -> None:
        """Make everything that is known visible to both proxies."""
        self.fenced = dict(self.known)


def _join(into: Times, other: Times) -> None:
    for actor, time in other.items():
        if into.get(actor, 0) < time:
            into[actor] = time


@dataclasses.dataclass(frozen=True)
class Access:
    """One read or write of shared memory.

    Attributes:
        actor: actor that makes the access.
        time: time of the access among the actor's.
        generic: True for threads, False for TMA and matrix instructions.
        who: name of the actor for error messages.
    """

    actor: Actor
    time: int
    generic: bool
    who: str

    def before(self, clock: Clock, *, generic: bool) -> str:
        """Return why an access with ``clock`` may not follow this one; "" if it may."""
        if clock.known.get(self.actor, 0) < self.time:
            return "nothing orders it after"
        if self.generic and not generic and clock.fenced.get(self.actor, 0) < self.time:
            return "no fence_async_shared orders it after"
        return ""

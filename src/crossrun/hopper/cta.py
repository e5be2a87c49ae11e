"""One CTA: its partitions, of which one runs at a time, and the asynchronous work beside them."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from crossrun.hopper.errors import Deadlock, Hazard
from crossrun.hopper.order import Access, Clock
from crossrun.hopper.shared_memory import Barrier, Shared


class _Killed(BaseException):
    """Raised in a partition after another one has failed."""


@dataclasses.dataclass(eq=False)
class Partition:
    """Partition of a CTA: warps that run one function.

    Attributes:
        number: index among the kernel's partitions.
        name: name of the partition's function.
        warps: number of warps of the partition.
        clock: operations that the partition knows to be complete.
        products: matrix instructions that it has started, and the number that it has waited for.
        stores: groups of TMA stores that it has started, and the number that it has waited for.
        copies: number of cp.async copies that it has started.
        groups: number of copies at which each of its cp.async groups ended.
        flying: numbers of its copies that have not landed.
        landed: actions to run once all copies up to a number have landed.
        waiting: condition that the partition waits for; None while it runs.
    """

    number: int
    name: str
    warps: int
    clock: Clock
    products: list[int] = dataclasses.field(default_factory=lambda: [0, 0])
    stores: list[int] = dataclasses.field(default_factory=lambda: [0, 0])
    copies: int = 0
    groups: list[int] = dataclasses.field(default_factory=list)
    flying: set[int] = dataclasses.field(default_factory=set)
    landed: list[tuple[int, Callable[[], None]]] = dataclasses.field(default_factory=list)
    waiting: Wait | None = None

    def __post_init__(self) -> None:
        self.tick()

    def tick(self) -> None:
        """Advance the partition's time; others learn of its later operations only by waiting."""
        self.clock.known[self.number] = self.clock.known.get(self.number, 0) + 1

    def access(self) -> Access:
        """Make an access by the partition's threads at its current time."""
        return Access(self.number, self.clock.known[self.number], True, self.name)

    def land(self, number: int) -> None:
        """Mark a cp.async copy as landed, and run the actions that waited for it."""
        self.flying.discard(number)
        first = min(self.flying, default=self.copies + 1)
        ready = [action for last, action in self.landed if last < first]
        self.landed = [each for each in self.landed if each[0] >= first]
        for action in ready:
            action()


@dataclasses.dataclass(frozen=True)
class Wait:
    """Condition that a partition waits for: a description, and a function that tests it."""

    what: object
    done: Callable[[], bool]


class Cta:
    """One CTA of a launch: schedules partitions and asynchronous operations.

    Each partition is a thread, of which one runs at a time. At every operation on shared memory or
    barriers another may be resumed, as ``seed`` decides; without a seed, only where one waits, and
    copies land when no partition can continue without them.
    """

    def __init__(self, seed: int | None, name: str, warps: int) -> None:
        self.random = None if seed is None else random.Random(seed)
        self.steps = 0
        self.flights: list[Callable[[], None]] = []
        self.barriers = 0
        self.main = Partition(0, name, warps, Clock())
        self._alone = True
        self._current = self.main
        self._alive: list[Partition] = []
        self._error: BaseException | None = None

    @property
    def partition(self) -> Partition:
        """Partition that is running."""
        return self._current

    # Scheduling.

    def specialise(self, functions: Sequence[tuple[Any, Any]], warps: Sequence[int]) -> None:
        """Run each function in a partition of its own, and continue when all have ended."""
        if not self._alone:
            raise Hazard("a partition is split into partitions")
        if len(warps) != len(functions) - 1:
            raise Hazard(f"{len(functions)} partitions, and warps of {len(warps)} beside the first")
        count = [self.main.warps, *warps]
        before = self.main.clock
        names = [function.__name__ for function, _ in functions]
        for number, name in enumerate(names):
            if names.count(name) > 1:
                names[number] = f"{name} (partition {number})"
        parts = [
            Partition(number, names[number], count[number], before.copy())
            for number in range(len(functions))
        ]
        self._alive = list(parts)
        self._turns = [threading.Semaphore(0) for _ in parts]
        self._finished = threading.Event()
        self._alone = False
        if self.random is not None:
            # Weights that differ much let some partition run far ahead of the others.
            self._weights = [10 ** self.random.uniform(-1.5, 1.5) for _ in parts]
            self._staying = self.random.choice((0.5, 0.8, 0.95))
            self._landing = self.random.choice((0.05, 0.3, 0.9))
        threads = [
            threading.Thread(target=self._run, args=(part, *each), daemon=True)
            for part, each in zip(parts, functions, strict=True)
        ]
        for thread in threads:
            thread.start()
        self._pass_on()
        self._finished.wait()
        for turn in self._turns:
            turn.release()
        for thread in threads:
            thread.join()
        self._alone = True
        self._current = self.main
        if self._error is not None:
            raise self._error
        for part in parts:
            self._ends(part)
            before.join(part.clock)
        self.main.tick()

    def end(self) -> None:
        """Check at the kernel's end that no asynchronous work is left."""
        self._ends(self.main)
        if self.flights:
            raise Hazard("the kernel ends before its copies have landed")

    def _ends(self, part: Partition) -> None:
        if part.stores[0] > part.stores[1]:
            raise Hazard(f"{part.name} ends without waiting for its TMA stores to have read")
        if part.products[0] > part.products[1]:
            raise Hazard(f"{part.name} ends without waiting for its matrix instructions")

    def _run(self, part: Partition, function: Callable[..., object], arguments: Any) -> None:
        torch.set_num_threads(1)  # a new thread does not inherit the setting
        self._turns[part.number].acquire()
        if self._error is not None:
            return
        try:
            function(*arguments)
            self._alive.remove(part)
            self._pass_on()
        except _Killed:
            return
        except BaseException as error:
            self._error = self._error or error
            self._finished.set()

    def _pass_on(self) -> None:
        """Resume a partition that can continue, after landing some copies."""
        while self._alive:
            if self.random is not None:
                while self.flights and self.random.random() < self._landing:
                    self._land()
            ready = [p for p in self._alive if p.waiting is None or p.waiting.done()]
            if ready:
                if self.random is None or len(ready) == 1:
                    chosen = ready[0]
                else:
                    weights = [self._weights[part.number] for part in ready]
                    chosen = self.random.choices(ready, weights)[0]
                self._current = chosen
                self._turns[chosen.number].release()
                return
            if not self.flights:
                waits = "; ".join(
                    f"{p.name} for {p.waiting.what}" for p in self._alive if p.waiting is not None
                )
                raise Deadlock(f"all wait for ever: {waits}")
            self._land()
        self._finished.set()

    def _land(self) -> None:
        number = 0 if self.random is None else self.random.randrange(len(self.flights))
        self.flights.pop(number)()

    def pause(self) -> None:
        """Give another partition the chance to run first."""
        self.steps += 1
        if self._alone:
            if self.random is not None and self.flights and self.random.random() < 0.3:
                self._land()
            return
        me = self._current
        if me.waiting is None:
            if self.random is None or self.random.random() < self._staying:
                return
        elif self.random is None and me.waiting.done():
            me.waiting = None
            return
        self._pass_on()
        self._turns[me.number].acquire()
        if self._error is not None:
            raise _Killed
        me.waiting = None

    def wait(self, what: object, done: Callable[[], bool]) -> None:
        """Wait until a condition holds, by others' operations or asynchronous ones."""
        if self._alone:
            self.pause()
            while not done():
                if not self.flights:
                    raise Deadlock(f"{self._current.name} waits for ever for {what}")
                self._land()
            return
        self._current.waiting = Wait(what, done)
        self.pause()

    # Accesses by threads.

    def touch(self, shared: Shared, *, writes: bool) -> None:
        """Record a load or a store by the running partition."""
        self.pause()
        part = self._current
        if writes:
            shared.writes(part.clock, part.access())
        else:
            shared.reads(part.clock, part.access())

    def fence(self) -> None:
        """Execute ``fence.proxy.async`` in the running partition."""
        self._current.clock.fence()

    # Barriers.

    def arrive(self, barrier: Barrier, count: int = 1, size: int = 0) -> None:
        """Arrive for the running partition; ``size`` more bytes must land in this phase."""
        self.pause()
        part = self._current
        barrier.arrive(part.clock, count, size)
        part.tick()

    def wait_barrier(self, barrier: Barrier, parity: int) -> None:
        """Wait until the barrier's phase of a parity is over."""
        self.wait(barrier, lambda: barrier.done(parity))
        self._current.clock.join(barrier.clock)

    # TMA.

    def load_box(self, shared: Shared, box: Callable[[], torch.Tensor], barrier: Barrier) -> None:
        """Start a copy whose bytes a barrier counts; ``box`` reads global memory when it lands."""
        self.pause()
        part = self._current
        what = f"the TMA load that {part.name} has started"
        # The copy's phase is over only after it has landed.
        access = Access(barrier, barrier.phase + 1, False, what)
        shared.writes(part.clock, access)

        def land() -> None:
            shared.fill(box())
            barrier.land(shared.nbytes)

        self.flights.append(land)

    def store_box(self, shared: Shared, write: Callable[[torch.Tensor], None]) -> None:
        """Start a copy out of shared memory, which may be read until the copy was waited for."""
        self.pause()
        part = self._current
        part.stores[0] += 1
        what = f"the TMA store that {part.name} has started"
        shared.reads(part.clock, Access((part.number, "bulk"), part.stores[0], False, what))
        write(shared.contents())

    def wait_stores(self, outstanding: int) -> None:
        """Wait until the partition's TMA stores have read, except the last ``outstanding``."""
        self.pause()
        self._waited(self._current, self._current.stores, "bulk", outstanding)

    # cp.async.

    def copy_rows(self, shared: Shared, data: torch.Tensor) -> None:
        """Start a cp.async copy by the running partition's threads."""
        self.pause()
        part = self._current
        part.copies += 1
        number = part.copies
        what = f"the copy that {part.name} has started"
        shared.writes(part.clock, Access((part.number, "copies"), number, True, what))
        part.flying.add(number)

        def land() -> None:
            shared.fill(data)
            part.land(number)

        self.flights.append(land)

    def commit(self) -> None:
        """End a group of the running partition's copies so far."""
        self._current.groups.append(self._current.copies)

    def wait_groups(self, outstanding: int) -> None:
        """Wait until the partition's groups have landed, except the last ``outstanding``."""
        part = self._current
        done = len(part.groups) - outstanding
        last = part.groups[done - 1] if done > 0 else 0
        self.wait(
            f"{len(part.groups) - outstanding} groups of its copies",
            lambda: min(part.flying, default=last + 1) > last,
        )
        self._knows(part, "copies", last)

    def arrive_after_copies(self, barrier: Barrier, *, counted: bool) -> None:
        """Let every thread arrive when its copies so far have landed."""
        self.pause()
        part = self._current
        threads, last = 32 * part.warps, part.copies
        if counted:
            barrier.expect_more(threads)
        clock = part.clock.copy()
        clock.known[part.number, "copies"] = last
        part.tick()

        def action() -> None:
            barrier.arrive(clock, threads)

        if min(part.flying, default=last + 1) > last:
            action()
        else:
            part.landed.append((last, action))

    # Matrix instructions.

    def multiply(self, *operands: Shared) -> int:
        """Start a matrix instruction, which reads operands until waited for; return its number."""
        self.pause()
        part = self._current
        part.products[0] += 1
        number = part.products[0]
        what = f"a matrix instruction of {part.name}"
        for operand in operands:
            operand.reads(part.clock, Access((part.number, "products"), number, False, what))
        return number

    def wait_products(self, outstanding: int) -> None:
        """Wait until the partition's matrix instructions are done, but the last ``outstanding``."""
        self.pause()
        self._waited(self._current, self._current.products, "products", outstanding)

    def _waited(self, part: Partition, counts: list[int], what: str, outstanding: int) -> None:
        counts[1] = max(counts[1], counts[0] - outstanding)
        self._knows(part, what, counts[1])

    def _knows(self, part: Partition, what: str, time: int) -> None:
        known = part.clock.known
        known[part.number, what] = max(known.get((part.number, what), 0), time)

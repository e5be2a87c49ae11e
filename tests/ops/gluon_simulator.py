"""Runs a warp-specialised Gluon kernel's own source on a CPU, its partitions interleaved at random.

Each partition is a thread; one runs at a time, and at every operation on shared memory or a barrier
another may take over. Copies and matrix products are agents of their own: a copy lands at any later
moment, a product reads its operands until it has been waited for. So a run checks

- the protocol: a partition that can never go on is a deadlock, an arrival too many is an error, and
  so is a write to what a product may still be reading, or a copy to what another copy is filling;
- the arithmetic: tensors are torch tensors, shared memory begins as NaN.

Only what the kernels of this repository use is there, for one CTA and one warpgroup a partition.
"""

from __future__ import annotations

import functools
import math
import random
import threading
import types

import torch
from torch import Tensor

from anymla.formats.e4m3 import encode_e4m3

THREADS = 128


class Deadlock(AssertionError):
    """No partition can go on, and nothing is under way."""


class Hazard(AssertionError):
    """Two accesses to the same shared memory that nothing orders."""


class _Killed(BaseException):
    pass


class _ElementType:
    def __init__(self, dtype):
        self.element_ty = dtype


class Pointer:
    """A global address: a flat tensor and element offsets into it."""

    def __init__(self, flat: Tensor, offset=0):
        self.flat = flat
        self.offset = offset
        self.dtype = _ElementType(flat.dtype)

    def __add__(self, more):
        return Pointer(self.flat, self.offset + more)

    def unsqueeze(self, axis):
        return Pointer(self.flat, self.offset.unsqueeze(axis))


class Descriptor:
    """A matrix in global memory with a fixed box; what lies outside reads as zero."""

    def __init__(self, matrix: Tensor, box: tuple[int, int]):
        self.matrix = matrix
        self.box = box

    def read(self, row: int, column: int) -> Tensor:
        rows, columns = self.box
        out = torch.zeros(self.box, dtype=self.matrix.dtype)
        first, last = max(row, 0), min(row + rows, len(self.matrix))
        if last > first:
            part = self.matrix[first:last, column : column + columns]
            out[first - row : last - row] = part
        return out


class Barrier:
    """An mbarrier: arrivals and bytes still expected in the current phase."""

    def __init__(self):
        self.count = 0

    def init(self, count):
        self.count = self.pending = int(count)
        self.bytes = 0
        self.phase = 0

    def arrive(self, count=1):
        self.pending -= count
        if self.pending < 0:
            raise Hazard("an arrival too many")
        self._advance()

    def expect(self, bytes_):
        self.bytes += bytes_
        self.arrive()

    def complete(self, bytes_):
        self.bytes -= bytes_
        self._advance()

    def _advance(self):
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count

    def done(self, parity) -> bool:
        return (self.phase & 1) != parity


class Shared:
    """A shared-memory buffer, or a view of one."""

    def __init__(self, machine, tensor, owner=None, key=()):
        self.machine = machine
        self.tensor = tensor
        self.owner = self if owner is None else owner
        self.key = key
        self.dtype = tensor.dtype
        if owner is None:
            self.barriers = {}

    def index(self, i):
        return Shared(self.machine, self.tensor[int(i)], self.owner, (*self.key, int(i)))

    def permute(self, order):
        return Shared(self.machine, self.tensor.permute(order), self.owner, self.key)

    @property
    def place(self):
        return id(self.owner), self.key

    @property
    def barrier(self) -> Barrier:
        return self.owner.barriers.setdefault(self.key, Barrier())

    def load(self, layout):
        self.machine.pause()
        self.machine.reads(self)
        return self.tensor.clone()

    def store(self, value):
        self.machine.pause()
        self.machine.writes(self)
        self.tensor.copy_(value.to(self.dtype))


class _Copies:
    """Rows that a partition's threads are copying, in groups."""

    def __init__(self):
        self.under_way = [0]

    def start(self):
        group = len(self.under_way) - 1
        self.under_way[group] += 1

        def landed():
            self.under_way[group] -= 1

        return landed

    def commit(self):
        self.under_way.append(0)

    def done(self, outstanding) -> bool:
        return not any(self.under_way[: len(self.under_way) - 1 - outstanding])


class Machine:
    """One CTA."""

    def __init__(self, seed: int, program: int, programs: int):
        self.random = random.Random(seed)
        self.program = program
        self.programs = programs
        self.flights: list = []  # copies under way: (partition, place, what happens when it lands)
        self.reading: dict = {}  # partition -> places its products in flight read, oldest first
        self.copying: dict = {}
        self.current = None
        self.error: BaseException | None = None
        self.steps = 0

    # Scheduling: exactly one thread holds the turn.

    def run(self, partitions):
        names = [function.__name__ for function, _ in partitions]
        self.turns = {name: threading.Semaphore(0) for name in names}
        self.waiting = dict.fromkeys(names)
        self.copying = {name: _Copies() for name in names}
        self.alive = set(names)
        # A run has its favourites, so that some partition is far ahead wherever it may be.
        self.weights = {name: 10 ** self.random.uniform(-1.5, 1.5) for name in names}
        self.staying = self.random.choice((0.5, 0.8, 0.95))
        self.landing = self.random.choice((0.05, 0.3, 0.9))
        self.finished = threading.Event()
        threads = [
            threading.Thread(target=self._thread, args=part, daemon=True) for part in partitions
        ]
        for thread in threads:
            thread.start()
        self._pass_on()
        self.finished.wait()
        for name in names:
            self.turns[name].release()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error
        if self.flights:
            raise Hazard("the kernel ended before its copies did")

    def _thread(self, function, args):
        torch.set_num_threads(1)  # a thread of its own has forgotten what was set
        self.turns[function.__name__].acquire()
        try:
            if self.error is None:
                function(*args)
        except _Killed:
            return
        except BaseException as error:
            self._fail(error)
            return
        self.alive.discard(function.__name__)
        try:
            self._pass_on()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error):
        self.error = self.error or error
        self.finished.set()

    def _pass_on(self):
        """Give the turn to a partition that can go on, after landing some copies."""
        if not self.alive:
            while self.flights:
                self._land()
            self.finished.set()
            return
        while True:
            while self.flights and self.random.random() < self.landing:
                self._land()
            ready = [
                name
                for name in sorted(self.alive)
                if self.waiting[name] is None or self.waiting[name][0].done(self.waiting[name][1])
            ]
            if ready:
                weights = [self.weights[name] for name in ready]
                self.current = self.random.choices(ready, weights)[0]
                self.turns[self.current].release()
                return
            if not self.flights:
                raise Deadlock(f"after {self.steps} steps {sorted(self.alive)} wait for ever")
            self._land()

    def _land(self):
        self.flights.pop(self.random.randrange(len(self.flights)))[2]()

    def pause(self):
        """Let another partition go first."""
        if self.current is None:
            return
        self.steps += 1
        me = self.current
        if self.waiting[me] is None and self.random.random() < self.staying:
            return
        self._pass_on()
        self.turns[me].acquire()
        if self.error is not None:
            raise _Killed
        self.waiting[me] = None

    def wait(self, barrier, parity):
        self.wait_for(barrier, int(parity))

    def wait_for(self, what, parity):
        if self.current is None:
            raise Hazard("a wait outside of the partitions")
        self.waiting[self.current] = (what, parity)
        self.pause()

    # Hazards.

    def writes(self, shared):
        for who, products in self.reading.items():
            if any(shared.place in places for places in products):
                raise Hazard(f"{self.current} writes what a product of {who} reads")
        self.reads(shared)

    def reads(self, shared):
        if any(place == shared.place for _, place, _ in self.flights):
            raise Hazard(f"{self.current} uses what a copy is filling")

    # What Gluon offers.

    def copy(self, shared, value, then):
        self.pause()
        self.writes(shared)

        def land():
            self.writes_landed(shared)
            shared.tensor.copy_(value)
            then()

        self.flights.append((self.current, shared.place, land))

    def writes_landed(self, shared):
        for who, products in self.reading.items():
            if any(shared.place in places for places in products):
                raise Hazard(f"a copy lands in what a product of {who} reads")

    def reserve_words(self):
        """Barriers of warps, which are not told apart here: one arrival is that of all."""
        self.words: dict[int, Barrier] = {}
        return 0

    def _word(self, which) -> Barrier:
        if int(which) not in self.words:
            self.words[int(which)] = Barrier()
            self.words[int(which)].init(1)
        return self.words[int(which)]

    def wait_word(self, words, which, parity):
        self.wait(self._word(which), parity)

    def arrive_word(self, words, which):
        self.pause()
        self._word(which).arrive()

    def load_tile(self, descriptor, coordinates, barrier, shared):
        value = descriptor.read(int(coordinates[0]), int(coordinates[1]))
        size = value.numel() * value.element_size()
        self.copy(shared, value, lambda: barrier.barrier.complete(size))

    def store_tile(self, descriptor, coordinates, shared):
        """Read later; until ``store_wait`` nobody may write there."""
        self.pause()
        self.reads(shared)
        self.reading.setdefault(f"{self.current}'s copies", []).append({shared.place})
        row, column = (int(x) for x in coordinates)
        rows, columns = descriptor.box
        assert row + rows <= len(descriptor.matrix)

        descriptor.matrix[row : row + rows, column : column + columns] = shared.tensor

    def store_wait(self, pendings):
        assert pendings == 0
        self.pause()
        self.reading.pop(f"{self.current}'s copies", None)

    def load_rows(self, shared, pointer, mask):
        value = load(pointer, mask=mask, other=0)
        self.copy(shared, value, self.copying[self.current].start())

    def commit_group(self):
        self.copying[self.current].commit()

    def wait_group(self, outstanding):
        """Wait until all rows that this partition copies are there, but the last groups."""
        self.wait_for(self.copying[self.current], outstanding)

    def arrive_after_copies(self, barrier, increment_count):
        assert increment_count is False
        self.pause()
        mine = [flight for flight in self.flights if flight[0] == self.current]
        rows = [flight for flight in mine if flight[2].__name__ == "land"]
        left = {"count": len(rows)}
        if not rows:
            barrier.barrier.arrive(THREADS)
            return

        def chain(old):
            def land():
                old()
                left["count"] -= 1
                if left["count"] == 0:
                    barrier.barrier.arrive(THREADS)

            return land

        for flight in rows:
            place = self.flights.index(flight)
            self.flights[place] = (flight[0], flight[1], chain(flight[2]))

    def product(self, a, b, acc, *, use_acc=True, is_async=False):
        assert is_async
        self.pause()
        places = set()
        values = []
        for operand in (a, b):
            if isinstance(operand, Shared):
                self.reads(operand)
                places.add(operand.place)
                values.append(operand.tensor.float())
            else:
                values.append(operand.float())
        self.reading.setdefault(self.current, []).append(places)
        out = values[0] @ values[1]
        return acc + out if use_acc else out

    def product_wait(self, outstanding, deps):
        self.pause()
        products = self.reading.setdefault(self.current, [])
        del products[: max(len(products) - outstanding, 0)]
        return deps[0] if len(deps) == 1 else tuple(deps)


def load(pointer, mask=None, other=None):
    offset = pointer.offset
    at = torch.as_tensor(offset)
    if mask is None:
        return pointer.flat[at]
    at, mask = torch.broadcast_tensors(at, torch.as_tensor(mask))
    if mask.any() and not ((at[mask] >= 0) & (at[mask] < pointer.flat.numel())).all():
        raise Hazard("a load outside of its tensor")
    value = pointer.flat[torch.where(mask, at, 0)]
    return torch.where(mask, value, torch.as_tensor(other, dtype=value.dtype))


def store(pointer, value, mask=None):
    at, value = torch.broadcast_tensors(torch.as_tensor(pointer.offset), value)
    if mask is not None:
        keep = torch.broadcast_to(torch.as_tensor(mask), at.shape)
        at, value = at[keep], value[keep]
    pointer.flat[at.flatten()] = value.flatten().to(pointer.flat.dtype)


def _where(condition, a, b):
    return torch.where(torch.as_tensor(condition), torch.as_tensor(a), torch.as_tensor(b))


def _extreme(pick, x, axis):
    return pick(x, dim=axis)


def _range(*bounds):
    for i in range(*(int(bound) for bound in bounds)):
        yield torch.tensor(i)


class _Anything:
    """Stands for every layout."""

    def __call__(self, *args, **kwargs):
        return self

    def __getattr__(self, name):
        return self


class _Typed(Tensor):
    """A tensor that can be asked for its layout."""

    type = _Anything()


def _cast(x, dtype, bitcast=False):
    return x.view(dtype) if bitcast else x.to(dtype)


def _assembly(text, constraints, args, dtype, is_pure, pack):
    if text.startswith("nanosleep"):
        return args[0]
    if text.startswith("prefetch"):
        load(args[0])  # inside of the tensor
        return args[0]
    if "vote.sync.all" in text:
        return args[0] * args[1]
    assert "cvt.rn.satfinite.e4m3x2.f32 pair, $2, $1;" in text
    low, high = (encode_e4m3(x.as_subclass(Tensor)).to(dtype) for x in args)
    return low | (high << 8)


def _record(fill, *args):
    """An aggregate, filled by its class's own __init__."""
    made = types.SimpleNamespace()
    fill(made, *args)
    return made


def _namespace(machine: Machine) -> dict:
    """What a kernel's module finds under the names that it imports from Gluon."""
    layout = _Anything()
    gl = types.SimpleNamespace(
        constexpr=lambda x: x,
        BlockedLayout=layout,
        SliceLayout=layout,
        DotOperandLayout=layout,
        NVMMADistributedLayout=layout,
        NVMMASharedLayout=layout,
        SwizzledSharedLayout=layout,
        DistributedLinearLayout=layout,
        int16=torch.int16,
        int32=torch.int32,
        int64=torch.int64,
        float32=torch.float32,
        cast=_cast,
        inline_asm_elementwise=_assembly,
        load=load,
        store=store,
        where=_where,
        program_id=lambda axis: machine.program,
        num_programs=lambda axis: machine.programs,
        static_range=range,
        arange=lambda a, b, layout: torch.arange(a, b),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        expand_dims=lambda x, axis: x.unsqueeze(axis),
        convert_layout=lambda x, layout: x,
        reshape=lambda x, shape: x.reshape(shape).as_subclass(_Typed),
        permute=lambda x, order: x.permute(order),
        split=lambda x: x.unbind(-1),
        join=lambda a, b: torch.stack((a, b), -1),
        abs=torch.abs,
        maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
        minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
        max=lambda x, axis: _extreme(torch.amax, x, axis),
        min=lambda x, axis: _extreme(torch.amin, x, axis),
        sum=lambda x, axis: x.sum(axis),
        exp2=torch.exp2,
        log2=torch.log2,
        allocate_shared_memory=lambda dtype, shape, layout: Shared(
            machine, _poisoned(shape, dtype)
        ),
        warp_specialize=lambda partitions, warps, registers: machine.run(partitions),
    )

    def arrive(barrier, count=1):
        machine.pause()
        barrier.barrier.arrive(int(count))

    def expect(barrier, bytes_):
        machine.pause()
        barrier.barrier.expect(bytes_)

    mbarrier = types.SimpleNamespace(
        MBarrierLayout=layout,
        init=lambda barrier, count: barrier.barrier.init(count),
        wait=lambda barrier, parity: machine.wait(barrier.barrier, parity),
        arrive=arrive,
        expect=expect,
    )
    return {
        "gl": gl,
        "mbarrier": mbarrier,
        "tma": types.SimpleNamespace(store_wait=machine.store_wait),
        "async_copy": types.SimpleNamespace(
            mbarrier_arrive=machine.arrive_after_copies,
            commit_group=machine.commit_group,
            wait_group=machine.wait_group,
        ),
        "fence_async_shared": lambda: None,
        "warpgroup_mma": machine.product,
        "warpgroup_mma_wait": lambda count, deps: machine.product_wait(count, deps),
        "range": _range,
    }


def _poisoned(shape, dtype):
    return torch.full(shape, math.nan if dtype.is_floating_point else -(2**30), dtype=dtype)


def _of_kernel(kernel, changed: dict) -> dict:
    """All names that the kernel's module and those of the device functions it calls know."""
    found: dict = {}
    modules = [kernel.fn.__globals__]
    while modules:
        for name, value in modules.pop().items():
            value = changed.get(name, value)
            if name not in found:
                found[name] = value
                if _on_device(value):
                    modules.append(value.fn.__globals__)
            else:
                same = found[name] is value or name.startswith("__") or not _on_device(value)
                assert same, f"two device functions {name}"
    return found


def _on_device(value) -> bool:
    return hasattr(value, "fn") and hasattr(value.fn, "__code__")


def simulate(
    kernel,
    *args,
    grid: int,
    seed: int = 0,
    names: dict | None = None,
    changed: dict | None = None,
    **constants,
):
    """Run ``kernel``, a function of ``gluon.jit``, on ``grid`` programs one after the other.

    Args:
        kernel: the kernel; what it calls of ``gluon.jit`` runs as Python as well.
        args: Pointer, Descriptor or numbers.
        grid: programs.
        seed: of the interleaving.
        names: method of ``Machine`` by the name under which the module calls it.
        changed: device functions that stand for those of the same name.
        constants: the kernel's constexprs.
    """
    steps = 0
    for program in range(grid):
        machine = Machine(seed * 1000 + program, program, grid)
        found = _of_kernel(kernel, changed or {})
        for name, value in list(found.items()):
            if _on_device(value):
                found[name] = types.FunctionType(
                    value.fn.__code__, found, value.fn.__name__, value.fn.__defaults__
                )
            elif type(value).__name__ == "constexpr":
                found[name] = value.value
            elif getattr(value, "__triton_aggregate__", False):
                found[name] = functools.partial(_record, value.hash_attrs[0].fn)
        found.update(_namespace(machine))
        for name, method in (names or {}).items():
            found[name] = getattr(machine, method)
        found[kernel.fn.__name__](*args, **constants)
        steps += machine.steps
    return steps

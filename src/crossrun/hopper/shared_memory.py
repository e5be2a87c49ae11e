"""Shared memory: bytes, views of them, and checks that accesses are ordered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from crossrun.hopper.errors import Hazard
from crossrun.hopper.kinds import Kind, kind_of
from crossrun.hopper.order import Access, Actor, Clock
from crossrun.hopper.values import Type, Value

if TYPE_CHECKING:
    from crossrun.hopper.cta import Cta

Place = tuple[Any, ...]


class Allocation:
    """Bytes, with the last accesses to every part that a kernel has a view of."""

    def __init__(self, size: int, name: str) -> None:
        self.bytes = torch.full((size,), 0xFF, dtype=torch.uint8)
        self.name = name
        self._covered: dict[Place, Tensor] = {}
        self._overlapping: dict[Place, list[Place]] = {}
        self._writes: dict[Place, Access] = {}
        self._reads: dict[Place, dict[Actor, Access]] = {}

    def place(self, view: Tensor) -> Place:
        """Return a key for the bytes of a view."""
        size = view.element_size()
        place = (view.storage_offset() * size, size, tuple(view.shape), view.stride())
        if place not in self._covered:
            covered = torch.zeros(self.bytes.numel(), dtype=torch.bool)
            steps = [(n, s * size) for n, s in zip(view.shape, view.stride(), strict=True)]
            shape, strides = zip(*steps, (size, 1), strict=True)
            covered.as_strided(shape, strides, place[0]).fill_(True)
            for other, bits in self._covered.items():
                if (bits & covered).any():
                    self._overlapping[other].append(place)
                    self._overlapping.setdefault(place, []).append(other)
            self._overlapping.setdefault(place, []).append(place)
            self._covered[place] = covered
        return place

    def reads(self, place: Place, clock: Clock, access: Access) -> None:
        """Record a read; earlier writes must be ordered before it."""
        for other in self._overlapping[place]:
            written = self._writes.get(other)
            if written is not None:
                self._check(written, clock, access, "reads", "write")
        self._reads.setdefault(place, {})[access.actor] = access

    def writes(self, place: Place, clock: Clock, access: Access) -> None:
        """Record a write; all earlier accesses must be ordered before it."""
        for other in self._overlapping[place]:
            written = self._writes.get(other)
            if written is not None:
                self._check(written, clock, access, "writes", "write")
            for read in self._reads.get(other, {}).values():
                self._check(read, clock, access, "writes", "read")
        self._reads.pop(place, None)
        self._writes[place] = access

    def _check(self, earlier: Access, clock: Clock, now: Access, does: str, what: str) -> None:
        reason = earlier.before(clock, generic=now.generic)
        if reason:
            raise Hazard(f"{now.who} {does} {self.name}: {reason} the {what} by {earlier.who}")


class Shared:
    """View of shared memory, as a kernel has it.

    ``view`` has the dimensions of the shape, but the last one split in two: tiles of the layout,
    whose rows are as wide as its swizzle, and positions within a row. ``order`` permutes the
    dimensions.
    """

    def __init__(
        self,
        cta: Cta,
        allocation: Allocation,
        view: Tensor,
        kind: Kind,
        layout: Any,
        order: tuple[int, ...] | None = None,
    ) -> None:
        self._cta = cta
        self._allocation = allocation
        self._view = view
        self._kind = kind
        self._order = order
        self.layout = layout
        self.place = allocation.place(view)

    @classmethod
    def allocate(cls, cta: Cta, kind: Kind, shape: Sequence[int], layout: Any) -> Shared:
        """Allocate memory with every bit set."""
        name = f"{kind.dtype} {list(shape)}"
        allocation = Allocation(math.prod(shape) * kind.itemsize, name)
        return cls._of(cta, allocation, allocation.bytes, kind, shape, layout)

    @classmethod
    def _of(
        cls,
        cta: Cta,
        allocation: Allocation,
        memory: Tensor,
        kind: Kind,
        shape: Sequence[int],
        layout: Any,
    ) -> Shared:
        size = math.prod(shape) * kind.itemsize
        if size > memory.numel():
            raise Hazard(f"a view of {size} bytes of {memory.numel()}")
        elements = memory[:size].view(kind.memory)
        *above, width = shape
        row = width
        if isinstance(layout, gl.NVMMASharedLayout) and above:
            row = min(width, (int(layout.swizzle_byte_width) or 16) // kind.itemsize)
        if width % row:
            raise Hazard(f"rows of {width} elements are not whole rows of the layout's tiles")
        if not above:
            view = elements.view(1, width)
        else:
            *outer, rows = above
            view = elements.view(*outer, width // row, rows, row).transpose(-3, -2)
        return cls(cta, allocation, view, kind, layout)

    @property
    def shape(self) -> list[int]:
        """Sizes of the dimensions, as the kernel sees them."""
        *above, tiles, row = self._view.shape
        shape = [*above, tiles * row]
        return shape if self._order is None else [shape[axis] for axis in self._order]

    @property
    def dtype(self) -> Any:
        """Gluon's type of the elements."""
        return self._kind.dtype

    @property
    def rank(self) -> int:
        """Number of dimensions of the view."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Number of elements of the view."""
        return self._view.numel()

    @property
    def nbytes(self) -> int:
        """Number of bytes of the view."""
        return self._view.numel() * self._kind.itemsize

    @property
    def type(self) -> Type:
        """Type of the view: shape and element type."""
        return Type(Value(self._view, self._kind))

    def _like(self, view: Tensor) -> Shared:
        return Shared(self._cta, self._allocation, view, self._kind, self.layout)

    def _straight(self, what: str) -> None:
        if self._order is not None:
            raise Hazard(f"{what} of a permuted view is not modelled")

    def index(self, i: Any) -> Shared:
        """Return the view of one index of the first dimension."""
        self._straight("an index")
        number = int(i)
        if not 0 <= number < len(self._view):
            raise Hazard(f"index {number} of {self._allocation.name}")
        return self._like(self._view[number])

    def slice(self, start: Any, length: Any, dim: int = 0) -> Shared:
        """Return the view of a range of one dimension."""
        self._straight("a slice")
        first, count, row = int(start), int(length), self._view.shape[-1]
        if not 0 <= first <= first + count <= self.shape[dim]:
            raise Hazard(f"rows {first} to {first + count} of {self._allocation.name}")
        if dim < self._view.ndim - 2:
            return self._like(self._view.narrow(dim, first, count))
        if self._view.shape[-2] == 1:
            return self._like(self._view.narrow(-1, first, count))
        if first % row or count % row:
            raise Hazard("a slice of columns that are not whole tiles is not modelled")
        return self._like(self._view.narrow(-2, first // row, count // row))

    def permute(self, order: Sequence[int]) -> Shared:
        """Return a view with dimensions in another order."""
        now = self._order or tuple(range(self._view.ndim - 1))
        made = self._like(self._view)
        made._order = tuple(now[axis] for axis in order)
        return made

    def reinterpret(self, dtype: Any, shape: Sequence[int], layout: Any) -> Shared:
        """Return a view of the same bytes with another type and shape."""
        self._straight("another type")
        at = self._view.storage_offset() * self._kind.itemsize
        memory = self._allocation.bytes[at : at + self.nbytes]
        return Shared._of(self._cta, self._allocation, memory, kind_of(dtype), list(shape), layout)

    _reinterpret = reinterpret  # its name in Triton 3.6

    def load(self, layout: Any = None) -> Value:
        """Load the view by the partition's threads."""
        self._cta.touch(self, writes=False)
        data = self.contents()
        if self._kind.widened:
            data = data.to(self._kind.torch) & self._kind.mask
        return Value(data, self._kind)

    def store(self, x: Value) -> None:
        """Store to the view by the partition's threads."""
        if x.shape != self.shape:
            raise Hazard(f"{x.shape} is stored to {self.shape} of {self._allocation.name}")
        if x.kind is not self._kind:
            raise Hazard(f"{x.dtype} is stored to {self._allocation.name}")
        self._cta.touch(self, writes=True)
        self.fill(x.tensor)

    # Operations of the machine, at the times that it has ordered.

    def contents(self) -> Tensor:
        """Return a copy of the contents."""
        data = self._view.flatten(-2)
        if self._order is not None:
            data = data.permute(self._order)
        return data.clone(memory_format=torch.contiguous_format)

    def fill(self, data: Tensor) -> None:
        """Write a tensor of the memory's dtype, or of the one in which torch holds elements."""
        if self._order is not None:
            inverse = sorted(range(len(self._order)), key=self._order.__getitem__)
            data = data.permute(inverse)
        self._view.copy_(data.to(self._kind.memory).reshape(self._view.shape))

    def reads(self, clock: Clock, access: Access) -> None:
        """Record a read of the view."""
        self._allocation.reads(self.place, clock, access)

    def writes(self, clock: Clock, access: Access) -> None:
        """Record a write to the view."""
        self._allocation.writes(self.place, clock, access)


class Barrier:
    """State of one mbarrier: arrivals and bytes still expected in the current phase."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = self.pending = self.bytes = self.phase = 0
        self.clock = Clock()  # joined from those who complete phases
        self._arriving = Clock()

    def init(self, count: int) -> None:
        """Set the number of arrivals in each phase."""
        if count < 1:
            raise Hazard(f"{self.name} is to await {count} arrivals")
        self.count = self.pending = count
        self.bytes = self.phase = 0

    def _live(self) -> None:
        if not self.count:
            raise Hazard(f"{self.name} is used before it is initialised")

    def arrive(self, clock: Clock, count: int = 1, size: int = 0) -> None:
        """Arrive ``count`` times; ``size`` more bytes must land before the phase is over."""
        self._live()
        if count > self.pending:
            raise Hazard(f"{count} arrivals at {self.name}, which awaits {self.pending}")
        self._arriving.join(clock)
        self.pending -= count
        self.bytes += size
        self._advance()

    def expect_more(self, count: int) -> None:
        """Expect ``count`` more arrivals in this phase."""
        self._live()
        self.pending += count

    def land(self, size: int) -> None:
        """Count bytes that have landed, possibly before they are expected."""
        self._live()
        self.bytes -= size
        self._advance()

    def _advance(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            self.clock.join(self._arriving)
            self.clock.known[self] = self.phase  # copies that the barrier counts

    def done(self, parity: int) -> bool:
        """Return True if the phase of a parity is over."""
        return (self.phase & 1) != parity

    def __str__(self) -> str:
        missing = f"{self.pending} of {self.count} arrivals"
        if self.bytes:
            missing += f" and {self.bytes} bytes"
        return f"{self.name} (phase {self.phase} lacks {missing})"


class Barriers:
    """Array of mbarriers in shared memory."""

    def __init__(self, each: Sequence[Barrier]) -> None:
        self._each = each

    @classmethod
    def allocate(cls, shape: Sequence[int], number: int) -> Barriers:
        """Allocate barriers, which must be initialised before use."""
        name = f"mbarrier {number}"
        count = shape[0] if shape else 1
        names = [f"{name}[{i}]" for i in range(count)] if count > 1 else [name]
        return cls([Barrier(each) for each in names])

    def index(self, i: Any) -> Barriers:
        """Return one barrier of the array."""
        number = int(i)
        if not 0 <= number < len(self._each):
            raise Hazard(f"barrier {number} of {len(self._each)}")
        return Barriers([self._each[number]])

    @property
    def one(self) -> Barrier:
        """Return the only barrier; an array of several is an error."""
        if len(self._each) != 1:
            raise Hazard(f"{len(self._each)} barriers where one is taken")
        return self._each[0]

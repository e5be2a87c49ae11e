"""Stand-ins for ``gluon.language.nvidia.hopper`` and ``ampere`` while kernels run on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton.experimental.gluon.language.nvidia import hopper

from crossrun.hopper.errors import Hazard, NotModelled
from crossrun.hopper.kinds import kind_of_torch
from crossrun.hopper.shared_memory import Barriers, Shared
from crossrun.hopper.values import Value, as_value

if TYPE_CHECKING:
    from crossrun.hopper.machine import Machine

# Bytes that a box's innermost coordinate must be a multiple of; otherwise TMA faults.
_TMA_STEP = 16


@dataclasses.dataclass
class Descriptor:
    """TMA descriptor: a tensor in global memory, and the box that copies move.

    Stands in for ``gluon.nvidia.hopper.TensorDescriptor``, which a launch also accepts, but
    requires nothing of strides and alignment. Elements outside the tensor read as zero and are not
    written.

    Attributes:
        base: tensor in global memory.
        block_shape: shape of the box.
        layout: layout of the box in shared memory; used by the kernel only.
    """

    base: Tensor
    block_shape: Sequence[int]
    layout: Any = None

    @property
    def dtype(self) -> Any:
        """Gluon's type of the elements."""
        return kind_of_torch(self.base.dtype).dtype

    @property
    def block_type(self) -> SimpleNamespace:
        """Type of the box: its shape and element type."""
        size = kind_of_torch(self.base.dtype).itemsize
        nbytes = torch.Size(self.block_shape).numel() * size
        return SimpleNamespace(shape=list(self.block_shape), nbytes=nbytes)

    @property
    def shape(self) -> list[Value]:
        """Shape of the tensor in global memory."""
        return [as_value(n) for n in self.base.shape]

    def _inside(self, at: Sequence[Any]) -> tuple[list[slice], list[slice]]:
        """Return slices of the tensor and of the box that cover the elements inside the tensor."""
        if len(at) != self.base.ndim or len(self.block_shape) != self.base.ndim:
            raise Hazard(f"{len(at)} coordinates of a box of {self.base.ndim} dimensions")
        if int(at[-1]) * self.base.element_size() % _TMA_STEP:
            raise Hazard(f"a box that begins at {int(at[-1])}, not at a multiple of 16 bytes")
        here, there = [], []
        for first, count, size in zip(at, self.block_shape, self.base.shape, strict=True):
            start = int(first)
            low = min(max(start, 0), size)
            high = max(min(start + count, size), low)
            here.append(slice(low, high))
            there.append(slice(low - start, high - start) if high > low else slice(0, 0))
        return here, there

    def read(self, at: Sequence[int]) -> Tensor:
        """Read the box at a coordinate; elements outside the tensor are zero."""
        here, there = self._inside(at)
        part = self.base[tuple(here)]
        if list(part.shape) == list(self.block_shape):
            return part
        out = torch.zeros(
            tuple(self.block_shape), dtype=torch.uint8 if _bytes(part) else part.dtype
        )
        out[tuple(there)] = part.view(torch.uint8) if _bytes(part) else part
        return out.view(part.dtype)

    def write(self, at: Sequence[int], box: Tensor) -> None:
        """Write the elements of a box that are inside the tensor."""
        here, there = self._inside(at)
        self.base[tuple(here)] = box[tuple(there)]


def _bytes(x: Tensor) -> bool:
    return x.element_size() == 1


@dataclasses.dataclass(frozen=True)
class Accumulator:
    """Future result of a matrix instruction, which must not be read before a wait."""

    value: Value
    number: int

    @property
    def type(self) -> Any:
        """Type of the result: shape and layout."""
        return self.value.type

    @property
    def shape(self) -> list[int]:
        """Sizes of the result's dimensions."""
        return self.value.shape

    @property
    def dtype(self) -> Any:
        """Gluon's type of the elements."""
        return self.value.dtype

    def _early(self, *_: Any) -> Any:
        raise Hazard("a matrix instruction's result is used before warpgroup_mma_wait returned it")

    to = __getitem__ = __bool__ = __int__ = __float__ = __neg__ = __invert__ = _early
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _early
    __lt__ = __le__ = __gt__ = __ge__ = __rtruediv__ = _early

    @property
    def tensor(self) -> Tensor:
        """Raise an error: the result does not exist before a wait."""
        found: Tensor = self._early()
        return found

    data = kind = tensor


class Module:
    """Module of Gluon in which some functions are replaced by stand-ins."""

    def __init__(self, machine: Machine, real: Any) -> None:
        self._machine = machine
        self._real = real

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._machine.translated(
            getattr(self._real, name), f"{self._real.__name__.rpartition('.')[2]}.{name}"
        )


class MBarrier(Module):
    """Stand-ins for the module ``mbarrier``."""

    def allocate_mbarrier(self, batch: int = 1, **_: Any) -> Barriers:
        """Allocate barriers, which must be initialised before use."""
        self._machine.cta.barriers += 1
        return Barriers.allocate([int(batch)], self._machine.cta.barriers)

    def init(self, barrier: Barriers, count: Any) -> None:
        """Set the number of arrivals in each phase."""
        barrier.one.init(int(count))

    def invalidate(self, barrier: Barriers) -> None:
        """Invalidate a barrier, which nobody may wait for afterwards."""
        barrier.one.count = 0

    def expect(self, barrier: Barriers, size: Any, pred: Any = True) -> None:
        """Arrive once, and expect ``size`` more bytes in this phase."""
        if pred:
            self._machine.cta.arrive(barrier.one, 1, int(size))

    def arrive(self, barrier: Barriers, *, count: Any = 1, pred: Any = True, **_: Any) -> None:
        """Arrive ``count`` times for the partition."""
        if pred:
            self._machine.cta.arrive(barrier.one, int(count))

    def wait(self, barrier: Barriers, phase: Any, pred: Any = True, deps: Any = ()) -> None:
        """Wait until the phase of a parity is over."""
        if pred:
            self._machine.cta.wait_barrier(barrier.one, int(phase))


class Tma(Module):
    """Stand-ins for the module ``tma``."""

    def async_copy_global_to_shared(
        self, desc: Any, coord: Sequence[Any], barrier: Barriers, result: Shared,
        pred: Any = True, multicast: Any = False, **_: Any,
    ) -> None:  # fmt: skip
        """Start a copy of a box to shared memory, whose bytes a barrier counts."""
        if multicast:
            raise NotModelled("multicast of several CTAs")
        if not pred:
            return
        box = _descriptor(desc)
        at = [int(each) for each in coord]
        _same(box, result)
        self._machine.cta.load_box(result, lambda: box.read(at), barrier.one)

    async_load = async_copy_global_to_shared

    def async_copy_shared_to_global(
        self, desc: Any, coord: Sequence[Any], src: Shared, **_: Any
    ) -> None:
        """Start a copy of a box from shared memory."""
        box = _descriptor(desc)
        at = [int(each) for each in coord]
        _same(box, src)
        self._machine.cta.store_box(src, lambda data: box.write(at, data))

    async_store = async_copy_shared_to_global

    def store_wait(self, pendings: Any = 0, **_: Any) -> None:
        """Wait until all boxes have been read, except the last ``pendings``."""
        self._machine.cta.wait_stores(int(pendings))


def _descriptor(desc: Any) -> Descriptor:
    if isinstance(desc, Descriptor):
        return desc
    return Descriptor(desc.base, list(desc.block_shape), desc.layout)


def _same(box: Descriptor, shared: Shared) -> None:
    if list(box.block_shape) != shared.shape or box.dtype != shared.dtype:
        raise Hazard(
            f"a box {box.dtype} {list(box.block_shape)} and shared memory {shared.dtype} "
            f"{shared.shape}"
        )


class AsyncCopy(Module):
    """Stand-ins for the module ``async_copy``."""

    def async_copy_global_to_shared(
        self, smem: Shared, pointer: Value, mask: Any = None, **_: Any
    ) -> None:
        """Start a copy of elements; masked elements are zeros."""
        there = None if mask is None else as_value(mask)
        value = self._machine.memory.load(pointer, there, as_value(0))
        if value.shape != smem.shape or value.kind.dtype != smem.dtype:
            raise Hazard(f"{value.dtype} {value.shape} are copied to {smem.dtype} {smem.shape}")
        self._machine.cta.copy_rows(smem, value.tensor)

    async_load = async_copy_global_to_shared

    def commit_group(self) -> None:
        """End a group of the copies so far."""
        self._machine.cta.commit()

    def wait_group(self, num_outstanding: Any = 0) -> None:
        """Wait until all groups have landed, except the last ``num_outstanding``."""
        self._machine.cta.wait_groups(int(num_outstanding))

    def mbarrier_arrive(self, barrier: Barriers, increment_count: Any = True) -> None:
        """Arrive for every thread when its copies have landed."""
        self._machine.cta.arrive_after_copies(barrier.one, counted=bool(increment_count))


class Hopper(Module):
    """Stand-ins for the functions of ``hopper`` and ``ampere``."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine, hopper)
        self.mbarrier = MBarrier(machine, hopper.mbarrier)
        self.tma = Tma(machine, hopper.tma)
        self.async_copy = AsyncCopy(machine, hopper.async_copy)

    def fence_async_shared(self, cluster: bool = False) -> None:
        """Order the threads' accesses to shared memory before those of TMA and WGMMA."""
        self._machine.cta.fence()

    def warpgroup_mma_init(self, value: Value) -> Value:
        """Make an accumulator with a value."""
        return value

    def warpgroup_mma(
        self, a: Any, b: Shared, acc: Any, *, use_acc: Any = True, precision: Any = None,
        max_num_imprecise_acc: Any = None, is_async: Any = False,
    ) -> Any:  # fmt: skip
        """Start a product, which reads shared memory until it has been waited for."""
        number = self._machine.cta.multiply(*(x for x in (a, b) if isinstance(x, Shared)))
        before = acc.value if isinstance(acc, Accumulator) else acc
        product = _product(a, b)
        if use_acc:
            product += before.tensor
        result = Value(product, before.kind)
        if is_async:
            return Accumulator(result, number)
        self._machine.cta.wait_products(0)
        return result

    def warpgroup_mma_wait(self, num_outstanding: Any = 0, deps: Sequence[Any] = ()) -> Any:
        """Wait for all products except the last ones, and return the accumulators."""
        cta = self._machine.cta
        cta.wait_products(int(num_outstanding))
        done = cta.partition.products[1]
        found = [
            each.value if isinstance(each, Accumulator) and each.number <= done else each
            for each in deps
        ]
        return found[0] if len(found) == 1 else tuple(found)

    def mma_v2(self, a: Value, b: Value, acc: Value, *_: Any, **__: Any) -> Value:
        """Multiply operands in registers."""
        return Value(_product(a, b) + acc.tensor, acc.kind)


def _product(a: Any, b: Any) -> Tensor:
    return torch.matmul(_operand(a), _operand(b))


def _operand(x: Any) -> Tensor:
    return (x.contents() if isinstance(x, Shared) else x.tensor).float()

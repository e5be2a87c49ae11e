"""What stands for ``gluon.language.nvidia.hopper`` and ``ampere`` while a kernel runs on a CPU."""

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

# Bytes that a box's innermost coordinate is a multiple of; else an instruction is illegal.
_TMA_STEP = 16


@dataclasses.dataclass
class Descriptor:
    """A tensor in global memory and the box that TMA copies of it.

    Stands for ``gluon.nvidia.hopper.TensorDescriptor``, which a launch takes as well, but asks
    nothing of strides and alignment. What lies outside of the tensor reads as zero, and is not
    written.

    Attributes:
        base: the tensor.
        block_shape: the box.
        layout: of the box in shared memory; only what the kernel makes of it.
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
        """Of the box."""
        size = kind_of_torch(self.base.dtype).itemsize
        nbytes = torch.Size(self.block_shape).numel() * size
        return SimpleNamespace(shape=list(self.block_shape), nbytes=nbytes)

    @property
    def shape(self) -> list[Value]:
        """Of the tensor."""
        return [as_value(n) for n in self.base.shape]

    def _inside(self, at: Sequence[Any]) -> tuple[list[slice], list[slice]]:
        """Of the tensor, and of the box."""
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
        """A box."""
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
        """What of a box is inside."""
        here, there = self._inside(at)
        self.base[tuple(here)] = box[tuple(there)]


def _bytes(x: Tensor) -> bool:
    return x.element_size() == 1


@dataclasses.dataclass(frozen=True)
class Accumulator:
    """What a matrix instruction will leave, which nobody may look at before a wait."""

    value: Value
    number: int

    @property
    def type(self) -> Any:
        """Shape and layout."""
        return self.value.type

    @property
    def shape(self) -> list[int]:
        """Sizes."""
        return self.value.shape

    @property
    def dtype(self) -> Any:
        """Of the elements."""
        return self.value.dtype

    def _early(self, *_: Any) -> Any:
        raise Hazard("a matrix instruction's result is used before warpgroup_mma_wait returned it")

    to = __getitem__ = __bool__ = __int__ = __float__ = __neg__ = __invert__ = _early
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _early
    __lt__ = __le__ = __gt__ = __ge__ = __rtruediv__ = _early

    @property
    def tensor(self) -> Tensor:
        """None yet."""
        found: Tensor = self._early()
        return found

    data = kind = tensor


class Module:
    """A module of Gluon, some of whose functions have stand-ins."""

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
    """``mbarrier``."""

    def allocate_mbarrier(self, batch: int = 1, **_: Any) -> Barriers:
        """Barriers that are to be initialised."""
        self._machine.cta.barriers += 1
        return Barriers.allocate([int(batch)], self._machine.cta.barriers)

    def init(self, barrier: Barriers, count: Any) -> None:
        """Await ``count`` arrivals a phase."""
        barrier.one.init(int(count))

    def invalidate(self, barrier: Barriers) -> None:
        """No more waits."""
        barrier.one.count = 0

    def expect(self, barrier: Barriers, size: Any, pred: Any = True) -> None:
        """One arrival, and bytes that are to land as well."""
        if pred:
            self._machine.cta.arrive(barrier.one, 1, int(size))

    def arrive(self, barrier: Barriers, *, count: Any = 1, pred: Any = True, **_: Any) -> None:
        """Of the partition, ``count`` times."""
        if pred:
            self._machine.cta.arrive(barrier.one, int(count))

    def wait(self, barrier: Barriers, phase: Any, pred: Any = True, deps: Any = ()) -> None:
        """Until the phase of a parity is over."""
        if pred:
            self._machine.cta.wait_barrier(barrier.one, int(phase))


class Tma(Module):
    """``tma``."""

    def async_copy_global_to_shared(
        self, desc: Any, coord: Sequence[Any], barrier: Barriers, result: Shared,
        pred: Any = True, multicast: Any = False, **_: Any,
    ) -> None:  # fmt: skip
        """A box, whose bytes a barrier counts."""
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
        """A box."""
        box = _descriptor(desc)
        at = [int(each) for each in coord]
        _same(box, src)
        self._machine.cta.store_box(src, lambda data: box.write(at, data))

    async_store = async_copy_shared_to_global

    def store_wait(self, pendings: Any = 0, **_: Any) -> None:
        """Until all boxes but the last ones have been read."""
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
    """``async_copy``."""

    def async_copy_global_to_shared(
        self, smem: Shared, pointer: Value, mask: Any = None, **_: Any
    ) -> None:
        """Elements; zeros where a mask hides them."""
        there = None if mask is None else as_value(mask)
        value = self._machine.memory.load(pointer, there, as_value(0))
        if value.shape != smem.shape or value.kind.dtype != smem.dtype:
            raise Hazard(f"{value.dtype} {value.shape} are copied to {smem.dtype} {smem.shape}")
        self._machine.cta.copy_rows(smem, value.tensor)

    async_load = async_copy_global_to_shared

    def commit_group(self) -> None:
        """The copies so far."""
        self._machine.cta.commit()

    def wait_group(self, num_outstanding: Any = 0) -> None:
        """Until all groups but the last ones have landed."""
        self._machine.cta.wait_groups(int(num_outstanding))

    def mbarrier_arrive(self, barrier: Barriers, increment_count: Any = True) -> None:
        """Of every thread, when its copies have landed."""
        self._machine.cta.arrive_after_copies(barrier.one, counted=bool(increment_count))


class Hopper(Module):
    """Functions of ``hopper`` and ``ampere``."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine, hopper)
        self.mbarrier = MBarrier(machine, hopper.mbarrier)
        self.tma = Tma(machine, hopper.tma)
        self.async_copy = AsyncCopy(machine, hopper.async_copy)

    def fence_async_shared(self, cluster: bool = False) -> None:
        """What threads have done with shared memory comes before what TMA will."""
        self._machine.cta.fence()

    def warpgroup_mma_init(self, value: Value) -> Value:
        """An accumulator."""
        return value

    def warpgroup_mma(
        self, a: Any, b: Shared, acc: Any, *, use_acc: Any = True, precision: Any = None,
        max_num_imprecise_acc: Any = None, is_async: Any = False,
    ) -> Any:  # fmt: skip
        """A product, which reads shared memory until it has been waited for."""
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
        """Accumulators of all products but the last ones."""
        cta = self._machine.cta
        cta.wait_products(int(num_outstanding))
        done = cta.partition.products[1]
        found = [
            each.value if isinstance(each, Accumulator) and each.number <= done else each
            for each in deps
        ]
        return found[0] if len(found) == 1 else tuple(found)

    def mma_v2(self, a: Value, b: Value, acc: Value, *_: Any, **__: Any) -> Value:
        """A product of registers."""
        return Value(_product(a, b) + acc.tensor, acc.kind)


def _product(a: Any, b: Any) -> Tensor:
    return torch.matmul(_operand(a), _operand(b))


def _operand(x: Any) -> Tensor:
    return (x.contents() if isinstance(x, Shared) else x.tensor).float()

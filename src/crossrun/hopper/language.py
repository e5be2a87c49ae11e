"""Stand-in for ``gluon.language`` while a kernel runs on a CPU."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from crossrun.hopper import ptx
from crossrun.hopper.errors import Hazard
from crossrun.hopper.kinds import BOOL, FLOAT32, INT32, Kind, kind_of
from crossrun.hopper.shared_memory import Barriers, Shared
from crossrun.hopper.values import (
    ANY_LAYOUT,
    Value,
    as_value,
    broadcast,
    chosen,
    pair,
)

if TYPE_CHECKING:
    from crossrun.hopper.machine import Machine

_LAYOUTS = (
    "AutoLayout", "BlockedLayout", "CoalescedLayout", "DistributedLinearLayout",
    "DotOperandLayout", "NVMMADistributedLayout", "SliceLayout",
)  # fmt: skip


class Constexpr:
    """Stand-in for ``gl.constexpr``, which leaves a number as it is."""

    def __new__(cls, x: Any) -> Any:
        """Return the number itself."""
        return x


def loop(*bounds: Any) -> Iterator[Value]:
    """Iterate like ``range`` over values, as a kernel's loop does."""
    for i in range(*(int(bound) for bound in bounds)):
        yield Value(i, INT32)


def _elementwise(function: Callable[[Tensor], Tensor]) -> Callable[[Any], Value]:
    def apply(x: Any) -> Value:
        given = as_value(x)
        given = given if given.kind.is_float else given.cast(FLOAT32)
        return Value(function(given.tensor), given.kind)

    return apply


# Functions of two that propagate NaN, that ignore it, and of Python's numbers.
_LARGER = (torch.maximum, torch.fmax, max)
_SMALLER = (torch.minimum, torch.fmin, min)


def _atomic(combine: Callable[[Value, Value], Value]) -> Callable[..., Value]:
    """Make a method that stores a function of memory and x, and returns the earlier values."""

    def atomic(self: Language, pointer: Value, x: Any, mask: Any = None, **_: Any) -> Value:
        return self._changed(pointer, x, mask, combine)

    return atomic


class Language:
    """Stand-ins for names of ``gluon.language``; all other names are the real ones."""

    constexpr = Constexpr
    exp = staticmethod(_elementwise(torch.exp))
    exp2 = staticmethod(_elementwise(torch.exp2))
    log = staticmethod(_elementwise(torch.log))
    log2 = staticmethod(_elementwise(torch.log2))
    sqrt = staticmethod(_elementwise(torch.sqrt))
    rsqrt = staticmethod(_elementwise(torch.rsqrt))
    sin = staticmethod(_elementwise(torch.sin))
    cos = staticmethod(_elementwise(torch.cos))
    erf = staticmethod(_elementwise(torch.erf))
    floor = staticmethod(_elementwise(torch.floor))
    ceil = staticmethod(_elementwise(torch.ceil))

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        for name in _LAYOUTS:
            setattr(self, name, ANY_LAYOUT)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = self._machine.translated(getattr(gl, name), f"gluon.language.{name}")
        setattr(self, name, found)
        return found

    # Programs.

    def program_id(self, axis: int = 0) -> Value:
        """Return this program's index in a dimension of the grid."""
        return Value(self._machine.program[axis], INT32)

    def num_programs(self, axis: int = 0) -> Value:
        """Return the number of programs in a dimension of the grid."""
        return Value(self._machine.grid[axis], INT32)

    def num_warps(self, *_: Any) -> int:
        """Return the number of warps of the partition."""
        return self._machine.cta.partition.warps

    def warp_specialize(
        self, functions: Sequence[Any], warps: Sequence[int], registers: Any = None
    ) -> None:
        """Run each function in a partition of its own."""
        count = [int(each) for each in warps]
        self._machine.cta.specialise([(each[0], each[1]) for each in functions], count)

    def static_range(self, *bounds: Any) -> range:
        """Return the bounds as a range; loops are not unrolled."""
        return range(*(int(bound) for bound in bounds))

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the threads of a partition are one thread here."""

    thread_barrier = barrier
    static_print = device_print = assume = barrier

    def static_assert(self, condition: Any, message: Any = "") -> None:
        """Check a condition that a GPU build checks at compile time."""
        assert condition, message

    device_assert = static_assert

    # Values.

    def to_tensor(self, x: Any) -> Value:
        """Make a value of a number."""
        return as_value(x)

    def arange(self, start: Any, end: Any, layout: Any = None) -> Value:
        """Make the integers from ``start`` to ``end`` - 1."""
        return Value(torch.arange(int(start), int(end), dtype=torch.int32), INT32)

    def full(self, shape: Sequence[int], x: Any, dtype: Any, layout: Any = None) -> Value:
        """Make a tensor of equal elements."""
        kind = kind_of(dtype)
        one = as_value(x).cast(kind)
        return Value(one.tensor.expand([int(n) for n in shape]).clone(), kind)

    def zeros(self, shape: Sequence[int], dtype: Any, layout: Any = None) -> Value:
        """Make a tensor of zeros."""
        kind = kind_of(dtype)
        return Value(torch.zeros([int(n) for n in shape], dtype=kind.torch), kind)

    def zeros_like(self, x: Value, **_: Any) -> Value:
        """Make zeros of the shape and type of x."""
        return Value(torch.zeros_like(x.tensor), x.kind) if x.shape else as_value(0, x.kind)

    def full_like(self, x: Value, fill: Any, **_: Any) -> Value:
        """Make equal elements of the shape and type of x."""
        return self.full(x.shape, fill, x.dtype)

    def cast(self, x: Any, dtype: Any, bitcast: bool = False, **_: Any) -> Value:
        """Convert x to a type, or reinterpret its bits."""
        return as_value(x).to(dtype, bitcast)

    def where(self, condition: Any, a: Any, b: Any) -> Value:
        """Choose elements of a where the condition is True, else of b."""
        return chosen(condition, a, b)

    def maximum(self, a: Any, b: Any, propagate_nan: Any = None) -> Value:
        """Return the larger of two; of a NaN and a number the number, unless NaN propagates."""
        return _extreme(a, b, propagate_nan, *_LARGER)

    def minimum(self, a: Any, b: Any, propagate_nan: Any = None) -> Value:
        """Return the smaller of two; of a NaN and a number the number, unless NaN propagates."""
        return _extreme(a, b, propagate_nan, *_SMALLER)

    def clamp(self, x: Any, low: Any, high: Any, **_: Any) -> Value:
        """Limit x to the range from ``low`` to ``high``."""
        return self.minimum(self.maximum(x, low), high)

    def abs(self, x: Any) -> Value:
        """Return the magnitude."""
        given = as_value(x)
        data = given.data
        return Value(data.abs() if isinstance(data, Tensor) else abs(data), given.kind)

    def fma(self, a: Any, b: Any, c: Any) -> Value:
        """Compute a * b + c with a single rounding."""
        x, y, z = (as_value(each).tensor.double() for each in (a, b, c))
        kind = next(each.kind for each in (a, b, c) if isinstance(each, Value))
        return Value((x * y + z).to(kind.torch), kind)

    def fdiv(self, a: Any, b: Any, **_: Any) -> Value:
        """Return the quotient a / b."""
        return as_value(a) / b

    div_rn = fdiv

    def add(self, a: Any, b: Any, **_: Any) -> Value:
        """Return the sum a + b."""
        return as_value(a) + b

    def sub(self, a: Any, b: Any, **_: Any) -> Value:
        """Return the difference a - b."""
        return as_value(a) - b

    def mul(self, a: Any, b: Any, **_: Any) -> Value:
        """Return the product a * b."""
        return as_value(a) * b

    def cdiv(self, a: Any, b: Any) -> Any:
        """Return the quotient a / b, rounded up."""
        return (a + b - 1) // b

    # Shapes.

    def expand_dims(self, x: Value, axis: int) -> Value:
        """Insert a dimension of size 1."""
        return Value(x.tensor.unsqueeze(axis), x.kind)

    def reshape(self, x: Value, *shape: Any) -> Value:
        """Change the sizes of the dimensions."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        return Value(x.tensor.reshape([int(n) for n in sizes]), x.kind)

    def ravel(self, x: Value) -> Value:
        """Flatten to one dimension."""
        return Value(x.tensor.flatten(), x.kind)

    def permute(self, x: Value, *order: Any) -> Value:
        """Reorder the dimensions."""
        axes = order[0] if len(order) == 1 and isinstance(order[0], tuple | list) else order
        return Value(x.tensor.permute([int(n) for n in axes]), x.kind)

    def broadcast(self, a: Any, b: Any) -> tuple[Value, ...]:
        """Broadcast both to one shape."""
        return tuple(broadcast([as_value(a), as_value(b)]))

    def join(self, a: Value, b: Value) -> Value:
        """Stack two values along a new last dimension."""
        tensors = torch.broadcast_tensors(a.tensor, b.tensor)
        return Value(torch.stack(tensors, -1), a.kind)

    def split(self, x: Value) -> tuple[Value, ...]:
        """Split the last dimension, of size 2, into two values."""
        if x.shape[-1] != 2:
            raise Hazard(f"a split of {x.shape}")
        return tuple(Value(each, x.kind) for each in x.tensor.unbind(-1))

    def gather(self, x: Value, index: Value, axis: int) -> Value:
        """Gather elements by their indices along an axis."""
        return Value(x.tensor.gather(axis, index.tensor.long()), x.kind)

    def convert_layout(self, x: Value, layout: Any = None, **_: Any) -> Value:
        """Return x unchanged, since layouts are not modelled."""
        return x

    set_auto_layout = multiple_of = max_contiguous = max_constancy = convert_layout

    # Reductions.

    def sum(self, x: Value, axis: int | None = None, keep_dims: bool = False, **_: Any) -> Value:
        """Sum over an axis, or over all elements."""
        kind = x.kind
        if not kind.is_float and kind.bits < 32:
            kind = INT32
        data, axes = _axis(x.cast(kind).tensor, axis)
        return _reduced(data.sum(axes, keepdim=keep_dims, dtype=data.dtype), kind)

    def max(self, x: Value, axis: int | None = None, **more: Any) -> Value:
        """Return the largest element; NaN does not count."""
        return _largest(x, axis, torch.amax, -torch.inf, **more)

    def min(self, x: Value, axis: int | None = None, **more: Any) -> Value:
        """Return the smallest element; NaN does not count."""
        return _largest(x, axis, torch.amin, torch.inf, **more)

    def reduce_or(self, x: Value, axis: int, **_: Any) -> Value:
        """Return the bitwise or along an axis."""
        return self.reduce(x, axis, operator.or_)

    def xor_sum(self, x: Value, axis: int, **_: Any) -> Value:
        """Return the bitwise exclusive or along an axis."""
        return self.reduce(x, axis, operator.xor)

    def reduce(self, x: Any, axis: int | None, combine: Callable[..., Any], **_: Any) -> Any:
        """Reduce by a function of two values, in a tree."""
        several = isinstance(x, tuple)
        values = list(x) if several else [x]
        data = [_axis(each.tensor, axis) for each in values]
        if axis is None:
            data = [(each.flatten(), 0) for each, _ in data]
        while (count := data[0][0].shape[data[0][1]]) > 1:
            half = count // 2
            first = [each.narrow(at, 0, half) for each, at in data]
            second = [each.narrow(at, half, half) for each, at in data]
            parts = [
                Value(each, value.kind)
                for part in (first, second)
                for each, value in zip(part, values, strict=True)
            ]
            found = combine(*parts)
            results = list(found) if several else [found]
            data = [(each.tensor, at) for each, (_, at) in zip(results, data, strict=True)]
        out = [
            _reduced(each.squeeze(at), value.kind)
            for (each, at), value in zip(data, values, strict=True)
        ]
        return tuple(out) if several else out[0]

    def associative_scan(
        self, x: Value, axis: int, combine: Callable[..., Value], reverse: bool = False
    ) -> Value:
        """Scan an axis by an associative function of two values."""
        data = x.tensor.movedim(axis, 0)
        data = data.flip(0) if reverse else data
        step = 1
        while step < len(data):
            later = combine(Value(data[:-step], x.kind), Value(data[step:], x.kind)).tensor
            data = torch.cat((data[:step], later))
            step *= 2
        data = data.flip(0) if reverse else data
        return Value(data.movedim(0, axis), x.kind)

    def cumsum(self, x: Value, axis: int = 0, **_: Any) -> Value:
        """Return the running sums along an axis."""
        return Value(x.tensor.cumsum(axis, dtype=x.kind.torch), x.kind)

    # Memory.

    def load(self, pointer: Value, mask: Any = None, other: Any = None, **_: Any) -> Value:
        """Load from global memory; without ``other``, masked elements are poison."""
        there = None if mask is None else as_value(mask)
        rest = None if other is None else as_value(other)
        return self._machine.memory.load(pointer, there, rest)

    def store(self, pointer: Value, x: Any, mask: Any = None, **_: Any) -> None:
        """Store to global memory, where ``mask`` is True."""
        there = None if mask is None else as_value(mask)
        self._machine.memory.store(pointer, as_value(x), there)

    atomic_add = _atomic(operator.add)
    atomic_max = _atomic(lambda old, new: _extreme(old, new, None, *_LARGER))
    atomic_min = _atomic(lambda old, new: _extreme(old, new, None, *_SMALLER))
    atomic_and = _atomic(operator.and_)
    atomic_or = _atomic(operator.or_)
    atomic_xor = _atomic(operator.xor)
    atomic_xchg = _atomic(lambda old, new: new)

    def atomic_cas(self, pointer: Value, compared: Any, x: Any, **_: Any) -> Value:
        """Store x where memory equals ``compared``; return the earlier values."""
        expected = as_value(compared)
        return self._changed(pointer, x, None, lambda old, new: chosen(old == expected, new, old))

    def _changed(
        self, pointer: Value, x: Any, mask: Any, combine: Callable[[Value, Value], Value]
    ) -> Value:
        """Combine elements with global memory, one after the other."""
        self._machine.cta.pause()
        kind = pointer.kind.element
        assert kind is not None
        there = Value(True, BOOL) if mask is None else as_value(mask)
        at, more, some = broadcast([pointer, as_value(x).cast(kind), there])
        old = torch.zeros(at.tensor.shape, dtype=kind.torch)
        memory, flat = self._machine.memory, old.view(-1)
        each = zip(at.tensor.flatten(), more.tensor.flatten(), some.tensor.flatten(), strict=True)
        for n, (address, number, wanted) in enumerate(each):
            if wanted:
                place = Value(int(address), pointer.kind)
                before = memory.load(place, None, None)
                flat[n] = before.data
                memory.store(place, combine(before, Value(number, kind)), None)
        return _reduced(old, kind)

    def allocate_shared_memory(
        self, dtype: Any, shape: Sequence[int], layout: Any, value: Value | None = None
    ) -> Any:
        """Memory whose bits are all one, or barriers."""
        sizes = [int(n) for n in shape]
        if isinstance(layout, mbarrier.MBarrierLayout):
            self._machine.cta.barriers += 1
            return Barriers.allocate(sizes, self._machine.cta.barriers)
        shared = Shared.allocate(self._machine.cta, kind_of(dtype), sizes, layout)
        if value is not None:
            shared.store(value)
        return shared

    def inline_asm_elementwise(
        self,
        text: str,
        constraints: str,
        arguments: Sequence[Any],
        dtype: Any,
        is_pure: bool,
        pack: int,
    ) -> Any:
        """PTX."""
        return ptx.execute(self._machine, text, constraints, arguments, dtype, int(pack))


def _axis(data: Tensor, axis: int | None) -> tuple[Tensor, Any]:
    return (data, tuple(range(data.ndim))) if axis is None else (data, int(axis))


def _reduced(data: Tensor, kind: Kind) -> Value:
    """Scalars of integers are numbers."""
    return Value(data, kind) if data.ndim or kind.is_float else as_value(data.item(), kind)


def _largest(
    x: Value,
    axis: int | None,
    function: Callable[..., Tensor],
    least: float,
    keep_dims: bool = False,
    **_: Any,
) -> Value:
    data, axes = _axis(x.tensor, axis)
    found = function(data, axes, keepdim=keep_dims)
    if x.kind.is_float and found.isnan().any():
        found = function(data.masked_fill(data.isnan(), least), axes, keepdim=keep_dims)
        all_nan = data.isnan()
        for n in sorted(axes if isinstance(axes, tuple) else (axes % data.ndim,), reverse=True):
            all_nan = all_nan.all(n, keepdim=keep_dims)
        found = found.masked_fill(all_nan, torch.nan)
    return _reduced(found, x.kind)


def _extreme(
    a: Any,
    b: Any,
    propagate_nan: Any,
    keeping: Callable[[Tensor, Tensor], Tensor],
    ignoring: Callable[[Tensor, Tensor], Tensor],
    numbers: Callable[[Any, Any], Any],
) -> Value:
    first, second = (a, b) if isinstance(a, Value) else (as_value(b), a)
    x, y, kind = pair(first, second)
    if not isinstance(x, Tensor) and not isinstance(y, Tensor):
        return Value(numbers(x, y), kind)
    x = torch.as_tensor(x, dtype=kind.torch)
    y = torch.as_tensor(y, dtype=kind.torch)
    all_of = getattr(propagate_nan, "name", "NONE") == "ALL"
    return Value((keeping if all_of or not kind.is_float else ignoring)(x, y), kind)

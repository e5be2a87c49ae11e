"""Values of a kernel: numbers or torch tensors, with Triton's arithmetic.

Layouts are not modelled: one object stands in for all layouts.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from crossrun.hopper.errors import Hazard
from crossrun.hopper.kinds import (
    BOOL,
    E4M3,
    FLOAT32,
    INT32,
    INT64,
    Kind,
    kind_of,
    literal_kind,
    promoted,
)

Data = bool | int | Tensor


class Layout:
    """Stand-in for every layout of registers."""

    def __call__(self, *args: Any, **kwargs: Any) -> Layout:
        """Return the same layout, since parameters do not matter."""
        return self

    def __getattr__(self, name: str) -> Layout:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


ANY_LAYOUT = Layout()


class Type:
    """Result of ``x.type`` in a kernel."""

    layout = ANY_LAYOUT

    def __init__(self, value: Value) -> None:
        self.shape = value.shape
        self.scalar = self.element_ty = value.dtype


def _divided(x: Any, y: Any) -> Any:
    """Divide, rounding towards zero; division by zero gives an arbitrary number."""
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        y = torch.where(y == 0, 1, y) if isinstance(y, Tensor) else y or 1
        x = x if isinstance(x, Tensor) else torch.tensor(x, dtype=y.dtype)
        return torch.div(x, y, rounding_mode="trunc")
    if y == 0:
        return -1
    return x // y if (x < 0) == (y < 0) else -(-x // y)


def _remainder(x: Any, y: Any) -> Any:
    """Return the remainder with the dividend's sign."""
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        if isinstance(y, Tensor) and not y.is_floating_point():
            y = torch.where(y == 0, 1, y)
        x = x if isinstance(x, Tensor) else torch.tensor(x, dtype=y.dtype)
        return torch.fmod(x, y)
    return x - _divided(x, y) * y


def _binary(function: Callable[[Any, Any], Any]) -> Callable[[Value, Any], Value]:
    return lambda a, b: _arithmetic(a, b, function)


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[Value, Any], Value]:
    """Make a method for a number before an operator, whose other operand is the value."""
    return lambda a, b: _arithmetic(a, b, lambda x, y: function(y, x))


def _comparison(function: Callable[[Any, Any], Any]) -> Any:
    return lambda a, b: _compared(a, b, function)


class Value:
    """Tensor or scalar of a kernel.

    Attributes:
        data: torch tensor, or a Python number for scalar integers.
        kind: kind of the elements.
    """

    __slots__ = ("data", "kind")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, data: Data, kind: Kind) -> None:
        self.data = data
        self.kind = kind

    def __repr__(self) -> str:
        return f"Value({self.data!r}, {self.kind.dtype})"

    @property
    def dtype(self) -> Any:
        """Gluon's type of the elements."""
        return self.kind.dtype

    @property
    def shape(self) -> list[int]:
        """Sizes of the dimensions; () for a scalar."""
        return list(self.data.shape) if isinstance(self.data, Tensor) else []

    @property
    def numel(self) -> int:
        """Number of elements of the value."""
        return math.prod(self.shape)

    @property
    def type(self) -> Type:
        """Type of the value: shape, element type and layout."""
        return Type(self)

    @property
    def tensor(self) -> Tensor:
        """Elements as a torch tensor."""
        data = self.data
        return data if isinstance(data, Tensor) else torch.tensor(data, dtype=self.kind.torch)

    def to(self, dtype: Any, bitcast: bool = False) -> Value:
        """Convert to another type, or with ``bitcast`` reinterpret the bits."""
        kind = kind_of(dtype)
        if kind is self.kind:
            return self
        return self.bits_as(kind) if bitcast and not kind.element else self.cast(kind)

    def cast(self, kind: Kind) -> Value:
        """Convert to the nearest number of another kind."""
        return Value(_cast(self.data, self.kind, kind), kind)

    def bits_as(self, kind: Kind) -> Value:
        """Reinterpret the bits as another kind."""
        if kind.bits != self.kind.bits:
            raise TypeError(f"a bitcast from {self.dtype} to {kind.dtype}, which differ in size")
        data = self.tensor
        if self.kind.widened:
            data = data.to(self.kind.memory)
        data = data.view(kind.memory)
        if kind.widened:
            data = data.to(kind.torch) & kind.mask
        return Value(data, kind)

    def __getitem__(self, where: Any) -> Value:
        return Value(self.tensor[where], self.kind)

    def _one(self) -> Any:
        data = self.data
        if isinstance(data, Tensor):
            if data.numel() != 1:
                raise Hazard(f"one number is asked of a tensor {self.shape}")
            return data.item()
        return data

    def __bool__(self) -> bool:
        return bool(self._one())

    def __int__(self) -> int:
        return int(self._one())

    def __float__(self) -> float:
        return float(self._one())

    __index__ = __int__

    # Arithmetic.

    def __add__(self, other: Any) -> Value:
        if self.kind.element is not None:
            return _moved(self, other, operator.add)
        if isinstance(other, Value) and other.kind.element is not None:
            return _moved(other, self, operator.add)
        return _arithmetic(self, other, operator.add)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Value:
        if self.kind.element is not None:
            return _moved(self, other, operator.sub)
        return _arithmetic(self, other, operator.sub)

    __rsub__ = _reflected(operator.sub)
    __mul__ = __rmul__ = _binary(operator.mul)
    __and__ = __rand__ = _binary(operator.and_)
    __or__ = __ror__ = _binary(operator.or_)
    __xor__ = __rxor__ = _binary(operator.xor)
    __lshift__, __rlshift__ = _binary(operator.lshift), _reflected(operator.lshift)
    __rshift__, __rrshift__ = _binary(operator.rshift), _reflected(operator.rshift)
    __floordiv__, __rfloordiv__ = _binary(_divided), _reflected(_divided)
    __mod__, __rmod__ = _binary(_remainder), _reflected(_remainder)

    def __truediv__(self, other: Any) -> Value:
        return _quotient(self, other)

    def __rtruediv__(self, other: Any) -> Value:
        return _quotient(as_value(other), self)

    def __neg__(self) -> Value:
        return _wrapped(-self.data, self.kind)

    def __pos__(self) -> Value:
        return self

    def __invert__(self) -> Value:
        if isinstance(self.data, bool):
            return Value(not self.data, BOOL)
        return _wrapped(~self.data, self.kind)

    __lt__, __le__ = _comparison(operator.lt), _comparison(operator.le)
    __gt__, __ge__ = _comparison(operator.gt), _comparison(operator.ge)
    __eq__, __ne__ = _comparison(operator.eq), _comparison(operator.ne)

    def logical_and(self, other: Any) -> Value:
        """Return the logical and of truth values."""
        return (self != 0) & (as_value(other) != 0)

    def logical_or(self, other: Any) -> Value:
        """Return the logical or of truth values."""
        return (self != 0) | (as_value(other) != 0)


def as_value(x: Any, like: Kind | None = None) -> Value:
    """Make a value of a number or a torch tensor; numbers get the kind ``like`` where possible."""
    if isinstance(x, Value):
        return x
    if isinstance(x, Tensor):
        kind = kind_of(x.dtype)
        if x.ndim == 0 and not kind.is_float:
            return Value(bool(x) if kind is BOOL else int(x), kind)
        return Value(x.to(kind.torch), kind)
    kind = literal_kind(x)
    if like is not None and (like.is_float or not kind.is_float):
        kind = like
    return Value(_number(x, kind), kind)


def _number(x: bool | int | float, kind: Kind) -> Data:
    if kind is BOOL:
        return bool(x)
    if kind.is_float:
        return torch.tensor(x, dtype=torch.float32).to(kind.torch)
    return _wrap_int(int(x), kind)


def _wrap_int(x: int, kind: Kind) -> int:
    x &= kind.mask
    return x - kind.mask - 1 if kind.signed and x >> (kind.bits - 1) else x


def _wrapped(data: Any, kind: Kind) -> Value:
    """Make a value of a result that may exceed its kind's range, by wrapping it."""
    if isinstance(data, Tensor):
        if kind.widened:
            data = data & kind.mask
    elif kind is BOOL:
        data = bool(data)
    elif not (-(2**31) <= data < 2**31 and kind.wide):
        data = _wrap_int(data, kind)
    return Value(data, kind)


def _cast(data: Data, old: Kind, new: Kind) -> Data:
    if old is new:
        return data
    if not isinstance(data, Tensor):
        return _number(data, new)
    if new is BOOL:
        return data != 0
    if new is E4M3:
        return saturated_e4m3(data)
    if old is E4M3 and not new.is_float:
        data = data.float()
    data = data.to(new.torch)
    return data & new.mask if new.widened and not old.is_float else data


def saturated_e4m3(x: Tensor) -> Tensor:
    """Round to e4m3 codes, to nearest; beyond 448 saturates as in hardware; NaN is one code."""
    codes = x.float().clamp(-448, 448).to(torch.float8_e4m3fn)
    bits = torch.where(x.isnan(), 0x7F, codes.view(torch.uint8))
    return bits.view(torch.float8_e4m3fn)


def pair(a: Value, b: Any, *, division: bool = False) -> tuple[Any, Any, Kind]:
    """Return both operands' data in the kind they compute in; ``b`` may be a number."""
    kind = a.kind
    if type(b) is int and kind.wide and -(2**31) <= b < 2**31:
        return a.data, b, kind
    if isinstance(b, Value):
        if b.kind is kind and not (division and kind.is_float):
            return a.data, b.data, kind
        if kind.element is not None or b.kind.element is not None:
            kind = INT64  # only comparisons and differences make sense
        else:
            kind = promoted(kind, b.kind, division=division)
        return _cast(a.data, a.kind, kind), _cast(b.data, b.kind, kind), kind
    if isinstance(b, Tensor):
        return pair(a, as_value(b), division=division)
    if kind.is_float:
        if (division and kind.bits < 32) or kind.bits == 8:
            return _cast(a.data, kind, FLOAT32), b, FLOAT32
        return a.data, b, kind
    if isinstance(b, float):
        return _cast(a.data, kind, FLOAT32), b, FLOAT32
    if isinstance(b, bool):
        return a.data, (b if kind is BOOL else int(b)), kind
    if kind is BOOL or not -(kind.mask >> 1) - 1 <= b <= kind.mask:
        wide = promoted(kind, literal_kind(b)) if kind is not BOOL else literal_kind(b)
        return _cast(a.data, kind, wide), b, wide
    # A number that only fits the kind's bits becomes the number that these bits represent.
    return a.data, (_wrap_int(b, kind) if kind.element is None else b), kind


def _arithmetic(a: Value, b: Any, function: Callable[[Any, Any], Any]) -> Value:
    x, y, kind = pair(a, b)
    if kind is BOOL and function in (operator.add, operator.sub, operator.mul):
        x, y, kind = _cast(x, BOOL, INT32), _cast(y, BOOL, INT32), INT32
    if kind is E4M3:
        x, y, kind = x.float(), y.float(), FLOAT32
    return _wrapped(function(x, y), kind)


def _compared(a: Value, b: Any, function: Callable[[Any, Any], Any]) -> Value:
    if b is None:
        return Value(function is operator.ne, BOOL)
    x, y, kind = pair(a, b)
    if kind is E4M3:
        x, y = x.float(), y.float()
    return Value(function(x, y), BOOL)


def _moved(pointer: Value, offset: Any, function: Callable[[Any, Any], Any]) -> Value:
    """Move a pointer by a number of elements."""
    assert pointer.kind.element is not None
    offset = as_value(offset, INT64)
    if offset.kind.is_float or offset.kind.element is not None:
        if function is operator.sub and offset.kind is pointer.kind:
            return (pointer.cast(INT64) - offset.cast(INT64)) // pointer.kind.element.itemsize
        raise TypeError("an address is moved by integers")
    data = offset.data
    if isinstance(data, Tensor):
        data = data.to(torch.int64)
    size = pointer.kind.element.itemsize
    return Value(function(pointer.data, data if size == 1 else data * size), pointer.kind)


def _quotient(a: Value, b: Any) -> Value:
    if not a.kind.is_float:
        b = as_value(b)
        kind = b.kind if b.kind.is_float else FLOAT32
        a, b = a.cast(kind), b.cast(kind)
    elif isinstance(b, Value) and not b.kind.is_float:
        b = b.cast(a.kind)
    x, y, kind = pair(a, b, division=True)
    return Value(torch.as_tensor(x) / y, kind)


def chosen(condition: Any, a: Any, b: Any) -> Value:
    """Select elements of a or b by a condition, as ``gl.where`` does."""
    condition = as_value(condition)
    if (
        isinstance(a, Value)
        and isinstance(b, Value)
        and a.kind is b.kind
        and not isinstance(condition.data, Tensor)
        and not isinstance(a.data, Tensor)
        and not isinstance(b.data, Tensor)
    ):
        return a if condition.data else b
    if isinstance(a, Value) or not isinstance(b, Value):
        first = as_value(a)
        x, y, kind = pair(first, as_value(b, None if isinstance(a, Value) else first.kind))
        if isinstance(a, Value) and not isinstance(b, Value):
            x, y, kind = pair(a, b)
    else:
        y, x, kind = pair(b, a)
    if isinstance(a, Value) and a.kind.element is not None:
        kind = a.kind
    elif isinstance(b, Value) and b.kind.element is not None:
        kind = b.kind
    if not isinstance(condition.data, Tensor) and not (
        (isinstance(x, Tensor) and x.ndim) or (isinstance(y, Tensor) and y.ndim)
    ):
        picked = x if condition.data else y
        return Value(_number(picked, kind) if not isinstance(picked, Tensor) else picked, kind)
    if not isinstance(x, Tensor) and not isinstance(y, Tensor):
        x = torch.tensor(x, dtype=kind.torch)
    return Value(torch.where((condition != 0).tensor, x, y), kind)


def broadcast(values: Sequence[Value]) -> list[Value]:
    """Broadcast all values to one shape."""
    tensors = torch.broadcast_tensors(*(each.tensor for each in values))
    return [Value(data, each.kind) for data, each in zip(tensors, values, strict=True)]

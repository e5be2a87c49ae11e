"""Kinds of elements: Gluon's dtypes, and the torch dtypes that hold them on a CPU."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import dtype as DType  # "torch" is a field
from triton.experimental.gluon import language as gl


@dataclasses.dataclass(frozen=True, eq=False)
class Kind:
    """Type of elements in registers and in memory.

    Attributes:
        dtype: Gluon's name of the type.
        torch: torch dtype that holds elements; a wider integer for uint16 and uint32.
        memory: torch dtype of elements in memory.
        bits: number of bits of an element; 64 for pointers.
        is_float: True for floating-point types.
        signed: True for signed types.
        element: kind that a pointer points to; None for other types.
    """

    dtype: Any
    torch: DType
    memory: DType
    bits: int
    is_float: bool = False
    signed: bool = True
    element: Kind | None = None

    @functools.cached_property
    def mask(self) -> int:
        """Integer with all bits of an element set."""
        return (1 << self.bits) - 1

    @functools.cached_property
    def wide(self) -> bool:
        """True for signed integers of 32 or 64 bits, as most scalars are."""
        return self.signed and not self.is_float and self.bits >= 32 and self.element is None

    @property
    def itemsize(self) -> int:
        """Bytes of an element in memory."""
        return self.memory.itemsize

    @property
    def widened(self) -> bool:
        """True if torch holds elements in a wider type."""
        return self.torch is not self.memory


BOOL = Kind(gl.int1, torch.bool, torch.bool, 1, signed=False)
UINT8 = Kind(gl.uint8, torch.uint8, torch.uint8, 8, signed=False)
INT16 = Kind(gl.int16, torch.int16, torch.int16, 16)
INT32 = Kind(gl.int32, torch.int32, torch.int32, 32)
UINT32 = Kind(gl.uint32, torch.int64, torch.int32, 32, signed=False)
INT64 = Kind(gl.int64, torch.int64, torch.int64, 64)
FLOAT16 = Kind(gl.float16, torch.float16, torch.float16, 16, is_float=True)
FLOAT32 = Kind(gl.float32, torch.float32, torch.float32, 32, is_float=True)
FLOAT64 = Kind(gl.float64, torch.float64, torch.float64, 64, is_float=True)
E4M3 = Kind(gl.float8e4nv, torch.float8_e4m3fn, torch.float8_e4m3fn, 8, is_float=True)
_ALL = (
    BOOL,
    UINT8,
    Kind(gl.int8, torch.int8, torch.int8, 8),
    INT16,
    Kind(gl.uint16, torch.int32, torch.int16, 16, signed=False),
    INT32,
    UINT32,
    INT64,
    E4M3,
    Kind(gl.float8e5, torch.float8_e5m2, torch.float8_e5m2, 8, is_float=True),
    FLOAT16,
    Kind(gl.bfloat16, torch.bfloat16, torch.bfloat16, 16, is_float=True),
    FLOAT32,
    FLOAT64,
)
_BY_NAME = {kind.dtype.name: kind for kind in _ALL}
# Addresses of bytes that torch calls unsigned are asked for as what torch computes with.
_BY_TORCH = {kind.memory: kind for kind in reversed(_ALL)} | {
    torch.int16: INT16,
    torch.int32: INT32,
    torch.uint32: UINT32,
    torch.uint16: _BY_NAME["uint16"],
    torch.uint64: INT64,
}
_POINTERS: dict[str, Kind] = {}


def kind_of(dtype: Any) -> Kind:
    """Return the kind of Gluon's dtype, of a pointer type, or of a constexpr with either."""
    dtype = getattr(dtype, "value", dtype)
    if isinstance(dtype, torch.dtype):
        return kind_of_torch(dtype)
    found = _BY_NAME.get(dtype.name)
    if found is not None:
        return found
    if dtype.is_ptr():
        return pointer_to(kind_of(dtype.element_ty))
    raise TypeError(f"elements of {dtype} are not modelled")


def kind_of_torch(dtype: torch.dtype) -> Kind:
    """Return the kind of the elements of a tensor in memory."""
    if dtype not in _BY_TORCH:
        raise TypeError(f"a kernel's tensor has dtype {dtype}, of which no kernel has elements")
    return _BY_TORCH[dtype]


def pointer_to(element: Kind) -> Kind:
    """Return the kind of pointers to elements of a kind."""
    name = element.dtype.name
    if name not in _POINTERS:
        _POINTERS[name] = Kind(
            gl.pointer_type(element.dtype), torch.int64, torch.int64, 64, element=element
        )
    return _POINTERS[name]


def promoted(a: Kind, b: Kind, *, division: bool = False) -> Kind:
    """Return the kind in which an operation on two kinds computes, by Triton's rules."""
    if a.element or b.element:
        raise TypeError("an address is added to an integer, or subtracted; nothing else")
    if a.is_float != b.is_float:
        return a if a.is_float else b
    if a.is_float:
        if a is b and not (division and a.bits < 32):
            return a
        if FLOAT64 in (a, b):
            return FLOAT64
        both_half = a is b and a.bits == 16
        return a if both_half and not division else FLOAT32
    if a.bits == b.bits:
        return a if not a.signed else b
    return a if a.bits > b.bits else b


def literal_kind(x: bool | int | float) -> Kind:
    """Return the kind of a literal number in a kernel's text."""
    if isinstance(x, bool):
        return BOOL
    if isinstance(x, float):
        return FLOAT32
    if -(2**31) <= x < 2**31:
        return INT32
    return UINT32 if 0 <= x < 2**32 else INT64

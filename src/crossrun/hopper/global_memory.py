"""Global memory: the storages of a kernel's tensors, by their real addresses."""

from __future__ import annotations

import bisect

import torch
from torch import Tensor

from crossrun.hopper.errors import Hazard
from crossrun.hopper.kinds import Kind, kind_of_torch, pointer_to
from crossrun.hopper.values import Value, as_value


class GlobalMemory:
    """Storages of the tensors that addresses may point into."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._bytes: list[Tensor] = []

    def pointer(self, tensor: Tensor, kind: Kind | None = None) -> Value:
        """Return a pointer to a tensor, from which its whole storage may be accessed."""
        if tensor.device.type != "cpu":
            raise ValueError(f"a kernel on a CPU takes tensors on the CPU, not on {tensor.device}")
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        place = bisect.bisect_left(self._starts, start)
        known = place < len(self._starts) and self._starts[place] == start
        if not known or self._bytes[place].numel() < storage.nbytes():
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            if known:
                self._bytes[place] = whole
            else:
                self._starts.insert(place, start)
                self._bytes.insert(place, whole)
        return Value(tensor.data_ptr(), pointer_to(kind or kind_of_torch(tensor.dtype)))

    def _storage(self, address: int, size: int) -> tuple[Tensor, int]:
        place = bisect.bisect_right(self._starts, address) - 1
        if place >= 0:
            inside = address - self._starts[place]
            if inside + size <= self._bytes[place].numel():
                return self._bytes[place], self._starts[place]
        raise Hazard(f"an access to {address:#x}, which is outside of all tensors")

    def _elements(self, addresses: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
        """Return a storage's elements, and the indices among them that the addresses point to."""
        size = kind.itemsize
        low, high = (int(x) for x in addresses.aminmax())
        storage, start = self._storage(low, size)
        if self._storage(high, size)[1] != start:
            raise Hazard("an access to addresses in several tensors at once is not modelled")
        place = addresses - start
        if size > 1 and bool((place & (size - 1)).any()):
            raise Hazard(f"an access to elements of {size} bytes that are not aligned")
        whole = storage[: storage.numel() // size * size].view(kind.memory)
        return whole, place // size if size > 1 else place

    def load(self, pointer: Value, mask: Value | None, other: Value | None) -> Value:
        """Load elements; where ``mask`` is False, the result is ``other``, or poison."""
        kind = pointer.kind.element
        if kind is None:
            raise TypeError("a load from what is no address")
        addresses = pointer.tensor
        if mask is not None:
            there = mask.tensor
            addresses, there = torch.broadcast_tensors(addresses, there)
            if not there.all():
                return Value(self._some(addresses, there, kind, other), kind)
        if not addresses.numel():
            return Value(torch.empty(addresses.shape, dtype=kind.torch), kind)
        if addresses.ndim == 0:
            address = int(addresses)
            storage, start = self._storage(address, kind.itemsize)
            raw = storage[address - start : address - start + kind.itemsize]
            if (address - start) % kind.itemsize:
                raise Hazard("an access to an element that is not aligned")
            data = raw.view(kind.memory)[0]
            if kind.is_float:
                return Value(data.clone(), kind)
            number = int(data)
            return as_value(number & kind.mask if kind.widened else number, kind)
        return Value(self._read(addresses, kind), kind)

    def _read(self, addresses: Tensor, kind: Kind) -> Tensor:
        """Read elements, which may lie in several tensors."""
        starts = torch.tensor(self._starts)
        owner = torch.searchsorted(starts, addresses, right=True)
        low, high = (int(x) for x in owner.aminmax())
        if low == high:
            whole, place = self._elements(addresses, kind)
            return _held(whole[place], kind)
        out = torch.empty(addresses.shape, dtype=kind.torch)
        for number in owner.unique().tolist():
            mine = owner == number
            whole, place = self._elements(addresses[mine], kind)
            out[mine] = _held(whole[place], kind)
        return out

    def _some(self, addresses: Tensor, there: Tensor, kind: Kind, other: Value | None) -> Tensor:
        out: Tensor
        if other is None:
            out = poison(addresses.shape, kind)
        else:
            out = other.cast(kind).tensor.expand(addresses.shape).clone()
        if there.any():
            out[there] = self._read(addresses[there], kind)
        return out

    def store(self, pointer: Value, x: Value, mask: Value | None) -> None:
        """Store elements where ``mask`` is True, or all of them without a mask."""
        self._change(pointer, x, mask, adds=False)

    def add(self, pointer: Value, x: Value, mask: Value | None) -> None:
        """Add elements where ``mask`` is True, one after the other."""
        self._change(pointer, x, mask, adds=True)

    def _change(self, pointer: Value, x: Value, mask: Value | None, *, adds: bool) -> None:
        kind = pointer.kind.element
        if kind is None:
            raise TypeError("a store to what is no address")
        data = x.cast(kind).tensor
        addresses, data = torch.broadcast_tensors(pointer.tensor, data)
        if mask is not None:
            there = torch.broadcast_to(mask.tensor, addresses.shape)
            if not there.all():
                addresses, data = addresses[there], data[there]
        if not addresses.numel():
            return
        whole, place = self._elements(addresses, kind)
        data = data.to(kind.memory) if kind.widened else data
        if adds:
            whole.index_put_((place,), data, accumulate=True)
        else:
            whole[place] = data


def _held(data: Tensor, kind: Kind) -> Tensor:
    return data.to(kind.torch) & kind.mask if kind.widened else data


def poison(shape: tuple[int, ...], kind: Kind) -> Tensor:
    """Return values for memory that was never written: NaN, or all bits set."""
    if kind.is_float:
        return torch.full(shape, torch.nan).to(kind.torch)
    if kind.torch is torch.bool:
        return torch.ones(shape, dtype=torch.bool)
    return torch.full(shape, -1 if kind.signed else kind.mask, dtype=kind.torch)

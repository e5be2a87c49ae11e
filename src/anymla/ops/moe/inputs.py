"""Arguments of the experts' kernels: a call, and the addresses of its experts' tensors.

The experts of a projection are separate tensors, or slices of one. A kernel gets the first expert's
tensor with a stride, if the others follow at equal distances as slices do, or with a table of
distances. Both follow from addresses alone and are cached: for every expert of a list, a call only
reads its address and checks that it is contiguous.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TypeAlias

import torch
from torch import Tensor

from anymla.ops.device import far_reaching
from anymla.ops.moe.shapes import ExpertFormats, ExpertsShape

# First tensor, stride and table of distances of a projection, as kernels take them.
Pointers: TypeAlias = tuple[Tensor | None, int, Tensor | None]

_MAX_ALIGNMENT = 16
# Largest number of lists whose addresses are cached: each layer of a model has six.
_REMEMBERED = 1024


class Addresses:
    """Addresses of a projection's tensors, relative to the first.

    Attributes:
        stride: elements between consecutive tensors; None if their distances differ.
        alignment: largest power of two, at most 16, that divides all addresses in bytes.
        unit: number of elements, 16 or 1, that divides all distances from the first.
    """

    def __init__(self, pointers: tuple[int, ...], itemsize: int, device: torch.device) -> None:
        """Derive strides and distances from ``pointers`` to elements of ``itemsize`` bytes."""
        distances = [pointer - pointers[0] for pointer in pointers]
        step = distances[1] if len(distances) > 1 else 0
        even = all(distance == e * step for e, distance in enumerate(distances))
        bits = functools.reduce(int.__or__, pointers, _MAX_ALIGNMENT)
        self.stride = step // itemsize if even else None
        self.alignment = bits & -bits
        self.unit = 1 if any(distance % (16 * itemsize) for distance in distances) else 16
        self._elements = [] if even else [distance // itemsize for distance in distances]
        self._device = device
        self._tables: dict[int, Tensor] = {}

    def table(self, unit: int) -> Tensor | None:
        """Return int64 distances from the first tensor in ``unit`` elements; None with a stride."""
        if self.stride is not None:
            return None
        if unit not in self._tables:
            counts = [elements // unit for elements in self._elements]
            self._tables[unit] = torch.tensor(counts, dtype=torch.int64, device=self._device)
        return self._tables[unit]


_remembered = functools.lru_cache(maxsize=_REMEMBERED)(Addresses)


@functools.lru_cache(maxsize=_REMEMBERED)
def _addresses_of_slices(
    pointer: int, count: int, stride: int, itemsize: int, device: torch.device
) -> Addresses:
    pointers = tuple(pointer + e * stride * itemsize for e in range(count))
    return Addresses(pointers, itemsize, device)


def _addresses(tensors: list[Tensor] | Tensor) -> Addresses:
    if isinstance(tensors, Tensor):
        pointer, itemsize = tensors.data_ptr(), tensors.element_size()
        count, stride = tensors.shape[0], tensors.stride(0)
        return _addresses_of_slices(pointer, count, stride, itemsize, tensors.device)
    pointers = tuple([tensor.data_ptr() for tensor in tensors])
    return _remembered(pointers, tensors[0].element_size(), tensors[0].device)


class ExpertTensors:
    """Contiguous tensors of all experts for one projection or its scales; may be empty.

    Attributes:
        first: tensor that begins where the first expert's does; None if there are no tensors.
        shape: shape of one expert's tensor; () if there are no tensors.
        addresses: addresses of all tensors; None if there are no tensors.
    """

    def __init__(self, tensors: list[Tensor] | Tensor, alignment: int = 1) -> None:
        """Wrap the tensors; those that are not contiguous or not aligned (in bytes) are copied."""
        self.first: Tensor | None = None
        self.shape: tuple[int, ...] = ()
        self.addresses: Addresses | None = None
        self.count = _count(tensors)
        if not self.count:
            return
        found = _addresses(tensors)
        if isinstance(tensors, Tensor):
            contiguous = _follow(tensors.shape[1:], tensors.stride()[1:])
        else:
            contiguous = all(tensor.is_contiguous() for tensor in tensors)
        if not contiguous or found.alignment < alignment:
            tensors = [_copied(tensor, alignment) for tensor in tensors]
            found = _addresses(tensors)
        self._kept = tensors  # keeps copies alive
        self.addresses = found
        if isinstance(tensors, Tensor):
            self.first, self.shape = tensors, tensors.shape[1:]
        else:
            self.first, self.shape = tensors[0], tensors[0].shape

    @property
    def alignment(self) -> int:
        """Alignment of all addresses in bytes, see ``Addresses``; 16 without tensors."""
        return _MAX_ALIGNMENT if self.addresses is None else self.addresses.alignment

    @property
    def unit(self) -> int:
        """Common unit of all distances in elements, see ``Addresses``; 16 without tensors."""
        return 16 if self.addresses is None else self.addresses.unit

    def evenly(self) -> ExpertTensors:
        """Return these tensors, or a copy of them, at distances that satisfy ``lie_evenly``."""
        found = self.addresses
        if found is None or lie_evenly(found.alignment, found.stride, self.shape[-1]):
            return self
        return ExpertTensors(torch.stack(list(self._kept)))

    def pointers(self, unit: int = 1, *, mixed: bool = False) -> Pointers:
        """Return first tensor, stride and table as a kernel takes them.

        Args:
            unit: unit of the table's distances in elements, which divides all of them.
            mixed: True if the kernel chooses between this tensor's address and another's.
        """
        if self.addresses is None:
            return None, 0, None
        assert self.first is not None
        own = isinstance(self._kept, Tensor) and not mixed
        first = self.first if own else far_reaching(self.first)
        return first, self.addresses.stride or 0, self.addresses.table(unit)


def lie_evenly(alignment: int, stride: int | None, row: int) -> bool:
    """Return True if experts follow each other by whole rows, all at multiples of 16 bytes.

    Args:
        alignment: number of bytes that divides all addresses.
        stride: elements between consecutive experts; None if their distances differ.
        row: number of elements of a row.
    """
    return alignment == _MAX_ALIGNMENT and stride is not None and stride >= 0 and stride % row == 0


def _count(tensors: list[Tensor] | Tensor) -> int:
    return tensors.shape[0] if isinstance(tensors, Tensor) else len(tensors)


def _follow(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return True if a tensor of that shape and those strides is contiguous."""
    if 0 in shape:
        return True
    size = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != size:
            return False
        size *= extent
    return True


def _copied(tensor: Tensor, alignment: int) -> Tensor:
    if not tensor.is_contiguous():
        return tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % alignment else tensor


_expected: dict[tuple[int, int, int], tuple[int, int | None]] = {}


def expected_addresses(tensors: list[Tensor] | Tensor) -> tuple[int, int | None]:
    """Return alignment and stride of a list, see ``Addresses``, as of its first use.

    Meant for ``supports``, which is called as often as the operation and need not read every
    address: the backend reads them, and copies tensors that have moved to unsuitable addresses.
    """
    if not len(tensors):
        return _MAX_ALIGNMENT, 0
    if isinstance(tensors, Tensor):
        if not tensors[0].is_contiguous():
            return _MAX_ALIGNMENT, None
        found = _addresses(tensors)
        return found.alignment, found.stride
    key = id(tensors), len(tensors), tensors[0].data_ptr()
    answer = _expected.get(key)
    if answer is None:
        if len(_expected) >= _REMEMBERED:
            _expected.clear()
        contiguous = all(tensor.is_contiguous() for tensor in tensors)
        # Contiguous copies of the others will be as aligned as allocations are.
        pointers = [tensor.data_ptr() for tensor in tensors if tensor.is_contiguous()]
        bits = functools.reduce(int.__or__, pointers, _MAX_ALIGNMENT)
        stride = _addresses(tensors).stride if contiguous else None
        answer = _expected[key] = bits & -bits, stride
    return answer


def expected_alignment(tensors: list[Tensor] | Tensor) -> int:
    """Return the bytes that all addresses are expected to be multiples of, as of first use."""
    return expected_addresses(tensors)[0]


@dataclasses.dataclass(frozen=True)
class ExpertInputs:
    """Arguments of one ``interface.experts`` call by their names there, as kernels take them.

    Tensors are contiguous.

    Attributes:
        quantized: True if activations are quantised, which not every format allows.
        shape: sizes of the call.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    w1: ExpertTensors
    w3: ExpertTensors
    w2: ExpertTensors
    s1: ExpertTensors
    s3: ExpertTensors
    s2: ExpertTensors
    weight_format: str
    swiglu_limit: float
    quantized: bool
    expert_offset: int
    shape: ExpertsShape
    quant_block: int
    global_scales: Tensor | None = None

    @property
    def formats(self) -> ExpertFormats:
        """Dtypes, formats and alignments of the call, as configs depend on them."""
        stored = self.x.dtype if self.w1.first is None else self.w1.first.dtype
        return ExpertFormats(
            self.x.dtype,
            self.weight_format,
            stored,
            self.quantized,
            min(self.w1.alignment, self.w3.alignment, self.w2.alignment),
            min(self.s1.alignment, self.s3.alignment, self.s2.alignment),
            self.quant_block,
        )

    @property
    def unit(self) -> int:
        """Number of elements that divides all distances in the weights' tables."""
        return min(self.w1.unit, self.w3.unit, self.w2.unit)

    @property
    def gate_up_pointers(self) -> tuple[object, ...]:
        """Kernel arguments for w1, s1, w3 and s3: pointer, stride and table of each."""
        unit = self.unit
        w1, w3 = (each.pointers(unit, mixed=True) for each in (self.w1, self.w3))
        s1, s3 = (each.pointers(mixed=True) for each in (self.s1, self.s3))
        return *w1, *s1, *w3, *s3

    @property
    def down_pointers(self) -> tuple[object, ...]:
        """Kernel arguments for w2 and s2: pointer, stride and table of each."""
        return *self.w2.pointers(self.unit), *self.s2.pointers()

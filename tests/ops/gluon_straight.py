"""Run Gluon kernels beside the copy engine on the host: the kernel's text, with torch tensors.

A copy that is under way leaves NaN where it goes, and lands when its barrier is waited for; so what
is read too early, or overwritten too soon, is seen. So is a buffer given back by threads that have
not fenced what they read of it. Matrix instructions read shared memory when they are waited for.
Partitions are threads. Layouts are not modelled, programs run one after the
other.
"""

import threading
import types

import gluon_simulator
import torch
from gluon_simulator import Pointer, load, store

from anymla.formats.e4m3 import decode_e4m3

_PATIENCE_S = 20
# Of every partition: reads that may be under way.
_reads = threading.local()


class Value(torch.Tensor):
    """A tensor with Gluon's casts."""

    type = types.SimpleNamespace(layout=None)

    def __iadd__(self, other):
        return self + other

    def to(self, kind, bitcast=False):
        plain = self.as_subclass(torch.Tensor)
        if bitcast and plain.dtype == torch.float32:
            plain = plain.view(torch.int32)
        if bitcast:
            return value(plain.to(torch.int32).contiguous().view(kind))
        return value(plain.to(kind))


def value(x):
    return torch.as_tensor(x).as_subclass(Value)


class Address(Pointer):
    """A pointer that can become one to words."""

    def __add__(self, more):
        return Address(self.flat, torch.as_tensor(self.offset) + torch.as_tensor(more))

    def to(self, kind):
        assert self.offset == 0
        return Address(self.flat.view(kind.element_ty))


class Barrier:
    """Arrivals, or bytes and the copies that bring them."""

    turn = threading.Condition()

    def __init__(self):
        self.phase, self.awaited, self.flights = 0, 0, []

    def expect(self, size, pred=True):
        if pred:
            with self.turn:
                assert not self.awaited, "expected twice"
                self.awaited = size
                self.turn.notify_all()

    def bring(self, place, part):
        with self.turn:
            place.view(torch.uint8).fill_(0xFF)
            self.flights.append((place, part))
            self.turn.notify_all()

    def arrive(self):
        assert not getattr(_reads, "under_way", 0), "given back while it is read"
        with self.turn:
            self.phase += 1
            self.turn.notify_all()

    def wait(self, parity):
        with self.turn:
            done = self.turn.wait_for(lambda: self._complete(int(parity)), _PATIENCE_S)
        assert done, "waits for ever"

    def _complete(self, parity):
        if self.phase & 1 != parity:
            return True
        size = sum(part.numel() * part.element_size() for _, part in self.flights)
        if not self.awaited or size < self.awaited:
            return False
        assert size == self.awaited
        for place, part in self.flights:
            place.copy_(part)
        self.phase, self.awaited, self.flights = self.phase + 1, 0, []
        return True


class Shared:
    """Shared memory, which begins as NaN."""

    def __init__(self, tensor):
        self.tensor = tensor

    def index(self, i):
        return self.tensor[int(i)] if isinstance(self.tensor, list) else Shared(self.tensor[int(i)])

    def permute(self, order):
        return Shared(self.tensor.permute(order))

    def load(self, layout):
        _reads.under_way = getattr(_reads, "under_way", 0) + 1
        return value(self.tensor.clone())

    def store(self, x):
        assert x.shape == self.tensor.shape
        assert x.dtype == self.tensor.dtype
        self.tensor.copy_(x)


class Descriptor:
    """A tensor and a box of it; zeros outside."""

    layout = None

    def __init__(self, tensor, box):
        self.tensor, self.box, self.dtype = tensor, box, tensor.dtype

    def read(self, at):
        out = torch.zeros(self.box, dtype=self.dtype)
        here = tuple(
            slice(int(a), max(int(a), min(int(a) + b, n)))
            for a, b, n in zip(at, self.box, self.tensor.shape, strict=True)
        )
        part = self.tensor[here]
        out.view(torch.uint8)[tuple(slice(0, n) for n in part.shape[:-1])][
            ..., : part.shape[-1] * part.element_size()
        ] = part.contiguous().view(torch.uint8)
        return out


def _copy(descriptor, at, barrier, shared, pred=True):
    if pred:
        barrier.bring(shared.tensor, descriptor.read(at))


def _decoded_words(text, constraints, arguments, **_):
    if "griddepcontrol" in text:
        return None
    words = arguments[0].as_subclass(torch.Tensor).contiguous()
    if text == "mov.b32 {$0, $1}, $2;":
        halves = words.view(torch.bfloat16).view(*words.shape, 2)
        return tuple(value(half) for half in halves.unbind(-1))
    assert text.count("cvt.rn.f16x2.e4m3x2") == 2
    codes = words.view(torch.uint8).view(*words.shape, 4)
    return tuple(value(half) for half in decode_e4m3(codes, torch.float16).unbind(-1))


def _fence():
    _reads.under_way = 0


def _float(operand):
    x = operand.tensor if isinstance(operand, Shared) else operand
    return x.as_subclass(torch.Tensor).double()


class _Product:
    def __init__(self, a, b):
        self.a, self.b = a, b


def _partitions(functions, warps, registers):
    """Each in a thread of its own."""
    failed = []

    def partition(function, arguments):
        torch.set_num_threads(1)  # a thread of its own has forgotten what was set
        try:
            function(*arguments)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=partition, args=each, daemon=True) for each in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def _namespace(program, programs):
    layout = gluon_simulator._Anything()
    kinds = {"uint8", "int32", "int64", "float32", "float16", "bfloat16"}
    gl = types.SimpleNamespace(
        **{kind: getattr(torch, kind) for kind in kinds},
        constexpr=lambda x: x,
        **dict.fromkeys(
            ("NVMMADistributedLayout", "NVMMASharedLayout", "DotOperandLayout", "SliceLayout"),
            layout,
        ),
        BlockedLayout=layout,
        DistributedLinearLayout=layout,
        pointer_type=lambda kind: types.SimpleNamespace(element_ty=kind),
        program_id=lambda axis: value(program[axis]),
        num_programs=lambda axis: programs[axis],
        arange=lambda a, b, layout: value(torch.arange(a, b)),
        zeros=lambda shape, dtype, layout: value(torch.zeros(shape, dtype=dtype)),
        where=lambda c, a, b: value(torch.where(*(torch.as_tensor(x) for x in (c, a, b)))),
        load=lambda at, mask=True, other=0: value(load(at, mask, other)),
        store=lambda at, x, mask=True: store(at, torch.as_tensor(x), mask),
        expand_dims=lambda x, axis: x.unsqueeze(axis),
        reshape=lambda x, shape: x.reshape(shape),
        permute=lambda x, order: x.permute(order),
        join=lambda a, b: torch.stack((a, b), -1),
        sum=lambda x, axis: x.sum(axis),
        convert_layout=lambda x, layout: x,
        static_range=range,
        inline_asm_elementwise=_decoded_words,
        warp_specialize=_partitions,
        allocate_shared_memory=lambda dtype, shape, layout: Shared(
            [Barrier() for _ in range(shape[0])]
            if dtype == torch.int64
            else torch.full(
                (*shape[:-1], shape[-1] * dtype.itemsize), 0xFF, dtype=torch.uint8
            ).view(dtype)
        ),
    )
    mbarrier = types.SimpleNamespace(
        MBarrierLayout=layout,
        init=lambda barrier, count: None,
        wait=lambda barrier, parity: barrier.wait(parity),
        expect=lambda barrier, size, pred=True: barrier.expect(size, pred),
        arrive=lambda barrier: barrier.arrive(),
    )
    return {
        "gl": gl,
        "mbarrier": mbarrier,
        "fence_async_shared": _fence,
        "_copy": _copy,
        "mma_v2": lambda a, b, c: value((_float(a) @ _float(b)).float() + c),
        "warpgroup_mma": lambda a, b, c, use_acc, is_async: _Product(a, b),
        "warpgroup_mma_wait": lambda count, deps: value(
            (_float(deps[0].a) @ _float(deps[0].b)).float()
        ),
    }


def _memory(tensor):
    assert tensor.storage_offset() == 0
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())


def run(kernel, grid, *arguments, **constants):
    """Run a kernel of ``gluon.jit``; tensors become pointers."""
    given = [
        Address(_memory(each), torch.tensor(0)) if isinstance(each, torch.Tensor) else each
        for each in arguments
    ]
    for second in range(grid[1]):
        for first in range(grid[0]):
            found = gluon_simulator._of_kernel(kernel, {})
            for name, each in list(found.items()):
                if gluon_simulator._on_device(each):
                    found[name] = types.FunctionType(
                        each.fn.__code__, found, each.fn.__name__, each.fn.__defaults__
                    )
                elif type(each).__name__ == "constexpr":
                    found[name] = each.value
            found.update(_namespace((first, second), grid))
            found[kernel.fn.__name__](*given, **constants)

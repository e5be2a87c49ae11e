"""Run Gluon kernels on the host: the kernel's own text, with torch tensors for Gluon's.

Partitions are threads, barriers are barriers, shared memory is memory, and matrix instructions
finish at once. So this shows what a kernel computes, that its partitions agree on how often they
wait for each other, and which bytes it touches; not what compilers and the hardware's own order of
things make of it. Layouts are not modelled, except that memory may be viewed as another type.
"""

import contextlib
import importlib
import random
import sys
import threading
import time
import types

import torch

import anymla.ops.sparse_attention as family
from anymla.formats.e4m3 import encode_e4m3

_PATIENCE_S = 10


class Value(torch.Tensor):
    """A tensor whose ``to`` knows bit casts and pointers, and whose layout is nothing."""

    type = types.SimpleNamespace(layout=None)

    def to(self, kind, bitcast=False):
        if isinstance(kind, PointerType):
            return Pointer(kind, self)
        plain = self.as_subclass(torch.Tensor)
        return value(plain.view(kind) if bitcast else plain.to(kind))


def value(x, dtype=None):
    return torch.as_tensor(x, dtype=dtype).as_subclass(Value)


class PointerType:
    def __init__(self, element_ty):
        self.element_ty = element_ty


class Pointer:
    """Addresses of elements of a type."""

    def __init__(self, dtype, address):
        self.dtype = dtype
        self.address = address

    def __add__(self, offset):
        # A scalar's type does not count beside a vector's in torch.
        offset = torch.as_tensor(offset, dtype=torch.int64)
        return Pointer(self.dtype, self.address + offset * self.dtype.element_ty.itemsize)

    def to(self, kind):
        return Pointer(kind, self.address) if isinstance(kind, PointerType) else self.address


class Memory:
    """Global memory: an address is a tensor's number and a byte of its storage."""

    def __init__(self):
        self._storages = []

    def pointer(self, tensor):
        storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        self._storages.append(storage)
        address = (len(self._storages) << 48) + tensor.storage_offset() * tensor.element_size()
        return Pointer(PointerType(tensor.dtype), value(address))

    def _bytes(self, address, size):
        flat = address.as_subclass(torch.Tensor).reshape(-1, 1) + torch.arange(size)
        numbers = (flat[:, 0] >> 48).unique().tolist()
        assert len(numbers) <= 1, "addresses of one access in several tensors"
        storage = self._storages[numbers[0] - 1] if numbers else torch.empty(0, dtype=torch.uint8)
        return storage, flat & ((1 << 48) - 1)

    def read(self, pointer, mask, other):
        dtype = pointer.dtype.element_ty
        address, mask = torch.broadcast_tensors(pointer.address, mask)
        result = torch.full(address.shape, other, dtype=dtype)
        storage, at = self._bytes(address[mask], dtype.itemsize)
        result[mask] = storage[at].view(dtype).squeeze(1)
        return value(result)

    def write(self, pointer, x, mask):
        dtype = pointer.dtype.element_ty
        address, mask, x = torch.broadcast_tensors(pointer.address, mask, torch.as_tensor(x))
        storage, at = self._bytes(address[mask], dtype.itemsize)
        plain = x[mask].as_subclass(torch.Tensor).to(dtype)
        storage[at] = plain.reshape(-1, 1).view(torch.uint8).reshape(-1, dtype.itemsize)


class Shared:
    """Shared memory, or a view of it; of matrices, tiles with rows of 128 bytes."""

    _ROW = 128

    def __init__(self, tensor, memory=None, turned=False):
        self._tensor = tensor  # the last dimension in two, by rows of tiles
        self._memory = memory
        self._turned = turned

    @classmethod
    def of(cls, memory, dtype, shape, layout):
        *above, width = shape
        row = min(width, cls._ROW // dtype.itemsize) if layout is TILES else width
        assert width % row == 0
        count = torch.Size(shape).numel()
        assert count * dtype.itemsize <= memory.numel()
        tiles = memory[: count * dtype.itemsize].view(dtype)
        tiles = tiles.view(*above[:-1], width // row, *above[-1:], row)
        return cls(tiles.transpose(-3, -2) if above else tiles, memory)

    def index(self, i):
        return Shared(self._tensor[int(i)])

    def slice(self, start, length, dim):
        assert dim == 0
        plain = self._tensor.ndim == 2  # a vector, which is one tile
        return Shared(self._tensor.narrow(1 if plain else 0, start, length))

    def permute(self, order):
        assert order == (1, 0)
        return Shared(self._tensor, turned=not self._turned)

    def _reinterpret(self, dtype, shape, layout):
        return Shared.of(self._memory, dtype, shape, layout)

    def store(self, x):
        x = x.mT if self._turned else x
        assert x.shape == self._tensor.flatten(-2).shape, (x.shape, self._tensor.shape)
        assert x.dtype == self._tensor.dtype, (x.dtype, self._tensor.dtype)
        self._tensor.copy_(x.reshape(self._tensor.shape))

    def load(self, _=None):
        x = self._tensor.flatten(-2)
        return value((x.mT if self._turned else x).clone())


# Seconds that a partition may dawdle before it arrives or waits, so that others overtake it.
dawdling = [0.0]


def _stroll():
    if dawdling[0] and random.random() < 0.3:
        time.sleep(random.random() * dawdling[0])


class Barrier:
    """An mbarrier, or several."""

    def __init__(self, count=1):
        self._parts = [Barrier.__new__(Barrier) for _ in range(count)] if count > 1 else [self]
        for part in self._parts:
            part._condition = threading.Condition()
            part._phase = part._arrived = part._expected = part._bytes = 0

    def index(self, i):
        return self._parts[int(i)]

    def init(self, count):
        self._expected = count

    def arrive(self, count=0):
        """``count``: bytes that are to land as well."""
        _stroll()
        with self._condition:
            self._arrived += 1
            self._bytes += count
            self._complete()

    def landed(self, count):
        with self._condition:
            self._bytes -= count
            self._complete()

    def _complete(self):
        if self._arrived == self._expected and not self._bytes:
            self._arrived, self._phase = 0, self._phase + 1
            self._condition.notify_all()

    def wait(self, parity):
        _stroll()
        with self._condition:
            done = self._condition.wait_for(lambda: self._phase % 2 != parity, _PATIENCE_S)
        assert done, "a partition waits for ever"


class _Int(int):
    value = property(int)


class _Float(float):
    value = property(float)


def _constexpr(x):
    if isinstance(x, bool) or not isinstance(x, int | float):
        return x
    return _Int(x) if isinstance(x, int) else _Float(x)


def _tensors(function):
    """Arguments as tensors that broadcast."""

    def apply(*xs):
        return value(function(*torch.broadcast_tensors(*(torch.as_tensor(x) for x in xs))))

    return staticmethod(apply)


def _halves(bits):
    """float32 to the bits of float16."""
    return bits.to(torch.float16).view(torch.int16).to(torch.int32) & 0xFFFF


class Language(types.ModuleType):
    """What stands for ``triton.experimental.gluon.language``."""

    int16, int32, int64, uint32, uint8 = (
        torch.int16, torch.int32, torch.int64, torch.int64, torch.uint8,
    )  # fmt: skip
    float16, bfloat16, float32 = torch.float16, torch.bfloat16, torch.float32
    float8e4nv = torch.float8_e4m3fn
    constexpr, pointer_type, tensor = staticmethod(_constexpr), PointerType, object
    minimum, maximum = _tensors(torch.fmin), _tensors(torch.fmax)
    static_range = range

    def NVMMASharedLayout(self, *args, **kwargs):
        return TILES

    def __init__(self):
        super().__init__("gl")
        self.program, self.programs = 0, 1
        self.memory = Memory()

    def program_id(self, _):
        return value(self.program)

    def num_programs(self, _):
        return value(self.programs)

    def arange(self, start, end, layout=None):
        return value(torch.arange(start, end, dtype=torch.int32))

    def full(self, shape, x, dtype, layout=None):
        return value(torch.full(shape, x, dtype=dtype))

    def zeros(self, shape, dtype, layout=None):
        return value(torch.zeros(shape, dtype=dtype))

    def load(self, pointer, mask=True, other=0):
        return self.memory.read(pointer, torch.as_tensor(mask), other)

    def store(self, pointer, x, mask=True):
        self.memory.write(pointer, x, torch.as_tensor(mask))

    def where(self, condition, a, b):
        if isinstance(a, int) and isinstance(b, int):
            a, b = (torch.tensor(x, dtype=torch.int32) for x in (a, b))
        return value(torch.where(torch.as_tensor(condition), a, b))

    def sum(self, x, axis):
        return x.sum(axis, dtype=x.dtype)

    def max(self, x, axis):
        lowest = -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
        return torch.where(x != x, lowest, x).amax(axis)

    def reduce_or(self, x, axis):
        return (x != 0).any(axis).to(torch.int32)

    def associative_scan(self, x, axis, combine):
        return x.cumsum(axis)

    def exp2(self, x):
        return torch.exp2(x)

    def log2(self, x):
        return torch.log2(x)

    def expand_dims(self, x, axis):
        return x.unsqueeze(axis)

    def reshape(self, x, shape):
        return x.reshape(shape)

    def permute(self, x, order):
        return x.permute(order)

    def join(self, a, b):
        return torch.stack((a, b), -1)

    def split(self, x):
        return x.unbind(-1)

    def abs(self, x):
        return x.abs()

    def convert_layout(self, x, layout, assert_trivial=False):
        return x

    def allocate_shared_memory(self, dtype, shape, layout):
        if layout is BARRIER:
            return Barrier(shape[0])
        filled = torch.full((torch.Size(shape).numel() * dtype.itemsize,), 0xFF, dtype=torch.uint8)
        return Shared.of(filled, dtype, shape, layout)

    def inline_asm_elementwise(self, text, constraints, arguments, **_):
        if text.startswith("mov"):
            return arguments[0]
        if any(word in text for word in ("griddepcontrol", "bar.warp", "prefetch", "wait_group")):
            return None
        if "ld.global" in text:
            address, there = torch.broadcast_tensors(*arguments)
            pointer = Pointer(PointerType(torch.int32), address)
            return tuple(self.memory.read(pointer + i, there != 0, 0) for i in range(4))
        if "satfinite.e4m3x2" in text:
            low, high = (x.as_subclass(torch.Tensor) for x in torch.broadcast_tensors(*arguments))
            codes = [encode_e4m3(x.contiguous()).int() for x in (low, high)]
            return value(codes[0] | (codes[1] << 8))
        if "e4m3x2" in text:
            codes, factor = torch.broadcast_tensors(*arguments)
            codes = codes.as_subclass(torch.Tensor).contiguous().view(torch.uint8)
            codes = codes.unflatten(-1, (-1, 4)).contiguous()
            factor = (factor & 0xFFFF).to(torch.int16).as_subclass(torch.Tensor).contiguous()
            scaled = codes.view(torch.float8_e4m3fn).half() * factor.view(torch.float16).unsqueeze(
                -1
            )
            words = scaled.contiguous().view(torch.int32)
            return value(words[..., 0]), value(words[..., 1])
        words, factor = torch.broadcast_tensors(arguments[0], torch.as_tensor(arguments[-1]))
        words = words.as_subclass(torch.Tensor).contiguous()
        if "shl.b32" in text:
            low, high = (words << 16).view(torch.float32), (words & -65536).view(torch.float32)
            if "mul.f32" in text:
                low, high = low * factor, high * factor
            return value(_halves(low) | (_halves(high) << 16))
        if "fma.rn.f16x2" in text:
            halves = words.view(torch.float16)
            return value((halves * 0 + halves).view(torch.int32))
        if "mul.rn.f16x2" in text:
            factor = factor.as_subclass(torch.Tensor).to(torch.int32).contiguous()
            return value((words.view(torch.float16) * factor.view(torch.float16)).view(torch.int32))
        half = _halves(words.view(torch.float32))
        return value(half | (half << 16))

    def warp_specialize(self, functions, warps, registers):
        problems = []

        def run(function, arguments):
            try:
                function(*arguments)
            except BaseException as problem:
                problems.append(problem)

        threads = [threading.Thread(target=run, args=each, daemon=True) for each in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


BARRIER, TILES = object(), object()


def _multiply(a, b, acc, use_acc=True, is_async=False):
    a = a.load() if isinstance(a, Shared) else a
    product = a.float() @ b.load().float()
    return acc + product if use_acc else product


class Rows:
    """A descriptor for the copy engine: rows of a matrix."""

    def __init__(self, matrix, rows=64):
        self._matrix = matrix
        self.block_shape = [rows, 256 if rows == 64 else 64]

    def _box(self, where, shared):
        row, column = (int(x) for x in where)
        rows, columns = shared.load().shape
        box = self._matrix[row : row + rows, column : column + columns]
        assert box.shape == (rows, columns)
        return box

    def read(self, where, barrier, shared):
        """Into shared memory."""
        box = self._box(where, shared)
        shared.store(box)
        barrier.landed(box.nbytes)

    def write(self, where, shared):
        """From shared memory."""
        self._box(where, shared).copy_(shared.load())


def _stand_ins(language):
    def module(name, **names):
        made = types.ModuleType(name)
        vars(made).update(names)
        return made

    def jit(function=None, **_):
        return function if function is not None else jit

    same = lambda x: x  # noqa: E731
    mbarrier = types.SimpleNamespace(
        MBarrierLayout=lambda: BARRIER,
        init=lambda barrier, count: barrier.init(count),
        arrive=lambda barrier, count: barrier.arrive(),
        wait=lambda barrier, parity: barrier.wait(int(parity)),
        expect=lambda barrier, count: barrier.arrive(count),
    )
    engine = types.SimpleNamespace(
        async_copy_global_to_shared=Rows.read,
        async_copy_shared_to_global=Rows.write,
        store_wait=lambda count: None,
    )
    hopper = module(
        "hopper",
        mbarrier=mbarrier,
        tma=engine,
        fence_async_shared=lambda: None,
        warpgroup_mma=_multiply,
        warpgroup_mma_wait=lambda count, deps: deps[0] if len(deps) == 1 else tuple(deps),
    )
    copies = types.SimpleNamespace(
        async_copy_global_to_shared=lambda to, pointer, mask: to.store(
            language.load(pointer, mask)
        ),
        commit_group=lambda: None,
        wait_group=lambda count: None,
    )
    gluon = module("gluon", jit=jit, constexpr_function=same, language=language)
    return {
        "triton": module("triton", __version__="3.6.0"),
        "triton.experimental": module("experimental", gluon=gluon),
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": language,
        "triton.experimental.gluon.language.nvidia": module("nvidia"),
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
        "triton.experimental.gluon.language.nvidia.ampere": module("ampere", async_copy=copies),
        "triton.language": module("language"),
        "triton.language.core": module("core", _aggregate=same),
    }


_SHARED = ("anymla.ops._gluon", "anymla.ops._gluon_epilogue")


def _on_device(name):
    return name.startswith(f"{family.__name__}.gluon_") or name in _SHARED


@contextlib.contextmanager
def _imports(stand_ins):
    """Import the family's Gluon files anew, and leave no trace of that."""
    hidden = {name for name in sys.modules if _on_device(name) or name.startswith("triton")}
    real = {name: sys.modules.pop(name) for name in hidden}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in [*stand_ins, *filter(_on_device, sys.modules)]:
            del sys.modules[name]
            if _on_device(name):
                parent, _, last = name.rpartition(".")
                delattr(sys.modules[parent], last)
        sys.modules.update(real)
        for name in filter(_on_device, hidden):
            parent, _, last = name.rpartition(".")
            setattr(sys.modules[parent], last, real[name])


def on_host(*names):
    """Modules ``gluon_sm90_<name>`` of sparse attention on the host, and their language."""
    language = Language()
    with _imports(_stand_ins(language)):
        modules = [
            importlib.import_module(f"{family.__name__}.gluon_sm90_{name}") for name in names
        ]
    return *modules, language


def launch(language, kernel, programs, *arguments, **constants):
    """Run a kernel's programs one after the other; tensors become pointers, numbers values."""
    language.programs = programs
    given = [
        language.memory.pointer(each) if isinstance(each, torch.Tensor) else value(each)
        for each in arguments
    ]
    for program in range(programs):
        language.program = program
        kernel(*given, **constants)

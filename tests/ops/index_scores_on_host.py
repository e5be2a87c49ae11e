"""Hopper's score kernel on the host: its own text, with torch tensors for Gluon's.

See ``gluon_on_host`` for what that shows and what not. Added here are a second grid dimension, and
the copy engine, whose copies arrive at a barrier by their bytes.
"""

import contextlib
import dataclasses
import functools
import importlib
import sys
import types

import gluon_on_host as host
import torch
from index_scores import D

import anymla.ops.indexer as family
from anymla.ops.indexer.selection_plan import GROUP, padded_entries

H, PAGE = 64, 64
NAMES = [
    f"{family.__name__}.gluon_sm90_{part}"
    for part in ("scores", "consume", "sums", "walk", "words")
]
NAMES += ["anymla.ops.pdl"]


class Value(host.Value):
    type = property(lambda self: types.SimpleNamespace(layout=None))


class Shared(host.Shared):
    """Row after row, whatever the layout."""

    def __init__(self, tensor):
        self._tensor = tensor

    def index(self, i):
        return Shared(self._tensor[int(i)])

    def permute(self, order):
        return Shared(self._tensor.permute(order))

    def _reinterpret(self, dtype, shape, _):
        whole = self._tensor.flatten().view(dtype)
        return Shared(whole[: torch.Size(shape).numel()].view(shape))

    def store(self, x):
        assert (x.shape, x.dtype) == (self._tensor.shape, self._tensor.dtype)
        self._tensor.copy_(x)

    def load(self, _=None):
        return host.value(self._tensor.clone())


class Barrier(host.Barrier):
    """Also awaits bytes: expecting them is one arrival, which their last byte completes."""

    def expect(self, size):
        self._bytes = size

    def receive(self, size):
        self._bytes -= size
        assert self._bytes >= 0
        if self._bytes == 0:
            self.arrive()


def with_keywords(function):
    return staticmethod(lambda *xs, **_: host._tensors(function).__func__(*xs))


class Language(host.Language):
    maximum = with_keywords(torch.maximum)  # of NaN and a number: NaN

    def program_id(self, axis):
        return host.value(self.program[axis])

    def num_programs(self, axis):
        return host.value(self.grid[axis])

    def inline_asm_elementwise(self, text, constraints, arguments, **_):
        """On shared words: barriers, which threads of a warp share here, and partial sums."""
        if "anymla_scores" in text:
            self.words, self.barriers = torch.full((9216 // 4,), torch.nan), {}
            return host.value(torch.tensor(0, dtype=torch.int32))
        at = None if not arguments else torch.as_tensor(arguments[0])
        if "%laneid" in text:
            return host.value(torch.zeros_like(at))
        if "ON:" in text:  # a branch that is taken
            assert int(arguments[1]) >= 0
            return None
        if "mbarrier.init" in text:
            self.barriers[int(at)] = Barrier()
            self.barriers[int(at)].init(int(arguments[1]) // 4)  # of the warps of consumers
        elif "mbarrier.try_wait" in text:
            self.barriers[int(at)].wait(int(arguments[1]))
        elif "mbarrier.arrive" in text:
            self.barriers[int(at.flatten()[0])].arrive()
            return arguments[1]
        elif "st.shared" in text:
            at, x = torch.broadcast_tensors(at, arguments[1])
            self.words[at.long() // 4] = x.as_subclass(torch.Tensor)
        elif "ld.shared" in text:
            return tuple(host.value(self.words[at.long() // 4 + n]) for n in range(4))
        return None

    def to_tensor(self, x):
        return host.value(x, torch.int32)

    def zeros_like(self, x):
        return host.value(torch.zeros_like(x))

    def reduce(self, x, axis, combine):
        return functools.reduce(combine, x.unbind(axis))

    def broadcast(self, a, b):
        return torch.broadcast_tensors(a, b)

    def fma(self, a, b, c):
        return a * b + c

    def allocate_shared_memory(self, dtype, shape, layout):
        if layout is host.BARRIER:
            made = Barrier(shape[0])
            for part in made._parts:
                part.__class__ = Barrier
            return made
        filled = torch.full((torch.Size(shape).numel() * dtype.itemsize,), 0xFF, dtype=torch.uint8)
        return Shared(filled.view(dtype).view(shape))


@dataclasses.dataclass
class Descriptor:
    """A tensor and the block that is copied out of it."""

    tensor: torch.Tensor
    block: tuple[int, ...]
    partial: bool = False

    def copy(self, at, barrier, memory):
        at = [int(x) for x in at]
        inside = tuple(slice(a, a + b) for a, b in zip(at, self.block, strict=True))
        part = self.tensor.view(self.bits)[inside]
        missing = self.block[0] - len(part)
        assert part.shape[1:] == self.block[1:]
        assert missing == 0 or self.partial
        # What lies outside is zero.
        part = torch.cat((part, part.new_zeros(missing, *self.block[1:])))
        memory._tensor.view(self.bits).copy_(part)
        barrier.receive(part.numel() * part.element_size())

    @property
    def bits(self):
        return {1: torch.uint8, 4: torch.int32}[self.tensor.element_size()]


def spoken(monkeypatch):
    """The kernel's module and its language, until a test has ended."""
    language = Language()
    stand_ins = host._stand_ins(language)
    hopper = stand_ins["triton.experimental.gluon.language.nvidia.hopper"]
    hopper.tma = types.SimpleNamespace(
        async_copy_global_to_shared=lambda d, at, barrier, memory: d.copy(at, barrier, memory)
    )
    hopper.mbarrier.expect = lambda barrier, size: barrier.expect(size)
    nan = types.SimpleNamespace(ALL=True)
    stand_ins["triton"].language = types.SimpleNamespace(PropagateNan=nan)
    monkeypatch.setattr(host, "Value", Value)
    for name in [name for name in sys.modules if name.startswith("triton") or name in NAMES]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    module = importlib.import_module(NAMES[0])
    for part in (module, sys.modules[NAMES[1]]):
        monkeypatch.setattr(part, "range", values, raising=False)
    yield module, language
    for name in NAMES:
        sys.modules.pop(name, None)
        with contextlib.suppress(AttributeError):
            package, _, part = name.rpartition(".")
            delattr(sys.modules[package], part)


def values(*bounds):
    """``range``, whose numbers are values, as a kernel's are."""
    return map(host.value, range(*map(int, bounds)))


def in_pages(cache):
    """Keys and words of FP8 pages."""
    pages, stride = len(cache), cache.stride(0)
    flat = cache.as_strided((pages, stride), (stride, 1))
    keys = flat.view(torch.float8_e4m3fn).as_strided((pages, PAGE, D), (stride, D, 1))
    return keys, flat[:, : PAGE * (D + 4)].view(torch.float32)


def score(
    kernel, q, keys, words, weights, lengths, table, k, *, starts, owners, together, span,
    context=0, ahead=False, programs=None,
):  # fmt: skip
    """Scores and maxima as the kernel leaves them: NaN and 77 where it wrote nothing.

    With a context there are no maxima; without a table pages are in order.
    """
    module, language = kernel
    rows, pages = len(q), len(keys)
    covered = PAGE * (pages if table is None else table.shape[1])
    columns = padded_entries(max(covered, context))
    scores = torch.full((rows, columns), torch.nan)
    maxima = torch.full((rows, columns // GROUP), 77, dtype=torch.int32)
    pointer = language.memory.pointer
    requests = 1 if table is None else len(table)
    given = [
        Descriptor(q.flatten(0, 1), (together * H, D), partial=True),
        Descriptor(keys, (1, PAGE, D)),
        Descriptor(words, (1, PAGE)),
        None if table is None else pointer(table),
        *((0, 0) if table is None else table.stride()),
        pointer(lengths),
        None if starts is None else pointer(starts),
        None if owners is None else pointer(owners),
        pointer(weights),
        weights.stride(0),
        pointer(scores),
        scores.stride(0),
        None if context else pointer(maxima),
        maxima.stride(0),
        0,
        rows,
        max(rows // requests, 1),
        requests,
        pages,
        covered,
        k,
        span,
        context,
        -(-rows // together),
    ]
    given = [host.value(each) if isinstance(each, int) else each for each in given]
    language.grid = programs or -(-rows // together), -(-max(covered, context) // span)
    for program in range(language.grid[0]):
        for part in range(language.grid[1]):
            language.program = (program, part)
            module.page_scores_kernel(
                *given,
                ROWS=together,
                BUFFERS=4,
                AHEAD=ahead,
                CONSUMER_REGISTERS=112,
                PRODUCER_REGISTERS=24,
                FILL=context > 0,
                PDL=True,
            )
    return scores, maxima

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
import pytest
import torch
from index_scores import D, i32
from paged import make_cache

import anymla.ops.indexer as family
from anymla.formats.page_layout import INDEX_FP8, get_layout
from anymla.ops.indexer import device_support
from anymla.ops.indexer.selection_plan import GROUP, padded_entries

H, PAGE = 64, 64
NAMES = [
    f"{family.__name__}.gluon_sm90_{part}"
    for part in ("scores", "consume", "sums", "walk", "words")
]
NAMES += ["anymla.ops.gluon_early"]
NOTHING = -(2**31)


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
            self.words, self.barriers = torch.full((5120 // 4,), torch.nan), {}
            return host.value(torch.tensor(0, dtype=torch.int32))
        at = None if not arguments else torch.as_tensor(arguments[0])
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


@pytest.fixture
def kernel(monkeypatch):
    """The kernel's module and its language."""
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
                EARLY=True,
            )
    return scores, maxima


def ordered(x):
    """What maxima are made of; scores here are integers, -inf or NaN."""
    bits = (x + 0.0).view(torch.int32)
    return torch.where(x.isnan(), 0x7F800001, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@pytest.mark.parametrize("stride", [8448, 8640])
@pytest.mark.parametrize(
    ("together", "owners"),
    [
        (1, [0, 1, 1, 0, -1, 1]),
        (2, [0, 0, 0, 1, 1]),
        (2, [0, 1, -1, 1, 0, 0]),
        (2, None),
        (1, None),
    ],
)
@pytest.mark.parametrize(
    ("span", "ahead", "programs"), [(192, False, None), (256, True, None), (256, True, 2)]
)
def test_scores_and_maxima(kernel, stride, together, owners, span, ahead, programs):
    rows, k = len(owners or [0] * 4), 40
    padded = make_cache(INDEX_FP8, 9, PAGE, gap=0).tensor
    packed = torch.full((9 * stride + 64,), 0xFF, dtype=torch.uint8)
    cache = packed.as_strided((9, PAGE, D + 4), (stride, D + 4, 1))
    cache.copy_(padded)
    table = i32([[3, 0, 8, 5], [1, -1, 7, 900]])
    keys = torch.randint(-2, 3, (2, 256, D)).float()
    for request in range(2):
        for number, page in enumerate(table[request].tolist()):
            if 0 <= page < 9:
                slots = page * PAGE + torch.arange(PAGE)
                part = keys[request, number * PAGE : (number + 1) * PAGE]
                get_layout(INDEX_FP8).write(cache, slots, part)
    q = torch.randint(-2, 3, (rows, H, D)).to(torch.float8_e4m3fn)
    weights = torch.randint(-2, 3, (rows, H)).float()
    weights[1, 3] = torch.nan
    lengths = torch.randint(100, 257, (rows,), dtype=torch.int32)
    lengths[0], lengths[rows - 1] = 256, 40
    starts = i32([0, 17, 90, 3, 64, 1][:rows]) if owners else None
    got, maxima = score(
        kernel,
        q,
        *in_pages(cache),
        weights,
        lengths,
        table,
        k,
        starts=starts,
        owners=None if owners is None else i32(owners),
        together=together,
        span=span,
        ahead=ahead,
        programs=programs,
    )
    entry = torch.arange(256)
    for row in range(rows):
        request = owners[row] if owners else row * 2 // rows
        first, last = int(starts[row]) if owners else 0, int(lengths[row])
        seen = (entry >= first) & (entry < last)
        if request < 0 or last - first <= k:
            seen[:] = False
        dots = q[row].float() @ keys[request].T
        want = weights[row] @ dots.relu()
        page = table[request].repeat_interleave(PAGE)
        want[(page < 0) | (page >= 9)] = -torch.inf
        # NaN is both what a weight makes and what nothing was written to.
        assert torch.equal(got[row, :256].nan_to_num(1e9)[seen], want.nan_to_num(1e9)[seen])
        assert got[row, :256][~seen].isnan().all()
        rank = torch.where(seen, ordered(want), NOTHING).view(-1, GROUP).amax(1)
        assert torch.equal(maxima[row, :16], torch.where(rank == NOTHING, 77, rank))


@pytest.mark.parametrize("ahead", [False, True])
def test_many_tiles(kernel, ahead):
    pages, rows = 9, 4
    codes = torch.randint(-2, 3, (pages, PAGE, D)).to(torch.float8_e4m3fn)
    scales = torch.randint(1, 4, (pages, PAGE)).float()
    words = torch.cat((torch.zeros(pages, PAGE * D // 4), scales), 1)
    q = torch.randint(-2, 3, (rows, H, D)).to(torch.float8_e4m3fn)
    weights, lengths = torch.randint(-2, 3, (rows, H)).float(), i32([576, 575, 420, 30])
    table = torch.stack((torch.randperm(pages), torch.randperm(pages))).int()
    got, maxima = score(
        kernel, q, codes, words, weights, lengths, table, 40,
        starts=None, owners=None, together=2, span=576, ahead=ahead, programs=1,
    )  # fmt: skip
    for row, length in enumerate(lengths.tolist()):
        page = table[row // 2].long()
        want = weights[row] @ (q[row].float() @ codes[page].flatten(0, 1).float().T).relu()
        want = (want * scales[page].flatten())[: length if length > 40 else 0]
        assert torch.equal(got[row, : len(want)], want)
        assert got[row, len(want) :].isnan().all()
        best = [ordered(want[at : at + GROUP].amax()).item() for at in range(0, len(want), GROUP)]
        assert maxima[row].tolist() == best + [77] * (len(maxima[row]) - len(best))


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("table", [i32([[2, 0, 5]]), i32([[2, 0, 5], [4, -1, 1]]), None])
def test_what_is_not_seen_is_filled(kernel, together, table):
    requests, rows = 1 if table is None else len(table), 4
    context = 192 if table is None else 300
    codes = torch.randint(-2, 3, (6, PAGE, D)).to(torch.float8_e4m3fn)
    scales = torch.randint(1, 4, (6, PAGE)).float()
    words = scales if table is None else torch.cat((torch.zeros(6, PAGE * D // 4), scales), 1)
    if table is None:
        codes, scales, words = codes[:3], scales[:3], words[:3]
    q = torch.randint(-2, 3, (rows, H, D)).to(torch.float8_e4m3fn)
    weights = torch.randint(-2, 3, (rows, H)).float()
    lengths, starts = i32([192, 130, 0, 60]), i32([0, 70, 0, 7]) if table is None else None
    got, _ = score(
        kernel, q, codes, words, weights, lengths, table, 0,
        starts=starts, owners=None, together=together, span=128, context=context,
    )  # fmt: skip
    for row in range(rows):
        pages = [0, 1, 2] if table is None else table[row * requests // rows].tolist()
        want = torch.full((context,), -torch.inf)
        for number, page in enumerate(pages):
            dots = q[row].float() @ codes[page].float().T
            if page >= 0:
                want[number * PAGE : (number + 1) * PAGE] = (
                    weights[row] @ dots.relu() * scales[page]
                )
        want[lengths[row] :] = -torch.inf
        want[: 0 if starts is None else starts[row]] = -torch.inf
        assert torch.equal(got[row, :context], want)
        assert got[row, context:].isnan().all()


def test_other_machines_are_refused():
    cache = get_layout(INDEX_FP8).allocate(1, 64)
    given = (torch.randn(1, H, D), cache, torch.randn(1, H), i32([3]), i32([[0]]), 1)
    support = device_support.hopper_support(*given)
    assert not support
    assert "compute capability 9.0" in support.reason

"""Hopper's selecting kernel on the host: its own text, with torch tensors for Gluon's.

See ``gluon_on_host``. Shared words are a tensor; instructions that reach them do what their text
says.
"""

import contextlib
import importlib
import math
import sys
import types

import gluon_on_host as host
import pytest
import torch
from index_scores import i32

import anymla.ops.indexer as family
from anymla.ops.indexer.selection_plan import GROUP

NAMES = [
    f"{family.__name__}.gluon_sm90_{part}"
    for part in ("topk", "bins", "digits", "counters", "warps")
] + ["anymla.ops.pdl"]


def keys_of(x):
    """Integers in the order of scores."""
    bits = x.as_subclass(torch.Tensor).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def scores_of(keys):
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).view(torch.float32)


class Language(host.Language):
    """With the instructions on shared words, which are garbage at first."""

    def __init__(self):
        super().__init__()
        self.words = torch.randint(-(2**31), 2**31 - 1, (28960 // 4,), dtype=torch.int32)

    def inline_asm_elementwise(self, text, constraints, arguments, **_):
        if "anymla_topk" in text:
            return host.value(torch.tensor(0, dtype=torch.int32))
        if "griddepcontrol" in text:
            return None
        given = torch.broadcast_tensors(*(torch.as_tensor(x) for x in arguments))
        at, *rest = (x.as_subclass(torch.Tensor).flatten() for x in given)
        if "0xff800000" in text:  # x, entries, an end
            hidden = rest[0] >= rest[1]
            return host.value(torch.where(hidden, -torch.inf, at).view(given[0].shape))
        at = at.long() // 4
        if "redux" in text or "shfl" in text:
            return self._by_warps(text, at, rest)
        if "atom.shared" in text:
            number, wanted, x, entry = rest
            for n in (number == wanted).nonzero()[:, 0]:
                count = int(self.words[at[n]])
                self.words[at[n]] = count + 1
                if count < 128:
                    self.words[at[n] + 4 + 2 * count] = x[n].view(torch.int32)
                    self.words[at[n] + 5 + 2 * count] = entry[n]
        elif "red.shared" in text:
            self.words.index_put_((at,), i32([1]), accumulate=True)
        elif "ld.shared.v4" in text:
            return tuple(host.value(self.words[at + n].view(given[0].shape)) for n in range(4))
        elif "ld.shared.v2" in text:
            score, entry = (self.words[at + n].view(given[0].shape) for n in range(2))
            return host.value(score.view(torch.float32)), host.value(entry)
        elif "ld.shared" in text:
            return host.value(self.words[at].view(given[0].shape))
        elif "{z, z, z, z}" in text:
            for n in range(4):
                self.words[at + n] = 0
        elif text.startswith("{ .reg .pred p; .reg .b32 a; mov"):
            each = constraints.count("=r")
            x, entry, limit = (part.view(-1, each) for part in rest)
            taken = x >= limit
            place = at.view(-1, each) + taken.cumsum(1) - 1
            self.words[place[taken]] = entry[taken]
        elif "st.shared.v4" in text:
            there = rest[3] != 0
            assert there.sum() <= 1, "one thread finds it, if any"
            for n in range(4):
                self.words[at[there] + n] = rest[n][there].int()
        else:
            assert "st.shared.b32" in text, text
            self.words[at[rest[1] != 0]] = rest[0][rest[1] != 0].int()
        return None

    def _by_warps(self, text, at, rest):
        """What warps of 32 neighbours tell, at the words of their first threads, and are told."""
        place = at.view(-1, 32)[:, 0] if len(at) > 1 else at
        if "redux.sync.max" in text and "ld.shared" in text:
            told = self.words[place + torch.arange(2 * (int(rest[0]) + 1))].view(-1, 2)
            return tuple(host.value(scores_of(x).amax()) for x in told.unbind(1))
        if "redux.sync.max" in text:
            for n in range(2):
                self.words[place + n] = keys_of(rest[n]).view(-1, 32).amax(1)
        elif "ld.shared" in text:
            sums = self.words[place[0] : place[0] + int(rest[0].max()) + 1].cumsum(0)
            own = self.words[place[0] : place[0] + int(rest[0].max()) + 1]
            return host.value((sums - own)[rest[0].long()].int())
        elif "PUT" in text:
            before, own, *counts, wanted, number = (x.view(-1, 32) for x in rest)
            assert (own == sum(counts).sum(1, keepdim=True)).all()
            count = torch.stack(counts, 2).flatten()
            reached = count.cumsum(0)
            it = ((reached - count < wanted[0, 0]) & (reached >= wanted[0, 0])).nonzero()[:, 0]
            assert len(it) <= 1
            assert (before[:, 0] == own[:, 0].cumsum(0) - own[:, 0]).all()
            for n in it:
                found = number.flatten()[n // 4] - n % 4, (reached - count)[n], 0, 1
                self.words[place[0] : place[0] + 4] = i32(found)
        else:
            x = rest[0].view(-1, 32)
            self.words[place] = x.sum(1).int()
            told = x.cumsum(1) - x if "shfl" in text else x.sum(1, keepdim=True).expand_as(x)
            return host.value(told.flatten().int())
        return None

    def num_programs(self, axis):
        return host.value(6)

    def associative_scan(self, x, axis, combine):
        return x.cumsum(axis, dtype=x.dtype)

    def reduce(self, x, axis, combine):  # of NaN and a number: NaN
        return x.amax(axis)

    def maximum(self, a, b, propagate_nan=None):
        return torch.maximum(a, torch.as_tensor(b))

    def fma(self, a, b, c):
        return torch.as_tensor((a.double() * b + c).float()).as_subclass(host.Value)

    def zeros_like(self, x):
        return torch.zeros_like(x)

    def to_tensor(self, x):
        return host.value(torch.tensor(x, dtype=torch.int32))

    def multiple_of(self, x, _):
        return x

    max_contiguous = multiple_of

    def convert_layout(self, x, layout):
        return x

    def broadcast(self, a, b):
        return torch.broadcast_tensors(a, b)


@pytest.fixture
def kernel(monkeypatch):
    """The kernel's module and its language."""
    language = Language()
    for name in [name for name in sys.modules if name.startswith("triton") or name in NAMES]:
        monkeypatch.delitem(sys.modules, name)
    stand_ins = host._stand_ins(language)
    nan = types.SimpleNamespace(ALL=True)
    stand_ins["triton"].language = types.SimpleNamespace(PropagateNan=nan)
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield importlib.import_module(NAMES[0]), language
    for name in NAMES:
        sys.modules.pop(name, None)
        with contextlib.suppress(AttributeError):
            package, _, part = name.rpartition(".")
            delattr(sys.modules[package], part)


def rows_of(kind, rows, covered):
    if kind == "ties":
        return torch.randint(-2, 3, (rows, covered)).float()
    x = torch.randn(rows, covered)
    if kind == "close":
        return 1 + x * 2**-20
    if kind == "few":
        return torch.where(torch.arange(covered) % 60 == 7, x, -9.0)
    if kind == "odd":
        x[:, ::5], x[:, 3], x[:, 70], x[:, 9] = -torch.inf, torch.nan, torch.inf, -0.0
    return x


def by_rule(scores, k):
    """Places of the k best: higher, NaN highest, then earlier."""
    order = sorted(
        range(len(scores)),
        key=lambda n: (not math.isnan(scores[n]), 0 if math.isnan(scores[n]) else -scores[n], n),
    )
    return sorted(order[:k])


@pytest.mark.parametrize("kind", ["random", "ties", "close", "odd", "few"])
@pytest.mark.parametrize(("groups", "k"), [(0, 20), (128, 20), (128, 16), (128, 3)])
@pytest.mark.parametrize("cut", [False, True])
def test_selection(kernel, kind, groups, k, cut):
    module, language = kernel
    rows, covered, kept = 6, 600, 32 if k > 16 else 16
    columns = -(-covered // 256) * 256
    values = rows_of(kind, rows, covered)
    scores = torch.full((rows, columns), torch.nan)
    scores[:, :covered] = values
    lengths = i32([covered, 0, k, k + 1, 355, covered])
    starts = i32([0, 0, 0, 0, 17, 263]) if cut else i32([0] * rows)
    entry = torch.arange(columns)
    bits = (scores + 0.0).view(torch.int32)
    rank = torch.where(scores.isnan(), 0x7F800001, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    seen = (entry >= starts.unsqueeze(1)) & (entry < lengths.unsqueeze(1))
    maxima = torch.where(seen, rank, -(2**31)).view(rows, -1, GROUP).amax(2)
    maxima = torch.where(maxima == -(2**31), 0x7FFFFFFF, maxima).int()
    out, slots = (torch.full((rows, k), -7, dtype=torch.int32) for _ in range(2))
    counts = torch.full((rows,), -7, dtype=torch.int32)
    table = i32([[5, 0, -1, 2, 9, 30, 31, 8, 1, 4]] * rows)
    pointer = language.memory.pointer
    given = [
        pointer(scores.view(torch.int32)), columns,
        pointer(maxima) if groups else None, columns // GROUP,
        pointer(lengths), pointer(starts) if cut else None, None, pointer(out), k,
        pointer(slots), k, pointer(counts), pointer(table), *table.stride(), table.shape[1], 64,
        0, 1, rows, covered, k,
    ]  # fmt: skip
    given = [host.value(each) if isinstance(each, int) else each for each in given]
    for row in range(rows):
        language.program = row
        module.topk_kernel(
            *given, GROUPS=groups, ELEMENTS=512 if groups else 1024, KEPT=kept, PDL=True, WARPS=4
        )
        first, last = int(starts[row]), int(lengths[row])
        want = by_rule(values[row, first:last].tolist(), k)
        count = len(want)
        assert out[row].tolist() == want + [-1] * (k - count)
        assert counts[row] == count
        places = first + out[row, :count].long()
        page = table[row][places // 64]
        slot = torch.where(page < 0, -1, page * 64 + places % 64)
        assert slots[row, :count].tolist() == slot.tolist()
        assert (slots[row, count:] == -1).all()

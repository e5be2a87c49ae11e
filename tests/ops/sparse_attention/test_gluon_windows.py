"""The Hopper kernel of windows that queries share, its own text on a CPU, against float64."""

import importlib.util
import pathlib
import re

import pytest
import torch

pytest.importorskip("triton")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.ops._epilogue import QuantizedOut, epilogue_pointers
from anymla.ops._gluon_epilogue import Output, store_quantized_rows, store_quantized_sums
from anymla.ops.linear import inverse_rope_fp8_quant
from anymla.ops.sparse_attention import gluon_sm90_windows as module
from anymla.ops.sparse_attention import sparse_attention
from anymla.ops.sparse_attention.gluon_sm90_windows import windows_kernel
from crossrun.hopper import Deadlock, Descriptor, Hazard
from crossrun.hopper import run as run_kernel

LAYOUT = get_layout(MAIN_FP8)
LOG2E = 1.4426950408889634


class Call:
    """Requests of some queries each, whose windows lie anywhere in a cache."""

    def __init__(self, requests, queries, heads, window=128, page=64, seed=0, sink=True):
        torch.manual_seed(seed)
        self.queries, self.window = queries, window
        columns = window + queries - 1
        pages = -(-requests * columns // page) + 1
        self.cache = LAYOUT.allocate(pages, page)
        rows = torch.randn(pages * page, 512) * 2 ** torch.randint(-3, 3, (pages * page, 1))
        LAYOUT.write(self.cache, torch.arange(pages * page), rows)
        self.slots = torch.randperm(pages * page)[: requests * columns].view(requests, -1).int()
        self.q = torch.randn(requests * queries, heads, 512).bfloat16()
        self.sink = torch.randn(heads) if sink else None
        self.counts = None

    def lists(self):
        lists = self.slots.unfold(1, self.window, 1).clone()
        if self.counts is not None:
            gone = torch.arange(self.queries) >= self.counts.unsqueeze(1)
            lists[gone] = -1
        return lists.flatten(0, 1)

    def expected(self):
        sink = None if self.sink is None else self.sink.double()
        return sparse_attention(
            self.q.double(), self.cache, self.lists(), sink=sink, backend="reference"
        )

    def run(self, group, seed=0, changed=None, to=None):
        tokens, heads, _ = self.q.shape
        requests, groups = len(self.slots), -(-self.queries // group)
        tiles = -(-heads // 64)
        out = torch.full_like(self.q, torch.nan)
        lse = torch.full((tokens, heads), torch.nan)
        run_kernel(
            windows_kernel, requests * groups * tiles,
            Descriptor(self.q.view(-1, 512), (64, 256)), self.cache, self.slots,
            self.slots if self.counts is None else self.counts,
            lse if self.sink is None else self.sink,
            out if to is None else to.codes.view(torch.int16), lse, *epilogue_pointers(to, lse),
            self.queries, group, groups, heads, len(self.cache) * self.cache.shape[1],
            self.slots.stride(0), 512**-0.5 * LOG2E, -torch.inf,
            HEAD_TILES=tiles, WINDOW=self.window, PAGE=self.cache.shape[1],
            STEP=self.cache.stride(0), SINK=self.sink is not None,
            COUNTS=self.counts is not None, WHOLE=heads % 64 == 0,
            WEIGHING_REGISTERS=0, UPDATER_REGISTERS=0,
            ROPE_DIM=0 if to is None else to.rope.dim, seed=seed, replacements=changed,
        )  # fmt: skip
        return out, lse

    def check(self, group, seed=0, changed=None):
        out, lse = self.run(group, seed, changed)
        want, want_lse = self.expected()
        # The weights are rounded to bfloat16, and so is the output: 2^-9 each, as a root mean
        # square 2^-9 / sqrt(3) of a number between powers of two.
        error = (out.double() - want).norm() / want.norm().clamp(min=1e-30)
        assert error < 2.5e-3
        torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=1e-4)
        return out


@pytest.mark.parametrize("group", [1, 2, 3, 8])
def test_numbers(group):
    for seed in range(2):
        Call(2, 8, 64, seed=seed).check(group, seed)


@pytest.mark.parametrize("queries", range(1, 9))
def test_any_number_of_queries(queries):
    Call(2, queries, 16, seed=queries).check(queries)


@pytest.mark.parametrize("heads", [16, 100, 128])
def test_any_number_of_heads(heads):
    Call(2, 5, heads).check(3)


@pytest.mark.parametrize("window", [16, 121, 126, 127])
@pytest.mark.parametrize("group", [2, 8])
def test_windows_narrower_than_the_places(window, group):
    Call(1, 9, 16, window, page=16).check(group)


def test_without_a_sink():
    Call(1, 2, 64, sink=False).check(2)


def test_queries_that_are_not_there_see_nothing():
    call = Call(4, 6, 64)
    call.counts = torch.tensor([6, 0, 1, 4], dtype=torch.int32)
    out = call.check(4)
    assert not out[6:12].any()


def test_slots_that_are_no_rows_are_not_read():
    call = Call(3, 4, 64)
    pages, page = call.cache.shape[:2]
    call.slots[0, :100] = -1
    call.slots[1] = torch.randint(-(2**31), 2**31 - 1, call.slots[1].shape).int()
    call.slots[1, ::7] = 3
    call.slots[1, ::11] = pages * page
    call.slots[2] = -5
    out = call.check(4)
    assert not out[8:].any()


def test_poisoned_rows_reach_those_who_see_them_and_nobody_else():
    call = Call(1, 8, 64)
    want, _ = call.run(8)
    # A NaN code, a NaN scale and a NaN in the tail, in columns that few queries see.
    for column, byte, value in ((0, 5, 0x7F), (131, 576 * call.cache.shape[1], 255)):
        slot = int(call.slots[0, column])
        page, entry = divmod(slot, call.cache.shape[1])
        flat = call.cache[page].flatten()
        at = byte + entry * 8 + 6 if byte > 576 else byte + entry * 576
        flat[at] = value
        call.cache[page] = flat.view_as(call.cache[page])
    out, lse = call.run(8)
    sees = [j == 0 or j >= 4 for j in range(8)]
    for j, poisoned in enumerate(sees):
        assert bool(out[j].isnan().all()) is poisoned
        assert bool(lse[j].isnan().all()) is poisoned
        if not poisoned:
            assert torch.equal(out[j], want[j])


@pytest.mark.parametrize("byte", [0, 1, 60, 104, 134, 135, 200])
def test_every_scale_is_exact(byte):
    """Scores that do not overflow: queries are as small as rows are large."""
    call = Call(1, 2, 16)
    page = call.cache.shape[1]
    scales = call.cache.flatten(1)[:, 576 * page :].view(-1, page, 8)
    scales[..., :7] = byte
    power = 2.0 ** (byte - 127)
    call.q[..., :448] = (call.q[..., :448].double() / power / 64).bfloat16()
    out, lse = call.run(2)
    want, want_lse = call.expected()
    assert (out.double() - want).norm() < 2.5e-3 * want.norm()
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
def test_heads_leave_as_the_fp8_that_a_second_kernel_would_make_of_them(heads):
    call = Call(2, 3, heads, window=100)
    call.counts = torch.tensor([3, 1], dtype=torch.int32)
    table, positions = torch.randn(9, 64), torch.tensor([8, 3, 0, 5, 12, -1])
    out, lse = call.run(2)
    to = QuantizedOut.allocate(call.q, positions, table, native=False)
    to.codes[:], to.scales[:] = 0x5A, torch.nan
    _, other_lse = call.run(2, to=to)
    want = inverse_rope_fp8_quant(out, positions, table, n_groups=4, backend="triton")
    got = to.results(4)
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(got[1], want[1])
    assert torch.equal(lse, other_lse)


@gluon.jit
def both_epilogues_kernel(
    sums, ordered, codes, scales, other_codes, other_scales, positions, table, angles, H,
    WHOLE: gl.constexpr,
):  # fmt: skip
    """The windows' epilogue of sums [64, 512], and swap_ab's of the same in its tail's order."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 128, 16])
    B: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, L)), 1)
    y = gl.load(sums + row * 512 + gl.expand_dims(gl.arange(0, 512, gl.SliceLayout(0, L)), 0))
    to = Output(codes, scales, positions, table, angles, 64, gl.bfloat16)
    token = gl.program_id(0)
    store_quantized_sums(y, to, token, H, 0, WHOLE)
    to = Output(other_codes, other_scales, positions, table, angles, 64, gl.bfloat16)
    row = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, B)), 1)
    channel = gl.expand_dims(gl.arange(0, 256, layout=gl.SliceLayout(0, B)), 0)
    for part in gl.static_range(2):
        y = gl.load(ordered + row * 512 + channel + part * 256)
        store_quantized_rows(y.to(gl.bfloat16), to, token, H, 0, 64, part)


@pytest.mark.parametrize("heads", [64, 20])
def test_the_bytes_are_those_of_decodes_epilogue(heads):
    sums = torch.randn(64, 512) * 2.0 ** torch.randint(-30, 30, (64, 4)).repeat_interleave(128, 1)
    sums[3], sums[4, 128:256], sums[5, ::2], sums[6, 400] = 0.0, -0.0, -0.0, 1e30
    place = torch.arange(64)
    ordered = sums.clone()
    group = place // 8
    ordered[:, 448:] = sums[:, 448 + ((group % 2) * 4 + group // 2) * 8 + place % 8]
    table, positions = torch.randn(9, 64), torch.tensor([7])
    outs = [
        QuantizedOut.allocate(torch.empty(1, heads, 512).bfloat16(), positions, table, native=False)
        for _ in range(2)
    ]
    for to in outs:
        to.codes[:], to.scales[:] = 0x5A, torch.nan
    given = [x for to in outs for x in (to.codes.view(torch.int16), to.scales)]
    run_kernel(
        both_epilogues_kernel, 1, sums, ordered, *given, positions, table, 9, heads,
        WHOLE=heads == 64, num_warps=8,
    )  # fmt: skip
    assert torch.equal(outs[0].codes, outs[1].codes)
    assert torch.equal(outs[0].scales, outs[1].scales)
    assert not outs[0].scales.isnan().any()


WAITS = [
    "        mbarrier.wait(shared.p_free.index(0), (k - 1) & 1)\n",
    "    mbarrier.wait(shared.loaded, 0)\n    scale",
    "            mbarrier.wait(shared.updated, (k - 1) & 1)\n",
    "        mbarrier.wait(shared.q_full, k & 1)\n",
    "        mbarrier.wait(shared.p_free.index(1), (k & 1) ^ 1)\n",
    "        mbarrier.wait(shared.p_ready.index(0), k & 1)\n",
    "        mbarrier.wait(shared.p_ready.index(1), k & 1)\n",
]


@pytest.mark.parametrize("wait", WAITS)
def test_no_wait_can_be_left_out(wait, tmp_path):
    changed = altered(tmp_path, wait, re.sub(r"mbarrier\.wait\(.*\)", "pass", wait))
    with pytest.raises((Deadlock, Hazard, AssertionError)):
        some_runs(changed)


def some_runs(changed):
    for seed in range(20):
        Call(1, 4, 64, seed=seed).check(4, seed, changed)


def altered(tmp_path, old, new):
    """The module's device functions with its source changed, by those that they stand for."""
    source = pathlib.Path(module.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1
    path = tmp_path / "altered_windows.py"
    path.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("altered_windows", path)
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    return {
        vars(module)[name]: value
        for name, value in vars(changed).items()
        if hasattr(value, "fn") and value is not vars(module)[name]
    }

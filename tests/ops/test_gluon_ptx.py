"""Inline PTX: each intrinsic of ``_gluon_ptx`` on a CPU, and no PTX anywhere else."""

import ast
import pathlib
import re

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

import anymla
from anymla.ops import _gluon_ptx
from crossrun.hopper import Deadlock, Machine, as_value

LANES = torch.arange(32, dtype=torch.int32)
THREADS = torch.arange(128, dtype=torch.int32)
# Magnitudes of the codes of E2M1.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
PTX = re.compile(r"\.(?:reg|pred|b16|b32|b64|b8|u16|u32|s32|f32|f16x2|bf16x2)\b.*;|\$\d\b")


class Cpu:
    """The CPU model, whose shared memory is one array of int32, at first zeros."""

    def __init__(self, words=4096):
        self.machine = Machine()
        self.base = int(self("shared_array", "words", 4 * words, 16))
        self[torch.arange(words)] = torch.zeros(words, dtype=torch.int32)

    def __call__(self, name, *args):
        function = self.machine.function(getattr(_gluon_ptx, name))
        result = function(*(as_value(x) if isinstance(x, torch.Tensor) else x for x in args))
        several = isinstance(result, tuple)
        data = [getattr(x, "data", x) for x in (result if several else [result])]
        return tuple(data) if several else data[0]

    def at(self, place):
        """Addresses of words."""
        return self.base + 4 * place

    def __getitem__(self, places):
        return self.machine.raw.load(self.base + 4 * torch.as_tensor(places))

    def __setitem__(self, places, words):
        self.machine.raw.store(self.base + 4 * places, words)

    def pointers(self, x):
        """Addresses of a tensor's elements in global memory."""
        start = self.machine.pointer(x).data
        return start + x.element_size() * torch.arange(x.numel())


@pytest.fixture
def cpu():
    return Cpu()


def halves(x):
    """Packed pairs as two float16 each."""
    return x.contiguous().view(torch.float16).view(*x.shape, 2)


def packed(*columns):
    """Tensors of 16 bits side by side, as int32."""
    return torch.stack(columns, -1).contiguous().view(torch.int32).squeeze(-1)


def codes(count):
    """Words of random bytes, none of which is a NaN of e4m3."""
    x = torch.randint(0, 256, (count, 4), dtype=torch.uint8)
    x[(x & 0x7F) == 0x7F] = 0
    return x


# --- what holds for all -------------------------------------------------------------------------


def _sources():
    root = pathlib.Path(anymla.__file__).parent / "ops"
    return [path for path in root.rglob("*.py") if path.name != "_gluon_ptx.py"]


@pytest.mark.parametrize("path", _sources(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_kernels_hold_no_ptx(path):
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            assert node.attr != "inline_asm_elementwise", f"line {node.lineno}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert id(node) in docstrings or not PTX.search(node.value), f"line {node.lineno}"


def test_each_intrinsic_is_public_and_tested():
    tree = ast.parse(pathlib.Path(_gluon_ptx.__file__).read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    public = {name for name in functions if not name.startswith("_")}
    assert public == set(_gluon_ptx.__all__)
    assert list(_gluon_ptx.__all__) == sorted(_gluon_ptx.__all__)
    here = ast.parse(pathlib.Path(__file__).read_text())
    named = {node.value for node in ast.walk(here) if isinstance(node, ast.Constant)}
    assert public <= named


# --- registers and threads ----------------------------------------------------------------------


def test_registers(cpu):
    x = torch.randint(-(2**31), 2**31 - 1, (64,), dtype=torch.int32)
    assert torch.equal(cpu("opaque", x), x)
    assert torch.equal(cpu("laneid", x), torch.arange(64, dtype=torch.int32) % 32)


@pytest.mark.parametrize(
    "call",
    [
        ("nanosleep", torch.tensor([7], dtype=torch.int32)),
        ("bar_warp_sync",),
        ("bar_warp_sync_after", THREADS),
        ("gdc_wait",),
        ("gdc_wait", True),
        ("gdc_launch_dependents",),
        ("gdc_launch_dependents", True),
        ("cp_async_bulk_wait_group_0",),
    ],
    ids=lambda call: f"{call[0]} {len(call) - 1}",
)
def test_what_has_no_effect_on_values(cpu, call):
    assert cpu(*call) is None


# --- mbarriers ----------------------------------------------------------------------------------


def test_an_mbarrier_ends_its_phase_when_all_warps_have_arrived(cpu):
    at = cpu.at(16)
    cpu("mbarrier_init_4", at)
    with pytest.raises(Deadlock):
        cpu("mbarrier_wait", cpu.at(0), 8, 0)
    cpu("mbarrier_arrive_warp", at)  # four warps
    cpu("mbarrier_wait", cpu.at(0), 8, 0)
    with pytest.raises(Deadlock):
        cpu("mbarrier_wait", at, 0, 1)


def test_an_mbarrier_counts_threads_of_lane_zero(cpu):
    at, x = cpu.at(0), torch.randn(64)
    cpu("mbarrier_init", at, 2)
    lanes = torch.arange(64, dtype=torch.int32) % 32
    got = cpu("mbarrier_arrive_after_read", torch.full((64,), at, dtype=torch.int32), x, lanes)
    assert torch.equal(got, x)
    cpu("mbarrier_wait", at, 0, 0)


def test_a_wait_that_no_thread_takes(cpu):
    at = cpu.at(0)
    cpu("mbarrier_init_4", at)
    cpu("mbarrier_arrive_warp", at)  # so that the phase of parity 1 is under way
    cpu("mbarrier_wait_if_negative", at, torch.tensor([0, 5], dtype=torch.int32))
    with pytest.raises(Deadlock):
        cpu("mbarrier_wait_if_negative", at, torch.tensor([0, -1], dtype=torch.int32))


# --- shared memory ------------------------------------------------------------------------------


def test_arrays_of_one_name_are_one(cpu):
    first = int(cpu("shared_array", "one", 64, 16))
    assert int(cpu("shared_array", "one", 64, 16)) == first
    assert int(cpu("shared_array", "other", 64, 1024)) not in (first, cpu.base)


def test_loads_from_shared_memory(cpu):
    cpu[torch.arange(128)] = torch.randn(128).view(torch.int32)
    words = cpu[torch.arange(128)]
    assert torch.equal(cpu("ld_shared_b32", cpu.at(THREADS)), words)
    x, entry = cpu("ld_shared_f32_b32", cpu.at(2 * LANES))
    assert torch.equal(x, words[:64:2].view(torch.float32))
    assert torch.equal(entry, words[1:64:2])
    four = torch.stack(cpu("ld_shared_v4_b32", cpu.at(4 * LANES)), 1)
    assert torch.equal(four, words.view(32, 4))
    four = torch.stack(cpu("ld_shared_v4_f32", cpu.at(4 * LANES)), 1)
    assert torch.equal(four, words.view(torch.float32).view(32, 4))


def test_stores_to_shared_memory(cpu):
    x = torch.randn(32)
    cpu("st_shared_f32", cpu.at(LANES), x)
    assert torch.equal(cpu[LANES].view(torch.float32), x)
    odd = LANES % 2 == 1
    cpu("st_shared_b32_if", cpu.at(LANES), LANES, odd)
    assert torch.equal(cpu[LANES], torch.where(odd, LANES, x.view(torch.int32)))
    cpu("st_shared_v4_zero", cpu.at(4 * LANES))
    assert not cpu[THREADS].any()
    cpu("st_shared_v4_if", cpu.at(4 * LANES), LANES, -LANES, LANES + 7, odd)
    want = torch.stack((LANES, -LANES, LANES + 7, torch.ones_like(LANES)), 1) * odd[:, None]
    assert torch.equal(cpu[THREADS].view(32, 4), want.int())


def test_counters(cpu):
    number = torch.randint(0, 16, (128,), dtype=torch.int32)
    cpu("red_shared_add_1", cpu.at(number))
    assert torch.equal(cpu[torch.arange(16)], torch.bincount(number, minlength=16).int())


@pytest.mark.parametrize("each", [1, 2, 4])
def test_a_list_takes_what_has_a_number(cpu, each):
    n = 32 * each
    number = torch.randint(0, 3, (n,), dtype=torch.int32)
    number[:3] = torch.arange(3)
    x, entry = torch.randn(n), torch.arange(n, dtype=torch.int32)
    at = torch.full((n,), cpu.base, dtype=torch.int32)
    wanted = torch.full((n,), 1, dtype=torch.int32)
    cpu("atom_shared_append_if_equal", at, number, wanted, x, entry, each)
    count = int(cpu[0])
    assert count == int((number == 1).sum())
    listed = cpu[torch.arange(4, 4 + 2 * count)].view(count, 2)
    want = (number == 1).nonzero().flatten()
    assert torch.equal(listed[:, 1].sort().values, want.int())
    assert torch.equal(listed[:, 0].view(torch.float32), x[listed[:, 1].long()])


def test_a_full_list_takes_no_more(cpu):
    x, entry = torch.randn(160), torch.arange(160, dtype=torch.int32)
    same = torch.zeros(160, dtype=torch.int32)
    at = torch.full((160,), cpu.base, dtype=torch.int32)
    cpu("atom_shared_append_if_equal", at, same, same, x, entry, 1)
    assert int(cpu[0]) == 160
    assert cpu[torch.arange(5, 4 + 256, 2)].unique().numel() == 128
    assert not cpu[torch.arange(4 + 256, 4 + 320)].any()


@pytest.mark.parametrize("each", [1, 2, 4])
def test_entries_are_stored_in_order(cpu, each):
    n = 32 * each
    x, entry = torch.randn(n), torch.arange(1, n + 1, dtype=torch.int32)
    limit = torch.full((n,), 0.25)
    reached = (x >= 0.25).view(32, each)
    before = (reached.sum(1).cumsum(0) - reached.sum(1)).int()
    at = cpu.at(before).repeat_interleave(each).int()
    cpu("st_shared_in_order_if_reached", at, x, entry, limit, each)
    want = entry[reached.flatten()]
    assert torch.equal(cpu[torch.arange(len(want))], want)
    assert not cpu[torch.arange(len(want), n)].any()


# --- reductions and scans -----------------------------------------------------------------------


@pytest.mark.parametrize("nan", [False, True])
def test_the_largest_of_all_warps(cpu, nan):
    a, b = torch.randn(128), -torch.rand(128)
    a[77] = 3e38
    if nan:
        b[5] = torch.nan
    place = cpu.at(2 * (THREADS // 32))
    cpu("redux_max_st_shared_f32x2", place, a, b)
    most, least = cpu("ld_shared_max_f32x2", cpu.base, 3)
    assert torch.all(torch.as_tensor(most) == a.max())
    least = torch.as_tensor(least)
    assert torch.all(least.isnan()) if nan else torch.all(least == b.max())


def test_sums_and_scans(cpu):
    x = torch.randint(0, 50, (128,), dtype=torch.int32)
    of_warps = x.view(4, 32).sum(1).int()
    warp = THREADS // 32
    got = cpu("redux_add_st_shared", cpu.at(warp), x)
    assert torch.equal(got, of_warps.repeat_interleave(32))
    assert torch.equal(cpu[torch.arange(4)], of_warps)
    below = cpu("scan_add_st_shared", cpu.at(8 + warp), x)
    assert torch.equal(below, (x.view(4, 32).cumsum(1) - x.view(4, 32)).flatten().int())
    assert torch.equal(cpu[torch.arange(8, 12)], of_warps)
    before = cpu("ld_shared_sum_before", cpu.at(8), warp)
    assert torch.equal(before, (of_warps.cumsum(0) - of_warps).int().repeat_interleave(32))


@pytest.mark.parametrize("wanted", [1, 5, 40, 200, 10000])
def test_where_counts_reach_a_sum(cpu, wanted):
    counts = torch.randint(0, 2, (128, 4), dtype=torch.int32)
    own = counts.view(4, 128).sum(1).int()
    before = (own.cumsum(0) - own).int().repeat_interleave(32)
    number = 511 - 4 * THREADS
    cpu(
        "st_shared_crossing", cpu.base, before, own.repeat_interleave(32),
        *counts.unbind(1), wanted, number,
    )  # fmt: skip
    running = counts.flatten().cumsum(0)
    if wanted > running[-1]:
        assert not cpu[torch.arange(4)].any()
        return
    first = int((running >= wanted).nonzero()[0])
    above = int(running[first] - counts.flatten()[first])
    assert cpu[torch.arange(4)].tolist() == [511 - first, above, 0, 1]


# --- global memory ------------------------------------------------------------------------------


@pytest.mark.parametrize("unordered", [False, True])
@pytest.mark.parametrize("immediate", [False, True])
def test_16_bytes_from_global_memory(cpu, unordered, immediate):
    x = torch.randint(1, 100, (128,), dtype=torch.int32)
    there = LANES % 3
    got = torch.stack(cpu("ld_global_v4_if", cpu.pointers(x)[::4], there, unordered, immediate), 1)
    assert torch.equal(got, x.view(32, 4) * (there != 0).int()[:, None])


@pytest.mark.parametrize(
    ("name", "adds"), [("st_global_v4_f32_if", False), ("red_global_add_v4_f32_if", True)]
)
def test_vectors_of_float32_go_to_global_memory(cpu, name, adds):
    before = torch.randn(32, 4)
    x, there = torch.randn(32, 4), LANES % 3
    memory = before.clone()
    cpu(name, cpu.pointers(memory)[::4], *x.unbind(1), there)
    want = torch.where((there != 0)[:, None], x + before if adds else x, before)
    assert torch.equal(memory, want)


def test_prefetches(cpu):
    x = torch.zeros(128, dtype=torch.int32)
    at = cpu.pointers(x)
    here = torch.ones(128, dtype=torch.int32)
    for call in (
        ("prefetch_global_l1", at),
        ("prefetch_global_l2", at),
        ("prefetch_global_l2_row_if", at, here, at, 0 * here),
        ("prefetch_global_l2_codes_if", at, here, 0 * here, at, here),
        ("cp_async_bulk_prefetch_l2", at[:1], torch.tensor([64], dtype=torch.int32)),
    ):
        assert cpu(*call) is None


# --- bytes and formats --------------------------------------------------------------------------


def test_bytes_are_chosen(cpu):
    a, b = codes(32), codes(32)
    words = [each.view(torch.int32).flatten() for each in (a, b)]
    got = cpu("prmt_b32", *words, torch.full((32,), 0x6420, dtype=torch.int32))
    want = torch.stack((a[:, 0], a[:, 2], b[:, 0], b[:, 2]), 1)
    assert torch.equal(got.view(torch.uint8).view(32, 4), want)


def test_pairs_of_float16(cpu):
    a, b = torch.randn(32, 2).half(), torch.randn(32, 2).half()
    a[3, 1] = torch.inf
    words = [packed(*each.unbind(1)) for each in (a, b)]
    assert torch.equal(halves(cpu("mul_f16x2", *words)), a * b)
    no_infinity = halves(cpu("fma_f16x2_zero", words[0]))
    assert torch.equal(no_infinity.isnan(), a.isinf())
    assert torch.equal(no_infinity.nan_to_num(7), torch.where(a.isinf(), 7, a))


def test_conversions_of_pairs(cpu):
    x = torch.randn(32)
    for given in (x, x.view(torch.int32)):
        assert torch.equal(halves(cpu("cvt_f16x2_f32", given)), x.half()[:, None].expand(32, 2))
    pair = torch.randn(32, 2).bfloat16()
    words = packed(*pair.unbind(1))
    assert torch.equal(halves(cpu("cvt_f16x2_bf16x2", words)), pair.half())
    assert torch.equal(torch.stack(cpu("mov_bf16_bf16x2", words), 1), pair)


def test_codes_of_two_floats(cpu):
    a = torch.cat((torch.tensor([0.0, -500.0, 448.0, 1e-4, torch.nan]), torch.randn(27) * 30))
    b = torch.randn(32)
    got = cpu("cvt_e4m3x2_f32", a, b)
    want = a.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).int()
    want[4] = 0x7F
    assert torch.equal(got, want | b.to(torch.float8_e4m3fn).view(torch.uint8).int() << 8)


def test_four_e4m3_codes(cpu):
    each = codes(32)
    words, value = each.view(torch.int32).flatten(), each.view(torch.float8_e4m3fn)
    assert torch.equal(torch.stack(cpu("cvt_f16_e4m3x4", words), 1), value.half())
    factor = torch.tensor([0.5, 4.0]).half()
    scaled = cpu("cvt_f16x2_e4m3x4_mul", words, packed(*factor).expand(32).contiguous())
    want = (value.half().view(32, 2, 2) * factor).view(32, 4)
    assert torch.equal(torch.cat([halves(x) for x in scaled], 1), want)


def test_two_of_eight_e4m3_codes(cpu):
    each = codes(64).view(32, 8)
    low, high = each.view(torch.int32).unbind(1)
    first, second = cpu(
        "cvt_f16x2_e4m3x2_prmt", low, high, torch.full((32,), 0x5522, dtype=torch.int32)
    )
    value = each.view(torch.float8_e4m3fn).half()
    assert torch.equal(halves(first), value[:, 2:3].expand(32, 2))
    assert torch.equal(halves(second), value[:, 5:6].expand(32, 2))


def test_eight_e2m1_codes(cpu):
    each = torch.randint(0, 16, (32, 8), dtype=torch.int64)
    words = sum(each[:, i] << 4 * i for i in range(8))
    words = (words - (words >> 31 << 32)).int()
    values = torch.tensor(E2M1)
    value = values[each & 7] * (1 - 2 * (each >> 3))
    factor = torch.tensor([0.5, 2.0]).half()
    pairs = cpu("cvt_f16x2_e2m1x8_mul", words, packed(*factor).expand(32).contiguous())
    got = torch.cat([halves(x) for x in pairs], 1)
    assert torch.equal(got, (value.half().view(32, 4, 2) * 128 * factor).view(32, 8))

    table = values.to(torch.float8_e4m3fn).view(torch.int32)
    even, odd = cpu("cvt_e4m3x8_e2m1x8_table", words, *(x.expand(32).contiguous() for x in table))
    got = torch.stack([x.view(torch.float8_e4m3fn).view(32, 4).float() for x in (even, odd)], 2)
    assert torch.equal(got.view(32, 8), value.float())


# --- several elements of a thread ---------------------------------------------------------------


@pytest.mark.parametrize("each", [1, 4])
@pytest.mark.parametrize("end", [0, 50, 1000])
def test_scores_from_an_entry_on_are_masked(cpu, each, end):
    n = 32 * each
    x, entry = torch.randn(n), torch.arange(n, dtype=torch.int32)
    ends = torch.full((n,), end, dtype=torch.int32)
    got = cpu("mask_from", x, entry, ends, each)
    assert torch.equal(got, x.masked_fill(entry >= end, -torch.inf))


@pytest.mark.parametrize("one", [False, True])
def test_factors_that_are_all_one_multiply_nothing(cpu, one):
    x = torch.randn(64, 32)
    factor = torch.ones(64, 1) if one else torch.rand(64, 1)
    got = cpu("mul_f32_unless_one", x, factor)
    assert torch.equal(got, x * factor)


def test_a_factor_of_either_row_of_a_thread_multiplies(cpu):
    """A thread has values of two rows, in turns of two."""
    x = torch.randn(32, 32)
    for row in (0, 1):
        factor = torch.where(torch.arange(32) // 2 % 2 == row, 0.5, 1.0).expand(32, 32).contiguous()
        assert torch.equal(cpu("mul_f32_unless_one", x, factor), x * factor)

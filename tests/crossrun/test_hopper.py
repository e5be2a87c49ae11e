"""Gluon kernels on a CPU: what they compute, and what they do not wait for."""

import importlib.util
import pathlib

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

import hopper_example as example
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from crossrun.hopper import (
    Deadlock,
    Descriptor,
    Hazard,
    Machine,
    NotModelled,
    as_value,
    install,
    run,
)


def matmul(seed=0, tiles=6, **more):
    a, b = torch.randn(64, 64 * tiles).half(), torch.randn(64 * tiles, 64).half()
    out = torch.full((64, 64), torch.nan)
    run(
        example.matmul_kernel, 1, Descriptor(a, [64, 64]), Descriptor(b, [64, 64]), out, tiles,
        seed=seed, **more,
    )  # fmt: skip
    torch.testing.assert_close(out, a.float() @ b.float(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("seed", [None, *range(10)])
def test_the_example(seed):
    matmul(seed)


@pytest.fixture
def installed(monkeypatch):
    """Launches of Gluon kernels on CPU tensors, as ``install`` makes them."""
    monkeypatch.setattr(GluonJITFunction, "run", GluonJITFunction.run)  # is put back
    install.__wrapped__(seed=1)


def test_launches_on_cpu_tensors_run_here(installed):
    a, b = torch.randn(64, 128).half(), torch.randn(128, 64).half()
    out, tile = torch.full((64, 64), torch.nan), gl.NVMMASharedLayout(128, 16, rank=2)
    boxes = [TensorDescriptor.from_tensor(x, [64, 64], tile) for x in (a, b)]
    example.matmul_kernel[lambda given: (given["tiles"] // 2,)](
        *boxes, out, tiles=2, num_warps=4, maxnreg=168
    )
    torch.testing.assert_close(out, a.float() @ b.float(), atol=1e-3, rtol=1e-3)
    with pytest.raises(NotModelled, match="clusters"):
        example.matmul_kernel[(1,)](*boxes, out, 2, num_ctas=2)


def test_launches_without_cpu_tensors_remain_tritons(installed, monkeypatch):
    kept = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **kwargs: kept.append(args))
    example.matmul_kernel[(1,)](torch.empty(4, device="meta"), 3)
    assert [len(args) for args in kept] == [2]


# What is missing --------------------------------------------------------------------------------

FUNCTIONS = ("_produce", "_multiply")
MISSING = {
    "the producer fills a buffer that is still read": "mbarrier.wait(empty.index(s)",
    "the consumer reads before the copy is there": "mbarrier.wait(full.index(s)",
    "the result is used before it is there": "acc = warpgroup_mma_wait(",
    "nobody gives a buffer back": "mbarrier.arrive(empty.index(s)",
    "the barrier never hears of the bytes": "mbarrier.expect(full.index(s)",
}


def without(line, tmp_path):
    """The example's kernel without the line that begins so."""
    source = pathlib.Path(example.__file__).read_text()
    (found,) = [each for each in source.splitlines(keepends=True) if each.strip().startswith(line)]
    path = tmp_path / "changed_example.py"
    path.write_text(source.replace(found, ""))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("what", MISSING)
@pytest.mark.parametrize("seed", [None, *range(5)])
def test_a_line_that_is_missing_is_found_at_once(what, seed, tmp_path):
    changed = without(MISSING[what], tmp_path)
    replacements = {getattr(example, name): getattr(changed, name) for name in FUNCTIONS}
    with pytest.raises((Deadlock, Hazard)):
        matmul(seed, replacements=replacements)


def test_messages_say_who_and_what(tmp_path):
    changed = without(MISSING["the consumer reads before the copy is there"], tmp_path)
    with pytest.raises(Hazard, match=r"fp16 \[2, 64, 64\]: nothing orders it after the .* _"):
        matmul(replacements={example._multiply: changed._multiply})
    changed = without(MISSING["nobody gives a buffer back"], tmp_path)
    with pytest.raises(Deadlock, match=r"_produce for mbarrier 2.* lacks 1 of 1 arrivals"):
        matmul(replacements={example._multiply: changed._multiply})


_load, _store = example._load, tma.async_copy_shared_to_global


@gluon.jit
def _read_kernel(desc, out, FENCE: gl.constexpr):
    """Threads read a buffer that TMA then fills again."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    memory = gl.allocate_shared_memory(gl.float32, [4, 32], FLAT)
    there = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(there, count=1)
    total = gl.zeros([4, 32], gl.float32, L)
    for i in range(2):
        mbarrier.expect(there, 512)
        _load(desc, [4 * i, 0], there, memory)
        mbarrier.wait(there, i & 1)
        total += memory.load(L)
        if FENCE:
            fence_async_shared()
    row = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(1, L)), 1)
    column = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, L)), 0)
    gl.store(out + row * 32 + column, total)


def test_a_refill_after_reads_of_threads_needs_a_fence():
    x, out = torch.randn(8, 32), torch.zeros(4, 32)
    run(_read_kernel, 1, Descriptor(x, [4, 32]), out, FENCE=True)
    assert torch.equal(out, x[:4] + x[4:])
    with pytest.raises(Hazard, match="no fence_async_shared"):
        run(_read_kernel, 1, Descriptor(x, [4, 32]), out, FENCE=False)


@gluon.jit
def _store_kernel(desc, WAIT: gl.constexpr):
    """Threads write what TMA is taking away."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    memory = gl.allocate_shared_memory(gl.float32, [4, 32], FLAT)
    for i in range(2):
        memory.store(gl.full([4, 32], i + 1, gl.float32, L))
        fence_async_shared()
        _store(desc, [4 * i, 0], memory)
        if WAIT or i == 1:
            tma.store_wait(0)


def test_a_tma_store_is_waited_for():
    x = torch.zeros(8, 32)
    run(_store_kernel, 1, Descriptor(x, [4, 32]), WAIT=True)
    assert torch.equal(x[:, 0], torch.tensor([1.0] * 4 + [2.0] * 4))
    with pytest.raises(Hazard, match="nothing orders"):
        run(_store_kernel, 1, Descriptor(x, [4, 32]), WAIT=False)


@gluon.jit
def _arithmetic_kernel(out, a, b):
    n = gl.arange(0, 8, layout=gl.BlockedLayout([1], [32], [4], [0])) - 4
    gl.store(out + n + 4, n // 3)
    gl.store(out + n + 12, n % 3)
    gl.store(out + n + 20, (n * 2147483647 + 1) >> 1)
    gl.store(out + n + 28, n.to(gl.uint32, bitcast=True) // 65536)
    gl.store(out + 36, a // b)
    gl.store(out + 37, gl.atomic_add(out + 36, 5))


def test_integers_are_those_of_the_hardware():
    out = torch.zeros(40, dtype=torch.int32)
    run(_arithmetic_kernel, 1, out, -7, 2)
    n = range(-4, 4)
    assert out[:8].tolist() == [int(each / 3) for each in n]
    assert out[8:16].tolist() == [each - 3 * int(each / 3) for each in n]
    wrapped = [((each * 2147483647 + 1 + 2**31) % 2**32 - 2**31) >> 1 for each in n]
    assert out[16:24].tolist() == wrapped
    assert out[24:32].tolist() == [each % 2**32 // 65536 for each in n]
    assert out[36:38].tolist() == [2, -3]


@gluon.jit
def _asm_kernel(out, x):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, 32, layout=L)
    total = gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 s; redux.sync.add.s32 s, $1, 0xffffffff;"
        " setp.lt.s32 p, $1, 4; mov.b32 $0, s; @p add.s32 $0, $1, 100; }",
        "=r,r", [gl.load(x + lane)], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    gl.store(out + lane, total)


def test_inline_ptx():
    out = torch.zeros(32, dtype=torch.int32)
    run(_asm_kernel, 1, out, torch.arange(32, dtype=torch.int32), num_warps=1)
    assert out.tolist() == [100, 101, 102, 103] + [496] * 28


@gluon.jit
def _pairs_kernel(out, x, y):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, 32, layout=L)
    made = gl.inline_asm_elementwise(
        "{ .reg .b32 a; prmt.b32 a, $1, $2, 0x1604; mul.rn.bf16x2 $0, a, $2; }",
        "=r,r,r", [gl.load(x + lane), gl.load(y + lane)],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    gl.store(out + lane, made)


def test_bytes_are_chosen_and_pairs_of_bfloat16_multiplied():
    """Bytes 4, 0, 6 and 1 of both registers; powers of two down to bfloat16's subnormal numbers."""
    y = torch.tensor([0.5, 2.0], dtype=torch.bfloat16).view(torch.int32).expand(32).contiguous()
    x = torch.arange(32, dtype=torch.int32) << 8 | torch.arange(32, dtype=torch.int32)
    out = torch.zeros(32, dtype=torch.int32)
    run(_pairs_kernel, 1, out, x, y, num_warps=1)
    own, other = x.view(torch.uint8).view(-1, 4), y.view(torch.uint8).view(-1, 4)
    chosen = torch.stack((other[:, 0], own[:, 0], other[:, 2], own[:, 1]), 1).contiguous()
    want = chosen.view(torch.bfloat16).float() * y.view(torch.bfloat16).view(-1, 2).float()
    assert torch.equal(out.view(torch.bfloat16).view(-1, 2), want.bfloat16())


@gluon.jit
def _vectors_kernel(sums, out, x, y, n):
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    both = gl.load(gl.where(lane % 2 == 0, x + lane, y + lane))
    there = (lane < n).to(gl.int32)
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $4, 0;"
        " @p red.relaxed.gpu.global.add.v2.f32 [$1], {$2, $3}; mov.b32 $0, 0; }",
        "=r,l,f,f,r", [(sums + lane // 8 * 2).to(gl.int64), both, both * 2, there],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $6, 0;"
        " @p st.global.v4.f32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }",
        "=r,l,f,f,f,f,r",
        [(out + lane * 4).to(gl.int64), both, both * 2, both * 3, both * 4, there],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def test_vectors_in_global_memory():
    x, y = torch.arange(32.0), -torch.arange(32.0)
    sums, out = torch.ones(4, 2), torch.full((32, 4), torch.nan)
    run(_vectors_kernel, 1, sums, out, x, y, 20, num_warps=1)
    both = torch.where(torch.arange(32) % 2 == 0, x, y)
    want = (both * (torch.arange(32) < 20)).view(4, 8).sum(1)
    assert torch.equal(sums, 1 + torch.stack((want, 2 * want), 1))
    assert torch.equal(out[:20], both[:20, None] * torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert out[20:].isnan().all()


@gluon.jit
def _outside_kernel(x, n):
    at = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(x + at, at, mask=at < n)


def test_what_is_outside_of_a_tensor_is_found():
    x = torch.zeros(40, dtype=torch.int32)
    run(_outside_kernel, 1, x, 40)
    assert x.tolist() == list(range(40))
    with pytest.raises(Hazard, match="outside of all tensors"):
        run(_outside_kernel, 1, x, 41)


@gluon.jit
def _histogram_kernel(x):
    gl.histogram(gl.load(x + gl.arange(0, 32)), 4)


def test_what_is_not_modelled_says_so():
    with pytest.raises(NotModelled, match="histogram"):
        run(_histogram_kernel, 1, torch.zeros(32, dtype=torch.int32))


@gluon.jit
def _twice(x):
    return x * 2


def test_device_functions_alone():
    machine = Machine()
    twice = machine.function(_twice)
    assert int(twice(machine.argument(21))) == 42
    assert twice(machine.argument(2**30)) == -(2**31)
    assert torch.equal(twice(as_value(torch.tensor([1.5, 2]))).tensor, torch.tensor([3.0, 4]))


def test_tma_begins_at_multiples_of_16_bytes():
    # An instruction that begins elsewhere is illegal on an H200.
    rows = Descriptor(torch.zeros(8, 64), [1, 8])
    rows.read([3, 4])
    with pytest.raises(Hazard, match="16 bytes"):
        rows.read([3, 2])
    with pytest.raises(Hazard, match="16 bytes"):
        rows.write([3, 2], torch.ones(1, 8))

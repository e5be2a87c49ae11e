"""The repaired interpreter computes what a GPU computes."""

import os

import pytest
import torch
from rounding import every_tie, same

triton = pytest.importorskip("triton", reason="triton is an extra")
import triton.language as tl  # noqa: E402

from crossrun.interpreter import install  # noqa: E402

# What is expected of the interpreter is what a GPU does.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
if INTERPRETED:
    install()
elif not torch.cuda.is_available():
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)


@triton.jit
def _cast_kernel(x, y, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at).to(y.dtype.element_ty))


@triton.jit
def _arithmetic_kernel(x, y, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    half = tl.load(x + at).to(tl.bfloat16)
    tl.store(y + at, half * half + half)


@triton.jit
def _dot_kernel(a, b, c, M: tl.constexpr, K: tl.constexpr):
    rows, columns = tl.arange(0, M)[:, None], tl.arange(0, M)[None, :]
    inner = tl.arange(0, K)
    left = tl.load(a + rows * K + inner[None, :])
    right = tl.load(b + inner[:, None] * M + columns)
    tl.store(c + rows * M + columns, tl.dot(left, right))


def run(kernel, x, dtype):
    x, y = x.to(DEVICE), torch.empty(x.shape, dtype=dtype, device=DEVICE)
    kernel[(triton.cdiv(x.numel(), 4096),)](x, y, BLOCK=4096)
    return y.cpu()


@pytest.fixture(scope="module")
def floats():
    return every_tie()


@pytest.mark.skipif(not INTERPRETED, reason="not every GPU has these types")
def test_casts_to_8_bits_round_to_nearest_even_and_saturate(floats):
    for dtype, top in ((torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)):
        same(run(_cast_kernel, floats, dtype), floats.clamp(-top, top).to(dtype))


def test_bfloat16_rounds_and_computes(floats):
    same(run(_cast_kernel, floats, torch.bfloat16), floats.bfloat16())
    half = floats.clamp(-1e3, 1e3).bfloat16()
    got = run(_arithmetic_kernel, half.float(), torch.bfloat16).float()
    want = half.float() ** 2 + half.float()
    # Two roundings (a GPU may fuse them into one), each of half a unit in the last place.
    error = (got - want).abs()
    assert (
        (error <= 2.0**-8 * (half.float() ** 2 + want.abs()) + 1e-37).logical_or(want.isnan()).all()
    )


@pytest.mark.skipif(not INTERPRETED, reason="of the interpreter")
def test_types_that_are_kept_are_those_that_were_asked_for():
    core = tl.core
    made = core.block_type(tl.int32, [4, 8])
    other = core.block_type(tl.pointer_type(tl.int8), [core.constexpr(4), 8])
    for each, numbers in ((made, "int32"), (other, "pointer<int8>")):
        again = core.block_type(each.element_ty, each.shape)
        assert again == each
        assert again is not each
        assert tuple(each.shape) == (4, 8)
        assert each.numel == 32
        assert each.scalar.name == numbers
    assert made != other
    halves = made.with_element_ty(tl.float16)
    assert halves == core.block_type(tl.float16, [4, 8]) != made
    assert halves.name != made.name != core.block_type(tl.int32, [8, 4]).name
    with pytest.raises(ValueError, match="power of 2"):
        core.block_type(tl.int32, [3])
    with pytest.raises(TypeError, match="must have type"):
        core.block_type(tl.int32, [8.0, 4])
    with pytest.raises(TypeError, match="must have type"):
        core.block_type(tl.int32, [4.0, 8])


@triton.jit
def _wrap_kernel(x):
    tl.store(x, tl.load(x) + 1)


def test_sums_of_integers_wrap():
    x = torch.tensor([2**31 - 1], dtype=torch.int32, device=DEVICE)
    _wrap_kernel[(1,)](x)
    assert x.item() == -(2**31)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dot_accumulates_in_float32(dtype):
    a, b = torch.randn(16, 64).to(dtype), torch.randn(64, 16).to(dtype)
    c = torch.empty(16, 16, device=DEVICE)
    _dot_kernel[(1,)](a.to(DEVICE), b.to(DEVICE), c, M=16, K=64)
    want = a.double() @ b.double()
    # 64 exact products summed in float32.
    bound = 64 * 2.0**-24 * (a.double().abs() @ b.double().abs())
    assert ((c.cpu().double() - want).abs() <= bound).all()

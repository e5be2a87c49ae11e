"""The repaired interpreter and the kernels' number formats, over every code."""

import os
import re
import subprocess
import sys

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is an extra")
import triton.language as tl  # noqa: E402

from anymla.formats import triton_cast, triton_words  # noqa: E402
from anymla.formats.e2m1 import decode_e2m1, encode_e2m1, unpack_nibbles  # noqa: E402
from anymla.formats.e4m3 import decode_e4m3, encode_e4m3  # noqa: E402
from anymla.formats.ue8m0 import decode_ue8m0, scale_exponent  # noqa: E402
from anymla.ops import device, triton_interpreter  # noqa: E402
from anymla.ops.device import INTERPRETED  # noqa: E402

pytestmark = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU or TRITON_INTERPRET=1"
)
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
NATIVE = [False] if DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9) else [0, 1]


PLAIN = """
import torch
from anymla.ops.norm_rope import rms_norm
torch.manual_seed(0)
x, weight = torch.randn(4, 512).bfloat16(), torch.rand(512).bfloat16()
with torch.no_grad():
    got, want = (rms_norm(x, weight, 1e-6, backend=name) for name in ("triton", "reference"))
print((got != want).sum().item())
"""


def test_a_program_that_only_sets_the_variable_gets_the_repaired_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PLAIN], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "0\n"


def test_an_interpreter_that_cannot_be_repaired_is_refused(monkeypatch):
    def install():
        raise AttributeError("no attribute 'cast_impl'")

    monkeypatch.setattr(triton_interpreter, "install", install)
    support = device._interpreter_support()
    assert not support
    assert re.search(r"triton 3\.\d+.* cannot be repaired \(no attribute", support.reason)


@triton.jit
def _map_kernel(x, y, n, WHAT: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0)
    if WHAT == "e4m3_to_fp32":
        result = triton_cast.e4m3_to_fp32(value, NATIVE)
    elif WHAT == "e4m3_to_fp16":
        result = triton_cast.e4m3_to_fp16(value, NATIVE)
    elif WHAT == "fp32_to_e4m3":
        result = triton_cast.fp32_to_e4m3(value, NATIVE)
    elif WHAT == "scale_exponent":
        result = triton_cast.scale_exponent(value, 448.0, 1e-4)
    elif WHAT == "exp2_int":
        result = triton_cast.exp2_int(value)
    elif WHAT == "ue8m0_to_fp32":
        result = triton_cast.ue8m0_to_fp32(value)
    elif WHAT == "fp32_to_e2m1":
        result = triton_cast.fp32_to_e2m1(value)
    elif WHAT == "e2m1_to_fp32":
        result = triton_cast.e2m1_to_fp32(value)
    elif WHAT == "bf16":
        result = value.to(tl.bfloat16)
    else:
        half = value.to(tl.bfloat16)
        result = half * half + half
    tl.store(y + at, result, mask=at < n)


@triton.jit
def _words_kernel(words, values, order, BYTES: tl.constexpr):
    row, word = tl.arange(0, 2)[:, None], tl.arange(0, 8)[None, :]
    packed = tl.load(words + row * 8 + word)
    if BYTES == 1:
        decoded = triton_words.words_to_e4m3(packed).to(tl.float32) * triton_words.E4M3_UNIT
    elif BYTES == 2:
        decoded = triton_words.words_to_fp16(packed).to(tl.float32) * triton_words.FLOAT16_UNIT
    else:
        decoded = triton_words.words_to_bf16(packed).to(tl.float32) * triton_words.BFLOAT16_UNIT
    place = tl.arange(0, 64)
    tl.store(values + row * 64 + place[None, :], decoded)
    tl.store(order + place, triton_words.channel_at(place, 1 if BYTES == 1 else 2))


@triton.jit
def _e4m3_words_kernel(words, values, COUNT: tl.constexpr):
    word = tl.arange(0, COUNT)
    c0, c1, c2, c3 = triton_words.e4m3_words_to_fp16(tl.load(words + word))
    decoded = tl.join(tl.join(c0, c2), tl.join(c1, c3)) * triton_words.E4M3_WORD_UNIT
    tl.store(values + tl.arange(0, 4 * COUNT), tl.reshape(decoded, (4 * COUNT,)))


@triton.jit
def _dot_kernel(a, b, c, M: tl.constexpr, K: tl.constexpr):
    rows, columns = tl.arange(0, M)[:, None], tl.arange(0, M)[None, :]
    inner = tl.arange(0, K)
    left = tl.load(a + rows * K + inner[None, :])
    right = tl.load(b + inner[:, None] * M + columns)
    tl.store(c + rows * M + columns, tl.dot(left, right))


def run(what, x, dtype, native=False):
    x = x.to(DEVICE)
    y = torch.empty(x.shape, dtype=dtype, device=DEVICE)
    block = 4096
    grid = (triton.cdiv(x.numel(), block),)
    _map_kernel[grid](x, y, x.numel(), WHAT=what, NATIVE=bool(native), BLOCK=block)
    return y.cpu()


def same(got, want):
    got, want = got.double(), want.double()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(0.25), want.nan_to_num(0.25))


CODES = torch.arange(256, dtype=torch.uint8)


@pytest.fixture(scope="module")
def floats():
    """65,536 values over all binades of e4m3, with every tie and its neighbours."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60000, generator=generator) * torch.exp2(
        torch.randint(-14, 10, (60000,), generator=generator).float()
    )
    values = decode_e4m3(CODES)
    values = values[~values.isnan()].sort().values
    ties = (values[1:] + values[:-1]) / 2
    nudged = torch.cat([torch.nextafter(ties, torch.tensor(side)) for side in (-1e9, 1e9)])
    special = torch.tensor([0.0, -0.0, 448, 449, 464, 465, 1e30, -1e30, torch.inf, -torch.inf])
    x = torch.cat((x, ties, nudged, special, torch.tensor([torch.nan])))
    return torch.nn.functional.pad(x, (0, 65536 - len(x)))


@pytest.mark.parametrize("native", NATIVE)
def test_every_e4m3_code(native):
    same(run("e4m3_to_fp32", CODES, torch.float32, native), decode_e4m3(CODES))
    same(run("e4m3_to_fp16", CODES, torch.float16, native), decode_e4m3(CODES))


@pytest.mark.parametrize("native", NATIVE)
def test_65536_encodes(native, floats):
    got = run("fp32_to_e4m3", floats, torch.uint8, native)
    assert torch.equal(got, encode_e4m3(floats))


def test_scales(floats):
    amax = floats.nan_to_num(0, 1e30, 1e30).abs()
    got = run("scale_exponent", amax, torch.int32)
    assert torch.equal(got, scale_exponent(amax, 448.0, 1e-4))
    same(run("ue8m0_to_fp32", CODES, torch.float32), decode_ue8m0(CODES))
    exponents = torch.arange(-126, 128, dtype=torch.int32)
    same(run("exp2_int", exponents, torch.float32), torch.exp2(exponents.double()))


def test_e2m1(floats):
    assert torch.equal(run("fp32_to_e2m1", floats, torch.uint8), encode_e2m1(floats))
    codes = torch.arange(16, dtype=torch.uint8)
    same(run("e2m1_to_fp32", codes, torch.float32), decode_e2m1(codes))


@pytest.mark.parametrize("form", [1, 2, 3], ids=["e4m3", "float16", "bfloat16"])
def test_words_of_e2m1(form):
    if form == 1 and 0 in NATIVE and len(NATIVE) == 1:
        pytest.skip("the device has no e4m3")
    # Every pair of codes in one byte, and every code at every place of a word.
    packed = torch.cat([torch.arange(64, dtype=torch.uint8) * 4 + i for i in range(4)])
    for part in packed.view(4, 2, 32):
        values = torch.empty(2, 64, device=DEVICE)
        order = torch.empty(64, dtype=torch.int32, device=DEVICE)
        words = part.contiguous().view(torch.int32).to(DEVICE)
        _words_kernel[(1,)](words, values, order, BYTES=form)
        want = decode_e2m1(unpack_nibbles(part))
        assert order.cpu().sort().values.tolist() == list(range(64))
        same(values.cpu(), want[:, order.cpu().long()])


def test_words_of_e4m3():
    """Every code in every place of a word; one NaN makes all four of its word NaN."""
    words = torch.zeros(512, 4, dtype=torch.uint8)
    finite = CODES[(CODES & 127) != 127]
    for place in range(4):
        words[:254, place] = finite.roll(place)
        words[254 + 2 * place, place], words[255 + 2 * place, place] = 127, 255
    values = torch.empty(words.shape, dtype=torch.float16, device=DEVICE)
    packed = words.view(torch.int32).to(DEVICE)
    _e4m3_words_kernel[(1,)](packed, values, COUNT=len(words))
    want = words.view(torch.float8_e4m3fn).double()
    want[want.isnan().any(1)] = torch.nan
    same(values.cpu(), want)
    assert int(want.isnan().sum()) == 4 * 8


def test_bfloat16_rounds_and_computes(floats):
    same(run("bf16", floats, torch.bfloat16), floats.bfloat16())
    half = floats.clamp(-1e3, 1e3).bfloat16()
    got = run("arithmetic", half.float(), torch.bfloat16).float()
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

"""The kernels' number formats, over every code."""

import pytest
import torch
from rounding import every_tie, same

triton = pytest.importorskip("triton", reason="triton is an extra")
import triton.language as tl  # noqa: E402

from anymla.formats import triton_cast, triton_words  # noqa: E402
from anymla.formats.e2m1 import decode_e2m1, encode_e2m1, unpack_nibbles  # noqa: E402
from anymla.formats.e4m3 import decode_e4m3, encode_e4m3  # noqa: E402
from anymla.formats.ue8m0 import decode_ue8m0, scale_exponent  # noqa: E402
from anymla.ops.device import INTERPRETED  # noqa: E402

pytestmark = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU or TRITON_INTERPRET=1"
)
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
NATIVE = [False] if DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9) else [0, 1]


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
    else:
        result = triton_cast.e2m1_to_fp32(value)
    tl.store(y + at, result, mask=at < n)


@triton.jit
def _words_kernel(words, values, order, BYTES: tl.constexpr, PAIRS: tl.constexpr):
    row, word = tl.arange(0, 2)[:, None], tl.arange(0, 8)[None, :]
    packed = tl.load(words + row * 8 + word)
    if BYTES == 1:
        decoded = triton_words.words_to_e4m3(packed).to(tl.float32) * triton_words.E4M3_UNIT
    elif BYTES == 2:
        decoded = triton_words.words_to_fp16(packed, PAIRS).to(tl.float32)
        decoded *= triton_words.FLOAT16_UNIT
    else:
        decoded = triton_words.words_to_bf16(packed).to(tl.float32) * triton_words.BFLOAT16_UNIT
    place = tl.arange(0, 64)
    tl.store(values + row * 64 + place[None, :], decoded)
    tl.store(order + place, triton_words.channel_at(place, 1 if BYTES == 1 else 2, PAIRS))


@triton.jit
def _e4m3_words_kernel(words, values, COUNT: tl.constexpr):
    word = tl.arange(0, COUNT)
    c0, c1, c2, c3 = triton_words.e4m3_words_to_fp16(tl.load(words + word))
    decoded = tl.join(tl.join(c0, c2), tl.join(c1, c3)) * triton_words.E4M3_WORD_UNIT
    tl.store(values + tl.arange(0, 4 * COUNT), tl.reshape(decoded, (4 * COUNT,)))


def run(what, x, dtype, native=False):
    x = x.to(DEVICE)
    y = torch.empty(x.shape, dtype=dtype, device=DEVICE)
    block = 4096
    grid = (triton.cdiv(x.numel(), block),)
    _map_kernel[grid](x, y, x.numel(), WHAT=what, NATIVE=bool(native), BLOCK=block)
    return y.cpu()


CODES = torch.arange(256, dtype=torch.uint8)


@pytest.fixture(scope="module")
def floats():
    return every_tie()


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


@pytest.mark.parametrize(
    ("form", "pairs"),
    [(1, 1), (2, 1), (2, 2), (3, 1)],
    ids=["e4m3", "float16", "float16 in runs of two pairs", "bfloat16"],
)
def test_words_of_e2m1(form, pairs):
    if form == 1 and 0 in NATIVE and len(NATIVE) == 1:
        pytest.skip("the device has no e4m3")
    # Every pair of codes in one byte, and every code at every place of a word.
    packed = torch.cat([torch.arange(64, dtype=torch.uint8) * 4 + i for i in range(4)])
    for part in packed.view(4, 2, 32):
        values = torch.empty(2, 64, device=DEVICE)
        order = torch.empty(64, dtype=torch.int32, device=DEVICE)
        words = part.contiguous().view(torch.int32).to(DEVICE)
        _words_kernel[(1,)](words, values, order, BYTES=form, PAIRS=pairs)
        want = decode_e2m1(unpack_nibbles(part))
        assert order.cpu().sort().values.tolist() == list(range(64))
        same(values.cpu(), want[:, order.cpu().long()])


def test_words_of_e4m3():
    """Every code in every place of a word, also beside NaN."""
    words = torch.zeros(512, 4, dtype=torch.uint8)
    finite = CODES[(CODES & 127) != 127]
    for place in range(4):
        words[:254, place] = finite.roll(place)
        words[254 + 2 * place, place], words[255 + 2 * place, place] = 127, 255
    values = torch.empty(words.shape, dtype=torch.float16, device=DEVICE)
    packed = words.view(torch.int32).to(DEVICE)
    _e4m3_words_kernel[(1,)](packed, values, COUNT=len(words))
    want = words.view(torch.float8_e4m3fn).double()
    same(values.cpu(), want)
    assert int(want.isnan().sum()) == 8

"""DeepSeek-V4.1's cache records: golden bytes, the quantisers in float64, every stored byte."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from anymla.formats import torch_rows
from anymla.formats.nvfp4 import dequantize_nvfp4, quantize_nvfp4_rows
from anymla.formats.page_layout import (
    INDEX_MXFP4,
    V41_COMPRESSED_NVFP4,
    V41_COMPRESSED_NVFP4_SPLIT,
    V41_LAYOUTS,
    V41_MAIN_FP8,
    V41_MAIN_FP8_SPLIT,
    get_layout,
)
from anymla.formats.torch_rows import decode_rows, encode_rows
from anymla.testing.oracle import rounding
from anymla.testing.oracle.row_formats import ROW_FORMATS, read_entries

# Leading two values of a block that is zero otherwise; scale byte and codes of the three records.
GOLDEN = [
    ((0.0, 0.0), (105, 0x00, 0x00), (0x01, 0x00, 0.0, 0.0), (1, 0x00)),
    ((1.0, -0.5), (119, 0x78, 0xF0), (0x23, 0xD7, 1.03125, -0.515625), (125, 0xC6)),
    ((6.0, 1.0), (121, 0x7C, 0x68), (0x38, 0x27, 6.0, 1.0), (127, 0x27)),
    ((0.1, -0.3), (117, 0x6D, 0xFA), (0x15, 0xF4, 0.1015625, -0.3046875), (123, 0xE3)),
    ((7.0, 2.5), (121, 0x7E, 0x72), (0x39, 0x47, 6.75, 2.25), (128, 0x26)),
    ((3.5, 0.0371), (120, 0x7E, 0x4A), (0x31, 0x07, 3.375, 0.0), (127, 0x06)),
    ((1e-5, -2e-5), (105, 0x62, 0xEA), (0x01, 0x80, 0.0, -0.0), (109, 0xF5)),
    ((3000.0, 10.0), (130, 0x7C, 0x3A), (0x7E, 0x07, 2688.0, 0.0), (136, 0x07)),
]


def coded(layout_id: str, rows: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Values and scales of the reference encoder and of the one of few calls."""
    layout = get_layout(layout_id)
    data, scales = layout.encode(rows)
    assert scales is not None
    fast, fast_scales = torch.zeros_like(data), torch.zeros_like(scales)
    encode_rows(layout, rows, fast, fast_scales, on_host=True)
    looking = torch.zeros_like(data), torch.zeros_like(scales)
    encode_rows(layout, rows, *looking, on_host=False)
    return [(data, scales), (fast, fast_scales), looking]


@pytest.mark.parametrize(("values", "fp8", "nvfp4", "mxfp4"), GOLDEN)
@pytest.mark.parametrize("last", [False, True])
def test_golden_vectors(values, fp8, nvfp4, mxfp4, last):
    for layout_id, block, golden in (
        (V41_MAIN_FP8, 32, fp8),
        (V41_COMPRESSED_NVFP4, 16, nvfp4),
        (INDEX_MXFP4, 32, mxfp4),
    ):
        layout = get_layout(layout_id)
        where = layout.channels // block - 1 if last else 0
        row = torch.zeros(1, layout.channels)
        row[0, where * block : where * block + 2] = torch.tensor(values)
        byte = where * block * layout.data_bytes // layout.channels
        for data, scales in coded(layout_id, row):
            assert scales[0, where] == golden[0]
            if layout_id == V41_MAIN_FP8:
                assert data[0, byte : byte + 2].tolist() == list(golden[1:])
            else:
                assert data[0, byte] == golden[1]
            assert data.count_nonzero() == data[0, byte : byte + 2].count_nonzero()
            others = torch.cat((scales[0, :where], scales[0, where + 1 :]))
            assert set(others.tolist()) == {GOLDEN[0][1 if block == 32 else 2][0]} or (
                layout_id == INDEX_MXFP4
            )
    data, scales = get_layout(V41_COMPRESSED_NVFP4).encode(torch.tensor([[*values, *[0.0] * 510]]))
    got = get_layout(V41_COMPRESSED_NVFP4).decode(data, scales, torch.bfloat16)[0, :2].double()
    want = torch.tensor(nvfp4[2:], dtype=torch.float64)
    assert torch.equal(got, want)
    assert torch.equal(got.signbit(), want.signbit())


def nvfp4_in_float64(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., 16] and scale bytes [...] of bfloat16 blocks, as the formula has them."""
    x = blocks.double()
    amax = x.abs().amax(-1).clamp(min=6 * 2.0**-9)
    scales = rounding.nearest_code(amax / 6, rounding.e4m3_values())
    step = rounding.e4m3_values()[scales].unsqueeze(-1)
    quotient = (x / step).clamp(-6, 6)
    codes = rounding.nearest_code(quotient.abs(), rounding.e2m1_values())
    return codes + 8 * x.signbit(), scales


def every_bfloat16() -> torch.Tensor:
    """All finite magnitudes."""
    return torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def test_nvfp4_scales_of_every_largest_magnitude():
    """Also that the largest value's own code is right wherever the scale was rounded down."""
    blocks = torch.zeros(0x7F80, 16, dtype=torch.bfloat16)
    blocks[:, 3] = every_bfloat16()
    codes, scales = nvfp4_in_float64(blocks)
    rows = blocks.view(-1, 512)
    for data, stored in coded(V41_COMPRESSED_NVFP4, rows):
        assert torch.equal(stored.flatten().long(), scales)
        high = (data.view(-1, 8)[:, 1] >> 4).long()
        assert torch.equal(high, codes[:, 3])
    assert scales.min() == 1
    assert scales.max() == 0x7E


def test_nvfp4_codes_on_and_beside_every_tie():
    """All scales, all midpoints of e2m1, the neighbours of each in bfloat16, both signs."""
    scales = rounding.e4m3_values()[1:]
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    products = (scales.unsqueeze(1) * ties).bfloat16()
    assert torch.equal(products.double(), scales.unsqueeze(1) * ties)
    bits = products.view(torch.int16)
    blocks = torch.zeros(len(scales) + 2, 2, 16, dtype=torch.bfloat16)
    for sign in (0, 1):
        each = torch.cat([(bits + step).view(torch.bfloat16) for step in (-1, 0)], 1)
        more = torch.cat(((bits + 1).view(torch.bfloat16), torch.zeros(len(scales), 8)), 1)
        for place, values in enumerate((each, more)):
            held = values[:, :15].bfloat16() * (-1 if sign else 1)
            blocks[: len(scales), place, 1 : 1 + held.shape[1]] = held
            blocks[: len(scales), place, 0] = (6 * scales).bfloat16()
        codes, expected = nvfp4_in_float64(blocks.view(-1, 16))
        assert torch.equal(expected[: 2 * len(scales) : 2], torch.arange(1, 127))
        for data, stored in coded(V41_COMPRESSED_NVFP4, blocks.view(-1, 512)):
            nibbles = torch.stack((data & 15, data >> 4), -1).view(-1, 16).long()
            assert torch.equal(stored.flatten().long(), expected)
            assert torch.equal(nibbles, codes)


def test_nvfp4_of_random_blocks():
    spread = torch.exp2(torch.randint(-14, 13, (4096, 1)).float())
    blocks = (torch.randn(4096, 16) * spread).bfloat16()
    blocks[::7] = -0.0
    codes, scales = nvfp4_in_float64(blocks)
    for data, stored in coded(V41_COMPRESSED_NVFP4, blocks.view(-1, 512)):
        nibbles = torch.stack((data & 15, data >> 4), -1).view(-1, 16).long()
        assert torch.equal(nibbles, codes)
        assert torch.equal(stored.flatten().long(), scales)


def test_nvfp4_of_float64_is_rounded_once():
    """Without the cast to bfloat16 of cache rows: a value just above a tie goes up."""
    x = torch.zeros(1, 16, dtype=torch.float64)
    x[0, :2] = torch.tensor([6.0, 2.5 + 1e-12], dtype=torch.float64)
    packed, scales = quantize_nvfp4_rows(x)
    assert (scales.item(), packed[0, 0].item()) == (0x38, 0x57)
    with pytest.raises(ValueError, match="multiple of 16, got 24"):
        quantize_nvfp4_rows(torch.zeros(1, 24))


def test_fp8_of_random_blocks():
    spread = torch.exp2(torch.randint(-24, 100, (2048, 1)).float())
    blocks = (torch.randn(2048, 32) * spread).bfloat16()
    blocks[::7, ::3] = -0.0
    x = blocks.double()
    exponent = rounding.scale_exponent(x.abs().amax(-1).clamp(min=1e-4), 448.0)
    codes = rounding.nearest_code(
        (x / torch.exp2(exponent.double()).unsqueeze(-1)).abs(), rounding.e4m3_values()
    )
    codes = codes + 128 * x.signbit()
    for data, scales in coded(V41_MAIN_FP8, blocks.view(-1, 512)):
        assert torch.equal(data.view(-1, 32).long(), codes)
        assert torch.equal(scales.flatten().long(), exponent + 127)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_scale_byte_times_every_code(dtype):
    """Zeros, subnormals, NaN and negative scales: readers take what a page holds."""
    scales = torch.arange(256).to(torch.uint8).view(8, 32)
    data = torch.arange(256).to(torch.uint8).repeat(8, 1)
    data = torch.stack([data.roll(step, 1) for step in range(256)]).view(-1, 256)
    scales = scales.repeat(256, 1)
    step = rounding.decode_e4m3(scales).unsqueeze(-1)
    want = (rounding.decode_e2m1_pairs(data).view(-1, 32, 16) * step).flatten(1)
    layout = get_layout(V41_COMPRESSED_NVFP4)
    fast = torch.empty(len(data), 512, dtype=dtype)
    decode_rows(layout, data, scales, fast)
    for got in (layout.decode(data, scales, dtype), fast):
        assert got.dtype == dtype
        assert torch.equal(got.double().nan_to_num(777.0), want.nan_to_num(777.0))
        known = ~want.isnan()
        assert torch.equal(got.signbit()[known], want.signbit()[known])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_fp8_scale_byte_times_every_code(dtype):
    scales = torch.arange(256).to(torch.uint8).view(16, 16)
    codes = torch.arange(256).to(torch.uint8).view(8, 32)
    data = torch.stack([codes.roll(step, 0).repeat(2, 1).flatten() for step in range(8)])
    data, scales = data.repeat(16, 1), scales.repeat_interleave(8, 0)
    step = rounding.decode_ue8m0(scales).unsqueeze(-1)
    exact = (rounding.decode_e4m3(data).view(-1, 16, 32) * step).flatten(1)
    want = exact.to(dtype).double()
    layout = get_layout(V41_MAIN_FP8)
    got = layout.decode(data, scales, dtype).double()
    assert torch.equal(got.nan_to_num(777.0, 888.0, -888.0), want.nan_to_num(777.0, 888.0, -888.0))
    fast = torch.empty(len(data), 512, dtype=dtype)
    decode_rows(layout, data, scales, fast)
    got = fast.double()
    # Subnormal results of torch's product may differ in no other way than being rounded once.
    assert torch.equal(got.nan_to_num(777.0, 888.0, -888.0), want.nan_to_num(777.0, 888.0, -888.0))


def test_rows_that_are_not_finite():
    rows = torch.zeros(3, 512)
    rows[0, 5], rows[1, 5], rows[2, 5] = torch.inf, -torch.inf, torch.nan
    rows[:, 6] = 1000.0
    for data, scales in coded(V41_COMPRESSED_NVFP4, rows):
        assert scales[:, 0].tolist() == [0x7F] * 3
        assert scales[:, 1:].eq(1).all()
        assert (data[:, 2] >> 4).tolist() == [7, 15, 7]
        assert (data[:, 3] & 15).tolist() == [4] * 3  # 1000 / 448 = 2.23
        decoded = get_layout(V41_COMPRESSED_NVFP4).decode(data, scales, torch.float32)
        assert decoded[:, :16].isnan().all()
        assert decoded[:, 16:].eq(0).all()


@pytest.mark.parametrize("layout_id", V41_LAYOUTS)
def test_two_entries_of_a_page(layout_id):
    """Where each byte lies, written down by hand."""
    layout, rows = get_layout(layout_id), torch.randn(2, 512)
    cache = layout.allocate(2, 2)
    layout.write(cache, torch.tensor([2, 3]), rows)
    page = cache.as_strided((2, cache.stride(0)), (cache.stride(0), 1))[1]
    data, scales = layout.encode(rows)
    if layout_id in (V41_MAIN_FP8, V41_COMPRESSED_NVFP4):
        want = torch.cat((data[0], scales[0], data[1], scales[1]))
        assert torch.equal(cache[1, 1], want[layout.entry_bytes :])
    else:
        want = torch.cat((data[0], data[1], scales[0], scales[1]))
    assert torch.equal(page[: len(want)], want)
    assert not page[len(want) :].any()
    for each, slots in ((cache, torch.tensor([2, 3])), (cache[1:], torch.tensor([0, 1]))):
        stored = read_entries(each, slots, layout_id)
        assert torch.equal(stored[0], data)
        assert torch.equal(stored[1], scales)


@pytest.mark.parametrize(
    ("one", "other"),
    [(V41_MAIN_FP8, V41_MAIN_FP8_SPLIT), (V41_COMPRESSED_NVFP4, V41_COMPRESSED_NVFP4_SPLIT)],
)
def test_a_page_read_in_the_other_arrangement_is_other_rows(one, other):
    layout, wrong = get_layout(one), get_layout(other)
    assert (layout.row_elements, layout.page_stride_bytes(64)) == (
        wrong.row_elements,
        wrong.page_stride_bytes(64),
    )
    cache = layout.allocate(1, 64)
    slots = torch.arange(64)
    layout.write(cache, slots, torch.randn(64, 512))
    right, misread = (each.read(cache, slots, torch.float32) for each in (layout, wrong))
    assert not torch.equal(right, misread)
    assert (right != misread).any(1).all()


@pytest.mark.parametrize("layout_id", V41_LAYOUTS)
def test_the_oracle_agrees(layout_id):
    row_format, layout = ROW_FORMATS[layout_id], get_layout(layout_id)
    rows = (torch.randn(64, 512) * torch.exp2(torch.randint(-12, 10, (64, 1)).float())).bfloat16()
    data, scales = layout.encode(rows)
    decoded = row_format.decode(data, scales)
    assert torch.equal(decoded, layout.decode(data, scales, torch.float64))
    assert torch.equal(decoded, row_format.round(rows.double()))
    assert row_format.explains(data, scales, rows.double(), rows.double()).all()
    spoiled = scales.clone()
    spoiled[:, 3] += 1
    block = slice(3 * row_format.block, 4 * row_format.block)
    assert not row_format.explains(data, spoiled, rows.double(), rows.double())[:, block].any()


def test_nvfp4_without_a_global_scale_is_that_with_one_of_one():
    packed = torch.arange(256).to(torch.uint8).view(2, 128)
    scales = torch.arange(32).to(torch.uint8).view(2, 16)
    with_one = dequantize_nvfp4(packed, scales, torch.ones(1))
    assert torch.equal(dequantize_nvfp4(packed, scales), with_one)


@pytest.mark.parametrize("layout_id", [V41_COMPRESSED_NVFP4, INDEX_MXFP4])
def test_a_device_waits_for_nothing_of_the_host(layout_id):
    """Rows of FP4 are encoded without a copy from the host's memory."""
    copied = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            tensors = [each for each in args if isinstance(each, torch.Tensor) and each.ndim]
            if any(each.is_cpu for each in tensors) and made.is_meta:
                copied.append(function)
            return made

    torch_rows._kept_e2m1_bounds.cache_clear()
    layout = get_layout(layout_id)
    rows = torch.empty(3, layout.channels, device="meta")
    data = torch.empty(3, layout.data_bytes, dtype=torch.uint8, device="meta")
    scales = torch.empty(3, layout.scale_bytes, dtype=torch.uint8, device="meta")
    with Watched():
        encode_rows(layout, rows, data, scales, on_host=False)
    torch_rows._kept_e2m1_bounds.cache_clear()
    assert not copied

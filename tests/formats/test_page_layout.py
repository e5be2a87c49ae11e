"""Page layouts: golden bytes, planes, strides, hostile slots, and dumps."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anymla.formats.cache_dump import CacheDumpError, load_cache, save_cache
from anymla.formats.page_layout import (
    INDEX_FP8,
    INDEX_MXFP4,
    MAIN_FP8,
    V32_FP8,
    V41_COMPRESSED_NVFP4,
    V41_COMPRESSED_NVFP4_SPLIT,
    V41_LAYOUTS,
    V41_MAIN_FP8,
    V41_MAIN_FP8_SPLIT,
    get_layout,
)
from anymla.formats.state_layout import allocate_states, state_page_stride_bytes

LAYOUTS = [
    MAIN_FP8,
    V32_FP8,
    *V41_LAYOUTS,
    INDEX_FP8,
    INDEX_MXFP4,
    "rows_bf16_512",
    "rows_fp32_512",
    "rows_bf16_128",
    "rows_fp32_128",
]

# Leading two values of a block, scale byte, codes, decoded values (DeepSeek-V4's quantiser).
GOLDEN = [
    ((0.0, 0.0), 105, (0x00, 0x00), (0.0, 0.0)),
    ((1.0, -0.5), 119, (0x78, 0xF0), (1.0, -0.5)),
    ((448.0, 1.0), 127, (0x7E, 0x38), (448.0, 1.0)),
    ((449.0, 3.0), 127, (0x7E, 0x44), (448.0, 3.0)),
    ((0.1, -0.3), 117, (0x6D, 0xFA), (0.1015625, -0.3125)),
    ((1e-5, -2e-5), 105, (0x62, 0xEA), (9.5367431640625e-06, -1.9073486328125e-05)),
    ((3.5, 0.0371), 120, (0x7E, 0x4A), (3.5, 0.0390625)),
]


@pytest.mark.parametrize(("values", "scale", "codes", "decoded"), GOLDEN)
@pytest.mark.parametrize("block", [0, 6])
def test_golden_main_record(values, scale, codes, decoded, block):
    layout = get_layout(MAIN_FP8)
    row = torch.zeros(1, 512)
    row[0, 64 * block : 64 * block + 2] = torch.tensor(values)
    data, scales = layout.encode(row)
    assert scales[0, block].item() == scale
    assert tuple(data[0, 64 * block : 64 * block + 2].tolist()) == codes
    assert scales[0, 7].item() == 0
    got = layout.decode(data, scales, torch.float64)
    assert tuple(got[0, 64 * block : 64 * block + 2].tolist()) == decoded
    assert got.count_nonzero() == sum(value != 0 for value in decoded)


def test_main_record_keeps_rope_channels_bit_for_bit():
    layout = get_layout(MAIN_FP8)
    rows = torch.randn(5, 512).bfloat16()
    data, scales = layout.encode(rows)
    assert torch.equal(layout.decode(data, scales, torch.bfloat16)[:, 448:], rows[:, 448:])
    little_endian = rows[0, 448:].view(torch.int16)[0].item() & 0xFFFF
    assert data[0, 448].item() + 256 * data[0, 449].item() == little_endian


def test_main_page_is_split_into_planes():
    layout = get_layout(MAIN_FP8)
    cache = layout.allocate(3, 64)
    assert cache.shape == (3, 64, 584)
    assert cache.stride() == (37440, 584, 1)
    rows = torch.randn(1, 512).bfloat16()
    layout.write(cache, torch.tensor([64 + 5]), rows)
    page = cache.as_strided((3, 37440), (37440, 1))[1]
    data, scales = layout.encode(rows)
    assert torch.equal(page[5 * 576 : 6 * 576], data[0])
    assert torch.equal(page[64 * 576 + 5 * 8 : 64 * 576 + 6 * 8], scales[0])
    assert page.count_nonzero() == data.count_nonzero() + scales.count_nonzero()


@pytest.mark.parametrize(("values", "scale", "codes", "decoded"), GOLDEN)
@pytest.mark.parametrize("block", [0, 3])
def test_golden_v32_record(values, scale, codes, decoded, block):
    layout = get_layout(V32_FP8)
    row = torch.zeros(1, 576)
    row[0, 128 * block : 128 * block + 2] = torch.tensor(values)
    row[0, 512], row[0, 575] = 1.0, -2.0
    data, scales = layout.encode(row)
    assert scales is None
    assert data.shape == (1, 656)
    stored = data[0, 512 + 4 * block : 516 + 4 * block]
    # A power of two in float32: the exponent field alone.
    assert stored.view(torch.int32).item() == scale << 23
    assert tuple(data[0, 128 * block : 128 * block + 2].tolist()) == codes
    assert data[0, 528:530].tolist() == [0x80, 0x3F]
    assert data[0, 654:656].tolist() == [0x00, 0xC0]
    got = layout.decode(data, None, torch.float64)
    assert tuple(got[0, 128 * block : 128 * block + 2].tolist()) == decoded
    assert got[0, [512, 575]].tolist() == [1.0, -2.0]
    assert got.count_nonzero() == 2 + sum(value != 0 for value in decoded)


def test_v32_rows_lie_side_by_side_and_may_have_any_scale():
    layout = get_layout(V32_FP8)
    cache = layout.allocate(2, 64)
    assert cache.shape == (2, 64, 656)
    assert cache.stride() == (64 * 656, 656, 1)
    rows = torch.randn(1, 576)
    layout.write(cache, torch.tensor([64 + 5]), rows)
    assert torch.equal(cache[1, 5], layout.encode(rows)[0][0])
    # Other writers divide by the largest magnitude over 448, whatever that is.
    cache[1, 5, 512:528] = torch.tensor([0.3, 1e-20, 3e5, 0.0]).view(torch.uint8)
    codes = layout.encode(rows)[0][:, :512].view(torch.float8_e4m3fn).double().view(4, 128)
    want = codes * torch.tensor([0.3, 1e-20, 3e5, 0.0]).double().unsqueeze(1)
    got = layout.read(cache, torch.tensor([64 + 5]), torch.float64)
    assert torch.equal(got[0, :512], want.flatten())


def test_index_pages():
    fp8 = get_layout(INDEX_FP8)
    assert fp8.page_stride_bytes(64) == 8640
    rows = torch.zeros(1, 128)
    rows[0, 3] = 3.5
    cache = fp8.allocate(2, 64)
    fp8.write(cache, torch.tensor([65]), rows)
    page = cache.as_strided((2, 8640), (8640, 1))[1]
    assert page[128 + 3].item() == 0x7E
    assert page[64 * 128 + 4 : 64 * 128 + 8].view(torch.float32).item() == 2.0**-7
    fp4 = get_layout(INDEX_MXFP4)
    assert fp4.page_stride_bytes(64) == 4608
    cache = fp4.allocate(2, 64)
    fp4.write(cache, torch.tensor([65]), rows)
    page = cache.as_strided((2, 4608), (4608, 1))[1]
    assert page[64 + 1].item() >> 4 == 6  # scale 2^0; 3.5 is a tie of 3 and 4, whose code is even
    assert page[64 * 64 + 4].item() == 127


@pytest.mark.parametrize(
    ("layout_id", "entries", "stride"),
    [
        (MAIN_FP8, 64, 37440),
        (MAIN_FP8, 2, 1728),
        (V32_FP8, 64, 41984),
        (V41_MAIN_FP8, 32, 16896),
        (V41_MAIN_FP8_SPLIT, 64, 33792),
        (V41_MAIN_FP8, 128, 67584),
        (V41_COMPRESSED_NVFP4, 64, 18432),
        (V41_COMPRESSED_NVFP4_SPLIT, 128, 36864),
        (INDEX_FP8, 64, 8640),
        (INDEX_MXFP4, 64, 4608),
        (INDEX_MXFP4, 128, 8704),
        (INDEX_FP8, 128, 17280),
    ],
)
def test_page_strides(layout_id, entries, stride):
    assert get_layout(layout_id).page_stride_bytes(entries) == stride


def test_state_pages():
    assert state_page_stride_bytes(4, 1024) == 32832
    assert state_page_stride_bytes(4, 256) == 8640
    assert state_page_stride_bytes(8, 512) == 32832
    states = allocate_states(3, 4, 256, fill=255)
    assert states.shape == (3, 4, 512)
    assert states.stride() == (2160, 512, 1)
    assert states.isnan().all()


@pytest.mark.parametrize("layout_id", LAYOUTS)
@given(
    pages=st.integers(0, 4),
    entries=st.sampled_from([1, 2, 3, 64]),
    padding=st.sampled_from([0, 16, 584 * 4]),
    hostile=st.lists(st.sampled_from([-1, -(2**31), 2**31 - 1, 2**40, 9999]), max_size=4),
    seed=st.integers(0, 2**31 - 1),
)
def test_round_trip_over_strided_pages(layout_id, pages, entries, padding, hostile, seed):
    layout = get_layout(layout_id)
    generator = torch.Generator().manual_seed(seed)
    stride = layout.page_stride_bytes(entries) + padding
    storage = torch.full((pages * stride,), 0xFF, dtype=torch.uint8)
    cache = storage.view(layout.dtype).as_strided(
        (pages, entries, layout.row_elements),
        (stride // layout.dtype.itemsize, layout.row_elements, 1),
    )
    slots = torch.randperm(pages * entries, generator=generator)[: pages * entries // 2 + 1]
    rows = torch.randn(len(slots) + len(hostile), layout.channels, generator=generator)
    everywhere = torch.cat((slots, torch.tensor(hostile, dtype=torch.int64)))
    layout.write(cache, everywhere, rows)
    got = layout.read(cache, everywhere, torch.float32)
    data, scales = layout.encode(rows[: len(slots)])
    assert torch.equal(got[: len(slots)], layout.decode(data, scales, torch.float32))
    assert got[len(slots) :].count_nonzero() == 0
    # Nothing but the written entries changed.
    untouched = storage.view(pages, stride)[:, entries * layout.entry_bytes :]
    assert (untouched == 0xFF).all()
    written = len(slots) * layout.entry_bytes
    assert (storage != 0xFF).sum() <= written


def test_layouts_refuse_what_does_not_fit():
    layout = get_layout(MAIN_FP8)
    with pytest.raises(TypeError, match=r"op: cache must be torch.uint8 for layout v4_main_fp8"):
        layout.check(torch.zeros(2, 4, 584), "op", "cache")
    with pytest.raises(ValueError, match=r"must be \[P, B, 584\].*got \[2, 4, 580\]"):
        layout.check(torch.zeros(2, 4, 580, dtype=torch.uint8), "op", "cache")
    wide = torch.zeros(2, 4, 600, dtype=torch.uint8)
    with pytest.raises(ValueError, match="inner strides"):
        layout.check(wide[:, :, :584], "op", "cache")
    with pytest.raises(ValueError, match=r"unknown cache layout 'v9'.*v4_main_fp8"):
        get_layout("v9")
    with pytest.raises(ValueError, match="entries >= 1"):
        layout.allocate(1, 0)


@pytest.mark.parametrize("layout_id", LAYOUTS)
def test_dump_round_trip(layout_id, tmp_path):
    layout = get_layout(layout_id)
    cache = layout.allocate(3, 4)
    layout.write(cache, torch.arange(12), torch.randn(12, layout.channels))
    path = tmp_path / "page.safetensors"
    save_cache(path, cache, layout_id, {"layer": 2})
    got, got_id, meta = load_cache(path)
    assert got_id == layout_id
    assert meta == {"layer": 2}
    slots = torch.arange(12)
    assert torch.equal(
        layout.read(got, slots, torch.float64), layout.read(cache, slots, torch.float64)
    )


def test_dump_errors(tmp_path):
    with pytest.raises(CacheDumpError, match=r"absent: cannot be read"):
        load_cache(tmp_path / "absent")
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"x" * 100)
    with pytest.raises(CacheDumpError, match=r"garbage: cannot be read"):
        load_cache(garbage)
    layout = get_layout(MAIN_FP8)
    good = tmp_path / "good"
    save_cache(good, layout.allocate(1, 2), MAIN_FP8)
    truncated = tmp_path / "truncated"
    truncated.write_bytes(good.read_bytes()[:-10])
    with pytest.raises(CacheDumpError, match=r"truncated: cannot be read"):
        load_cache(truncated)
    from safetensors.torch import save_file

    other = tmp_path / "other"
    save_file({"pages": torch.zeros(1, 2)}, other)
    with pytest.raises(CacheDumpError, match=r"other: not a cache dump"):
        load_cache(other)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"meta": "["}, "bad header: not JSON"),
        ({"meta": "[1]"}, "bad header: not a JSON object, but a list"),
        ({"meta": "null"}, "bad header: not a JSON object, but null"),
        ({"meta": "[" * 100_000}, "bad header: nested more than 64 deep"),
        ({"meta": '{"rows": 1e400}'}, "bad header: the number 1e400 is too large"),
        ({"entries_per_page": "1" + "0" * 5000}, "bad header: "),
        ({"entries_per_page": "1" + "0" * 30}, "pages of 1728 bytes cannot hold 10"),
        ({"entries_per_page": "0"}, "bad pages"),
        ({"entries_per_page": "-2"}, "bad pages"),
        ({"layout_id": "nonsense"}, "bad header: unknown cache layout 'nonsense'"),
    ],
)
def test_dump_with_a_hostile_header(tmp_path, changed, message):
    from safetensors.torch import save_file

    header = {
        "format": "anymla-cache",
        "version": "1",
        "layout_id": MAIN_FP8,
        "entries_per_page": "2",
        "meta": "{}",
    }
    path = tmp_path / "dump"
    pages = torch.zeros(1, 1728, dtype=torch.uint8)
    save_file({"pages": pages}, path, metadata=header)
    assert load_cache(path)[2] == {}
    save_file({"pages": pages}, path, metadata=header | changed)
    with pytest.raises(CacheDumpError, match=rf"dump: {message}") as caught:
        load_cache(path)
    assert "\n" not in str(caught.value)

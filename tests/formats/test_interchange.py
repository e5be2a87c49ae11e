import itertools

import pytest
import torch

from anymla.formats.cache_check import check_cache_bytes
from anymla.formats.cache_dump import CacheDumpError, load_cache, read_page, save_cache
from anymla.formats.convert import convert_cache
from anymla.formats.e4m3 import decode_e4m3, decode_e4m3fnuz
from anymla.formats.interchange import (
    DUMP_LAYOUT_IDS,
    INDEX_FP8_FNUZ,
    MAIN_FP8_FNUZ,
    MAIN_FP8_ROWS,
    FnuzMainLayout,
    dump_layout,
)
from anymla.formats.page_layout import (
    INDEX_FP8,
    INDEX_MXFP4,
    LAYOUT_IDS,
    MAIN_FP8,
    ROWS_BF16_128,
    ROWS_BF16_512,
    ROWS_FP32_512,
    V41_COMPRESSED_NVFP4,
    V41_COMPRESSED_NVFP4_SPLIT,
    V41_MAIN_FP8,
    V41_MAIN_FP8_SPLIT,
    get_layout,
)
from anymla.ops.kv_cache import quantize_and_insert_k_cache

MAIN = (MAIN_FP8, MAIN_FP8_ROWS, MAIN_FP8_FNUZ, ROWS_BF16_512, ROWS_FP32_512)
V41 = (V41_MAIN_FP8, V41_MAIN_FP8_SPLIT, V41_COMPRESSED_NVFP4, V41_COMPRESSED_NVFP4_SPLIT)
INDEX = (INDEX_FP8, INDEX_FP8_FNUZ, INDEX_MXFP4, ROWS_BF16_128)


def filled(layout_id: str, rows: int = 100, entries: int = 16) -> torch.Tensor:
    layout = dump_layout(layout_id)
    cache = layout.allocate(-(-rows // entries), entries)
    values = torch.randn(rows, layout.channels) * torch.exp2(12 * torch.rand(rows, 1) - 6)
    layout.write(cache, torch.arange(rows), values)
    return cache


def rows_of(cache: torch.Tensor, layout_id: str) -> torch.Tensor:
    slots = torch.arange(cache.shape[0] * cache.shape[1])
    return dump_layout(layout_id).read(cache, slots, torch.float64)


def test_golden_bytes_of_an_entry() -> None:
    row = torch.zeros(1, 512)
    row[0, 0], row[0, 1], row[0, 2], row[0, 448] = 448.0, -0.875, -0.0, 1.0
    data, scales = dump_layout(MAIN_FP8).encode(row)
    assert (data[0, :3].tolist(), scales[0, :2].tolist()) == ([0x7E, 0xB6, 0x80], [127, 105])
    cache = dump_layout(MAIN_FP8_ROWS).allocate(1, 1)
    dump_layout(MAIN_FP8_ROWS).write(cache, torch.zeros(1, dtype=torch.int64), row)
    assert torch.equal(cache[0], torch.cat((data, scales), 1))
    # Half of the value for the same code, so twice the scale; there is no -0.
    data, scales = dump_layout(MAIN_FP8_FNUZ).encode(row)
    assert (data[0, :3].tolist(), scales[0, :2].tolist()) == ([0x7E, 0xB6, 0], [128, 106])
    assert scales[0, 7] == 0
    codes, scale = dump_layout(INDEX_FP8_FNUZ).encode(torch.full((1, 128), 448.0))
    assert (codes[0, 0].item(), scale.view(torch.float32).item()) == (0x7E, 2.0)


def test_rows_of_fnuz_codes_are_main_rows_of_the_same_values() -> None:
    rows = torch.randn(5, 512) * torch.logspace(-6, 3, 5).unsqueeze(1)
    layout = dump_layout(MAIN_FP8_FNUZ)
    assert isinstance(layout, FnuzMainLayout)
    data, scales = layout.encode(rows)
    data[4, 7], data[4, 8] = 0x80, 0x7F  # NaN, and 240, which no block of vLLM's holds
    got = dump_layout(MAIN_FP8).decode(*layout.to_base(data, scales), torch.float64)
    want = layout.decode(data, scales, torch.float64)
    assert bool(got[4, 7:9].isnan().all())
    got[4, 7:9] = want[4, 7:9] = 0
    assert torch.equal(got, want)


def test_pages_of_whole_entries() -> None:
    layout, rows = dump_layout(MAIN_FP8_ROWS), torch.randn(3, 512)
    cache = layout.allocate(1, 3)
    layout.write(cache, torch.arange(3), rows)
    assert layout.page_stride_bytes(3) == -(-3 * 584 // 16) * 16
    assert torch.equal(cache[0], torch.cat(dump_layout(MAIN_FP8).encode(rows), 1))


def test_every_fnuz_code_counts() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(1, 2)[:, :448]
    data = torch.cat((codes, torch.zeros(1, 128, dtype=torch.uint8)), 1)
    scales = torch.full((1, 8), 128, dtype=torch.uint8)
    got = dump_layout(MAIN_FP8_FNUZ).decode(data, scales, torch.float64)[0, :448]
    want = decode_e4m3fnuz(codes[0], torch.float64) * 2
    assert torch.equal(got.nan_to_num(777.0), want.nan_to_num(777.0))
    # All of OCP's finite values are among them, at twice the scale.
    assert set(decode_e4m3(codes[0]).nan_to_num(0).tolist()) <= set(got.nan_to_num(0).tolist())


def test_operations_do_not_take_them() -> None:
    assert set(DUMP_LAYOUT_IDS) - set(LAYOUT_IDS) == {MAIN_FP8_ROWS, MAIN_FP8_FNUZ, INDEX_FP8_FNUZ}
    rows, slots = torch.zeros(1, 512), torch.zeros(1, dtype=torch.int64)
    for layout_id in (MAIN_FP8_ROWS, MAIN_FP8_FNUZ):
        cache = dump_layout(layout_id).allocate(1, 2)
        with pytest.raises(ValueError, match=f"unknown cache layout '{layout_id}'"):
            quantize_and_insert_k_cache(rows, cache, slots, layout=layout_id)
    with pytest.raises(ValueError, match=r"unknown cache layout 'v5'; known: .*fnuz"):
        dump_layout("v5")


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(MAIN, 2)))
def test_main_caches_convert_without_loss(source: str, target: str) -> None:
    """What FP8 rows decode to is in every other layout; plain rows are the source's here."""
    cache = filled(source)
    if not source.startswith("v4"):  # only values that FP8 can hold can become FP8 without loss
        rows = rows_of(filled(MAIN_FP8), MAIN_FP8)
        dump_layout(source).write(cache, torch.arange(len(rows)), rows.float())
    result, loss = convert_cache(cache, source, target, rows=100)
    assert (loss.values, loss.changed, loss.largest) == (100 * 512, 0, 0.0)
    assert torch.equal(rows_of(result, target)[:100], rows_of(cache, source)[:100])
    assert rows_of(result, target)[100:].eq(0).all()
    assert result.stride(0) * result.element_size() == dump_layout(target).page_stride_bytes(16)


def test_fp8_there_and_back_is_the_same_bytes() -> None:
    cache = filled(MAIN_FP8)
    for other in (MAIN_FP8_ROWS, MAIN_FP8_FNUZ, ROWS_BF16_512):
        there, _ = convert_cache(cache, MAIN_FP8, other, rows=112)
        back, _ = convert_cache(there, other, MAIN_FP8, rows=112)
        assert torch.equal(rows_of(back, MAIN_FP8), rows_of(cache, MAIN_FP8))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (V41_MAIN_FP8, V41_MAIN_FP8_SPLIT),
        (V41_MAIN_FP8_SPLIT, V41_MAIN_FP8),
        (V41_COMPRESSED_NVFP4, V41_COMPRESSED_NVFP4_SPLIT),
        (V41_COMPRESSED_NVFP4_SPLIT, V41_COMPRESSED_NVFP4),
    ],
)
def test_arrangements_convert_into_each_other_byte_by_byte(source: str, target: str) -> None:
    """Also where bytes are such as other quantisers write: nothing is coded again."""
    cache = filled(source)
    result, loss = convert_cache(cache, source, target, rows=100)
    assert (loss.changed, loss.largest) == (0, 0.0)
    before, after = dump_layout(source).planes(cache), dump_layout(target).planes(result)
    for plane, copy in zip(before, after, strict=True):
        assert torch.equal(plane.flatten(0, 1)[:100], copy.flatten(0, 1)[:100])


@pytest.mark.parametrize("source", V41)
def test_v41_rows_become_plain_rows_without_loss_and_fp8_ones_with_some(source: str) -> None:
    cache = filled(source)
    result, loss = convert_cache(cache, source, ROWS_BF16_512, rows=100)
    assert loss.changed == 0
    assert torch.equal(rows_of(result, ROWS_BF16_512)[:100], rows_of(cache, source)[:100])
    # 16 channels a scale, and scales that are no powers of two, cannot all be kept.
    other, loss = convert_cache(cache, source, MAIN_FP8, rows=100)
    changed = (rows_of(other, MAIN_FP8) != rows_of(cache, source))[:100].sum()
    assert loss.changed == changed
    _, loss = convert_cache(result, ROWS_BF16_512, source, rows=100)
    assert loss.changed == 0 or source in V41[2:]


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(INDEX, 2)))
def test_index_caches_convert_and_say_what_it_cost(source: str, target: str) -> None:
    cache = filled(source)
    result, loss = convert_cache(cache, source, target, rows=100)
    before, after = rows_of(cache, source)[:100], rows_of(result, target)[:100]
    assert loss.changed == int((before != after).sum())
    assert loss.largest == float((before - after).abs().max())
    # bfloat16 needs more than either code; MXFP4's values fit the others, theirs not MXFP4.
    lossy = target == INDEX_MXFP4 or (source == ROWS_BF16_128)
    assert (loss.changed > 0) == lossy


def test_nan_stays_nan() -> None:
    cache = get_layout(ROWS_BF16_512).allocate(1, 4)
    cache[0, 2, 5] = torch.nan
    result, loss = convert_cache(cache, ROWS_BF16_512, MAIN_FP8_FNUZ, rows=4)
    assert rows_of(result, MAIN_FP8_FNUZ)[2, 5].isnan()
    assert loss.changed == 0


def test_rows_of_other_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="512 channels and v4_index_fp8 of 128"):
        convert_cache(filled(MAIN_FP8), MAIN_FP8, INDEX_FP8, rows=1)
    with pytest.raises(ValueError, match=r"rows must be within 0\.\.112"):
        convert_cache(filled(MAIN_FP8), MAIN_FP8, ROWS_BF16_512, rows=113)


@pytest.mark.parametrize("layout_id", DUMP_LAYOUT_IDS)
def test_dumps_of_every_layout(tmp_path, layout_id: str) -> None:
    cache = filled(layout_id, rows=20, entries=7)
    save_cache(tmp_path / "dump", cache, layout_id)
    loaded, found, _ = load_cache(tmp_path / "dump")
    assert found == layout_id
    assert torch.equal(rows_of(loaded, layout_id), rows_of(cache, layout_id))
    assert [file.name for file in tmp_path.iterdir()] == ["dump"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch) -> None:
    path = tmp_path / "dump"
    save_cache(path, filled(MAIN_FP8), MAIN_FP8)
    before = path.read_bytes()

    def full(tensors, name, metadata) -> None:
        name.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("anymla.formats.cache_dump.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_cache(path, filled(INDEX_FP8), INDEX_FP8)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["dump"]


def test_bare_bytes_of_a_page(tmp_path) -> None:
    cache = filled(MAIN_FP8, rows=16)
    path = tmp_path / "page.bin"
    path.write_bytes(bytes(cache.untyped_storage()))
    assert torch.equal(rows_of(read_page(path, MAIN_FP8, 16), MAIN_FP8), rows_of(cache, MAIN_FP8))
    path.write_bytes(bytes(cache.untyped_storage())[: 16 * 584 - 1])
    with pytest.raises(CacheDumpError, match=r"9343 bytes, but 16 entries of .* take 9344"):
        read_page(path, MAIN_FP8, 16)
    with pytest.raises(CacheDumpError, match="cannot be read"):
        read_page(tmp_path / "none", MAIN_FP8, 16)


def test_a_page_without_end(tmp_path) -> None:
    path = tmp_path / "page.bin"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CacheDumpError, match=r"cannot be a page: longer than 100000000 bytes"):
        read_page(path, MAIN_FP8, 16)


def problems(cache: torch.Tensor, layout_id: str, rows: int) -> dict[str, tuple[int, int, bool]]:
    found = check_cache_bytes(cache, dump_layout(layout_id), rows)
    return {each.kind: (each.count, each.first, each.harmless) for each in found}


@pytest.mark.parametrize("layout_id", DUMP_LAYOUT_IDS)
def test_what_the_codec_writes_is_clean(layout_id: str) -> None:
    cache, layout = filled(layout_id), dump_layout(layout_id)
    layout.write(cache, torch.tensor([5]), torch.zeros(1, layout.channels))
    assert problems(cache, layout_id, rows=100) == {}


def test_problems_of_a_main_page() -> None:
    cache = filled(MAIN_FP8, rows=32)
    data, scales = get_layout(MAIN_FP8).planes(cache)
    data[0, 3, 17] = 0x7F
    scales[0, 9, 2] = 3
    scales[1, 2, 7] = 9
    data[1, 15, 0] = 1
    page = cache.untyped_storage()
    page[16 * 584 + 5] = 77
    found = problems(cache, MAIN_FP8, rows=31)
    assert found.pop("loose scale", None) is None
    assert found == {
        "NaN": (1, 3, False),
        "scale": (1, 9, False),
        "padding": (1, 18, False),
        "stale": (1, 31, True),
        "page padding": (1, 5, True),
    }


@pytest.mark.parametrize("layout_id", [MAIN_FP8, MAIN_FP8_ROWS, MAIN_FP8_FNUZ])
def test_a_scale_larger_than_needed_is_a_note(layout_id: str) -> None:
    cache = filled(layout_id, rows=32)
    data, _ = dump_layout(layout_id).planes(cache)
    data[0, 7, 64:128] = 0x75  # 208, of at most 448
    assert problems(cache, layout_id, rows=32) == {"loose scale": (1, 7, True)}


@pytest.mark.parametrize("layout_id", V41[2:])
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0x85, 0xFF])
def test_nvfp4_scales_that_no_quantiser_writes(layout_id: str, byte: int) -> None:
    cache = filled(layout_id, rows=32)
    _, scales = dump_layout(layout_id).planes(cache)
    scales[1, 4, 31] = byte
    assert problems(cache, layout_id, rows=32)["scale"] == (1, 20, False)


@pytest.mark.parametrize("layout_id", V41)
def test_a_v41_scale_larger_than_needed_is_a_note(layout_id: str) -> None:
    cache = filled(layout_id, rows=32)
    data, scales = dump_layout(layout_id).planes(cache)
    if layout_id in V41[2:]:
        data[0, 7, 8:16], scales[0, 7, 1] = 0x66, 3  # 4 scales, of 6
        data[0, 8, 8:16], scales[0, 8, 1] = 0x66, 2  # amax / 6 just above 1.5 steps is rounded to 2
    else:
        data[0, 7, 32:64] = 0x75
    assert problems(cache, layout_id, rows=32) == {"loose scale": (1, 7, True)}


@pytest.mark.parametrize(("stored", "read"), [(0, 1), (1, 0), (2, 3), (3, 2)])
def test_a_page_of_the_other_arrangement_is_noticed(tmp_path, stored: int, read: int) -> None:
    """Sizes are alike, so only what the bytes say can tell."""
    cache = filled(V41[stored], rows=16)
    path = tmp_path / "page.bin"
    path.write_bytes(bytes(cache.untyped_storage()))
    assert problems(read_page(path, V41[stored], 16), V41[stored], rows=16) == {}
    assert "scale" in problems(read_page(path, V41[read], 16), V41[read], rows=16)


@pytest.mark.parametrize("layout_id", [INDEX_FP8, INDEX_FP8_FNUZ, "v32_main_fp8"])
@pytest.mark.parametrize("value", [0.0, -1.0, torch.inf, torch.nan])
def test_scales_that_are_no_positive_numbers(layout_id: str, value: float) -> None:
    cache = filled(layout_id, rows=32)
    layout = dump_layout(layout_id)
    data, scales = layout.planes(cache)
    held = data[..., 512:528] if scales is None else scales
    held[1, 4, :4] = torch.tensor([value]).view(torch.uint8)
    assert problems(cache, layout_id, rows=32)["scale"] == (1, 20, False)


def test_a_scale_that_is_no_power_of_two_is_a_note() -> None:
    cache = filled(INDEX_FP8, rows=32)
    _, scales = get_layout(INDEX_FP8).planes(cache)
    scales[0, 1] = torch.tensor([0.3]).view(torch.uint8)
    assert problems(cache, INDEX_FP8, rows=32) == {"loose scale": (1, 1, True)}


def test_a_nan_scale_of_mxfp4() -> None:
    cache = filled(INDEX_MXFP4, rows=32)
    _, scales = get_layout(INDEX_MXFP4).planes(cache)
    scales[0, 1, 3] = 255
    assert problems(cache, INDEX_MXFP4, rows=32)["scale"] == (1, 1, False)

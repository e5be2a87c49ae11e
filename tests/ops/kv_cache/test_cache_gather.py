from __future__ import annotations

import pytest
import torch
from cache_rows import E4M3, HOSTILE, rows_of
from hypothesis import given
from hypothesis import strategies as st
from paged import (
    ALL_BACKENDS,
    DEVICE_BACKENDS,
    INDEX_LAYOUTS,
    LAYOUTS,
    MAIN_LAYOUTS,
    TRITON,
    a_device,
    make_cache,
    runnable,
    skip_float64,
    use_backend,
    use_device_backend,
)

from anymla.ops.kv_cache import (
    dequant_gather_slots,
    dequantize_and_gather_k_cache,
    quantize_and_insert_k_cache,
)
from anymla.ops.kv_cache.shapes import COMPRESSED_PAGE_SIZE, PAGE_SIZE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_code_and_every_scale_byte_decodes(backend, dtype):
    skip_float64(backend, dtype)
    cache = make_cache("v4_main_fp8", 256, 2)
    codes = torch.arange(256, dtype=torch.uint8).repeat(2)
    for page in range(256):
        begin = page * cache.stride
        for entry in range(2):
            cache.storage[begin + entry * 576 :][:448] = codes[:448].roll(entry * 200)
            cache.storage[begin + entry * 576 + 448 :][:128] = 0
        cache.storage[begin + 1152 :][:16] = page
    out = torch.zeros(512, 512, dtype=dtype)
    dequant_gather_slots(out, cache.tensor, torch.arange(512, dtype=torch.int32), backend=backend)
    stored = torch.stack([cache.entry_bytes(slot) for slot in range(512)])
    scale = torch.exp2(stored[:, 576:577].double() - 127)
    scale[stored[:, 576] == 255] = torch.nan
    want = (E4M3[stored[:, :448].long()] * scale).float().to(dtype)
    if dtype == torch.float64:
        want = E4M3[stored[:, :448].long()] * scale
    assert torch.equal(out[:, :448].isnan(), want.isnan())
    assert torch.equal(out[:, :448].nan_to_num(), want.nan_to_num())
    assert len(stored[:, :448].unique()) == 256


@pytest.mark.parametrize("layout", INDEX_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_any_index_bytes_decode_alike(layout, dtype, monkeypatch):
    cache = make_cache(layout, 4, 8)
    cache.storage.random_(0, 256)
    if layout == "v4_index_fp8":  # the scales are floats, of any value but NaN
        scales = cache.storage[: 4 * cache.stride].view(4, cache.stride)[:, 1024:1056]
        scales.copy_(torch.randn(4, 8).view(torch.uint8))
    ids = torch.arange(32, dtype=torch.int32)
    results = []
    for name in runnable(ALL_BACKENDS):
        if dtype == torch.float64 and name in TRITON:
            continue
        out = torch.zeros(32, 128, dtype=dtype)
        with monkeypatch.context() as patch:
            dequant_gather_slots(
                out, cache.tensor, ids, layout=layout, backend=use_backend(name, patch)
            )
        results.append(out)
    for out in results[1:]:
        assert torch.equal(out.isnan(), results[0].isnan())
        assert torch.equal(out.nan_to_num(), results[0].nan_to_num())


def test_many_rows_are_read_like_few(backend):
    cache = make_cache("v4_main_fp8", 12, PAGE_SIZE)
    slots = torch.randperm(cache.slots)
    quantize_and_insert_k_cache(
        rows_of("v4_main_fp8", len(slots)), cache.tensor, slots, backend="torch"
    )
    ids = torch.randint(0, cache.slots, (600,), dtype=torch.int32)
    ids[::7] = -1
    out = torch.full((600, 512), torch.nan, dtype=torch.bfloat16)
    dequant_gather_slots(out, cache.tensor, ids, backend=backend)
    single = torch.full((1, 512), torch.nan, dtype=torch.bfloat16)
    for row in (0, 1, 255, 256, 257, 599):
        dequant_gather_slots(single, cache.tensor, ids[row : row + 1], backend=backend)
        assert torch.equal(out[row : row + 1], single)


def gathered(
    cache, seq_lens, gather_lens, tables, columns, *, rows, offset, backend, dtype=torch.float32
):
    """Gather into a buffer of sentinels and compare it with a slot by slot read."""
    entries = cache.tensor.shape[1]
    out = torch.full((len(seq_lens), rows, 512), 7.0, dtype=dtype)
    table = torch.tensor(tables, dtype=torch.int64).view(len(seq_lens), columns)
    table = table.clamp(-(2**31), 2**31 - 1).int()
    dequantize_and_gather_k_cache(
        out,
        cache.tensor,
        torch.tensor(seq_lens, dtype=torch.int32),
        None if gather_lens is None else torch.tensor(gather_lens, dtype=torch.int32),
        table,
        offset=offset,
        layout=cache.layout.layout_id,
        backend=backend,
    )
    want = torch.full_like(out, 7.0)
    for request, stop in enumerate(seq_lens):
        count = stop if gather_lens is None else gather_lens[request]
        for row in range(count):
            if offset + row >= rows:
                break
            position = stop - count + row
            slot = -1
            if 0 <= position < columns * entries:
                page = int(table[request, position // entries])
                if 0 <= page < cache.tensor.shape[0]:
                    slot = page * entries + position % entries
            read = torch.zeros(1, 512, dtype=dtype)
            ids = torch.tensor([slot], dtype=torch.int32)
            dequant_gather_slots(
                read, cache.tensor, ids, layout=cache.layout.layout_id, backend="reference"
            )
            want[request, offset + row] = read[0]
    assert torch.equal(out.nan_to_num(99.0), want.nan_to_num(99.0))
    return out


@pytest.mark.parametrize("layout", MAIN_LAYOUTS)
@pytest.mark.parametrize("entries", [COMPRESSED_PAGE_SIZE, 4, PAGE_SIZE])
def test_gather_the_last_rows_of_sequences(backend, layout, entries):
    pages = -(-150 // entries)
    cache = make_cache(layout, 2 * pages, entries)
    permutation = torch.randperm(2 * pages)
    slots = torch.arange(2 * pages * entries)
    quantize_and_insert_k_cache(
        rows_of(layout, len(slots)), cache.tensor, slots, layout=layout, backend="torch"
    )
    tables = permutation.view(2, pages).tolist()
    out = gathered(cache, [137, 12], [130, 5], tables, pages, rows=140, offset=3, backend=backend)
    assert out[0, 3:133].isfinite().all()
    assert (out[0, :3] == 7).all()
    assert (out[1, 8:] == 7).all()
    gathered(cache, [9, 0], None, tables, pages, rows=9, offset=0, backend=backend)


def test_gather_reads_unwritten_rows_only_when_asked(backend):
    cache = make_cache("v4_main_fp8", 4, 4)  # all NaN
    quantize_and_insert_k_cache(
        rows_of("v4_main_fp8", 3), cache.tensor, torch.tensor([8, 9, 10]), backend="torch"
    )
    out = gathered(cache, [3], None, [[2]], 1, rows=8, offset=2, backend=backend)
    assert out.isfinite().all()


def test_gather_more_rows_than_there_are(backend):
    cache = make_cache("v4_main_fp8", 4, 4)
    slots = torch.arange(16)
    quantize_and_insert_k_cache(rows_of("v4_main_fp8", 16), cache.tensor, slots, backend="torch")
    tables = [[2, 3], [1, -1]]
    out = gathered(cache, [5, 8], [9, 11], tables, 2, rows=14, offset=1, backend=backend)
    assert not out[0, 1:5].any()
    assert out[0, 5:10].any(dim=1).all()
    assert not out[1, 1:4].any()
    assert out[1, 4:8].any(dim=1).all()
    assert not out[1, 8:12].any()
    gathered(cache, [12, 3], None, tables, 2, rows=14, offset=1, backend=backend)


@given(
    seed=st.integers(0, 2**20),
    layout=st.sampled_from(MAIN_LAYOUTS),
    entries=st.integers(1, 5),
    pages=st.integers(0, 4),
    columns=st.integers(0, 3),
    lengths=st.lists(st.tuples(st.integers(-3, 20), st.integers(-3, 24)), max_size=3),
    everything=st.booleans(),
    rows=st.integers(0, 20),
    offset=st.integers(0, 22),
    gap=st.sampled_from([0, 64, 1000]),
    name=st.sampled_from(runnable(ALL_BACKENDS)),
)
def test_gather_with_hostile_lengths_and_tables(
    seed, layout, entries, pages, columns, lengths, everything, rows, offset, gap, name
):
    cache = make_cache(layout, pages, entries, gap=gap)
    slots = torch.arange(cache.slots)
    quantize_and_insert_k_cache(
        rows_of(layout, len(slots)), cache.tensor, slots, layout=layout, backend="torch"
    )
    generator = torch.Generator().manual_seed(seed)
    choices = torch.tensor([*range(pages), *HOSTILE, pages])
    picks = torch.randint(0, len(choices), (len(lengths) * columns,), generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        gathered(
            cache,
            [stop for stop, _ in lengths],
            None if everything else [count for _, count in lengths],
            choices[picks].tolist(),
            columns,
            rows=rows,
            offset=offset,
            backend=use_backend(name, patch),
        )


def test_gather_into_a_strided_buffer(backend):
    cache = make_cache("v4_main_fp8", 4, 4)
    slots = torch.arange(16)
    quantize_and_insert_k_cache(rows_of("v4_main_fp8", 16), cache.tensor, slots, backend="torch")
    buffer = torch.full((3, 10, 600), 7.0, dtype=torch.bfloat16)
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    lengths = torch.tensor([6, 3], dtype=torch.int32)
    dequantize_and_gather_k_cache(
        buffer[:2, ::2, 8:520], cache.tensor, lengths, None, table, backend=backend
    )
    dense = torch.full((2, 5, 512), 7.0, dtype=torch.bfloat16)
    dequantize_and_gather_k_cache(dense, cache.tensor, lengths, None, table, backend="reference")
    assert torch.equal(buffer[:2, ::2, 8:520], dense)
    assert (buffer[2] == 7).all()
    assert (buffer[:, 1::2] == 7).all()
    assert (buffer[..., :8] == 7).all()
    assert (buffer[..., 520:] == 7).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"out": torch.zeros(2, 8, 512, dtype=torch.uint8)}, TypeError, "out must be bfloat16"),
        ({"seq_lens": torch.zeros(2, dtype=torch.int64)}, TypeError, "seq_lens must be int32"),
        (
            {"gather_lens": torch.zeros(3, dtype=torch.int32)},
            ValueError,
            r"gather_lens must be int32 \[R=2\]",
        ),
        ({"block_table": torch.zeros(1, 1, dtype=torch.int32)}, ValueError, "block_table must be"),
        ({"offset": -1}, ValueError, "offset must be at least 0, got -1"),
        ({"layout": "v4_index_fp8"}, ValueError, r"\[P, B, 132\] for layout v4_index_fp8"),
        ({"out": torch.zeros(2, 8, 128)}, ValueError, "layout must be one of 128 channels"),
        ({"k_cache": torch.zeros(1, 1, 584, device="meta")}, TypeError, "k_cache must be"),
        (
            {"k_cache": torch.zeros(1, 1, 584, dtype=torch.uint8, device="meta")},
            ValueError,
            "k_cache must be on cpu, got meta",
        ),
    ],
)
def test_gather_names_what_is_wrong(change, error, message):
    arguments = {
        "out": torch.zeros(2, 8, 512),
        "k_cache": torch.zeros(2, 4, 584, dtype=torch.uint8),
        "seq_lens": torch.zeros(2, dtype=torch.int32),
        "gather_lens": None,
        "block_table": torch.zeros(2, 1, dtype=torch.int32),
    }
    with pytest.raises(error, match=message):
        dequantize_and_gather_k_cache(**(arguments | change))


def test_gather_slots_names_what_is_wrong():
    cache = torch.zeros(2, 4, 584, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"indices must be int32 \[M=3\], got int32 \[2\]"):
        dequant_gather_slots(torch.zeros(3, 512), cache, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(TypeError, match="indices must be int32"):
        dequant_gather_slots(torch.zeros(3, 512), cache, torch.zeros(3, dtype=torch.int64))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", DEVICE_BACKENDS)
def test_a_device_gathers_the_same_rows(layout, name, monkeypatch):
    device, backend = a_device(), use_device_backend(name, monkeypatch)
    host = make_cache(layout, 6, 8, gap=64)
    rows = rows_of(layout, 48)
    quantize_and_insert_k_cache(rows, host.tensor, torch.arange(48), layout=layout)
    cache = (
        host.storage.to(device)
        .view(host.tensor.dtype)
        .as_strided(host.tensor.shape, host.tensor.stride(), host.tensor.storage_offset())
    )
    seq_lens = torch.tensor([13, 0, 20], dtype=torch.int32)
    gather_lens = torch.tensor([11, 0, 25], dtype=torch.int32)
    table = torch.tensor([[3, 5, -1], [0, 1, 2], [4, 2**31 - 1, 1]], dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float32):
        want = torch.full((3, 20, rows.shape[1]), 7.0, dtype=dtype)
        got = want.to(device)
        arguments = (seq_lens, gather_lens, table)
        dequantize_and_gather_k_cache(want, host.tensor, *arguments, offset=2, layout=layout)
        dequantize_and_gather_k_cache(
            got, cache, *(x.to(device) for x in arguments), offset=2, layout=layout, backend=backend
        )
        assert torch.equal(got.cpu(), want)

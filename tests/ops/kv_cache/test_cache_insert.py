from __future__ import annotations

import numpy as np
import pytest
import torch
from cache_rows import E4M3, HOSTILE, rows_of
from hypothesis import given
from hypothesis import strategies as st
from paged import (
    ALL_BACKENDS,
    DEVICE_BACKENDS,
    LAYOUTS,
    PAGE_SIZES,
    TRITON,
    a_device,
    make_cache,
    runnable,
    skip_float64,
    use_backend,
    use_device_backend,
    without_waiting,
)
from torch import Tensor

from anymla.formats.page_layout import V32_FP8, get_layout
from anymla.ops import _host
from anymla.ops.kv_cache import (
    dequant_gather_slots,
    dequantize_and_gather_k_cache,
    quantize_and_insert_k_cache,
)
from anymla.ops.kv_cache.shapes import PAGE_SIZE
from anymla.ops.registry import BackendUnavailable
from anymla.testing.oracle.row_formats import ROW_FORMATS

GOLDEN = [
    ((0.0, 0.0), 105, (0x00, 0x00), (0.0, 0.0)),
    ((1.0, -0.5), 119, (0x78, 0xF0), (1.0, -0.5)),
    ((448.0, 1.0), 127, (0x7E, 0x38), (448.0, 1.0)),
    ((449.0, 3.0), 127, (0x7E, 0x44), (448.0, 3.0)),
    ((0.1, -0.3), 117, (0x6D, 0xFA), (0.1015625, -0.3125)),
    ((1e-5, -2e-5), 105, (0x62, 0xEA), (10 * 2.0**-20, -20 * 2.0**-20)),
    ((3.5, 0.0371), 120, (0x7E, 0x4A), (3.5, 0.0390625)),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_golden_bytes_of_a_main_row(backend, dtype):
    skip_float64(backend, dtype)
    cache = make_cache("v4_main_fp8", 2, 8)
    row = torch.zeros(512, dtype=torch.float64)
    for block, (values, *_) in enumerate(GOLDEN):
        row[block * 64 : block * 64 + 2] = torch.tensor(values, dtype=torch.float64)
    tail = torch.linspace(-3, 3, 64, dtype=torch.float64)
    row[448:] = tail
    quantize_and_insert_k_cache(
        row.to(dtype).unsqueeze(0), cache.tensor, torch.tensor([11]), backend=backend
    )
    stored = cache.entry_bytes(11)
    expected = torch.zeros(448, dtype=torch.uint8)
    for block, (_, _, codes, _) in enumerate(GOLDEN):
        expected[block * 64 : block * 64 + 2] = torch.tensor(codes, dtype=torch.uint8)
    assert torch.equal(stored[:448], expected)
    assert torch.equal(stored[448:576].view(torch.bfloat16), tail.to(dtype).bfloat16())
    assert stored[576:].tolist() == [byte for _, byte, _, _ in GOLDEN] + [0]

    out = torch.full((1, 512), torch.nan)
    dequant_gather_slots(out, cache.tensor, torch.tensor([11], dtype=torch.int32), backend=backend)
    for block, (_, _, _, decoded) in enumerate(GOLDEN):
        assert out[0, block * 64 : block * 64 + 2].tolist() == list(decoded)
    assert torch.equal(out[0, 448:], tail.to(dtype).bfloat16().float())


def nearest_code(x: Tensor) -> Tensor:
    """e4m3 code of each |x| <= 448 by search: the nearest value, the even code in a tie."""
    magnitudes = E4M3[:127]
    error = (x.abs().unsqueeze(-1) - magnitudes).abs()
    smallest = error.min(-1, keepdim=True).values
    ties = (error == smallest).double() * (1 + (torch.arange(127) % 2 == 0))
    return (ties.argmax(-1) + 128 * torch.signbit(x)).to(torch.uint8)


def test_main_rows_are_the_nearest_codes(backend):
    rows = rows_of("v4_main_fp8", 12, spread=6.0).bfloat16()
    rows[3, 64:128] = 0
    rows[4, :64] = 2.0**-133  # subnormal
    rows[5, :448] *= 2.0**40
    rows[6, 0] = 3.0e38
    cache = make_cache("v4_main_fp8", 3, 4)
    quantize_and_insert_k_cache(rows, cache.tensor, torch.arange(12), backend=backend)
    for slot, row in enumerate(rows.double()):
        stored = cache.entry_bytes(slot)
        for block in range(7):
            x = row[block * 64 : block * 64 + 64]
            amax = max(float(x.abs().max()), 1e-4)
            fraction, exponent = np.frexp(amax / 448)
            e = int(exponent) - (fraction == 0.5)
            assert int(stored[576 + block]) == e + 127
            codes = nearest_code(x * 2.0**-e)
            assert torch.equal(stored[block * 64 : block * 64 + 64], codes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("entries", PAGE_SIZES)
def test_every_backend_stores_the_bytes_of_the_reference(layout, entries, monkeypatch):
    rows = rows_of(layout, 24, spread=8.0)
    rows[1] = 0
    rows[2, ::2] = -0.0
    rows[3] = 448 * torch.randn(rows.shape[1]).sign()
    rows[4] = 2.0 ** torch.randint(-140, 120, (rows.shape[1],)).float()
    rows[5] = torch.arange(rows.shape[1]) / 64  # ties of both code formats
    slots = torch.randperm(-(-40 // entries) * entries)[:24]
    names = runnable(ALL_BACKENDS)
    caches = [make_cache(layout, -(-40 // entries), entries) for _ in names]
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for cache, name in zip(caches, names, strict=True):
            if dtype == torch.float64 and name in TRITON:
                continue
            with monkeypatch.context() as patch:
                quantize_and_insert_k_cache(
                    rows.to(dtype),
                    cache.tensor,
                    slots,
                    layout=layout,
                    backend=use_backend(name, patch),
                )
            assert torch.equal(cache.storage, caches[0].storage)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("entries", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_few_rows_on_the_host_are_the_same_bytes_as_many(layout, entries, dtype):
    rows = rows_of(layout, 40, spread=8.0)
    rows[1] = 0
    rows[2, ::2] = -0.0
    # Magnitudes from subnormals to nearly the largest.
    exponents = torch.linspace(-149, 127, 20).floor().unsqueeze(1)
    rows[20:] = torch.rand(20, rows.shape[1]).add(1).ldexp(exponents).nan_to_num()
    rows = rows.to(dtype).nan_to_num()
    slots = torch.randperm(-(-48 // entries) * entries)[:40]
    many, few = (make_cache(layout, -(-48 // entries), entries, gap=64) for _ in range(2))
    quantize_and_insert_k_cache(rows, many.tensor, slots, layout=layout, backend="torch")
    for some, at in zip(rows.split(3), slots.split(3), strict=True):
        quantize_and_insert_k_cache(some, few.tensor, at, layout=layout, backend="torch")
    assert torch.equal(few.storage, many.storage)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("count", [1, 3])
def test_a_broken_row_stays_broken_and_alone(backend, layout, bad, count):
    """No finite number comes back for it, and its neighbours are as they were."""
    cache = make_cache(layout, 1, 4)
    rows = rows_of(layout, count)
    rows[0, 5] = bad
    slots = torch.arange(count)
    quantize_and_insert_k_cache(rows, cache.tensor, slots, layout=layout, backend=backend)
    out = torch.zeros(rows.shape)
    dequant_gather_slots(out, cache.tensor, slots.int(), layout=layout, backend=backend)
    assert not out[0, 5].isfinite()
    for row, read in zip(rows[1:], out[1:], strict=True):
        data, scales = cache.layout.encode(row.unsqueeze(0))
        assert torch.equal(read, cache.layout.decode(data, scales, torch.float32)[0])


def not_finite(layout: str) -> Tensor:
    """Rows with infinities, NaN of both signs, and large numbers beside them."""
    rows = rows_of(layout, 8)
    negative = torch.tensor(-0x400000, dtype=torch.int32).view(torch.float32)
    rows[0, 5], rows[1, 5], rows[2, 5], rows[3, 5] = torch.inf, -torch.inf, torch.nan, negative
    rows[4, 5:8] = torch.tensor([torch.inf, 3e38, -1e37])
    rows[5, 5:8] = torch.tensor([torch.nan, -torch.inf, 3e38])
    rows[6, -1], rows[7, -1] = torch.inf, -torch.inf
    return rows


@pytest.mark.parametrize("layout", [each for each in LAYOUTS if not each.startswith("rows")])
@pytest.mark.parametrize("count", [1, 8])
def test_every_writer_stores_the_same_bytes_of_rows_that_are_not_finite(backend, layout, count):
    for rows in not_finite(layout).split(count):
        cache = make_cache(layout, 1, 8)
        slots = torch.arange(count)
        quantize_and_insert_k_cache(rows, cache.tensor, slots, layout=layout, backend=backend)
        data, scales = cache.layout.encode(rows)
        data_plane, scale_plane = cache.layout.planes(cache.tensor)
        assert torch.equal(data_plane[0, :count], data)
        assert scales is None or torch.equal(scale_plane[0, :count], scales)


def test_the_bytes_of_rows_that_are_not_finite():
    """Block 0 of the main record, as docs/formats.md has it."""
    layout = get_layout("v4_main_fp8")
    data, scales = layout.encode(not_finite("v4_main_fp8"))
    assert scales[:6, 0].tolist() == [255] * 6
    assert data[:4, 5].tolist() == [0x7E, 0xFE, 0x7F, 0x7F]
    assert data[4, 5:8].tolist() == [0x7E, 0x46, 0x9F]  # 3e38 / 2^126 = 3.5, 1e37 / 2^126 = 0.12
    assert data[5, 5:8].tolist() == [0x7F, 0xFE, 0x46]
    packed, scales = get_layout("v4_index_mxfp4").encode(not_finite("v4_index_mxfp4"))
    assert scales[:6, 0].tolist() == [254] * 6
    assert [byte >> 4 for byte in packed[:4, 2].tolist()] == [7, 15, 7, 7]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [1, 6])
def test_rows_of_any_strides(backend, layout, dtype, count):
    rows = rows_of(layout, count).to(dtype)
    wide = torch.zeros(count, 2 * rows.shape[1], dtype=dtype)
    wide[:, ::2] = rows
    whole = make_cache(layout, 1, 8)
    slots = torch.arange(count)
    quantize_and_insert_k_cache(rows, whole.tensor, slots, layout=layout, backend="reference")
    for strided in (rows.T.contiguous().T, wide[:, ::2]):
        cache = make_cache(layout, 1, 8)
        quantize_and_insert_k_cache(strided, cache.tensor, slots, layout=layout, backend=backend)
        assert torch.equal(cache.storage, whole.storage)


@given(
    seed=st.integers(0, 2**20),
    layout=st.sampled_from(LAYOUTS),
    pages=st.integers(0, 5),
    entries=st.integers(1, 9),
    gap=st.sampled_from([0, 4, 64, 576, 1000]),
    start=st.sampled_from([0, 4, 16, 100]),
    valid=st.integers(0, 12),
    hostile=st.lists(st.sampled_from(HOSTILE), max_size=4),
    extra=st.integers(0, 3),
    name=st.sampled_from(runnable(ALL_BACKENDS)),
)
def test_any_slots_in_any_cache(
    seed, layout, pages, entries, gap, start, valid, hostile, extra, name
):
    generator = torch.Generator().manual_seed(seed)
    cache = make_cache(layout, pages, entries, gap=gap, start=start)
    slots = torch.randperm(cache.slots, generator=generator)[:valid].tolist()
    mapping = torch.tensor([*slots, *hostile, cache.slots], dtype=torch.int64)
    mapping = mapping[torch.randperm(len(mapping), generator=generator)]
    rows = rows_of(layout, len(mapping) + extra)
    before = cache.storage.clone()
    with pytest.MonkeyPatch.context() as patch:
        backend = use_backend(name, patch)
        quantize_and_insert_k_cache(rows, cache.tensor, mapping, layout=layout, backend=backend)
        assert cache.changed(before) == set(slots)
        for slot, row in zip(mapping.tolist(), rows, strict=False):
            if slot in slots:
                data, scales = cache.layout.encode(row.unsqueeze(0))
                entry = data if scales is None else torch.cat((data, scales), 1)
                assert torch.equal(cache.entry_bytes(slot), entry[0])

        # What was never written is 0xFF, NaN in every layout with a NaN; nobody may read it.
        out = torch.full((len(mapping), cache.layout.channels), torch.nan)
        wanted = mapping.clamp(-(2**31), 2**31 - 1).int()
        dequant_gather_slots(out, cache.tensor, wanted, layout=layout, backend=backend)
    assert out.isfinite().all()
    for slot, row, read in zip(mapping.tolist(), rows, out, strict=False):
        if slot in slots:
            data, scales = cache.layout.encode(row.unsqueeze(0))
            assert torch.equal(read, cache.layout.decode(data, scales, torch.float32)[0])
        else:
            assert not read.any()


@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("hostile", [*HOSTILE, 12])
def test_a_hostile_slot_changes_nothing_wherever_it_stands(backend, place, hostile):
    cache = make_cache("v4_main_fp8", 3, 4)
    before = cache.storage.clone()
    rows, slots = rows_of("v4_main_fp8", 4), [7, 1, 10]
    slots.insert(place, hostile)
    quantize_and_insert_k_cache(rows, cache.tensor, torch.tensor(slots), backend=backend)
    assert cache.changed(before) == {7, 1, 10}
    for slot, row in zip(slots, rows, strict=True):
        if slot != hostile:
            codes, scales = cache.layout.encode(row.unsqueeze(0))
            assert torch.equal(cache.entry_bytes(slot), torch.cat((codes, scales), 1)[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_lone_hostile_slot_changes_nothing(backend, layout):
    cache = make_cache(layout, 3, 4)
    before = cache.storage.clone()
    for slot in (*HOSTILE, 12):
        mapping = torch.tensor([slot])
        rows = rows_of(layout, 1)
        quantize_and_insert_k_cache(rows, cache.tensor, mapping, layout=layout, backend=backend)
        assert not cache.changed(before)


def test_slot_mapping_may_be_shorter_than_k(backend):
    cache = make_cache("v4_main_fp8", 2, 4)
    before = cache.storage.clone()
    rows = rows_of("v4_main_fp8", 5)
    rows[2:] = torch.nan
    quantize_and_insert_k_cache(rows, cache.tensor, torch.tensor([6, 1]), backend=backend)
    assert cache.changed(before) == {6, 1}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_to_write_and_nowhere_to_write_it(backend, layout):
    channels = get_layout(layout).channels
    cache = make_cache(layout, 2, 4)
    before = cache.storage.clone()
    nothing = torch.empty(0, dtype=torch.int64)
    for count in (0, 3):
        quantize_and_insert_k_cache(
            torch.ones(count, channels), cache.tensor, nothing, layout=layout, backend=backend
        )
    empty = get_layout(layout).allocate(0, 4)
    quantize_and_insert_k_cache(
        torch.ones(2, channels), empty, torch.tensor([0, 1]), layout=layout, backend=backend
    )
    quantize_and_insert_k_cache(
        torch.ones(2, channels),
        cache.tensor,
        torch.tensor([-1, -1]),
        layout=layout,
        backend=backend,
    )
    assert not cache.changed(before)
    out = torch.full((2, channels), torch.nan)
    ids = torch.tensor([0, 1], dtype=torch.int32)
    dequant_gather_slots(out, empty, ids, layout=layout, backend=backend)
    assert not out.any()
    dequant_gather_slots(out[:0], cache.tensor, ids[:0], layout=layout, backend=backend)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_only_the_layout_rounds(backend, layout, dtype):
    skip_float64(backend, dtype)
    cache = make_cache(layout, 1, 4)
    rows = rows_of(layout, 4).to(dtype)
    slots = torch.arange(4)
    quantize_and_insert_k_cache(rows, cache.tensor, slots, layout=layout, backend=backend)
    out = torch.empty(rows.shape, dtype=dtype)
    dequant_gather_slots(out, cache.tensor, slots.int(), layout=layout, backend=backend)
    if "fp32" in layout:
        assert torch.equal(out, rows.float().to(dtype))
    elif "bf16" in layout:
        assert torch.equal(out, rows.bfloat16().to(dtype))
    elif layout == "v4_main_fp8":
        assert torch.equal(out[:, 448:], rows[:, 448:].bfloat16().to(dtype))
    else:
        assert not torch.equal(out, rows)


def test_a_cache_with_a_head_dim(backend):
    plain, headed = make_cache("v4_main_fp8", 3, 4), make_cache("v4_main_fp8", 3, 4)
    rows, slots = rows_of("v4_main_fp8", 4), torch.tensor([5, 0, 11, 2])
    quantize_and_insert_k_cache(rows, plain.tensor, slots, backend=backend)
    quantize_and_insert_k_cache(rows, headed.tensor.unsqueeze(2), slots, backend=backend)
    assert torch.equal(plain.storage, headed.storage)
    got, want = torch.zeros(4, 512), torch.ones(4, 512)
    dequant_gather_slots(got, headed.tensor.unsqueeze(2), slots.int(), backend=backend)
    dequant_gather_slots(want, plain.tensor, slots.int(), backend=backend)
    assert torch.equal(got, want)


@pytest.mark.parametrize("layout", ["v4_main_fp8", "v4_index_fp8", "rows_fp32_512"])
def test_pages_beyond_two_gibibytes(backend, layout):
    """Only touched memory becomes real, so a large cache costs little."""
    row_layout = get_layout(layout)
    stride = row_layout.page_stride_bytes(PAGE_SIZE)
    pages = 2**31 // stride + 3
    item = row_layout.dtype.itemsize
    storage = torch.empty(pages * stride, dtype=torch.uint8)
    cache = storage.view(row_layout.dtype).as_strided(
        (pages, PAGE_SIZE, row_layout.row_elements), (stride // item, row_layout.row_elements, 1)
    )
    rows = rows_of(layout, 3)
    slots = torch.tensor([pages * PAGE_SIZE - 1, 5, (pages - 2) * PAGE_SIZE + 7])
    quantize_and_insert_k_cache(rows, cache, slots, layout=layout, backend=backend)
    out = torch.zeros(3, row_layout.channels)
    dequant_gather_slots(out, cache, slots.int(), layout=layout, backend=backend)
    data, scales = row_layout.encode(rows)
    assert torch.equal(out, row_layout.decode(data, scales, torch.float32))
    last = (pages - 1) * stride + (PAGE_SIZE - 1) * row_layout.data_bytes
    assert torch.equal(storage[last : last + row_layout.data_bytes], data[0])


def test_the_masking_branch_never_looks(monkeypatch):
    """What runs on a device: no operation that would wait for a value."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoLooking(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            waits = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select")
            assert not any(wait in str(func) for wait in waits), func
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(_host, "on_host", lambda x: False)
    cache = make_cache("v4_main_fp8", 4, 4)
    slots = torch.tensor([3, -1, 9])
    out = torch.zeros(1, 8, 512)
    ids, table = slots.int(), torch.tensor([[0, 1]], dtype=torch.int32)
    lengths = torch.tensor([5], dtype=torch.int32)
    rows = rows_of("v4_main_fp8", 3)
    with NoLooking():
        quantize_and_insert_k_cache(rows, cache.tensor, slots, backend="torch")
        dequant_gather_slots(out[0, :3], cache.tensor, ids, backend="torch")
        dequantize_and_gather_k_cache(out, cache.tensor, lengths, None, table, backend="torch")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": torch.zeros(3, 512, dtype=torch.int32)}, TypeError, "k must be bfloat16 or"),
        ({"k": torch.zeros(1, 512)}, ValueError, r"k must be .* \[N=2 or more, D=512\]"),
        ({"k": torch.zeros(2, 448)}, ValueError, "layout must be one of 448 channels"),
        ({"k": [1.0]}, TypeError, "k must be a tensor"),
        ({"slot_mapping": torch.zeros(2, dtype=torch.int32)}, TypeError, "slot_mapping must be"),
        ({"slot_mapping": torch.zeros(1, 2, dtype=torch.int64)}, ValueError, r"must be int64 \[N"),
        ({"k_cache": torch.zeros(2, 4, 584)}, TypeError, "k_cache must be torch.uint8"),
        ({"k_cache": None}, TypeError, "k_cache must be a tensor, got NoneType"),
        (
            {"k_cache": torch.zeros(2, 4, 656, dtype=torch.uint8)},
            ValueError,
            r"k_cache must be \[P, B, 584\] for layout v4_main_fp8, got \[2, 4, 656\]",
        ),
        (
            {"k_cache": torch.zeros(2, 4, 592, dtype=torch.uint8)[..., :584]},
            ValueError,
            r"inner strides \[584, 1\]",
        ),
        ({"layout": "fp8_ds_mla"}, ValueError, "unknown cache layout 'fp8_ds_mla'; known: "),
        ({"layout": "rows_bf16_512"}, TypeError, "k_cache must be torch.bfloat16"),
    ],
)
def test_insert_names_what_is_wrong(change, error, message):
    arguments = {
        "k": torch.zeros(2, 512),
        "k_cache": torch.zeros(2, 4, 584, dtype=torch.uint8),
        "slot_mapping": torch.zeros(2, dtype=torch.int64),
    }
    with pytest.raises(error, match=message):
        quantize_and_insert_k_cache(**(arguments | change))


@pytest.mark.skipif("triton" not in runnable(TRITON), reason="Triton kernels do not run here")
@pytest.mark.parametrize("backend", ["reference", "torch", None])
@pytest.mark.parametrize("count", [1, 30])
def test_v32_rows(backend, count):
    """Rows of 576 channels; Triton kernels leave them to torch."""
    cache = make_cache(V32_FP8, 3, 16, gap=48)
    before = cache.storage.clone()
    rows = torch.randn(count, 576)
    slots = torch.randperm(48)[:count]
    mapping = torch.cat((slots, torch.tensor([-1, 48])))
    k = torch.cat((rows, torch.randn(2, 576)))
    quantize_and_insert_k_cache(k, cache.tensor, mapping, layout=V32_FP8, backend=backend)
    assert cache.changed(before) <= set(slots.tolist())
    out = torch.empty(count + 1, 576)
    ids = torch.cat((slots, torch.tensor([-7]))).int()
    dequant_gather_slots(out, cache.tensor, ids, layout=V32_FP8, backend=backend)
    want = ROW_FORMATS[V32_FP8].round(rows.double())
    assert torch.equal(out[:count].double(), want)
    assert not out[count].any()
    refused = dequant_gather_slots.supports(
        out, cache.tensor, ids, layout=V32_FP8, backend="triton"
    )
    assert not refused
    assert "torch" in refused.reason or "not installed" in refused.reason


def test_triton_refuses_float64():
    cache = make_cache("v4_main_fp8", 1, 4).tensor
    rows, slots = torch.zeros(1, 512, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(BackendUnavailable, match="float32, but argument 0 is float64"):
        quantize_and_insert_k_cache(rows, cache, slots, backend="triton")
    with pytest.raises(BackendUnavailable, match="float32, but argument 0 is float64"):
        dequant_gather_slots(rows, cache, slots.int(), backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", DEVICE_BACKENDS)
def test_a_device_stores_and_reads_the_same_bytes_without_waiting(layout, name, monkeypatch):
    device, backend = a_device(), use_device_backend(name, monkeypatch)
    host = make_cache(layout, 6, 8, gap=64)
    storage = host.storage.to(device)
    cache = storage.view(host.tensor.dtype).as_strided(
        host.tensor.shape, host.tensor.stride(), host.tensor.storage_offset()
    )
    rows, slots = rows_of(layout, 20), torch.randperm(48)[:20]
    slots[::5] = torch.tensor([-1, 48, 2**40, -(2**40)])
    given_rows, given_slots = rows.to(device), slots.to(device)
    ids = slots.clamp(-1, 48).int()
    out = torch.zeros(20, rows.shape[1], device=device)
    given_ids = ids.to(device)
    options = {"layout": layout, "backend": backend}
    # Tables of codes are made at the first use of a device.
    dequant_gather_slots(out, cache, given_ids, **options)
    quantize_and_insert_k_cache(given_rows, cache, given_slots * 0 - 1, **options)
    with without_waiting(device):
        quantize_and_insert_k_cache(given_rows, cache, given_slots, **options)
        dequant_gather_slots(out, cache, given_ids, **options)
    quantize_and_insert_k_cache(rows, host.tensor, slots, layout=layout)
    want = torch.zeros(20, rows.shape[1])
    dequant_gather_slots(want, host.tensor, ids, layout=layout)
    assert torch.equal(storage.cpu(), host.storage)
    assert torch.equal(out.cpu(), want)

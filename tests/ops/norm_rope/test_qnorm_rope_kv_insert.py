from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from norm_rope_float64 import TABLE, norm64, rope64
from paged import (
    DEVICE_BACKENDS,
    MAIN_LAYOUTS,
    V41_LAYOUTS,
    a_device,
    make_cache,
    skip_float64,
    use_device_backend,
    without_waiting,
)
from torch import Tensor

from anymla.ops.kv_cache import quantize_and_insert_k_cache
from anymla.ops.norm_rope import qnorm_rope_kv_insert, rope
from anymla.ops.norm_rope.shapes import V4_FLASH, V4_PRO
from anymla.testing.tolerance import accumulation, assert_close, ulps

D = V4_FLASH.channels


def inserted(layout: str, rows: Tensor, slots: Tensor) -> Tensor:
    cache = make_cache(layout, 3, 4)
    quantize_and_insert_k_cache(rows, cache.tensor, slots, layout=layout, backend="reference")
    return cache.storage


@pytest.mark.parametrize("layout", MAIN_LAYOUTS + V41_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("heads", [1, 5, V4_FLASH.heads])
def test_queries_and_rows_of_a_step(backend, layout, dtype, heads):
    skip_float64(backend, dtype)
    q, kv = (torch.randn(6, heads, D) * 3).to(dtype), torch.randn(6, D).to(dtype)
    slots = torch.tensor([11, -1, 2, 12, 7, 2**40])
    positions = torch.tensor([0, 1, 127, 128, 3000, 4095])
    q_before, kv_before = q.clone(), kv.clone()
    cache = make_cache(layout, 3, 4)
    got = qnorm_rope_kv_insert(
        q, kv, cache.tensor, slots, positions, TABLE, 1e-6, layout=layout, backend=backend
    )
    assert torch.equal(q, q_before)
    assert torch.equal(kv, kv_before)
    assert got.dtype == dtype

    wide = torch.promote_types(dtype, torch.float32)
    want = rope64(norm64(q, None, 1e-6), positions, TABLE)
    magnitude = norm64(q, None, 1e-6).abs().unflatten(-1, (-1, 2)).sum(-1)
    bound = accumulation(D, wide, c=1.0) + ulps(wide, 4)
    assert_close(
        got,
        want,
        atol=bound,
        rtol=ulps(dtype, 0.5),
        scale=magnitude.repeat_interleave(2, dim=-1),
        name="queries",
    )
    # The rows keep the precision of the computation until the layout rounds them.
    rows = rope(kv.to(wide).unsqueeze(1), positions, TABLE, backend="reference").squeeze(1)
    assert torch.equal(cache.storage, inserted(layout, rows, slots))


@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype"),
    [
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float64),
        (torch.float16, torch.bfloat16),
    ],
)
def test_rows_keep_their_own_precision(backend, q_dtype, kv_dtype):
    skip_float64(backend, q_dtype, kv_dtype)
    q, kv = torch.randn(5, 2, D).to(q_dtype), torch.randn(5, D).to(kv_dtype)
    slots, positions = torch.tensor([3, 9, 0, 1, 5]), torch.tensor([0, 1, 127, 2048, 4095])
    cache = make_cache("rows_fp32_512", 3, 4)
    qnorm_rope_kv_insert(
        q, kv, cache.tensor, slots, positions, TABLE, 1e-6, layout="rows_fp32_512", backend=backend
    )
    wide = torch.promote_types(kv_dtype, torch.float32)
    rows = rope(kv.to(wide).unsqueeze(1), positions, TABLE, backend="reference").squeeze(1)
    assert torch.equal(cache.storage, inserted("rows_fp32_512", rows, slots))


def test_every_query_is_processed_whatever_its_slot(backend):
    q, kv = torch.randn(5, 3, D).bfloat16(), torch.randn(5, D).bfloat16()
    positions = torch.arange(5)
    whole = make_cache("v4_main_fp8", 3, 4)
    got = qnorm_rope_kv_insert(
        q, kv, whole.tensor, torch.tensor([4, 5, 6, 7, 8]), positions, TABLE, 1e-6, backend=backend
    )
    for slots, written in (([4, 5], {4, 5}), ([], set()), ([-1, -1, 6, -7, 12], {6})):
        cache = make_cache("v4_main_fp8", 3, 4)
        before = cache.storage.clone()
        mapping = torch.tensor(slots, dtype=torch.int64)
        same = qnorm_rope_kv_insert(
            q, kv, cache.tensor, mapping, positions, TABLE, 1e-6, backend=backend
        )
        assert torch.equal(same, got)
        assert cache.changed(before) == written
        for slot in written:
            assert torch.equal(cache.entry_bytes(slot), whole.entry_bytes(slot))


def test_results_go_where_the_caller_says(backend):
    q, kv = torch.randn(5, 3, D).bfloat16(), torch.randn(5, D).bfloat16()
    arguments = (torch.tensor([1, 2]), torch.arange(5), TABLE, 1e-6)
    cache = make_cache("v4_main_fp8", 3, 4)
    want = qnorm_rope_kv_insert(q, kv, cache.tensor, *arguments, backend=backend)
    buffer = torch.full((5, 8, D), 7.0).bfloat16()
    got = qnorm_rope_kv_insert(q, kv, cache.tensor, *arguments, out=buffer[:, 2:5], backend=backend)
    assert got.data_ptr() == buffer[:, 2:5].data_ptr()
    assert torch.equal(buffer[:, 2:5], want)
    assert (buffer[:, :2] == 7).all()
    assert (buffer[:, 5:] == 7).all()
    qnorm_rope_kv_insert(q, kv, cache.tensor, *arguments, out=q, backend=backend)
    assert torch.equal(q, want)


def test_no_tokens(backend):
    cache = make_cache("v4_main_fp8", 3, 4)
    before = cache.storage.clone()
    none = torch.empty(0, dtype=torch.int64)
    q, kv = torch.empty(0, 8, D).bfloat16(), torch.empty(0, D).bfloat16()
    got = qnorm_rope_kv_insert(q, kv, cache.tensor, none, none, TABLE, 1e-6, backend=backend)
    assert got.shape == (0, 8, D)
    assert not cache.changed(before)


@given(
    tokens=st.integers(1, 40),
    heads=st.sampled_from([1, 8, 20, V4_FLASH.heads, V4_PRO.heads]),
    seed=st.integers(0, 999),
)
def test_a_row_does_not_depend_on_its_batch(tokens, heads, seed):
    """Bit for bit, also where the batch is worked off in blocks."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, heads, D, generator=generator).bfloat16()
    kv = torch.randn(tokens, D, generator=generator).bfloat16()
    positions = torch.randint(0, 4096, (tokens,), generator=generator)
    slots = torch.randperm(tokens, generator=generator)
    cache, alone = make_cache("v4_main_fp8", 10, 4), make_cache("v4_main_fp8", 10, 4)
    got = qnorm_rope_kv_insert(q, kv, cache.tensor, slots, positions, TABLE, 1e-6, backend="torch")
    for token in range(0, tokens, 7):
        part = slice(token, token + 1)
        single = qnorm_rope_kv_insert(
            q[part],
            kv[part],
            alone.tensor,
            slots[part],
            positions[part],
            TABLE,
            1e-6,
            backend="torch",
        )
        assert torch.equal(single, got[part])
        slot = int(slots[token])
        assert torch.equal(alone.entry_bytes(slot), cache.entry_bytes(slot))


def test_a_row_does_not_depend_on_its_neighbours(backend):
    """Bit for bit, on every backend; few rows, for the sake of the slow ones."""
    q, kv = torch.randn(5, 3, D).bfloat16(), torch.randn(5, D).bfloat16()
    slots, positions = torch.tensor([3, 9, 0, 1, 5]), torch.tensor([0, 1, 127, 2048, 4095])
    cache, alone = make_cache("v4_main_fp8", 3, 4), make_cache("v4_main_fp8", 3, 4)
    got = qnorm_rope_kv_insert(q, kv, cache.tensor, slots, positions, TABLE, 1e-6, backend=backend)
    for part in (slice(0, 1), slice(1, 3), slice(3, 5)):
        some = qnorm_rope_kv_insert(
            q[part], kv[part], alone.tensor, slots[part], positions[part], TABLE, 1e-6,
            backend=backend,
        )  # fmt: skip
        assert torch.equal(some, got[part])
    assert torch.equal(alone.storage, cache.storage)


@pytest.mark.compiles
@pytest.mark.parametrize("given_out", [False, True])
def test_torch_compile_sees_through_the_insertion(given_out):
    def step(q, kv, cache, out):
        slots, positions = torch.tensor([3, -1, 7]), torch.tensor([0, 5, 9])
        rotated = qnorm_rope_kv_insert(
            q * 2, kv, cache, slots, positions, TABLE, 1e-6, layout="rows_fp32_512", out=out
        )
        return rope(rotated, positions, TABLE, inverse=True) + 1

    q, kv = torch.randn(3, 2, D), torch.randn(3, D)
    results = []
    for run in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        cache = make_cache("rows_fp32_512", 2, 4)
        out = torch.zeros_like(q) if given_out else None
        results.append((run(q, kv, cache.tensor, out), cache.storage, out))
    (want, stored, written), (got, compiled_stored, compiled_written) = results
    assert torch.equal(got, want)
    assert torch.equal(compiled_stored, stored)
    if given_out:
        assert torch.equal(compiled_written, written)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(2, D)}, ValueError, r"q must be .* \[T, H, D\]"),
        ({"kv": torch.zeros(3, D)}, ValueError, r"kv must be .* \[T=2, D=512\]"),
        ({"kv": torch.zeros(2, D).int()}, TypeError, "kv must be bfloat16 or"),
        ({"slot_mapping": torch.zeros(3).long()}, ValueError, "at most T=2 long, got 3"),
        ({"positions": torch.zeros(2).int()}, TypeError, "positions must be int64"),
        ({"cos_sin_cache": TABLE.bfloat16()}, TypeError, "cos_sin_cache must be float32 or"),
        ({"cos_sin_cache": TABLE[:, :63]}, ValueError, r"R even .* got \[4096, 63\]"),
        ({"cos_sin_cache": TABLE[:0]}, ValueError, r"with L >= 1, got \[0, 64\]"),
        ({"layout": "v4_index_fp8"}, ValueError, r"\[P, B, 132\]"),
        ({"out": torch.zeros(2, 4, D).double()}, TypeError, "out must be float32"),
        ({"out": torch.zeros(2, 4, D)}, ValueError, r"out must be .* got float32 \[2, 4, 512\]"),
    ],
)
def test_insertion_names_what_is_wrong(change, error, message):
    arguments = {
        "q": torch.zeros(2, 3, D),
        "kv": torch.zeros(2, D),
        "k_cache": torch.zeros(2, 4, 584, dtype=torch.uint8),
        "slot_mapping": torch.zeros(2, dtype=torch.int64),
        "positions": torch.zeros(2, dtype=torch.int64),
        "cos_sin_cache": TABLE,
        "eps": 1e-6,
    }
    with pytest.raises(error, match=message):
        qnorm_rope_kv_insert(**(arguments | change))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", MAIN_LAYOUTS + V41_LAYOUTS)
@pytest.mark.parametrize("name", DEVICE_BACKENDS)
def test_a_device_does_the_same_without_waiting(layout, name, monkeypatch):
    device, backend = a_device(), use_device_backend(name, monkeypatch)
    q, kv = torch.randn(9, 5, D), torch.randn(9, D)
    slots, positions = torch.tensor([11, -1, 2, 40, 7, 3, 1]), torch.randint(0, 4096, (9,))
    host = make_cache(layout, 3, 4)
    cache = host.tensor.to(device)
    want = qnorm_rope_kv_insert(
        q, kv, host.tensor, slots, positions, TABLE, 1e-6, layout=layout, backend="reference"
    )
    moved = [x.to(device) for x in (q, kv, slots, positions, TABLE)]
    with without_waiting(device):
        got = qnorm_rope_kv_insert(
            *moved[:2], cache, *moved[2:], 1e-6, layout=layout, backend=backend
        )
    bound = accumulation(D, torch.float32, c=1.0) + ulps(torch.float32, 4)
    assert_close(got.cpu(), want, atol=bound, scale=4.0)
    if backend == "triton":  # its products are not contracted, so the rows are the same bits
        assert torch.equal(cache.cpu().view(torch.uint8), host.tensor.view(torch.uint8))
    elif layout == "rows_fp32_512":
        assert_close(
            cache.cpu().nan_to_num(), host.tensor.nan_to_num(), atol=ulps(torch.float32, 8)
        )

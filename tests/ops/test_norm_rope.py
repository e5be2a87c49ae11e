from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paged import (
    ALL_BACKENDS,
    DEVICE_BACKENDS,
    MAIN_LAYOUTS,
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

from anymla.formats.fp8_block import quantize_fp8_rows
from anymla.formats.quantized_rows import QuantizedRows
from anymla.ops.kv_cache import quantize_and_insert_k_cache
from anymla.ops.norm_rope import (
    YarnScaling,
    cos_sin_table,
    fused_q_kv_rmsnorm,
    inv_freq,
    qnorm_rope_kv_insert,
    rms_norm,
    rope,
)
from anymla.ops.registry import BackendUnavailable
from anymla.testing.tolerance import accumulation, assert_close, ulps

DEEPSEEK_YARN = YarnScaling(factor=16.0, original_max_position_embeddings=65536)
TABLE = cos_sin_table(inv_freq(64, 160000.0, DEEPSEEK_YARN), 0, 4096)


@pytest.fixture(params=ALL_BACKENDS)
def backend(request, monkeypatch):
    return use_backend(request.param, monkeypatch)


# Tables ----------------------------------------------------------------------------------------


def test_compressed_frequencies_of_deepseek():
    freqs = inv_freq(64, 160000.0, DEEPSEEK_YARN).double()
    golden = {
        0: 1.0,
        15: 3.635538584e-03,
        16: 2.265625e-03,
        20: 2.969777783e-04,
        25: 5.372312671e-06,
        31: 5.680529037e-07,
    }
    for pair, value in golden.items():
        # Four roundings: the power, its reciprocal, the blend's product and sum.
        assert math.isclose(float(freqs[pair]), value, rel_tol=ulps(torch.float32, 2))


def test_frequencies_by_the_formula():
    plain = 160000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    bound = ulps(torch.float32, 2)
    assert_close(inv_freq(64, 160000.0), plain, rtol=bound)
    # Pairs 0..15 turn often and stay, 25..31 turn less than once and slow down 16 times, a ramp of
    # ten steps lies between.
    kept = (1 - (torch.arange(32, dtype=torch.float64) - 15) / 10).clamp(0, 1)
    yarn = plain * (kept + (1 - kept) / 16)
    assert_close(inv_freq(64, 160000.0, DEEPSEEK_YARN), yarn, rtol=2 * bound)
    assert torch.equal(inv_freq(64, 160000.0, DEEPSEEK_YARN)[:16], inv_freq(64, 160000.0)[:16])
    assert torch.equal(inv_freq(64, 160000.0, DEEPSEEK_YARN)[25:], inv_freq(64, 160000.0)[25:] / 16)


def test_a_ramp_without_width():
    """No pair turns even once in 3 positions, so both ends clamp to pair 0: no division by zero."""
    freqs = inv_freq(8, 10000.0, YarnScaling(factor=8.0, original_max_position_embeddings=3))
    assert torch.equal(freqs, inv_freq(8, 10000.0) / torch.tensor([1, 8, 8, 8]))


@pytest.mark.parametrize("position", [0, 1, 127, 2048, 65536, 200_000, 1_048_575])
@pytest.mark.parametrize(("theta", "yarn"), [(10000.0, None), (160000.0, DEEPSEEK_YARN)])
def test_table_at_a_position(position, theta, yarn):
    freqs = inv_freq(64, theta, yarn)
    row = cos_sin_table(freqs, position, position + 1)
    # The angle is a float32 product by definition; only its cosine and sine are approximate.
    angle = (torch.tensor(float(position)) * freqs).double()
    want = torch.cat((angle.cos(), angle.sin())).unsqueeze(0)
    assert row.dtype == torch.float32
    assert_close(row, want, atol=ulps(torch.float32, 1))


def test_the_two_tables_differ():
    """Layers that compress turn by another base than layers that do not."""
    plain = cos_sin_table(inv_freq(64, 10000.0), 127, 128)
    compressed = cos_sin_table(inv_freq(64, 160000.0, DEEPSEEK_YARN), 127, 128)
    assert (plain - compressed).abs().max() > 0.5


def test_a_table_is_the_same_in_pieces():
    freqs = inv_freq(64, 10000.0)
    whole = cos_sin_table(freqs, 0, 300)
    pieces = [cos_sin_table(freqs, *span) for span in ((0, 1), (1, 130), (130, 130), (130, 300))]
    assert torch.equal(torch.cat(pieces), whole)
    assert cos_sin_table(freqs, 7, 7).shape == (0, 64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: inv_freq(7, 10000.0), "rope_dim must be even and positive, got 7"),
        (lambda: inv_freq(0, 10000.0), "rope_dim must be even and positive, got 0"),
        (lambda: inv_freq(64, 1.0), "theta must be above 1, got 1.0"),
        (lambda: cos_sin_table(torch.ones(2), 5, 4), "0 <= start <= stop, got 5 and 4"),
        (lambda: cos_sin_table(torch.ones(2), -1, 4), "0 <= start <= stop, got -1 and 4"),
    ],
)
def test_tables_name_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Norms -----------------------------------------------------------------------------------------


def norm64(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5, 7168), (3, 2, 128), (64,), (0, 512), (2, 0, 8)])
def test_rms_norm(backend, dtype, weight_dtype, shape):
    skip_float64(backend, dtype, weight_dtype)
    x = torch.randn(shape, dtype=dtype) * 3
    weight = torch.randn(shape[-1]).to(weight_dtype)
    got = rms_norm(x, weight, 1e-6, backend=backend)
    assert got.dtype == dtype
    # The mean's rounding is a sum of positive terms; its root halves it. Three more products.
    bound = accumulation(shape[-1], dtype, c=1.0) + ulps(dtype, 3)
    assert_close(got, norm64(x, weight, 1e-6), rtol=bound)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_rms_norm_rounds_bfloat16_once(backend, weight_dtype):
    x = torch.randn(64, 1024).bfloat16()
    weight = torch.randn(1024).to(weight_dtype)
    got = rms_norm(x, weight, 1e-6, backend=backend)
    assert got.dtype == torch.bfloat16
    # Half a unit, plus what float32 may move a value across a tie.
    assert_close(got, norm64(x, weight, 1e-6), rtol=ulps(torch.bfloat16, 0.5) + 1e-5)


@pytest.mark.parametrize("shape", [(70, 4096), (3, 300, 512), (2, 2**18)])
def test_large_batches_are_their_rows(shape):
    """Worked off in blocks, from a strided view, bit for bit."""
    x = torch.randn(*shape[:-1], shape[-1] + 16).bfloat16()[..., 16:]
    weight = torch.randn(shape[-1]).bfloat16()
    got = rms_norm(x, weight, 1e-6, backend="torch")
    assert got.is_contiguous()
    rows = zip(got.flatten(0, -2), x.flatten(0, -2), strict=True)
    for row, single in rows if len(shape) == 2 else list(rows)[::37]:
        assert torch.equal(row, rms_norm(single, weight, 1e-6, backend="torch"))


def test_rms_norm_of_zeros_and_of_tiny_rows(backend):
    x = torch.zeros(2, 64)
    x[1] = 1e-20
    got = rms_norm(x, torch.ones(64), 1e-6, backend=backend)
    assert not got[0].any()
    assert_close(got[1], norm64(x[1], None, 1e-6), rtol=ulps(torch.float32, 4))


def test_norms_take_slices_of_a_fused_projection(backend):
    fused = torch.randn(6, 160 + 512).bfloat16()
    qr, kv = fused.split((160, 512), dim=1)
    q_weight, kv_weight = torch.randn(160).bfloat16(), torch.randn(512).bfloat16()
    before = fused.clone()
    quantised = QuantizedRows.empty(6, 160, qr.device)
    got_q, got_kv = fused_q_kv_rmsnorm(
        qr, kv, q_weight, kv_weight, 1e-6,
        codes=quantised.codes, code_scales=quantised.scales, backend=backend,
    )  # fmt: skip
    codes, scales = quantize_fp8_rows(got_q)
    assert torch.equal(quantised.codes[:6], codes)
    assert torch.equal(quantised.scales[:6], scales)
    assert torch.equal(fused, before)
    assert torch.equal(got_q, rms_norm(qr.contiguous(), q_weight, 1e-6, backend=backend))
    assert torch.equal(got_kv, rms_norm(kv.contiguous(), kv_weight, 1e-6, backend=backend))
    bound = ulps(torch.bfloat16, 0.5) + 1e-5
    assert_close(got_q, norm64(qr, q_weight, 1e-6), rtol=bound)
    assert_close(got_kv, norm64(kv, kv_weight, 1e-6), rtol=bound)
    empty_q, empty_kv = fused_q_kv_rmsnorm(
        qr[:0], kv[:0], q_weight, kv_weight, 1e-6, backend=backend
    )
    assert empty_q.shape == (0, 160)
    assert empty_kv.shape == (0, 512)


# Rotation --------------------------------------------------------------------------------------


def rope64(x: Tensor, positions: Tensor, table: Tensor, *, inverse: bool = False) -> Tensor:
    """The rotation as complex numbers in float64."""
    half = table.shape[1] // 2
    cos, sin = table[positions].double().split(half, dim=1)
    by = torch.complex(cos, -sin if inverse else sin).unsqueeze(1)
    y = x.double().clone()
    tail = y[..., -2 * half :].unflatten(-1, (half, 2)).contiguous()
    y[..., -2 * half :] = torch.view_as_real(torch.view_as_complex(tail) * by).flatten(-2)
    return y


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(("heads", "width"), [(1, 512), (5, 128), (3, 64), (2, 96)])
def test_rope_turns_the_last_pairs(backend, dtype, inverse, heads, width):
    skip_float64(backend, dtype)
    x = torch.randn(7, heads, width).to(dtype)
    positions = torch.tensor([0, 1, 2, 127, 128, 2048, 4095])
    before = x.clone()
    got = rope(x, positions, TABLE, inverse=inverse, backend=backend)
    assert torch.equal(x, before)
    assert got.dtype == dtype
    assert torch.equal(got[..., : width - 64], x[..., : width - 64])
    want = rope64(x, positions, TABLE, inverse=inverse)
    # |even| + |odd| bounds the terms: three roundings at work, one to the result's dtype.
    magnitude = x.double().abs().unflatten(-1, (-1, 2)).sum(-1).repeat_interleave(2, dim=-1)
    wide = torch.promote_types(dtype, torch.float32)
    assert_close(got, want, atol=ulps(wide, 2), rtol=ulps(dtype, 0.5), scale=magnitude)


def test_nothing_outlives_the_table_it_was_made_of(backend):
    x, positions = torch.randn(1, 2, 128), torch.tensor([3])
    table = TABLE.clone()
    rope(x, positions, table, backend=backend)
    table[3, :32], table[3, 32:] = 0, 1
    got = rope(x, positions, table, backend=backend)
    assert torch.equal(got[..., -64::2], -x[..., -63::2])
    del table
    for angle in range(4):  # other tables in the same place
        table = TABLE.roll(-angle, 0).contiguous()
        assert torch.equal(
            rope(x, positions, table, backend=backend),
            rope(x.repeat(17, 1, 1), positions.repeat(17), table, backend=backend)[:1],
        )
        del table


def overwrite(way: str, table: Tensor, new: Tensor) -> None:
    """Write a table in a way that torch may not count."""
    if way == "data":
        table.data.copy_(new)
    elif way == "numpy":
        table.numpy()[:] = new.numpy()
    else:
        table.copy_(new)


@pytest.mark.parametrize("way", ["data", "numpy", "inference"])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("inverse", [False, True])
def test_a_table_that_is_written_turns_by_what_is_written(backend, way, tokens, inverse):
    x, positions = torch.randn(tokens, 2, 128), torch.arange(tokens) + 3
    with torch.inference_mode(way == "inference"):
        table = TABLE[:8].clone()
        rope(x, positions, table, inverse=inverse, backend=backend)
        overwrite(way, table, TABLE[100:108])
        got = rope(x, positions, table, inverse=inverse, backend=backend)
        want = rope(x, positions + 100, TABLE, inverse=inverse, backend=backend)
    assert torch.equal(got, want)


def test_rope_is_interleaved_and_not_in_halves(backend):
    x = torch.zeros(1, 1, 512)
    x[0, 0, 448 + 2 * 3] = 1
    got = rope(x, torch.tensor([5]), TABLE, backend=backend)[0, 0]
    assert set(got.nonzero().squeeze(1).tolist()) == {448 + 6, 448 + 7}
    assert got[448 + 6] == TABLE[5, 3]
    assert got[448 + 7] == TABLE[5, 32 + 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_inverse_undoes_the_rotation(backend, dtype):
    skip_float64(backend, dtype)
    x = torch.randn(64, 4, 512, dtype=dtype)
    positions = torch.randint(0, 4096, (64,))
    there = rope(x, positions, TABLE, backend=backend)
    back = rope(there, positions, TABLE, inverse=True, backend=backend)
    assert (there - x).abs().max() > 1
    # The table is float32, so its cosines and sines are not quite of unit length.
    bound = ulps(torch.float32, 2) + (ulps(dtype, 4) if dtype == torch.float32 else 0.0)
    magnitude = x.double().abs().unflatten(-1, (-1, 2)).sum(-1).repeat_interleave(2, dim=-1)
    assert_close(back, x, atol=bound, scale=magnitude)


def test_rotated_products_depend_on_the_distance_only(backend):
    skip_float64(backend, torch.float64)
    q, k = torch.randn(2, 1, 1, 64, dtype=torch.float64).unbind(0)
    for distance in (0, 1, 130):
        dots = []
        for start in (0, 7, 2000):
            at = torch.tensor([start]), torch.tensor([start + distance])
            turned = [rope(x, p, TABLE, backend=backend) for x, p in zip((k, q), at, strict=True)]
            dots.append(float((turned[0] * turned[1]).sum()))
        # float32 angles: a position of 2^11 times half a unit of a frequency near 1.
        assert max(dots) - min(dots) < 64 * 2.0**11 * 2.0**-24 * float(
            q.abs().max() * k.abs().max()
        )


def test_rope_of_strided_and_of_no_tokens(backend):
    x = torch.randn(4, 6, 1024)[::2, 1::2, 300:812]
    positions = torch.tensor([9, 11])
    got = rope(x, positions, TABLE, backend=backend)
    assert torch.equal(got, rope(x.contiguous(), positions, TABLE, backend=backend))
    assert got.is_contiguous()
    assert rope(x[:0], positions[:0], TABLE, backend=backend).shape == (0, 3, 512)
    assert rope(x[:0], positions[:0], TABLE[:0], backend=backend).shape == (0, 3, 512)
    assert rope(x[:, :0], positions, TABLE, backend=backend).shape == (2, 0, 512)


def test_padding_tokens_may_have_any_position(backend):
    x = torch.randn(6, 2, 512)
    positions = torch.tensor([3, -1, 2**40, 17, -(2**62), 4096])
    got = rope(x, positions, TABLE, backend=backend)
    assert got.isfinite().all()
    known = torch.tensor([0, 3])
    assert torch.equal(got[known], rope(x[known], positions[known], TABLE, backend=backend))


# Queries and the insertion of keys -------------------------------------------------------------


def inserted(layout: str, rows: Tensor, slots: Tensor) -> Tensor:
    cache = make_cache(layout, 3, 4)
    quantize_and_insert_k_cache(rows, cache.tensor, slots, layout=layout, backend="reference")
    return cache.storage


@pytest.mark.parametrize("layout", MAIN_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("heads", [1, 5, 64])
def test_queries_and_rows_of_a_step(backend, layout, dtype, heads):
    skip_float64(backend, dtype)
    q, kv = (torch.randn(6, heads, 512) * 3).to(dtype), torch.randn(6, 512).to(dtype)
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
    bound = accumulation(512, wide, c=1.0) + ulps(wide, 4)
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
    q, kv = torch.randn(5, 2, 512).to(q_dtype), torch.randn(5, 512).to(kv_dtype)
    slots, positions = torch.tensor([3, 9, 0, 1, 5]), torch.tensor([0, 1, 127, 2048, 4095])
    cache = make_cache("rows_fp32_512", 3, 4)
    qnorm_rope_kv_insert(
        q, kv, cache.tensor, slots, positions, TABLE, 1e-6, layout="rows_fp32_512", backend=backend
    )
    wide = torch.promote_types(kv_dtype, torch.float32)
    rows = rope(kv.to(wide).unsqueeze(1), positions, TABLE, backend="reference").squeeze(1)
    assert torch.equal(cache.storage, inserted("rows_fp32_512", rows, slots))


def test_every_query_is_processed_whatever_its_slot(backend):
    q, kv = torch.randn(5, 3, 512).bfloat16(), torch.randn(5, 512).bfloat16()
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
    q, kv = torch.randn(5, 3, 512).bfloat16(), torch.randn(5, 512).bfloat16()
    arguments = (torch.tensor([1, 2]), torch.arange(5), TABLE, 1e-6)
    cache = make_cache("v4_main_fp8", 3, 4)
    want = qnorm_rope_kv_insert(q, kv, cache.tensor, *arguments, backend=backend)
    buffer = torch.full((5, 8, 512), 7.0).bfloat16()
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
    q, kv = torch.empty(0, 8, 512).bfloat16(), torch.empty(0, 512).bfloat16()
    got = qnorm_rope_kv_insert(q, kv, cache.tensor, none, none, TABLE, 1e-6, backend=backend)
    assert got.shape == (0, 8, 512)
    assert not cache.changed(before)


@given(
    tokens=st.integers(1, 40), heads=st.sampled_from([1, 8, 20, 64, 128]), seed=st.integers(0, 999)
)
def test_a_row_does_not_depend_on_its_batch(tokens, heads, seed):
    """Bit for bit, also where the batch is worked off in blocks."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, heads, 512, generator=generator).bfloat16()
    kv = torch.randn(tokens, 512, generator=generator).bfloat16()
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
    q, kv = torch.randn(5, 3, 512).bfloat16(), torch.randn(5, 512).bfloat16()
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
        turned = qnorm_rope_kv_insert(
            q * 2, kv, cache, slots, positions, TABLE, 1e-6, layout="rows_fp32_512", out=out
        )
        return rope(turned, positions, TABLE, inverse=True) + 1

    q, kv = torch.randn(3, 2, 512), torch.randn(3, 512)
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


# What bad arguments get ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(2, 512)}, ValueError, r"q must be .* \[T, H, D\]"),
        ({"kv": torch.zeros(3, 512)}, ValueError, r"kv must be .* \[T=2, D=512\]"),
        ({"kv": torch.zeros(2, 512).int()}, TypeError, "kv must be bfloat16 or"),
        ({"slot_mapping": torch.zeros(3).long()}, ValueError, "at most T=2 long, got 3"),
        ({"positions": torch.zeros(2).int()}, TypeError, "positions must be int64"),
        ({"cos_sin_cache": TABLE.bfloat16()}, TypeError, "cos_sin_cache must be float32 or"),
        ({"cos_sin_cache": TABLE[:, :63]}, ValueError, r"R even .* got \[4096, 63\]"),
        ({"cos_sin_cache": TABLE[:0]}, ValueError, r"with L >= 1, got \[0, 64\]"),
        ({"layout": "v4_index_fp8"}, ValueError, r"\[P, B, 132\]"),
        ({"out": torch.zeros(2, 4, 512).double()}, TypeError, "out must be float32"),
        ({"out": torch.zeros(2, 4, 512)}, ValueError, r"out must be .* got float32 \[2, 4, 512\]"),
    ],
)
def test_insertion_names_what_is_wrong(change, error, message):
    arguments = {
        "q": torch.zeros(2, 3, 512),
        "kv": torch.zeros(2, 512),
        "k_cache": torch.zeros(2, 4, 584, dtype=torch.uint8),
        "slot_mapping": torch.zeros(2, dtype=torch.int64),
        "positions": torch.zeros(2, dtype=torch.int64),
        "cos_sin_cache": TABLE,
        "eps": 1e-6,
    }
    with pytest.raises(error, match=message):
        qnorm_rope_kv_insert(**(arguments | change))


def test_norms_and_rotation_name_what_is_wrong():
    with pytest.raises(ValueError, match=r"rms_norm: weight must be .* \[D=8\], got float32 \[7\]"):
        rms_norm(torch.zeros(2, 3, 8), torch.zeros(7), 1e-6)
    with pytest.raises(TypeError, match="rms_norm: x must be bfloat16"):
        rms_norm(torch.zeros(2, 8).int(), torch.zeros(8), 1e-6)
    with pytest.raises(TypeError, match="rms_norm: x must be a tensor"):
        rms_norm([1.0], torch.zeros(8), 1e-6)
    with pytest.raises(ValueError, match="fused_q_kv_rmsnorm: kv must be"):
        fused_q_kv_rmsnorm(
            torch.zeros(2, 8), torch.zeros(3, 8), torch.zeros(8), torch.zeros(8), 1e-6
        )
    with pytest.raises(ValueError, match=r"rope: positions must be int64 \[T=2\], got int64 \[3\]"):
        rope(torch.zeros(2, 1, 64), torch.zeros(3).long(), TABLE)
    with pytest.raises(ValueError, match="2 <= R <= D=32"):
        rope(torch.zeros(2, 1, 32), torch.zeros(2).long(), TABLE)
    with pytest.raises(ValueError, match="cos_sin_cache must be on cpu, got meta"):
        rope(torch.zeros(2, 1, 64), torch.zeros(2).long(), TABLE.to("meta"))


@pytest.mark.skipif("triton" not in runnable(TRITON), reason="Triton kernels do not run here")
def test_triton_refuses_float64():
    x, positions = torch.zeros(2, 1, 64), torch.zeros(2).long()
    with pytest.raises(BackendUnavailable, match="float32, but argument 0 is float64"):
        rope(x.double(), positions, TABLE, backend="triton")
    with pytest.raises(BackendUnavailable, match="float32, but argument 1 is float64"):
        rms_norm(x, weight=torch.ones(64).double(), eps=1e-6, backend="triton")


# What a device does ----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("layout", MAIN_LAYOUTS)
@pytest.mark.parametrize("name", DEVICE_BACKENDS)
def test_a_device_does_the_same_without_waiting(layout, name, monkeypatch):
    device, backend = a_device(), use_device_backend(name, monkeypatch)
    q, kv = torch.randn(9, 5, 512), torch.randn(9, 512)
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
    bound = accumulation(512, torch.float32, c=1.0) + ulps(torch.float32, 4)
    assert_close(got.cpu(), want, atol=bound, scale=4.0)
    if backend == "triton":  # its products are not contracted, so the rows are the same bits
        assert torch.equal(cache.cpu().view(torch.uint8), host.tensor.view(torch.uint8))
    elif layout == "rows_fp32_512":
        assert_close(
            cache.cpu().nan_to_num(), host.tensor.nan_to_num(), atol=ulps(torch.float32, 8)
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", DEVICE_BACKENDS[:2])
def test_a_device_norms_and_rotates_alike(dtype, name, monkeypatch):
    device, backend = a_device(), use_device_backend(name, monkeypatch)
    fused = torch.randn(9, 1536 + 512).to(dtype)
    weights = torch.randn(1536).to(dtype), torch.randn(512).to(dtype)
    qr, kv = fused.to(device).split((1536, 512), dim=1)
    moved = [weight.to(device) for weight in weights]
    got = fused_q_kv_rmsnorm(qr, kv, *moved, 1e-6, backend=backend)
    bound = accumulation(1536, torch.float32, c=1.0) + ulps(torch.float32, 8)
    for result, x, weight in zip(got, fused.split((1536, 512), dim=1), weights, strict=True):
        assert_close(result.cpu(), norm64(x, weight, 1e-6), rtol=ulps(dtype, 0.5) + bound)
    alone = rms_norm(qr, moved[0], 1e-6, backend=backend)
    assert_close(alone.cpu(), got[0].cpu().double(), rtol=ulps(dtype, 1) + bound)

    x, positions = torch.randn(9, 3, 512).to(dtype), torch.randint(-2, 5000, (9,))
    for inverse in (False, True):
        turned = rope(
            x.to(device), positions.to(device), TABLE.to(device), inverse=inverse, backend=backend
        )
        want = rope64(x, positions.clamp(0, 4095), TABLE, inverse=inverse)
        magnitude = x.double().abs().unflatten(-1, (-1, 2)).sum(-1).repeat_interleave(2, dim=-1)
        assert_close(
            turned.cpu(), want, atol=ulps(torch.float32, 2), rtol=ulps(dtype, 0.5), scale=magnitude
        )

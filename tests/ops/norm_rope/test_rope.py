from __future__ import annotations

import pytest
import torch
from norm_rope_float64 import TABLE, norm64, rope64
from paged import DEVICE_BACKENDS, TRITON, a_device, runnable, skip_float64, use_device_backend
from torch import Tensor

from anymla.ops.norm_rope import fused_q_kv_rmsnorm, rms_norm, rope
from anymla.ops.norm_rope.shapes import V4_FLASH, V4_PRO
from anymla.ops.registry import BackendUnavailable
from anymla.testing.tolerance import accumulation, assert_close, ulps

D = V4_FLASH.channels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(
    ("heads", "width"), [(1, D), (5, V4_FLASH.index_channels), (3, 64), (2, 96)]
)
def test_rope_rotates_the_last_pairs(backend, dtype, inverse, heads, width):
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
    x, positions = torch.randn(1, 2, V4_FLASH.index_channels), torch.tensor([3])
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
def test_a_table_that_is_written_rotates_by_what_is_written(backend, way, tokens, inverse):
    x, positions = torch.randn(tokens, 2, V4_FLASH.index_channels), torch.arange(tokens) + 3
    with torch.inference_mode(way == "inference"):
        table = TABLE[:8].clone()
        rope(x, positions, table, inverse=inverse, backend=backend)
        overwrite(way, table, TABLE[100:108])
        got = rope(x, positions, table, inverse=inverse, backend=backend)
        want = rope(x, positions + 100, TABLE, inverse=inverse, backend=backend)
    assert torch.equal(got, want)


def test_rope_is_interleaved_and_not_in_halves(backend):
    x = torch.zeros(1, 1, D)
    x[0, 0, 448 + 2 * 3] = 1
    got = rope(x, torch.tensor([5]), TABLE, backend=backend)[0, 0]
    assert set(got.nonzero().squeeze(1).tolist()) == {448 + 6, 448 + 7}
    assert got[448 + 6] == TABLE[5, 3]
    assert got[448 + 7] == TABLE[5, 32 + 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_inverse_undoes_the_rotation(backend, dtype):
    skip_float64(backend, dtype)
    x = torch.randn(64, 4, D, dtype=dtype)
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
            rotated = [rope(x, p, TABLE, backend=backend) for x, p in zip((k, q), at, strict=True)]
            dots.append(float((rotated[0] * rotated[1]).sum()))
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
    assert rope(x[:0], positions[:0], TABLE, backend=backend).shape == (0, 3, D)
    assert rope(x[:0], positions[:0], TABLE[:0], backend=backend).shape == (0, 3, D)
    assert rope(x[:, :0], positions, TABLE, backend=backend).shape == (2, 0, D)


def test_padding_tokens_may_have_any_position(backend):
    x = torch.randn(6, 2, D)
    positions = torch.tensor([3, -1, 2**40, 17, -(2**62), 4096])
    got = rope(x, positions, TABLE, backend=backend)
    assert got.isfinite().all()
    known = torch.tensor([0, 3])
    assert torch.equal(got[known], rope(x[known], positions[known], TABLE, backend=backend))


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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", DEVICE_BACKENDS[:2])
def test_a_device_norms_and_rotates_alike(dtype, name, monkeypatch):
    device, backend = a_device(), use_device_backend(name, monkeypatch)
    sizes = V4_PRO.q_rank, V4_PRO.channels
    fused = torch.randn(9, sum(sizes)).to(dtype)
    weights = [torch.randn(size).to(dtype) for size in sizes]
    qr, kv = fused.to(device).split(sizes, dim=1)
    moved = [weight.to(device) for weight in weights]
    got = fused_q_kv_rmsnorm(qr, kv, *moved, 1e-6, backend=backend)
    bound = accumulation(V4_PRO.q_rank, torch.float32, c=1.0) + ulps(torch.float32, 8)
    for result, x, weight in zip(got, fused.split(sizes, dim=1), weights, strict=True):
        assert_close(result.cpu(), norm64(x, weight, 1e-6), rtol=ulps(dtype, 0.5) + bound)
    alone = rms_norm(qr, moved[0], 1e-6, backend=backend)
    assert_close(alone.cpu(), got[0].cpu().double(), rtol=ulps(dtype, 1) + bound)

    x, positions = torch.randn(9, 3, D).to(dtype), torch.randint(-2, 5000, (9,))
    for inverse in (False, True):
        rotated = rope(
            x.to(device), positions.to(device), TABLE.to(device), inverse=inverse, backend=backend
        )
        want = rope64(x, positions.clamp(0, 4095), TABLE, inverse=inverse)
        magnitude = x.double().abs().unflatten(-1, (-1, 2)).sum(-1).repeat_interleave(2, dim=-1)
        assert_close(
            rotated.cpu(), want, atol=ulps(torch.float32, 2), rtol=ulps(dtype, 0.5), scale=magnitude
        )

from __future__ import annotations

import pytest
import torch
from norm_rope_float64 import norm64
from paged import skip_float64

from anymla.formats.fp8_block import quantize_fp8_rows
from anymla.formats.quantized_rows import QuantizedRows
from anymla.ops.device import CPU, TARGETS, XPU
from anymla.ops.norm_rope import fused_q_kv_rmsnorm, rms_norm
from anymla.ops.norm_rope.shapes import MODELS, V4_FLASH, V4_PRO
from anymla.testing.tolerance import accumulation, assert_close, ulps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "shape",
    [(5, V4_PRO.hidden), (3, 2, V4_FLASH.index_channels), (64,), (0, V4_FLASH.channels), (2, 0, 8)],
)
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
    x = torch.randn(64, V4_FLASH.q_rank).bfloat16()
    weight = torch.randn(V4_FLASH.q_rank).to(weight_dtype)
    got = rms_norm(x, weight, 1e-6, backend=backend)
    assert got.dtype == torch.bfloat16
    # Half a unit, plus what float32 may move a value across a tie.
    assert_close(got, norm64(x, weight, 1e-6), rtol=ulps(torch.bfloat16, 0.5) + 1e-5)


@pytest.mark.parametrize("shape", [(70, V4_FLASH.hidden), (3, 300, V4_FLASH.channels), (2, 2**18)])
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
    channels = V4_FLASH.channels
    fused = torch.randn(6, 160 + channels).bfloat16()
    qr, kv = fused.split((160, channels), dim=1)
    q_weight, kv_weight = torch.randn(160).bfloat16(), torch.randn(channels).bfloat16()
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
    assert empty_kv.shape == (0, channels)


@pytest.mark.parametrize("target", [*TARGETS.values(), XPU, CPU], ids=lambda target: target.name)
def test_tiles_are_whole_rows_of_any_width(target):
    pytest.importorskip("triton")
    from anymla.ops.norm_rope import config

    models = {width for model in MODELS for width in model.widths}
    for width in (1, 2, 96, 100_000, *models):
        for choose in (config.choose_norm_config, config.choose_rope_config):
            chosen = choose(width, target)
            assert chosen.width == width
            assert width <= chosen.padded < 2 * width
            for number in (chosen.padded, chosen.rows, chosen.num_warps):
                assert number & (number - 1) == 0
            threads = chosen.num_warps * target.warp_size
            assert threads <= 1024
            if width in models:  # accesses of 16 bytes of bfloat16
                assert chosen.rows * chosen.padded >= 8 * threads

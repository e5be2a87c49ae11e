"""Kernels of the output projection: float64 of its formula, and the very codes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from index_scores import multiplies_fp8
from paged import a_device, skip_float64
from torch import Tensor

from anymla.formats.e4m3 import decode_e4m3
from anymla.formats.fp8_block import (
    dequantize_fp8_rows,
    dequantize_fp8_weight,
    quantize_fp8_rows,
    quantize_fp8_weight,
)
from anymla.ops import device as device_facts
from anymla.ops.linear import (
    grouped_output_projection,
    grouped_output_projection_fp8,
    inverse_rope_fp8_quant,
)
from anymla.ops.linear.config import TritonConfig, choose_triton_config
from anymla.testing.tolerance import Bound, accumulation, assert_close, assert_identical, ulps

no_triton = pytest.mark.skipif(not device_facts.has_triton(), reason="triton is not installed")
BACKENDS = [pytest.param("triton", marks=no_triton)]
TURNED = 8


def angles(rows: int = 50) -> Tensor:
    """Cosines, then sines, of angles of many magnitudes."""
    angle = torch.arange(rows)[:, None] * torch.logspace(0, -3, TURNED // 2)
    return torch.cat((angle.cos(), angle.sin()), 1)


def turned_back(o: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """R^-1 o in float64, pair by pair."""
    out = o.double().clone()
    first = o.shape[2] - TURNED
    for t, position in enumerate(positions.tolist()):
        for pair in range(TURNED // 2):
            cos, sin = table[position, pair].double(), table[position, TURNED // 2 + pair].double()
            even, odd = o[t, :, first + 2 * pair].double(), o[t, :, first + 2 * pair + 1].double()
            out[t, :, first + 2 * pair] = even * cos + odd * sin
            out[t, :, first + 2 * pair + 1] = odd * cos - even * sin
    return out


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_projection(backend: str, dtype: torch.dtype, tokens: int) -> None:
    skip_float64(backend, dtype)
    # 144 channels: a block of 128 and a shorter one, which holds the rotated channels.
    o = torch.randn(tokens, 6, 144).to(dtype)
    positions, table = torch.randint(0, 50, (tokens,)), angles()
    wo_a = (torch.randn(3, 20, 288) / 288**0.5).to(dtype)
    got = grouped_output_projection(o, positions, table, wo_a, backend=backend)
    assert (got.shape, got.dtype) == ((tokens, 60), dtype)
    turned = turned_back(o, positions, table)
    groups = turned.view(tokens, 3, 288)
    want = torch.einsum("tgj,grj->tgr", groups, wo_a.double()).flatten(1)
    magnitude = torch.einsum("tgj,grj->tgr", groups.abs(), wo_a.double().abs()).flatten(1)
    wide = torch.promote_types(dtype, torch.float32)
    # Rotated channels are rounded once before the product: half an ulp of each term at most.
    bound = accumulation(288, wide) + ulps(dtype, 0.5)
    assert_close(got, want, atol=bound, rtol=ulps(dtype, 0.5), scale=magnitude)


@pytest.mark.parametrize(("block", "floor"), [(128, 1e-10), (32, 1e-4)])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_quantised_heads(
    backend: str,
    dtype: torch.dtype,
    native: bool,
    block: int,
    floor: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if native and backend != "triton":
        pytest.skip("only kernels convert in two ways")
    if native and torch.cuda.is_available() and not device_facts.target_of(a_device()).native_e4m3:
        pytest.skip("this GPU has no e4m3 instructions")
    if backend == "triton":
        from anymla.ops import _triton_epilogue

        target = dataclasses.replace(device_facts.CPU, native_e4m3=native)
        monkeypatch.setattr(_triton_epilogue, "target_of", lambda device: target)
    o = torch.randn(5, 4, 256).to(dtype)
    o[0, 0], o[1, 2, 128:] = 0, 1e-13  # below the floor
    o[2] *= torch.exp2(torch.randint(-30, 30, (4, 1)).float())
    positions, table = torch.tensor([0, 49, 7, 1, 30]), angles()
    call = functools.partial(
        inverse_rope_fp8_quant, o, positions, table, n_groups=2, quant_block=block, amax_floor=floor
    )
    codes, scales = call(backend=backend)
    assert (codes.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert (codes.shape, scales.shape) == ((5, 2, 512), (5, 2, 512 // block))
    runs = turned_back(o, positions, table).view(5, 2, 512 // block, block)
    exponent = torch.ceil(torch.log2(runs.abs().amax(-1).clamp(min=floor) / 448))
    assert_identical(scales, torch.exp2(exponent).float())
    got = dequantize_fp8_rows(codes.view(torch.uint8), scales, torch.float64, block)
    # An e4m3 has 3 bits after the leading one; below its smallest normal steps are 2^-9.
    step = scales.double().repeat_interleave(block, -1) * 2.0**-10
    assert_close(got, runs.flatten(-2), rtol=2.0**-4 + 2.0**-20, atol=1.0, scale=step)
    reference = call(backend="reference")
    assert_identical(codes.view(torch.uint8), reference[0].view(torch.uint8), name="codes")


@pytest.mark.parametrize("scale_format", ["ue8m0", "fp32"])
@pytest.mark.parametrize("out_dtype", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("tokens", [0, 1, 20])
@pytest.mark.parametrize("backend", BACKENDS)
def test_projection_of_codes(backend: str, tokens: int, out_dtype: str, scale_format: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[out_dtype]
    skip_float64(backend, dtype)
    codes = torch.randn(tokens, 2, 256).to(torch.float8_e4m3fn)
    o_scale = torch.exp2(torch.randint(-5, 5, (tokens, 2, 2)).float())
    pairs = [quantize_fp8_weight(torch.randn(128, 256) * g, scale_format) for g in (1.0, 30.0)]
    weight, scale = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    got = grouped_output_projection_fp8(
        codes, o_scale, weight, scale, out_dtype=out_dtype, backend=backend
    )
    assert (got.shape, got.dtype) == ((tokens, 256), dtype)
    heads = decode_e4m3(codes.view(torch.uint8), torch.float64)
    heads = heads * o_scale.double().repeat_interleave(128, -1)
    exact = torch.stack([dequantize_fp8_weight(*pair, torch.float64) for pair in pairs])
    want = torch.einsum("tgj,grj->tgr", heads, exact).flatten(1)
    magnitude = torch.einsum("tgj,grj->tgr", heads.abs(), exact.abs()).flatten(1)
    wide = torch.promote_types(dtype, torch.float32)
    bound = accumulation(256, wide)
    if multiplies_fp8(backend):
        # Hopper's FP8 products are cut off, not rounded, 13 bits below the largest of a step.
        bound += Bound(2.0**-12, "FP8 products cut off at 13 bits (Hopper)")
    assert_close(got, want, atol=bound, rtol=ulps(dtype, 0.5), scale=magnitude)


@no_triton
def test_heads_that_become_float16_before_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    from anymla.ops.linear import triton_launch

    forms = iter((True, False))

    def forced(shape: Any, form: str, _: object, **given: Any) -> TritonConfig:
        config = choose_triton_config(shape, form, device_facts.TARGETS["sm_80"], **given)
        assert config.by_words
        wide = next(forms)
        return dataclasses.replace(config, float16_x=wide, scales_ahead=wide)

    monkeypatch.setattr(triton_launch, "choose_triton_config", forced)
    rows = [quantize_fp8_rows(torch.randn(34, 256)) for _ in range(3)]
    o = torch.stack([codes for codes, _ in rows], 1).view(torch.float8_e4m3fn)
    o_scale = torch.stack([scale for _, scale in rows], 1)
    pairs = [quantize_fp8_weight(torch.randn(128, 256), "fp32") for _ in range(3)]
    wo_a, wo_a_scale = (torch.stack(each) for each in zip(*pairs, strict=True))
    got, want = (
        grouped_output_projection_fp8(o, o_scale, wo_a, wo_a_scale, backend="triton")
        for _ in range(2)
    )
    assert bool(got.any())
    # Both decode the same numbers and add their products in the same order.
    assert_identical(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_heads(backend: str) -> None:
    storage = torch.full((3, 4, 288), torch.nan)
    storage[:, :, ::2] = torch.randn(3, 4, 144)
    o, positions, table = storage[:, :, ::2], torch.tensor([4, 0, 9]), angles()
    wo_a = torch.randn(2, 8, 288)
    got = grouped_output_projection(o, positions, table, wo_a, backend=backend)
    want = grouped_output_projection(o.contiguous(), positions, table, wo_a, backend=backend)
    assert_identical(got, want)


@no_triton
def test_kernels_say_what_they_do_not_take() -> None:
    positions, table = torch.zeros(1, dtype=torch.int64), angles()
    o, wo_a = torch.zeros(1, 2, 9), torch.zeros(1, 4, 18)
    odd = grouped_output_projection.supports(o, positions, table, wo_a, backend="triton")
    assert "even number" in odd.reason
    wide = grouped_output_projection.supports(
        o.double(), positions, table, wo_a.double(), backend="triton"
    )
    assert not wide


@no_triton
@pytest.mark.parametrize("split_k", [128, 256])
def test_splits_of_a_tile_of_128_tokens(split_k: int) -> None:
    """No split is empty, also where the last is shorter: the kernel tells the compiler so."""
    from anymla.ops._gemm_config import TileConfig
    from anymla.ops.linear.config import TritonConfig
    from anymla.ops.linear.triton_launch import launch_gemm

    tile = TileConfig(128, 64, 64, 8, 3)
    config = TritonConfig(False, torch.bfloat16, tile, split_k)
    x = torch.randn(3, 2, 320).bfloat16()
    w = torch.randn(2, 70, 320).bfloat16()
    out = launch_gemm(x, None, w, None, config, weight_format="plain", out_dtype=torch.float32)
    want = torch.einsum("tgk,gnk->tgn", x.double(), w.double())
    magnitude = torch.einsum("tgk,gnk->tgn", x.double().abs(), w.double().abs())
    assert_close(out, want, atol=accumulation(320, torch.float32), scale=magnitude)

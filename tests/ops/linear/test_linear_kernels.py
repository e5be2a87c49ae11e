"""Kernels of packed linear layers: float64 products of the exactly decoded weight."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from paged import a_device, skip_float64
from torch import Tensor

from anymla.formats.fp8_block import (
    dequantize_fp8_rows,
    dequantize_fp8_weight,
    quantize_fp8_rows,
    quantize_fp8_weight,
)
from anymla.formats.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from anymla.formats.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from anymla.formats.quantized_rows import QuantizedRows
from anymla.ops import device as device_facts
from anymla.ops.linear import (
    fp8_block_linear,
    linear,
    linear_float32,
    mxfp4_linear,
    nvfp4_linear,
)
from anymla.ops.linear.config import TritonConfig, choose_triton_config
from anymla.testing.tolerance import accumulation, assert_close, assert_identical, ulps

no_triton = pytest.mark.skipif(not device_facts.has_triton(), reason="triton is not installed")
BACKENDS = [pytest.param("triton", marks=no_triton)]
FORMATS = ["fp8-ue8m0", "fp8-fp32", "mxfp4", "nvfp4"]


def packed(weight_format: str, n: int, k: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """A random weight as stored, and its values in float64."""
    w = torch.randn(n, k) / k**0.5
    # Scales that differ from row to row and from block to block.
    w *= torch.exp2(torch.randint(-6, 6, (n, 1)).float()) * torch.linspace(0.1, 2, k)
    if weight_format == "mxfp4":
        stored: tuple[Tensor, ...] = quantize_mxfp4(w)
        return stored, dequantize_mxfp4(*stored, torch.float64)
    if weight_format == "nvfp4":
        stored = quantize_nvfp4(w)
        return stored, dequantize_nvfp4(*stored, torch.float64)
    stored = quantize_fp8_weight(w, weight_format.removeprefix("fp8-"))
    return stored, dequantize_fp8_weight(*stored, torch.float64)


def multiply(
    weight_format: str, x: Tensor, stored: tuple[Tensor, ...], quantize: bool, backend: str
) -> Tensor:
    if weight_format == "nvfp4":
        return nvfp4_linear(x, *stored, backend=backend)
    operation = mxfp4_linear if weight_format == "mxfp4" else fp8_block_linear
    return operation(x, *stored, quantize_activations=quantize, backend=backend)


def check_product(
    weight_format: str, x: Tensor, n: int, backend: str, *, quantize: bool = False
) -> None:
    k = x.shape[-1]
    stored, exact = packed(weight_format, n, k)
    got = multiply(weight_format, x, stored, quantize, backend)
    given = dequantize_fp8_rows(*quantize_fp8_rows(x), torch.float64) if quantize else x.double()
    assert (got.shape, got.dtype) == ((*x.shape[:-1], n), x.dtype)
    magnitude = given.abs() @ exact.abs().T
    # The operands are exact, so only the sum of k float32 products and one rounding are left.
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    assert_close(
        got,
        given @ exact.T,
        atol=accumulation(k, wide),
        rtol=ulps(x.dtype, 0.5),
        scale=magnitude,
        name=f"{weight_format}, {backend}",
    )


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_result_is_rounded(backend: str, weight_format: str, dtype: torch.dtype) -> None:
    skip_float64(backend, dtype)
    check_product(weight_format, torch.randn(3, 160).to(dtype), 136, backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weight_format", FORMATS[:3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_quantised_activations(backend: str, weight_format: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, 160).to(dtype)
    x[0, :128], x[1, 5] = 0, 300  # a run at the floor, and one whose others nearly vanish
    check_product(weight_format, x, 136, backend, quantize=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["reference", "torch", *BACKENDS])
def test_activations_that_come_quantised(backend: str, dtype: torch.dtype) -> None:
    stored, _ = packed("fp8-ue8m0", 136, 300)
    x = torch.randn(2, 3, 300).to(dtype)
    rows = QuantizedRows.empty(6, 300, torch.device("cpu"))
    rows.codes[:6], rows.scales[:6] = quantize_fp8_rows(x.view(6, 300))
    given = {"codes": rows.codes, "code_scales": rows.scales}
    want = fp8_block_linear(x, *stored, quantize_activations=True, backend=backend)
    anything = torch.full_like(x, torch.nan)
    got = fp8_block_linear(anything, *stored, quantize_activations=True, backend=backend, **given)
    assert_identical(got, want)
    with pytest.raises(ValueError, match="codes"):
        fp8_block_linear(x, *stored, backend=backend, **given)


@pytest.mark.parametrize("shape", [(0,), (1,), (20,), (2, 3)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_leading_shape(backend: str, shape: tuple[int, ...]) -> None:
    check_product("mxfp4", torch.randn(*shape, 64).bfloat16(), 40, backend)
    x, weight = torch.randn(*shape, 64), torch.randn(40, 64)
    want = x.double() @ weight.double().T
    bound = accumulation(64, torch.float32)
    assert_close(linear(x, weight), want, atol=bound, scale=10.0)


@pytest.mark.parametrize("weight_format", FORMATS)
@no_triton
def test_splits_of_k_in_kernels(weight_format: str) -> None:
    # 1184 channels: two splits, the second of which ends within a block of 128.
    x = torch.randn(2, 1184).bfloat16()
    check_product(weight_format, x, 72, "triton")
    check_product(weight_format, x, 72, "triton", quantize=weight_format != "nvfp4")


@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("weight_format", ["fp8-ue8m0", "nvfp4"])
@no_triton
def test_kernels_on_a_target_with_fp8(
    weight_format: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = dataclasses.replace(device_facts.CPU, native_e4m3=True, dot_e4m3=True)
    from anymla.ops import _triton_quantize
    from anymla.ops.linear import triton_launch

    for module in (triton_launch, _triton_quantize):
        monkeypatch.setattr(module, "target_of", lambda device: target)
    x = torch.randn(tokens, 256).bfloat16()
    check_product(weight_format, x, 136, "triton", quantize=weight_format != "nvfp4")


@pytest.mark.parametrize(
    ("weight_format", "form"),
    [("fp8-fp32", "float16"), ("mxfp4", "float16"), ("mxfp4", "e4m3"), ("mxfp4", "block diagonal")],
)
@no_triton
def test_swapped_operands(weight_format: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from anymla.ops.linear import triton_launch
    from anymla.ops.linear.config import GemmShape, swap_ab_config

    operand = torch.float16 if form == "float16" else torch.float8_e4m3fn
    if operand != torch.float16:
        skip_without_e4m3()
    launched: list[object] = []

    def forced(shape: GemmShape, *_: object, **__: object) -> TritonConfig:
        config = swap_ab_config(shape, weight_format, device_facts.CPU)
        changed = {"operand": operand, "block_diagonal": form == "block diagonal"}
        launched.append(shape)
        return dataclasses.replace(config, **changed)

    monkeypatch.setattr(triton_launch, "choose_triton_config", forced)
    x = torch.randn(3, 1024).bfloat16()  # two splits
    x[0, :128], x[1, 5] = 0, 300
    check_product(weight_format, x, 128, "triton", quantize=True)
    assert len(launched) == 1
    if weight_format == "mxfp4":
        # Small scales, the smallest, and NaN.
        (codes, scales), _ = packed("mxfp4", 64, 128)
        scales[7], scales[:, 2], scales[5, 1] = 30, 0, 255
        x = x[:, :128].float()
        got = mxfp4_linear(x, codes, scales, quantize_activations=True, backend="triton")
        given = dequantize_fp8_rows(*quantize_fp8_rows(x), torch.float64)
        exact = dequantize_mxfp4(codes, scales, torch.float64)
        assert bool(got[:, 5].isnan().all())
        kept = [row for row in range(64) if row != 5]
        want, magnitude = given @ exact[kept].T, given.abs() @ exact[kept].abs().T
        assert_close(got[:, kept], want, atol=accumulation(128, torch.float32), scale=magnitude)


@pytest.mark.parametrize(
    ("weight_format", "tokens", "n", "k"),
    [
        ("fp8-ue8m0", 1, 48, 1024),
        ("fp8-fp32", 9, 64, 768),
        ("fp8-ue8m0", 20, 96, 512),
        ("fp8-ue8m0", 40, 72, 272),
        ("fp8-fp32", 70, 64, 640),
    ],
)
@pytest.mark.parametrize("block", [128, 32])
@no_triton
def test_codes_decoded_by_words(
    weight_format: str, tokens: int, n: int, k: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anymla.ops.linear import triton_launch

    chosen: list[TritonConfig] = []

    def as_sm_80(shape: Any, form: str, _: object, **given: Any) -> TritonConfig:
        chosen.append(choose_triton_config(shape, form, device_facts.TARGETS["sm_80"], **given))
        return chosen[-1]

    monkeypatch.setattr(triton_launch, "choose_triton_config", as_sm_80)
    w = torch.randn(n, k) / k**0.5
    codes, scales = quantize_fp8_weight(w, weight_format.removeprefix("fp8-"), block)
    exact = dequantize_fp8_weight(codes, scales, torch.float64, block)
    x = torch.randn(tokens, k).bfloat16()
    x[0, :128], x[-1, 5] = 0, 300
    given = dequantize_fp8_rows(*quantize_fp8_rows(x, block), torch.float64, block)
    got, spoiled = (
        fp8_block_linear(
            x, each, scales, quantize_activations=True, quant_block=block, backend="triton"
        )
        for each in (codes, with_nan(codes, 17, 131))
    )
    assert all(config.k_warps > 0 or config.by_words for config in chosen)
    want, magnitude = given @ exact.T, given.abs() @ exact.abs().T
    bound = accumulation(k, torch.float32)
    assert_close(got, want, atol=bound, rtol=ulps(x.dtype, 0.5), scale=magnitude)
    assert bool(spoiled[:, 17].isnan().all())
    spoiled[:, 17] = got[:, 17]
    assert_identical(spoiled, got)


@pytest.mark.parametrize(
    ("tokens", "n", "k", "block", "coded"),
    [
        (40, 72, 640, 128, False),
        (40, 72, 1152, 128, True),
        (70, 128, 128, 128, True),
        (33, 64, 384, 32, False),
    ],
)
@pytest.mark.parametrize("ahead", [False, True])
@no_triton
def test_activations_that_become_float16_before_the_product(
    tokens: int,
    n: int,
    k: int,
    block: int,
    coded: bool,
    ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from anymla.ops.linear import triton_launch

    forms = iter((True, False))

    def forced(shape: Any, form: str, _: object, **given: Any) -> TritonConfig:
        config = choose_triton_config(shape, form, device_facts.TARGETS["sm_80"], **given)
        assert config.by_words
        wide = next(forms)
        return dataclasses.replace(config, float16_x=wide, scales_ahead=ahead and wide)

    monkeypatch.setattr(triton_launch, "choose_triton_config", forced)
    w = torch.randn(n, k) / k**0.5
    codes, scales = quantize_fp8_weight(w, "fp32", block)
    x = torch.randn(tokens, k).bfloat16()
    x[0, :block], x[-1, 5] = 0, 300
    more: dict[str, Any] = {} if block == 128 else {"quant_block": block}
    if coded:
        rows = QuantizedRows.empty(tokens, k, x.device)
        found = quantize_fp8_rows(x)
        rows.codes[:tokens], rows.scales[:tokens] = found
        rows.codes[7, 131 % k] = 0x7F
        more |= {"codes": rows.codes, "code_scales": rows.scales}
    got, want = (
        fp8_block_linear(
            x, with_nan(codes, 17, 3), scales, quantize_activations=True, backend="triton", **more
        )
        for _ in range(2)
    )
    # Both decode the same numbers and add their products in the same order.
    assert_identical(got, want)
    assert bool(got[:, 17].isnan().all())
    assert int(got.isnan().sum()) == tokens + (n - 1) * coded


def skip_without_e4m3() -> None:
    if torch.cuda.is_available() and not device_facts.target_of(a_device()).dot_e4m3:
        pytest.skip("this GPU has no products of e4m3")


def with_nan(codes: Tensor, row: int, column: int) -> Tensor:
    """A copy of e4m3 codes of which one is NaN."""
    copy = codes.clone()
    copy[row, column] = 0xFF
    return copy


@pytest.mark.parametrize("weight_format", ["fp8-ue8m0", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_an_unused_row_stays_there(backend: str, weight_format: str) -> None:
    stored, _ = packed(weight_format, 130, 128)
    x = torch.randn(2, 128).bfloat16()
    clean = multiply(weight_format, x, stored, False, backend)
    x[1, 3] = torch.nan
    got = multiply(weight_format, x, stored, False, backend)
    assert_identical(got[0], clean[0])
    assert bool(got[1].isnan().all())


@no_triton
def test_kernels_quantise_to_the_same_codes() -> None:
    from anymla.ops._triton_quantize import quantize_rows

    x = torch.randn(5, 300) * torch.exp2(torch.randint(-40, 40, (5, 300)).float())
    x[2, 7], x[3, 130], x[4, :128] = torch.inf, -torch.inf, 0.0
    for given in (x, x.bfloat16()):
        codes, scales = quantize_rows(given)
        want_codes, want_scales = quantize_fp8_rows(given)
        assert_identical(codes, want_codes, name="codes")
        assert_identical(scales, want_scales, name="scales")


@no_triton
def test_kernels_refuse_float64() -> None:
    stored, _ = packed("mxfp4", 32, 64)
    support = mxfp4_linear.supports(torch.zeros(1, 64).double(), *stored, backend="triton")
    assert not support
    assert "float64" in support.reason


@no_triton
def test_mn_major_scales() -> None:
    from anymla.ops._triton_quantize import quantize_rows, quantize_rows_mn_major

    x = torch.randn(5, 320).bfloat16()
    codes, scales = quantize_rows(x)
    padded, mn_major = quantize_rows_mn_major(x, 16)
    assert padded.shape == (16, 320)
    assert mn_major.shape == (16, 3)
    assert mn_major.stride() == (1, 16)
    assert_identical(padded[:5], codes)
    assert_identical(mn_major[:5].contiguous(), scales)


def test_plain_products_have_no_triton_kernel() -> None:
    x, weight = torch.randn(2, 64), torch.randn(40, 64)
    for each in (linear, linear_float32):
        assert "triton" not in each.backends
        assert "vendor's library" in each.supports(x, weight, backend="vendor").reason

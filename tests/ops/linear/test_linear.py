from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from anymla.formats.fp8_block import quantize_fp8_weight
from anymla.formats.mxfp4 import quantize_mxfp4
from anymla.formats.nvfp4 import quantize_nvfp4
from anymla.ops import _gemm
from anymla.ops.device import numba_problem
from anymla.ops.linear import (
    fp8_block_linear,
    linear,
    linear_float32,
    mxfp4_linear,
    nvfp4_linear,
)
from anymla.ops.registry import Operation
from anymla.testing.oracle.rounding import (
    decode_e2m1_pairs,
    decode_e4m3,
    decode_ue8m0,
    e4m3_values,
    round_to,
    scale_exponent,
)
from anymla.testing.tolerance import accumulation, assert_close, assert_identical, ulps

PLAIN_BACKENDS = ("reference", "torch")
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
KINDS = ("fp8", "fp8 in fp32 scales", "mxfp4", "nvfp4")


no_numba = pytest.mark.skipif(bool(numba_problem()), reason=numba_problem() or "-")


@pytest.fixture(params=[*PLAIN_BACKENDS, pytest.param("numba", marks=no_numba)])
def backend(request):
    return request.param


@pytest.fixture(params=PLAIN_BACKENDS)
def plain_backend(request):
    return request.param


def skip_unsupported(operation: Operation, *args: object, backend: str, **kwargs: object) -> None:
    """What numba takes is little, and said by ``supports``; the others take everything."""
    if backend == "numba":
        support = operation.supports(*args, backend=backend, **kwargs)
        if not support:
            pytest.skip(support.reason)


@dataclasses.dataclass
class Weight:
    """A stored weight, its float64 values, and the operation that multiplies by it."""

    kind: str
    stored: tuple[Tensor, ...]

    @property
    def values(self) -> Tensor:
        codes, scale = self.stored[:2]
        if self.kind == "mxfp4":
            return decode_e2m1_pairs(codes) * decode_ue8m0(scale).repeat_interleave(32, 1)
        if self.kind == "nvfp4":
            blocks = decode_e4m3(scale).repeat_interleave(16, 1)
            return decode_e2m1_pairs(codes) * blocks * self.stored[2].double()
        factor = decode_ue8m0(scale) if scale.dtype == torch.uint8 else scale.double()
        factor = factor.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return decode_e4m3(codes) * factor[: codes.shape[0], : codes.shape[1]]

    def times(self, x: Tensor, backend: str, quantize: bool = False) -> Tensor:
        if self.kind == "nvfp4":
            if backend == "numba":
                pytest.skip("numba has no NVFP4")
            return nvfp4_linear(x, *self.stored, backend=backend)
        run = self.operation
        skip_unsupported(run, x, *self.stored, quantize_activations=quantize, backend=backend)
        return run(x, *self.stored, quantize_activations=quantize, backend=backend)

    @property
    def operation(self) -> Operation:
        return mxfp4_linear if self.kind == "mxfp4" else fp8_block_linear


def weight_of(kind: str, rows: int, columns: int) -> Weight:
    """Magnitudes differ by orders between parts of the matrix."""
    dense = torch.randn(rows, columns) * (torch.randn(rows, 1) * 3).exp2()
    if kind == "mxfp4":
        return Weight(kind, quantize_mxfp4(dense))
    if kind == "nvfp4":
        return Weight(kind, quantize_nvfp4(dense))
    return Weight(kind, quantize_fp8_weight(dense, "ue8m0" if kind == "fp8" else "fp32"))


def as_fp8(x: Tensor) -> Tensor:
    """What an FP8 kernel sees of activations: blocks of 128 channels, scales 2^e, float64."""
    short = -x.shape[-1] % 128
    runs = torch.nn.functional.pad(x.double(), (0, short)).unflatten(-1, (-1, 128))
    exponent = scale_exponent(runs.abs().amax(-1, keepdim=True).clamp(min=1e-4), 448.0)
    scale = torch.exp2(exponent.double())
    return (round_to(runs / scale, e4m3_values()) * scale).flatten(-2)[..., : x.shape[-1]]


def check(out: Tensor, x: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    """Against float64: float32 sums (float64 for float64), one rounding to the dtype."""
    assert out.dtype == dtype
    wide = torch.promote_types(dtype, torch.float32)
    magnitude = x.double().abs() @ weight.abs().T
    assert_close(
        out,
        x.double() @ weight.T,
        atol=accumulation(x.shape[-1], wide),
        rtol=ulps(dtype, 0.5) + accumulation(1, wide),
        scale=magnitude,
        name="product",
    )


@given(
    seed=st.integers(0, 2**20),
    lead=st.sampled_from([(0,), (1,), (3,), (2, 5), (1, 1, 2), (130,)]),
    rows=st.sampled_from([1, 7, 128, 200]),
    columns=st.sampled_from([32, 96, 128, 160, 416]),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(FLOATS),
    quantize=st.booleans(),
    backend=st.sampled_from(PLAIN_BACKENDS),
)
def test_products_with_stored_weights(seed, lead, rows, columns, kind, dtype, quantize, backend):
    torch.manual_seed(seed)
    weight = weight_of(kind, rows, columns)
    x = torch.randn(*lead, columns).to(dtype)
    quantize = quantize and kind != "nvfp4"
    out = weight.times(x, backend, quantize)
    assert out.shape == (*lead, rows)
    seen = as_fp8(x) if quantize else x.double()
    check(out.flatten(0, -2), seen.flatten(0, -2), weight.values, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("lead", [(1,), (5,), (0,), (2, 3)])
def test_plain_product(plain_backend, dtype, lead):
    x, weight = torch.randn(*lead, 300).to(dtype), torch.randn(70, 300).to(dtype)
    out = linear(x, weight, backend=plain_backend)
    assert out.shape == (*lead, 70)
    check(out.flatten(0, -2), x.flatten(0, -2), weight.double(), dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_weights_are_decoded_exactly(backend, kind, dtype):
    # Unit vectors pick single weights: whatever comes out was rounded once, to x's dtype.
    weight = weight_of(kind, 40, 160)
    out = weight.times(torch.eye(160).to(dtype), backend)
    wide = torch.promote_types(dtype, torch.float32)
    want = weight.values.T
    if kind in ("nvfp4", "fp8 in fp32 scales"):
        # Code times scale has more digits than float32, in which it is formed.
        want = want.to(wide)
        error = ulps(dtype, 1) if dtype.itemsize == 2 else ulps(wide, 1)
        assert_close(out, want, rtol=error)
        return
    assert torch.equal(out, want.to(dtype))


@pytest.mark.parametrize("byte", [3, 10, 31, 32, 60, 127, 200, 239])
@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_scale_byte_decodes_exactly(backend, byte, kind, dtype):
    weight = weight_of(kind, 64, 128)
    weight.stored[1].fill_(byte)
    want = weight.values.T
    # Kernels may take subnormal operands and results for zero.
    normal = want.abs() >= 2.0**-126
    out = weight.times(torch.eye(128).to(dtype), backend)
    assert torch.equal(out[normal], want.to(dtype)[normal])
    assert (out[~normal].abs() <= 2.0**-126).all()


def test_scales_beyond_half_precision_are_not_rounded_to_it(backend):
    # float16 ends at 65504 and has 2^-24 as its smallest step.
    for byte, size in ((100, 2.0**20), (150, 2.0**-20)):
        weight = weight_of("fp8", 64, 128)
        weight.stored[1].fill_(byte)
        x = (torch.randn(4, 128) * size).half()
        check(weight.times(x, backend), x, weight.values, torch.float16)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nan_codes_are_nan_and_stay_in_their_row(backend, code, dtype):
    weight = weight_of("fp8", 40, 128)
    weight.stored[0][7, 3] = code
    out = weight.times(torch.randn(5, 128).to(dtype), backend)
    assert out[:, 7].isnan().all()
    assert out[:, torch.arange(40) != 7].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [128, 300])
def test_decoding_in_blocks_of_rows_changes_nothing(monkeypatch, kind, rows):
    weight = weight_of(kind, rows, 160)
    x = torch.randn(3, 160)
    whole = weight.times(x, "torch")
    decoded = []
    for module, name in (
        (_gemm, "dequantize_fp8_weight"),
        (_gemm, "dequantize_mxfp4"),
        (_gemm, "dequantize_nvfp4"),
    ):
        original = getattr(module, name)

        def counting(*args, original=original):
            dense = original(*args)
            decoded.append(dense.numel())
            return dense

        monkeypatch.setattr(module, name, counting)
    monkeypatch.setattr(_gemm, "_DECODED_ELEMENTS", 128 * 160)
    error = accumulation(160, torch.float32)
    magnitude = x.double().abs() @ weight.values.abs().T
    assert_close(weight.times(x, "torch"), whole, atol=error, scale=magnitude)
    assert sum(decoded) == rows * 160
    assert max(decoded) <= 128 * 160


@given(
    seed=st.integers(0, 2**20),
    columns=st.sampled_from([1, 64, 128, 130, 256, 300]),
    exponent=st.integers(-30, 100),
    dtype=st.sampled_from(FLOATS),
    backend=st.sampled_from(PLAIN_BACKENDS),
)
def test_activations_are_rounded_to_fp8_first(seed, columns, exponent, dtype, backend):
    # Times the identity, the operation shows the rounded activations themselves.
    torch.manual_seed(seed)
    if dtype == torch.float16:
        exponent = exponent % 20 - 10
    spread = (torch.randn(6, columns, dtype=torch.float64) * 6).exp2()
    x = (torch.randn(6, columns, dtype=torch.float64) * spread * 2.0**exponent).to(dtype)
    x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    x[1] = 0
    if columns > 2:
        x[2, :3] = torch.tensor([448.0, 1.0625, -1.1875], dtype=dtype)  # ties of e4m3
    codes = torch.zeros(columns, columns, dtype=torch.uint8).fill_diagonal_(0x38)
    scale = torch.full((-(-columns // 128),) * 2, 127, dtype=torch.uint8)
    out = fp8_block_linear(x, codes, scale, quantize_activations=True, backend=backend)
    assert torch.equal(out, as_fp8(x).to(dtype))


def test_a_row_alone_is_the_row_in_a_batch(backend):
    weight = weight_of("fp8", 200, 416)
    x = torch.randn(9, 416).bfloat16()
    batch = weight.times(x, backend, quantize=True)
    alone = torch.cat([weight.times(row.unsqueeze(0), backend, quantize=True) for row in x])
    seen = as_fp8(x)
    magnitude = seen.abs() @ weight.values.abs().T
    error = accumulation(416, torch.float32)
    assert_close(alone, batch, atol=error, rtol=ulps(torch.bfloat16, 1), scale=magnitude)


def test_strided_activations(backend):
    x = torch.randn(128, 6).T
    weight = weight_of("fp8", 64, 128)
    assert_identical(weight.times(x, backend), weight.times(x.contiguous(), backend))


X = torch.zeros(2, 128)
BYTES = torch.uint8


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: linear(X, X.double()), TypeError, "linear: weight must be torch.float32 like x"),
        (lambda: linear(X, torch.zeros(3, 64)), ValueError, r"linear: weight must be .*K=128"),
        (lambda: linear(X.int(), X), TypeError, "linear: x must be bfloat16 or"),
        (
            lambda: fp8_block_linear(X, torch.zeros(3, 128), torch.zeros(1, 1, dtype=BYTES)),
            TypeError,
            "fp8_block_linear: weight must be uint8",
        ),
        (
            lambda: fp8_block_linear(X, torch.zeros(200, 128, dtype=BYTES), torch.zeros(1, 1)),
            ValueError,
            r"fp8_block_linear: scale must be \[2, 1\], got \[1, 1\]",
        ),
        (
            lambda: mxfp4_linear(
                X, torch.zeros(3, 60, dtype=BYTES), torch.zeros(3, 4, dtype=BYTES)
            ),
            ValueError,
            r"mxfp4_linear: weight must be \[N, 64\]",
        ),
        (
            lambda: mxfp4_linear(
                X[:, :40], torch.zeros(3, 20, dtype=BYTES), torch.zeros(3, 1, dtype=BYTES)
            ),
            ValueError,
            "mxfp4_linear: x must be .* multiple of 32, got K=40",
        ),
        (
            lambda: mxfp4_linear(
                X, torch.zeros(3, 64, dtype=BYTES), torch.zeros(3, 5, dtype=BYTES)
            ),
            ValueError,
            r"mxfp4_linear: scale must be \[3, 4\]",
        ),
        (
            lambda: nvfp4_linear(
                X, torch.zeros(3, 64, dtype=BYTES), torch.zeros(3, 4, dtype=BYTES), X[0, :1]
            ),
            ValueError,
            r"nvfp4_linear: scale must be \[3, 8\]",
        ),
        (
            lambda: nvfp4_linear(
                X, torch.zeros(3, 64, dtype=BYTES), torch.zeros(3, 8, dtype=BYTES), X[0, :2]
            ),
            ValueError,
            r"nvfp4_linear: global_scale must be .*\[1\]",
        ),
    ],
)
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize("w_dtype", FLOATS)
def test_results_in_float32_are_never_narrower(plain_backend, x_dtype, w_dtype):
    """The operands' own values, sums in float32 or wider, and no rounding behind them."""
    x, weight = torch.randn(2, 3, 700).to(x_dtype), torch.randn(9, 700).to(w_dtype)
    out = linear_float32(x, weight, backend=plain_backend)
    wide = torch.float64 if torch.float64 in (x_dtype, w_dtype) else torch.float32
    assert out.dtype == wide
    want = x.double() @ weight.double().T
    error = accumulation(700, wide)
    assert_close(out, want, atol=error, rtol=error, scale=700**0.5 * 3, name="linear_float32")


@pytest.mark.gpu
def test_a_gpus_product_of_narrow_operands_is_float32():
    for tokens in (1, 37):
        x = torch.randn(tokens, 4096, device="cuda").bfloat16()
        weight = torch.randn(2048, 4096, device="cuda").bfloat16()
        out = linear_float32(x, weight)
        want = x.double() @ weight.double().T
        error = accumulation(4096, torch.float32)
        assert_close(out.cpu(), want.cpu(), atol=error, rtol=error, scale=192.0, name="gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 65, 300])
def test_the_vendors_fp8_product(tokens):
    """Hopper's FP8 sums keep 13 bits below the largest product of a block of 128 channels."""
    weight = quantize_fp8_weight(torch.randn(256, 1024, device="cuda"), "fp32")
    x = torch.randn(tokens, 1024, device="cuda").bfloat16()
    support = fp8_block_linear.supports(x, *weight, quantize_activations=True, backend="vendor")
    if not support:
        pytest.skip(support.reason)
    out = fp8_block_linear(x, *weight, quantize_activations=True, backend="vendor")
    stored = Weight("fp8 in fp32 scales", tuple(each.cpu() for each in weight))
    want = as_fp8(x.cpu()) @ stored.values.T
    error = ulps(torch.bfloat16, 1) + 2.0**-12
    assert_close(out.cpu(), want, atol=error, rtol=error, scale=32.0, name="vendor")

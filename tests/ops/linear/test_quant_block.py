"""Products of weights and activations in blocks of 32, as DeepSeek-V4.1 stores them."""

import pytest
import torch

from anymla.formats.fp8_block import (
    dequantize_fp8_rows,
    dequantize_fp8_weight,
    quantize_fp8_rows,
    quantize_fp8_weight,
)
from anymla.formats.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from anymla.formats.ue8m0 import decode_ue8m0
from anymla.ops._gemm_config import TileConfig
from anymla.ops.device import INTERPRETED, has_triton, target_of
from anymla.ops.linear import fp8_block_linear, mxfp4_linear, support
from anymla.ops.linear.config import TritonConfig
from anymla.ops.moe import config, experts
from anymla.ops.registry import BackendUnavailable, Support
from anymla.testing.tolerance import relative_l2

BLOCK = 32

# Of kernels that are launched without an operation around them.
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
no_triton = pytest.mark.skipif(not has_triton(), reason="needs triton")
BACKENDS = ["reference", "torch", pytest.param("triton", marks=no_triton)]


def _randn(*shape, seed=0):
    # Channels of unlike size, so that it matters which of them share a scale.
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values * torch.exp2(torch.arange(shape[-1]) // BLOCK % 5 * 3.0)


def _rounded(x):
    return dequantize_fp8_rows(*quantize_fp8_rows(x, BLOCK), block=BLOCK)


@pytest.mark.parametrize("shape", [(96, 160), (70, 100), (128, 128)])
def test_weights_come_back_block_by_block(shape):
    weight = _randn(*shape)
    codes, scales = quantize_fp8_weight(weight, block=BLOCK)
    assert scales.shape == (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        decoded = dequantize_fp8_weight(codes, scales, dtype, BLOCK).float()
        for row in range(0, shape[0], BLOCK):
            for column in range(0, shape[1], BLOCK):
                part = slice(row, row + BLOCK), slice(column, column + BLOCK)
                error = (decoded[part] - weight[part]).abs().max()
                assert error <= weight[part].abs().max() / 8


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("quantises", [False, True])
@pytest.mark.parametrize("float_scales", [False, True])
@pytest.mark.parametrize(("tokens", "n", "k"), [(1, 70, 160), (7, 70, 100), (20, 128, 1280)])
def test_fp8_product(backend, quantises, float_scales, tokens, n, k):
    # The last is of the kernel with swapped operands, and its channels are split.
    x = _randn(tokens, k, seed=1)
    codes, scales = quantize_fp8_weight(_randn(n, k), block=BLOCK)
    if float_scales:
        scales = decode_ue8m0(scales, torch.float32)
    out = fp8_block_linear(
        x, codes, scales, quantize_activations=quantises, quant_block=BLOCK, backend=backend
    )
    exact = (_rounded(x) if quantises else x).double()
    want = exact @ dequantize_fp8_weight(codes, scales, torch.float64, BLOCK).T
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("tokens", "k"), [(5, 160), (2, 1280), (40, 256)])
def test_mxfp4_product(backend, tokens, k):
    x = _randn(tokens, k, seed=1)
    packed, scales = quantize_mxfp4(_randn(64, k))
    out = mxfp4_linear(
        x, packed, scales, quantize_activations=True, quant_block=BLOCK, backend=backend
    )
    want = _rounded(x).double() @ dequantize_mxfp4(packed, scales, torch.float64).T
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-4 * float(want.abs().max()))


@no_triton
@pytest.mark.parametrize("block_diagonal", [False, True])
def test_mxfp4_product_of_swapped_operands(block_diagonal):
    """Both ways to multiply the scales in, whatever the interpreter's target would choose."""
    from anymla.ops._triton_gemm import operand_rows
    from anymla.ops.linear.triton_launch import launch_gemm

    x = _randn(3, 512, seed=1)
    packed, scales = quantize_mxfp4(_randn(64, 512))
    tile = TileConfig(16, 64, 128, 4, 2)
    chosen = TritonConfig(True, torch.float16, tile, 256, block_diagonal)
    rows, factors = operand_rows(
        x.to(DEVICE), torch.float16, weight_format="mxfp4", quantize=True, block=BLOCK
    )
    stored = (each.to(DEVICE).unsqueeze(0) for each in (packed, scales))
    out = launch_gemm(
        rows.unsqueeze(1), factors, *stored, chosen,
        weight_format="mxfp4", out_dtype=torch.float32, block=BLOCK,
    )  # fmt: skip
    want = _rounded(x).double() @ dequantize_mxfp4(packed, scales, torch.float64).T
    torch.testing.assert_close(
        out[:, 0].double().cpu(), want, rtol=1e-5, atol=1e-4 * float(want.abs().max())
    )


@no_triton
def test_kernels_quantise_bit_for_bit():
    from anymla.ops._triton_gemm import operand_rows
    from anymla.ops._triton_quantize import quantize_rows

    x = _randn(37, 384, seed=3)
    x[5, 40] = torch.inf
    x[7] = 0
    want, scales = quantize_fp8_rows(x, BLOCK)
    codes, found = quantize_rows(x.to(DEVICE), BLOCK)
    assert torch.equal(codes.cpu(), want)
    assert torch.equal(found.cpu(), scales)
    for operand in (torch.float8_e4m3fn, torch.float16):
        rows, found = operand_rows(
            x.to(DEVICE), operand, weight_format="fp8", quantize=True, block=BLOCK
        )
        if operand == torch.float8_e4m3fn:
            assert torch.equal(rows.cpu(), want)
        assert torch.equal(found.cpu(), scales)


def _experts_call(weight_format, tokens, d, inner):
    """Four experts, and tokens of which each visits two."""
    quantise = quantize_mxfp4
    if weight_format == "fp8":

        def quantise(weight):
            return quantize_fp8_weight(weight, block=BLOCK)

    # Blocks of activations are of unlike size, and weights make up for it: all blocks matter.
    small_d, small_i = (torch.exp2(torch.arange(size) // BLOCK % 4 * -8.0) for size in (d, inner))
    shapes = {
        "1": small_d.expand(inner, d),
        "3": small_d * small_i.flip(0).unsqueeze(1),
        "2": (1 / small_i.flip(0)).expand(d, inner),
    }
    given = {}
    for name, sizes in shapes.items():
        noise = torch.Generator().manual_seed(int(name))
        pairs = [quantise(torch.randn(sizes.shape, generator=noise) * sizes) for _ in range(4)]
        given[f"w{name}"], given[f"s{name}"] = ([pair[i] for pair in pairs] for i in (0, 1))
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, 4, generator=generator).argsort(1)[:, :2].int()
    return given | {
        "x": torch.randn(tokens, d, generator=generator) / small_d, "ids": ids,
        "weights": torch.rand(tokens, 2, generator=generator), "weight_format": weight_format,
        "swiglu_limit": 2.0**40, "quantize_activations": True, "quant_block": BLOCK,
    }  # fmt: skip


# A code of w2's input may fall on the other side of a tie, by the order of w1's sums.
_TIES = 2e-3


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=no_triton)])
@pytest.mark.parametrize("weight_format", ["fp8", "mxfp4"])
@pytest.mark.parametrize(("tokens", "d", "inner"), [(1, 96, 64), (3, 96, 64), (40, 128, 256)])
def test_experts(backend, weight_format, tokens, d, inner):
    call = _experts_call(weight_format, tokens, d, inner)
    want = experts(**call, backend="reference")
    assert relative_l2(experts(**call, backend=backend), want) < _TIES
    if weight_format == "mxfp4":
        # Blocks of another size are not these.
        assert relative_l2(experts(**call | {"quant_block": 128}, backend=backend), want) > 0.1


@no_triton
@pytest.mark.parametrize(
    ("weight_format", "operand", "wide", "k_warps"),
    [
        ("mxfp4", torch.float8_e4m3fn, False, 0),
        ("mxfp4", torch.float8_e4m3fn, True, 0),
        ("mxfp4", torch.float16, False, 0),
        ("mxfp4", torch.float16, False, 2),
        ("mxfp4", torch.bfloat16, False, 0),
        ("fp8", torch.float16, False, 0),
    ],
)
@pytest.mark.parametrize("tokens", [1, 9])
def test_experts_of_swapped_operands(weight_format, operand, wide, k_warps, tokens):
    """The configs of other targets, which the interpreter's are not."""
    from anymla.ops.moe import triton_grouped_gemm, triton_launch

    unknown = DEVICE == "cuda" and not target_of(torch.device(DEVICE, 0)).dot_e4m3
    if operand == torch.float8_e4m3fn and unknown:
        pytest.skip("this GPU has no products of e4m3")
    call = _experts_call(weight_format, tokens, 256, 256)
    want = experts(**call, backend="reference")
    block_k = 256 if wide and operand == torch.float8_e4m3fn else 128
    forced = config.GemmConfig(
        True, tokens > 1, 16, 64, block_k, operand, k_warps or 4, 2, wide, k_warps, k_warps > 0
    )
    for name in ("w1", "w3", "w2", "s1", "s3", "s2"):
        call[name] = [each.to(DEVICE) for each in call[name]]
    tensors = [call.pop(name).to(DEVICE) for name in ("x", "ids", "weights")]
    gemms = triton_launch.Gemms(
        lambda inputs, results: triton_grouped_gemm.grouped_gemm(inputs, results, forced)
    )
    found = triton_launch.run_experts(lambda *_: gemms, *tensors, **call)
    assert relative_l2(found.cpu(), want) < _TIES


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_large_channel_hides_those_of_its_block_alone(backend):
    x = torch.ones(2, 128)
    x[:, 3] = 2.0**24
    weight = torch.ones(32, 128)
    weight[:, 3] = 0
    packed, scales = quantize_mxfp4(weight)
    for block, left in ((128, 0.0), (BLOCK, 96.0)):
        out = mxfp4_linear(
            x, packed, scales, quantize_activations=True, quant_block=block, backend=backend
        )
        assert out.tolist() == [[left] * 32] * 2


def test_hoppers_kernels_take_up_to_32_tokens(monkeypatch):
    monkeypatch.setattr(support, "triton_support", lambda *_: Support(True))
    monkeypatch.setattr(support, "runs_gluon", lambda _: True)
    codes, scales = quantize_fp8_weight(torch.randn(128, 256), block=BLOCK)
    how = {"quantize_activations": True, "quant_block": BLOCK, "backend": "gluon_sm90"}
    few, many = torch.randn(32, 256).bfloat16(), torch.randn(33, 256).bfloat16()
    assert fp8_block_linear.supports(few, codes, scales, **how)
    found = fp8_block_linear.supports(many, codes, scales, **how)
    assert "blocks of 32 with up to 32 tokens, got 33" in found.reason


def test_kernels_that_know_blocks_of_128_alone_say_so():
    x = torch.randn(2, 128)
    codes, scales = quantize_fp8_weight(torch.randn(128, 128), block=BLOCK)
    reason = "scales of blocks of 128, got 32"
    for backend in ("vendor", "numba"):
        found = fp8_block_linear.supports(x, codes, scales, quant_block=BLOCK, backend=backend)
        assert not found
        assert reason in found.reason
    with pytest.raises(BackendUnavailable, match=reason):
        fp8_block_linear(x, codes, scales, quant_block=BLOCK, backend="vendor")
    for backend in ("triton", "gluon_sm90"):
        found = fp8_block_linear.supports(x, codes, scales[:2, :2], quant_block=64, backend=backend)
        assert "scales of blocks of 128 or 32, got 64" in found.reason
    with pytest.raises(ValueError, match=r"fp8_block_linear: scale must be \[1, 1\]"):
        fp8_block_linear(x, codes, scales)

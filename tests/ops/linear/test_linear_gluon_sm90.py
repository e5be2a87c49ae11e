"""Hopper's FP8 products: the text of their kernels on the host, against float64."""

import pytest
import torch

pytest.importorskip("triton")

from anymla.formats.e4m3 import decode_e4m3, encode_e4m3
from anymla.formats.fp8_block import dequantize_fp8_rows, quantize_fp8_rows
from anymla.formats.quantized_rows import QuantizedRows
from anymla.formats.ue8m0 import decode_ue8m0
from anymla.ops.device import TARGETS
from anymla.ops.linear import fp8_block_linear, grouped_output_projection_fp8
from anymla.ops.linear.config import GemmShape, choose_sm90_config
from anymla.ops.linear.gluon_sm90_gemm import (
    fp8_wgmma_kernel,
    warp_split_k_kernel,
    warp_split_n_kernel,
)
from anymla.ops.linear.shapes import MODELS, V41_FLASH
from anymla.testing.tolerance import Bound, accumulation, assert_close, ulps
from crossrun.hopper import Descriptor, run

# Of a run: four instructions of 32 products, of values whose sizes are alike (docs/numerics.md).
FP8_SUMS = Bound(2 * (128 / 32) ** 0.5 * 2.0**-13, "2 * sqrt(128 / 32) * 2^-13, FP8 instructions")


def made(tokens, groups, n, runs, scale_format, normal=False, block=128):
    """Activations, their scales, a weight, its scales; the product and its terms' magnitude.

    The weight has any codes, or those of normally distributed values; ``block`` of its rows and of
    all channels share a scale.
    """
    width, blocks = runs * 128, runs * 128 // block
    x = torch.randn(tokens * groups, blocks, block) * 2.0 ** torch.randint(-9, 9, (blocks, 1))
    x, x_scales = quantize_fp8_rows(x.flatten(1), block)
    w = torch.randint(0, 256, (groups, n, width), dtype=torch.uint8)
    w[(w & 127) == 127] = 1
    if normal:
        w = encode_e4m3(torch.randn(groups, n, width) * 100)
    scales = torch.randint(120, 130, (groups, -(-n // block), blocks), dtype=torch.uint8)
    factors = decode_ue8m0(scales, torch.float64)
    if scale_format == "fp32":
        scales = factors.float() * 1.25
        factors = scales.double()
    factors = factors.repeat_interleave(block, 1)[:, :n].repeat_interleave(block, 2)
    weight = decode_e4m3(w, torch.float64) * factors
    given = dequantize_fp8_rows(x, x_scales, torch.float64, block).view(tokens, groups, width)
    want = torch.einsum("tgk,gnk->tgn", given, weight)
    scale = torch.einsum("tgk,gnk->tgn", given.abs(), weight.abs())
    return (
        x.view(tokens, groups, width),
        x_scales.view(tokens, groups, blocks),
        w,
        scales,
        want,
        scale,
    )


def by_run(x_scales):
    """A run after the other, with memory for rows in sixteens."""
    tokens, groups, runs = x_scales.shape
    memory = torch.full((groups, runs, -(-tokens // 16) * 16), torch.nan).permute(2, 0, 1)
    memory[:tokens] = x_scales
    return memory[:tokens]


def words(codes, lines):
    return codes.view(torch.int32).view(lines, -1)


def warp_split_k(x, x_scales, w, scales, rows, warps, programs, columns=8, stages=3, block=128):
    (tokens, groups, width), n = x.shape, w.shape[1]
    out = torch.full((tokens, groups, n), torch.nan)
    tiles = groups * n // rows
    weight, given = (
        Descriptor(words(each, lines).view(lines, -1, 32).transpose(0, 1), (warps, box, 32))
        for each, lines, box in ((w, groups * n, rows), (x.contiguous(), tokens, columns))
    )
    run(
        warp_split_k_kernel, (min(programs, tiles), 1), given, x_scales, weight, scales, out,
        tokens, n, width // 128, tiles, groups, x_scales.stride(0), x_scales.stride(2),
        BLOCK_N=rows, BLOCK_M=columns, WARPS=warps,
        STAGES=stages, MN_MAJOR=x_scales.stride(0) == 1, BF16=False, QUANT=block, PDL=True,
    )  # fmt: skip
    return out


def warp_split_n(x, x_scales, w, scales, rows, warps, programs, columns=8, stages=3):
    (tokens, groups, width), n = x.shape, w.shape[1]
    out = torch.full((tokens, groups, n), torch.nan)
    tiles = groups * n // rows
    weight, given = (
        Descriptor(words(each, lines), (box, 32))
        for each, lines, box in ((w, groups * n, rows), (x.contiguous(), tokens, columns))
    )
    run(
        warp_split_n_kernel, (min(programs, tiles), 1), given, x_scales, weight, scales, out,
        tokens, n, width // 128, tiles, groups, x_scales.stride(0), x_scales.stride(2),
        BLOCK_N=rows, BLOCK_M=columns, WARPS=warps,
        STAGES=stages, MN_MAJOR=x_scales.stride(0) == 1, PDL=True,
    )  # fmt: skip
    return out


def fp8_wgmma(x, x_scales, w, scales, rows, programs, at_once, stages=5):
    (tokens, groups, width), n = x.shape, w.shape[1]
    out = torch.full((tokens, groups, n), torch.nan)
    tiles = groups * n // rows
    kind = torch.float8_e4m3fn
    w_desc = Descriptor(w.view(kind).view(groups * n, -1), (rows, 128))
    x_desc = Descriptor(x.contiguous().view(kind).view(tokens, -1), (64, 128))
    run(
        fp8_wgmma_kernel, (min(programs, tiles), 1), x_desc, x_scales, w_desc, scales, out, tokens,
        n, width // 128, tiles, groups, x_scales.stride(0), x_scales.stride(2), BLOCK_N=rows,
        BLOCK_M=64, STAGES=stages, IN_FLIGHT=at_once, PDL=True,
    )  # fmt: skip
    return out


def check(got, want, scale, width):
    bound = accumulation(width, torch.float32)
    assert_close(got, want, atol=bound, rtol=0.0, scale=scale)


@pytest.mark.parametrize(
    ("tokens", "groups", "n", "runs", "rows", "warps", "programs"),
    [(1, 1, 96, 4, 32, 4, 2), (5, 2, 128, 6, 16, 4, 3), (8, 1, 256, 1, 64, 4, 9)],
)
@pytest.mark.parametrize("scale_format", ["ue8m0", "fp32"])
def test_few_tokens(tokens, groups, n, runs, rows, warps, programs, scale_format):
    x, x_scales, w, scales, want, scale = made(tokens, groups, n, runs, scale_format)
    for given in (x_scales, by_run(x_scales)):
        got = warp_split_k(x, given, w, scales, rows, warps, programs)
        check(got, want, scale, runs * 128)


@pytest.mark.parametrize(
    ("tokens", "groups", "n", "runs", "rows", "warps", "programs"),
    [(1, 1, 96, 5, 32, 4, 2), (8, 2, 64, 6, 16, 4, 3), (13, 1, 192, 4, 32, 2, 9)],
)
@pytest.mark.parametrize("scale_format", ["ue8m0", "fp32"])
def test_scales_of_32_rows_and_channels(
    tokens, groups, n, runs, rows, warps, programs, scale_format
):
    x, x_scales, w, scales, want, scale = made(tokens, groups, n, runs, scale_format, block=32)
    columns = 8 if tokens <= 8 else 16
    for given in (x_scales, by_run(x_scales)):
        got = warp_split_k(x, given, w, scales, rows, warps, programs, columns, block=32)
        check(got, want, scale, runs * 128)


def test_products_of_bfloat16_in_float32():
    tokens, n, runs, warps, rows = 5, 96, 6, 4, 32
    x, w = torch.randn(tokens, runs * 64).bfloat16(), torch.randn(n, runs * 64).bfloat16()
    given, weight = (
        Descriptor(words(each, lines).view(lines, -1, 32).transpose(0, 1), (warps, box, 32))
        for each, lines, box in ((x, tokens, 8), (w, n, rows))
    )
    out = torch.full((tokens, 1, n), torch.nan)
    run(
        warp_split_k_kernel, (2, 1), given, None, weight, None, out, tokens, n, runs, n // rows, 1,
        0, 0, BLOCK_N=rows, BLOCK_M=8, WARPS=warps, STAGES=2, MN_MAJOR=False, BF16=True, QUANT=128,
        PDL=True,
    )  # fmt: skip
    x, w = x.double(), w.double()
    check(out[:, 0], x @ w.T, x.abs() @ w.abs().T, runs * 64)


@pytest.mark.parametrize(
    ("tokens", "groups", "n", "runs", "programs"), [(5, 2, 128, 3, 2), (8, 1, 384, 2, 2)]
)
def test_few_tokens_and_few_channels(tokens, groups, n, runs, programs):
    x, x_scales, w, scales, want, scale = made(tokens, groups, n, runs, "ue8m0")
    for given in (x_scales, by_run(x_scales)):
        got = warp_split_n(x, given, w, scales, 128, 4, programs)
        check(got, want, scale, runs * 128)


def test_a_scale_that_is_no_number_spoils_its_rows():
    x, x_scales, w, scales, _, _ = made(2, 1, 256, 4, "ue8m0")
    scales[0, 1, 2] = 255
    for got in (
        warp_split_k(x, x_scales, w, scales, 32, 4, 3),
        fp8_wgmma(x, x_scales, w, scales, 32, 4, 4),
    ):
        assert got[..., 128:].isnan().all()
        assert got[..., :128].isfinite().all()


@pytest.mark.parametrize(
    ("tokens", "groups", "n", "runs", "rows", "programs", "at_once"),
    [(3, 1, 128, 12, 32, 3, 4), (40, 2, 64, 4, 16, 9, 2), (64, 1, 192, 8, 64, 2, 2)],
)
def test_tens_of_tokens(tokens, groups, n, runs, rows, programs, at_once):
    x, x_scales, w, scales, want, scale = made(tokens, groups, n, runs, "ue8m0")
    for given in (x_scales, by_run(x_scales)):
        got = fp8_wgmma(x, given, w, scales, rows, programs, at_once)
        check(got, want, scale, runs * 128)


@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 17, 32, 33, 64, 65, 128])
@pytest.mark.parametrize("block", [128, 32])
def test_every_shape_has_a_config(tokens, block):
    if block == 32 and tokens > 32:
        pytest.skip("of blocks of 32 Hopper's kernels take up to 32 tokens")
    products = [product for sizes in (*MODELS.values(), V41_FLASH) for product in sizes.products()]
    shapes = [(max(1, each.groups), each.n, each.k // 128) for each in products]
    for groups, n, runs in ((1, 64, 4), (1, 576, 12), *shapes):
        if runs % 4 and tokens > 32:
            continue  # left to Triton
        shape = GemmShape(tokens, n, runs * 128, groups)
        chosen = choose_sm90_config(shape, TARGETS["sm_90"], block)
        assert chosen.block_m >= tokens
        assert n % chosen.block_n == 0
        assert block % chosen.block_n == 0  # one scale for all rows of a tile
        assert (chosen.kernel == "fp8_wgmma") == (tokens > 32)
        assert runs % chosen.in_flight == 0
        line = 128 * (chosen.block_n + chosen.block_m)
        ring = chosen.stages * line * (chosen.warps if chosen.kernel == "warp_split_k" else 1)
        # The sums of warps that share K are exchanged through memory of their own.
        sums = (
            4 * chosen.block_n * chosen.block_m * chosen.warps * (chosen.kernel == "warp_split_k")
        )
        assert ring + sums <= TARGETS["sm_90"].shared_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 9, 31, 40, 64, 65, 128])
@pytest.mark.parametrize(("groups", "n", "runs"), [(1, 576, 12), (1, 4096, 8), (8, 256, 4)])
def test_on_a_gpu(tokens, groups, n, runs):
    rounded = tokens > 32
    x, x_scales, w, scales, want, scale = made(tokens, groups, n, runs, "ue8m0", normal=rounded)
    given = [each.cuda() for each in (x, x_scales, w, scales)]
    if groups == 1:
        rows = QuantizedRows.empty(tokens, runs * 128, given[0].device)
        rows.codes[:tokens], rows.scales[:tokens] = given[0][:, 0], given[1][:, 0]
        weight = (given[2][0], given[3][0])
        how = {"quantize_activations": True, "backend": "gluon_sm90"}
        how |= {"codes": rows.codes, "code_scales": rows.scales}
        anything = torch.full((tokens, runs * 128), torch.nan, device="cuda").bfloat16()
        if not fp8_block_linear.supports(anything, *weight, **how):
            pytest.skip("needs Hopper")
        got = [fp8_block_linear(anything, *weight, **how) for _ in range(2)]
        if not rounded:
            wide = fp8_block_linear(anything.float(), *weight, **how)
            check(wide.cpu(), want[:, 0], scale[:, 0], runs * 128)
    else:
        given[0] = given[0].view(torch.float8_e4m3fn)
        if not grouped_output_projection_fp8.supports(*given, backend="gluon_sm90"):
            pytest.skip("needs Hopper")
        got = [grouped_output_projection_fp8(*given, backend="gluon_sm90") for _ in range(2)]
    assert torch.equal(*got)
    bound = FP8_SUMS if rounded else accumulation(runs * 128, torch.float32)
    got = got[0].cpu().view(tokens, groups, n)
    assert_close(got, want, atol=bound, rtol=ulps(torch.bfloat16, 0.5), scale=scale)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 9, 32])
@pytest.mark.parametrize(("n", "runs"), [(576, 12), (1792, 40), (5120, 18)])
@pytest.mark.parametrize("scale_format", ["ue8m0", "fp32"])
def test_blocks_of_32_on_a_gpu(tokens, n, runs, scale_format):
    x, x_scales, w, scales, want, scale = made(tokens, 1, n, runs, scale_format, block=32)
    exact = dequantize_fp8_rows(x[:, 0], x_scales[:, 0], block=32).cuda()
    how = {"quantize_activations": True, "quant_block": 32, "backend": "gluon_sm90"}
    weight = w[0].cuda(), scales[0].cuda()
    if not fp8_block_linear.supports(exact, *weight, **how):
        pytest.skip("needs Hopper")
    got = [fp8_block_linear(exact, *weight, **how) for _ in range(2)]
    assert torch.equal(*got)
    check(got[0].cpu(), want[:, 0], scale[:, 0], runs * 128)

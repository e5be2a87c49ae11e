"""Hopper's W4A8 GEMMs on the host: the kernel's own text, see ``crossrun.hopper``."""

import pytest
import torch

pytest.importorskip("triton")

from anymla.formats.fp8_block import dequantize_fp8_rows, quantize_fp8_rows
from anymla.formats.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from anymla.ops.moe import config, experts
from anymla.ops.moe.gluon_sm90_w4a8_gemm import WINDOW, w4a8_gemm_kernel
from anymla.ops.moe.inputs import ExpertTensors
from anymla.ops.moe.triton_sort_quantize import align_closely, quantize_pairs
from anymla.ops.registry import Support
from anymla.testing.tolerance import assert_close, assert_identical, ulps
from crossrun.hopper import Descriptor, run

D, I = 512, 512  # noqa: E741
LIMIT = 1.5


def operands(x, made, columns):
    """Codes of sorted rows in the order of decoded words, and scales block by block."""
    codes, scales = quantize_fp8_rows(x)
    codes = codes.view(torch.uint8).view(len(x), -1, 4, 4, 4, 2).permute(0, 1, 3, 5, 2, 4)
    codes = codes.reshape(len(x), -1)
    _, table, most = made
    by_block = torch.full((most, scales.shape[1], columns), torch.nan)
    for block in range(int(table[-1])):
        begin, end = table[most + block], table[2 * most + block]
        by_block[block, :, : end - begin] = scales[begin:end].T
    return codes.contiguous().view(torch.float8_e4m3fn), by_block.flatten(0, 1)


def plan(ids, columns, count):
    """Pairs by expert, and blocks without gaps between them."""
    order, blocks = [], []
    for expert in range(count):
        mine = (ids.flatten() == expert).nonzero().flatten().tolist()
        for start in range(0, len(mine), columns):
            end = min(start + columns, len(mine))
            blocks.append((expert, len(order) + start, len(order) + end))
        order += mine
    most = ids.numel() // columns + count
    table = torch.full((3, most), 1 << 30, dtype=torch.int32)
    if blocks:
        table[:, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32).T
    table = torch.cat((table.flatten(), torch.tensor([len(blocks)], dtype=torch.int32)))
    return torch.tensor(order, dtype=torch.int32), table, most


def launched(x, weights, made, parts, out, columns, *, up, ctas=3, stages=3, seed=0):
    """One of the two products; ``parts`` are codes and scales of both halves of a tile."""
    order, table, most = made
    codes, scales = operands(x, made, columns)
    (w1, s1), (w3, s3) = parts
    rows = [w.view(-1, w.shape[-1]) for w in (w1, w3)]
    run(
        w4a8_gemm_kernel, ctas, Descriptor(codes, [columns, 128]), Descriptor(scales, [1, columns]),
        *(Descriptor(each, [64, 64]) for each in rows), weights, order, table, s1, s1.stride(0), s3,
        s3.stride(0), out, most, w1.shape[1], w3.shape[1], LIMIT, K=x.shape[1], OUT=out.shape[1],
        N=columns, UP=up, STAGES=stages, CONSUMER_REGISTERS=216, PRODUCER_REGISTERS=72, PDL=True,
        num_warps=4, seed=seed,
    )  # fmt: skip


def random_matrices(count):
    """Codes and scales of w1 and w3 together, and of w2."""
    w1, w3, w2 = (torch.randn(count, n, k) / 9 for n, k in ((I, D), (I, D), (D, I)))
    # What one access reads is in one tensor here.
    return (*quantize_mxfp4(torch.stack((w1, w3))), *quantize_mxfp4(w2))


def both(x, ids, weights, matrices, columns, seed=0):
    """The sum over a token's experts by the kernels, and by the reference."""
    (tokens, chosen), (w13, s13, w2, s2) = ids.shape, matrices
    made = plan(ids, columns, len(w2))
    order = made[0].long()
    inner = torch.full((len(order), I), torch.nan).bfloat16()
    results = torch.full((tokens * chosen, D), torch.nan).bfloat16()
    flat = weights.flatten()
    parts = (w13[0], s13[0]), (w13[1], s13[1])
    rows = x[order // chosen]
    launched(rows, flat, made, parts, inner, columns, up=True, seed=seed)
    launched(inner, flat, made, ((w2, s2), (w2, s2)), results, columns, up=False, seed=seed)
    here = ((ids >= 0) & (ids < len(w2))).flatten()
    assert results[~here].isnan().all()
    results[~here] = 0
    got = results.view(tokens, chosen, D).float().sum(1).bfloat16()
    want = experts(
        x, ids, weights, *(list(w) for w in (*w13, w2)), *(list(s) for s in (*s13, s2)),
        weight_format="mxfp4", swiglu_limit=LIMIT, quantize_activations=True, backend="reference",
    )  # fmt: skip
    return got, want


@pytest.mark.parametrize("columns", [32, 64, 128])
def test_grouped_gemms(columns):
    tokens, count, chosen = 90, 3, 2
    x, weights = torch.randn(tokens, D).bfloat16(), torch.rand(tokens, chosen)
    ids = torch.rand(tokens, count).argsort(1)[:, :chosen].int()
    ids[0, 0], ids[3, 1] = count + 3, -1
    got, want = both(x, ids, weights, random_matrices(count), columns)
    # Sums in another order, after which a value may round the other way.
    assert_close(got, want, atol=ulps(torch.bfloat16, 4))


def product(x, codes, scales, columns=64, seed=0):
    """X @ w2^T for one expert, by the kernel."""
    made = plan(torch.zeros(len(x), 1, dtype=torch.int32), columns, 1)
    out = torch.full((len(x), codes.shape[1]), torch.nan)
    launched(x, None, made, ((codes, scales),) * 2, out, columns, up=False, ctas=1, seed=seed)
    return out


def exact_product(x, codes, scales):
    given = dequantize_fp8_rows(*quantize_fp8_rows(x), torch.float64)
    return given @ dequantize_mxfp4(codes[0], scales[0], torch.float64).T


@pytest.mark.parametrize(
    ("pairs", "columns"), [(1, 32), (31, 32), (33, 32), (63, 64), (64, 64), (65, 64), (130, 64)]
)
def test_scales_of_any_distance_are_exact(pairs, columns):
    # Activations of few bits and rows of one group each: sums are exact in float32 as well.
    x = torch.zeros(pairs, D)
    x[torch.arange(pairs), torch.randint(D, (pairs,))] = 1.0
    codes = torch.randint(256, (1, 384, D // 2), dtype=torch.uint8)
    scales = torch.randint(64, 190, (1, 384, D // 32), dtype=torch.uint8)
    scales[0, :64] = torch.randint(118, 130, (64, D // 32), dtype=torch.uint8)
    # Tiles whose scales take one window, and the first two with the least distance between them.
    scales[0, 128:256] = torch.randint(118, 130, (128, D // 32), dtype=torch.uint8)
    scales[0, 256:] = 127
    scales[0, 300, 5] = 127 - WINDOW
    got = product(x, codes, scales, columns)
    assert_identical(got.double(), exact_product(x, codes, scales))


def test_scales_at_the_ends_of_their_range():
    x = torch.randn(5, D)
    codes = torch.randint(256, (1, 128, D // 2), dtype=torch.uint8)
    scales = torch.randint(120, 124, (1, 128, D // 32), dtype=torch.uint8)
    scales[0, 1] = 0
    scales[0, 2] = 230
    scales[0, 3, 4] = 255
    scales[0, 70] = 255
    # A group of zeros whose scale is the largest there is, and one whose is the least.
    scales[0, 5, 7], codes[0, 5, 7 * 16 : 8 * 16] = 254, 0
    scales[0, 6, 9], codes[0, 6, 9 * 16 : 10 * 16] = 0, 0
    got, want = product(x, codes, scales), exact_product(x, codes, scales)
    spoiled = torch.zeros(128, dtype=torch.bool)
    spoiled[[3, 70]] = True
    assert got[:, spoiled].isnan().all()
    got, want = got[:, ~spoiled], want[:, ~spoiled]
    size = want.abs().amax(0, keepdim=True)
    assert ((got - want).abs() <= 1e-5 * size + 2.0**-140).all()


@pytest.mark.parametrize(
    ("tokens", "columns", "count"), [(2, 32, 3), (90, 32, 3), (90, 64, 3), (150, 128, 9)]
)
def test_operands_of_sorted_pairs(tokens, columns, count):
    chosen = 2
    ids = torch.rand(tokens, count).argsort(1)[:, :chosen].int() + 3
    ids[0, 0], ids[-1, 1] = -1, count + 3
    x = torch.randn(tokens, 384).bfloat16()
    made = align_closely(ids, count, 3, columns)
    order, table, most = plan(ids - 3, columns, count)
    assert made.count == most
    assert_identical(made.sorted_pairs[: len(order)], order)
    assert made.blocks[-1] == table[-1]
    blocks = int(table[-1])
    got = made.blocks[:-1].view(3, most)[:, :blocks]
    assert_identical(got, table[:-1].view(3, most)[:, :blocks])
    rows = x[order.long() // chosen]
    want_codes, want_scales = operands(rows, (order, table, most), columns)
    for given, per_token in ((x, chosen), (rows, 0)):
        codes, scales = quantize_pairs(given, ids.numel(), made, columns, per_token)
        assert_identical(codes[: len(order)], want_codes.view(torch.uint8))
        known = ~want_scales.isnan()
        assert_identical(scales[known], want_scales[known])


@pytest.mark.parametrize("columns", [32, 64, 128])
def test_experts_with_any_number_of_pairs(columns):
    loads = (0, 1, columns - 1, columns, columns + 1, 300)
    ids = torch.cat([torch.full((n,), e, dtype=torch.int32) for e, n in enumerate(loads)])
    ids = ids[torch.randperm(len(ids))].unsqueeze(1)
    x, weights = torch.randn(len(ids), D).bfloat16(), torch.rand(len(ids), 1)
    got, want = both(x, ids, weights, random_matrices(len(loads)), columns, seed=columns)
    assert_close(got, want, atol=ulps(torch.bfloat16, 4))


@pytest.mark.parametrize("seed", range(4))
def test_interleavings_of_several_tiles_and_windows(seed):
    x = torch.zeros(70, D)
    x[torch.arange(70), torch.randint(D, (70,))] = 1.0
    codes = torch.randint(256, (1, 384, D // 2), dtype=torch.uint8)
    scales = torch.randint(118, 130, (1, 384, D // 32), dtype=torch.uint8)
    scales[0, 130, ::2] = 90
    assert_identical(product(x, codes, scales, seed=seed).double(), exact_product(x, codes, scales))


def test_no_pairs():
    codes, scales = (torch.zeros(1, 128, D // n, dtype=torch.uint8) for n in (2, 32))
    made = plan(torch.full((3, 1), -1, dtype=torch.int32), 64, 1)
    out = torch.full((3, 128), torch.nan)
    launched(torch.zeros(3, D), None, made, ((codes, scales),) * 2, out, 64, up=False)
    assert out.isnan().all()


def test_what_the_backend_runs_and_where_it_is_chosen(monkeypatch):
    for name, answer in (("triton_support", Support(True)), ("runs_gluon", True)):
        monkeypatch.setattr(config, name, lambda *_, answer=answer: answer)
    size, count = 1024, 4
    codes = torch.zeros(3, count, size, size // 2, dtype=torch.uint8)
    scales = torch.zeros(3, count, size, size // 32, dtype=torch.uint8)

    def supports(dtype=torch.bfloat16, matrices=codes, width=size, tokens=500, **options):
        x = torch.zeros(tokens, width, dtype=dtype)
        given = x, torch.zeros(tokens, 2).int(), torch.zeros(tokens, 2)
        how = {"weight_format": "mxfp4", "swiglu_limit": LIMIT, "quantize_activations": True}
        return config.w4a8_support(*given, *matrices, *scales, **(how | options))

    assert supports().automatic
    # 11 pairs an expert, which blocks of 16 take.
    assert supports(tokens=23).automatic
    assert not supports(tokens=22).automatic
    assert supports(matrices=[list(each) for each in codes])
    assert "bfloat16" in supports(torch.float16).reason
    assert "mxfp4" in supports(weight_format="fp8").reason
    assert "quantised" in supports(quantize_activations=False).reason
    assert "512" in supports(width=size + 128).reason
    apart = [codes[0, 0], codes[0, 1], codes[0, 3]]
    assert "even" in supports(matrices=[apart] * 3).reason
    assert "gluon_sm90_w4a8" in [each.name for each in experts._automatic]


def test_experts_that_lie_anywhere_are_copied():
    codes = torch.randint(256, (5, 8, 64), dtype=torch.uint8)
    even = ExpertTensors(codes)
    assert even.evenly() is even
    found = ExpertTensors([codes[0], codes[1], codes[4]]).evenly()
    assert found.addresses.stride == 8 * 64
    assert_identical(found.first, codes[[0, 1, 4]])

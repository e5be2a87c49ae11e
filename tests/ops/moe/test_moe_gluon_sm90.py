"""Hopper's grouped GEMMs on the host: the kernel's own text, see ``crossrun.hopper``."""

import pytest
import torch

pytest.importorskip("triton")

from anymla.formats.fp8_block import quantize_fp8_rows
from anymla.formats.mxfp4 import quantize_mxfp4
from anymla.ops.moe import config, experts
from anymla.ops.moe.gluon_sm90_grouped_gemm import grouped_gemm_kernel
from anymla.ops.moe.triton_align import align_and_quantize
from anymla.ops.registry import Support
from anymla.testing.tolerance import assert_close, assert_identical, ulps
from crossrun.hopper import run

E, K, D, I = 4, 2, 512, 512  # noqa: E741
LIMIT = 1.5


def operands(x, quant=128):
    """Codes in the order of decoded words, and scales."""
    codes, scales = quantize_fp8_rows(x, quant)
    place = torch.arange(x.shape[1])
    within = place % 32
    channel = place - within + 8 * (within // 4 % 4) + 2 * (within % 4) + within // 16
    return codes[:, channel].contiguous(), scales.contiguous()


def plan(ids, columns, experts=E):
    """Pairs by expert, and blocks without gaps between them."""
    order, blocks = [], []
    for expert in range(experts):
        mine = (ids.flatten() == expert).nonzero().flatten().tolist()
        starts = range(0, len(mine), columns)
        ends = [min(start + columns, len(mine)) for start in starts]
        blocks += [
            (expert, len(order) + a, len(order) + b) for a, b in zip(starts, ends, strict=True)
        ]
        order += mine
    most = ids.numel() // columns + min(ids.numel(), experts)
    table = torch.full((3, most), 1 << 30, dtype=torch.int32)
    table[:, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32).T
    table = torch.cat((table.flatten(), torch.tensor([len(blocks)], dtype=torch.int32)))
    return torch.tensor(order, dtype=torch.int32), table, most


def launched(x, x_scales, weights, made, tensors, out, columns, config_, stages=None):
    """One product by a kernel of ``config_``: CTAs, rows, channels, QUANT."""
    ctas, rows, channels, quant = config_
    order, table, most = made
    matrices = [each for tensor in tensors for each in (tensor, tensor.stride(0), None)]
    up = len(tensors) == 4
    width = x.shape[1]
    run(
        grouped_gemm_kernel, ctas, x, x_scales, weights, order, table, *matrices,
        *([] if up else [None] * 6), out, most, LIMIT, K=width, OUT=out.shape[1],
        PER_TOKEN=K if up else 1, M=rows, N=columns, CHUNK=channels,
        STAGES=stages or width // channels - 1, UP=up, W_UNIT=1, WARPS=rows // 16, CTAS_PER_SM=1,
        BATCH=2, QUANT=quant, PDL=True, num_warps=rows // 16,
    )  # fmt: skip


def random_matrices():
    """Codes and scales of w1 and w3 together, and of w2."""
    w1, w3, w2 = (torch.randn(E, n, k) / 9 for n, k in ((I, D), (I, D), (D, I)))
    # What one access reads is in one tensor here.
    return (*quantize_mxfp4(torch.stack((w1, w3))), *quantize_mxfp4(w2))


def both(x, ids, weights, matrices, columns, up, down, quant=128, down_stages=None):
    """The sum over a token's experts by the kernels, and by the reference."""
    tokens, (w13, s13, w2, s2) = len(x), matrices
    made = plan(ids, columns)
    inner, results = (torch.full((tokens * K, n), torch.nan).bfloat16() for n in (I, D))
    flat = weights.flatten()
    gate_up = w13[0], s13[0], w13[1], s13[1]
    launched(*operands(x, quant), flat, made, gate_up, inner, columns, (*up, quant))
    launched(inner, None, flat, made, (w2, s2), results, columns, (*down, quant), down_stages)
    here = ((ids >= 0) & (ids < E)).flatten()
    assert results[~here].isnan().all()
    results[~here] = 0
    got = results.view(tokens, K, D).float().sum(1).bfloat16()
    want = experts(
        x, ids, weights, *(list(w) for w in (*w13, w2)), *(list(s) for s in (*s13, s2)),
        weight_format="mxfp4", swiglu_limit=LIMIT, quantize_activations=True, quant_block=quant,
        backend="reference",
    )  # fmt: skip
    return got, want


@pytest.mark.parametrize(
    ("tokens", "columns", "up", "down"),
    [
        (1, 8, (3, 64, 256), (2, 128, 256)),
        (11, 16, (4, 128, 256), (3, 64, 256)),
    ],
)
@pytest.mark.parametrize("quant", [128, 32])
def test_grouped_gemms(tokens, columns, up, down, quant):
    matrices = random_matrices()
    s2 = matrices[3]
    s2[1, 5, 3], s2[1, 9, 2] = 0, 255
    # Channels of unlike size, so that it matters which of them share a scale.
    sizes = (2.0 ** torch.randint(-6, 3, (D // 32,))).repeat_interleave(32)
    x, weights = (torch.randn(tokens, D) * sizes).bfloat16(), torch.rand(tokens, K)
    ids = torch.rand(tokens, E).argsort(1)[:, :K].int()
    ids[0, 0] = E + 3
    got, want = both(x, ids, weights, matrices, columns, up, down, quant)
    spoiled = want.isnan()
    assert torch.equal(got.isnan(), spoiled)
    assert spoiled.any() == (ids == 1).any()
    # Sums in another order, after which a value may round the other way.
    assert_close(got[~spoiled], want[~spoiled], atol=ulps(torch.bfloat16, 4))


@pytest.mark.parametrize(
    ("down", "stages"),
    [((2, 64, 256), 2), ((3, 64, 256), 5), ((2, 64, 512), 3), ((50, 64, 512), 2)],
)
def test_a_ring_of_more_stages_than_a_tile_has(down, stages):
    """A rank's channels of an expert: w2 has few stages a tile, or one."""
    x, weights = torch.randn(9, D).bfloat16(), torch.rand(9, K)
    ids = torch.rand(9, E).argsort(1)[:, :K].int()
    up = (3, 64, 256)
    got, want = both(x, ids, weights, random_matrices(), 8, up, down, down_stages=stages)
    assert_close(got, want, atol=ulps(torch.bfloat16, 4))


def test_one_token_is_a_row_of_two():
    # Rows of an instruction's result do not meet, and each token's sums are in the same order.
    matrices, columns, tiles = random_matrices(), 8, ((3, 64, 256), (2, 128, 256))
    x, weights = torch.randn(2, D).bfloat16(), torch.rand(2, K)
    ids = torch.tensor([[2, E + 1], [-1, 2]], dtype=torch.int32)
    together, _ = both(x, ids, weights, matrices, columns, *tiles)
    for t in range(2):
        row = slice(t, t + 1)
        alone, want = both(x[row], ids[row], weights[row], matrices, columns, *tiles)
        assert_identical(alone, together[row])
        assert_close(alone, want, atol=ulps(torch.bfloat16, 4))


@pytest.mark.parametrize(
    ("tokens", "columns", "count"), [(2, 8, E), (9, 8, E), (90, 16, E), (150, 8, 70)]
)
@pytest.mark.parametrize("quant", [128, 32])
def test_pairs_by_expert_and_operands(tokens, columns, count, quant):
    ids = torch.rand(tokens, count).argsort(1)[:, :K].int() + 3
    ids[0, 0], ids[-1, 1] = -1, count + 3
    x = torch.randn(tokens, 128).bfloat16()
    coded, scales, made = align_and_quantize(x, ids, count, 3, columns, quant)
    order, table, most = plan(ids - 3, columns, count)
    assert made.count == most
    assert_identical(made.sorted_pairs[: len(order)], order)
    blocks = int(table[-1])
    assert made.blocks[-1] == blocks
    got, want = made.blocks[:-1].view(3, most), table[:-1].view(3, most)
    assert_identical(got[:, :blocks], want[:, :blocks])
    want_codes, want_scales = operands(x, quant)
    assert_identical(coded, want_codes)
    assert_identical(scales, want_scales)


def test_the_backend_says_what_it_takes(monkeypatch):
    for name, answer in (("triton_support", Support(True)), ("runs_gluon", True)):
        monkeypatch.setattr(config, name, lambda *_, answer=answer: answer)
    size, memory = 1024, torch.zeros(1 << 20, dtype=torch.uint8)

    def supports(dtype=torch.bfloat16, shift=0, **options):
        matrix = memory[shift : shift + size * size // 2].view(size, -1)
        scale = memory[: size * size // 32].view(size, -1)
        given = torch.zeros(2, size, dtype=dtype), torch.zeros(2, K).int(), torch.zeros(2, K)
        how = {"weight_format": "mxfp4", "swiglu_limit": LIMIT, "quantize_activations": True}
        lists = [[matrix] * E] * 3 + [[scale] * E] * 3
        return config.gluon_support(*given, *lists, **(how | options))

    assert supports()
    assert "bfloat16" in supports(torch.float16).reason
    assert "mxfp4" in supports(weight_format="fp8").reason
    assert "quantised" in supports(quantize_activations=False).reason
    assert "16 bytes" in supports(shift=8).reason
    monkeypatch.setattr(config, "runs_gluon", lambda _: False)
    assert "sm_90" in supports().reason

"""Hopper's W4A8 GEMMs on the host: the kernel's own text, see ``crossrun.hopper``."""

import importlib
import itertools

import pytest
import torch

pytest.importorskip("triton")

from anymla.formats.fp8_block import dequantize_fp8_rows, quantize_fp8_rows
from anymla.formats.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from anymla.ops.moe import config, experts
from anymla.ops.moe.gluon_sm90_w4a8_gemm import WINDOW, w4a8_gemm_kernel
from anymla.ops.moe.gluon_sm90_w4a8_sums import w4a8_sums_kernel
from anymla.ops.moe.inputs import ExpertTensors
from anymla.ops.moe.shapes import ExpertsShape
from anymla.ops.moe.triton_sort_quantize import align_closely, quantize_pairs
from anymla.ops.registry import BackendUnavailable, Support
from anymla.testing.tolerance import assert_close, assert_identical, ulps
from crossrun.hopper import Descriptor, run

D, I = 512, 512  # noqa: E741
LIMIT = 1.5


SUMS = (16, 32)  # blocks of pairs whose sums are scaled


def operands(x, made, columns, quant=128):
    """Codes of sorted rows in the order of decoded words, and scales block by block."""
    codes, scales = quantize_fp8_rows(x, block=quant)
    codes = codes.view(torch.uint8).view(len(x), -1, 4, 4, 4, 2)
    codes = codes.permute(0, 1, 2, 5, 3, 4) if columns in SUMS else codes.permute(0, 1, 3, 5, 2, 4)
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


def launched(x, weights, made, parts, out, columns, *, up, ctas=3, stages=3, seed=0, quant=128):
    """One of the two products; ``parts`` are codes and scales of both halves of a tile."""
    order, table, most = made
    codes, scales = operands(x, made, columns, quant)
    kernel, scale_rows, options = w4a8_gemm_kernel, 1, {}
    if columns in SUMS:
        kernel, scale_rows, options = w4a8_sums_kernel, 256 // quant, {"QUANT": quant}
    (w1, s1), (w3, s3) = parts
    rows = [w.view(-1, w.shape[-1]) for w in (w1, w3)]
    run(
        kernel, ctas, Descriptor(codes, [columns, 128]), Descriptor(scales, [scale_rows, columns]),
        *(Descriptor(each, [64, 64]) for each in rows), weights, order, table, s1, s1.stride(0), s3,
        s3.stride(0), out, most, w1.shape[1], w3.shape[1], LIMIT, K=x.shape[1], OUT=out.shape[1],
        N=columns, UP=up, STAGES=stages, CONSUMER_REGISTERS=216, PRODUCER_REGISTERS=72, PDL=True,
        num_warps=4, seed=seed, **options,
    )  # fmt: skip


def random_matrices(count, inner=I):
    """Codes and scales of w1 and w3 together, and of w2."""
    w1, w3, w2 = (torch.randn(count, n, k) / 9 for n, k in ((inner, D), (inner, D), (D, inner)))
    # What one access reads is in one tensor here.
    return (*quantize_mxfp4(torch.stack((w1, w3))), *quantize_mxfp4(w2))


def products(x, ids, weights, matrices, columns, seed=0, quant=128):
    """The kernels' results: w2's inputs of sorted pairs, products of all pairs, and the order."""
    (tokens, chosen), (w13, s13, w2, s2) = ids.shape, matrices
    made = plan(ids, columns, len(w2))
    order = made[0].long()
    inner = torch.full((len(order), w13.shape[2]), torch.nan).bfloat16()
    results = torch.full((tokens * chosen, D), torch.nan).bfloat16()
    flat = weights.flatten()
    parts = (w13[0], s13[0]), (w13[1], s13[1])
    rows = x[order // chosen]
    options = {"seed": seed, "quant": quant}
    launched(rows, flat, made, parts, inner, columns, up=True, **options)
    launched(inner, flat, made, ((w2, s2), (w2, s2)), results, columns, up=False, **options)
    here = ((ids >= 0) & (ids < len(w2))).flatten()
    assert results[~here].isnan().all()
    results[~here] = 0
    return inner, results, order


def both(x, ids, weights, matrices, columns, seed=0):
    """The sum over a token's experts by the kernels, and by the reference."""
    w13, s13, w2, s2 = matrices
    _, results, _ = products(x, ids, weights, matrices, columns, seed)
    got = results.view(*ids.shape, D).float().sum(1).bfloat16()
    want = experts(
        x, ids, weights, *(list(w) for w in (*w13, w2)), *(list(s) for s in (*s13, s2)),
        weight_format="mxfp4", swiglu_limit=LIMIT, quantize_activations=True, backend="reference",
    )  # fmt: skip
    return got, want


def pairwise(rows, expert, w, s, quant):
    """Products in float64 of quantised rows with the matrices of their experts, as bfloat16."""
    rows = dequantize_fp8_rows(*quantize_fp8_rows(rows, block=quant), torch.float64, block=quant)
    matrices = dequantize_mxfp4(w, s, torch.float64)
    found = [matrices[e] @ row for e, row in zip(expert.tolist(), rows, strict=True)]
    return torch.stack(found).bfloat16()


@pytest.mark.parametrize(
    ("columns", "quant", "inner"),
    [(16, 128, 512), (16, 32, 256), (32, 128, 768), (32, 32, 512), (64, 128, 512), (128, 128, 512)],
)
def test_grouped_gemms(columns, quant, inner):
    tokens, count, chosen = 90, 3, 2
    x, weights = torch.randn(tokens, D).bfloat16(), torch.rand(tokens, chosen)
    ids = torch.rand(tokens, count).argsort(1)[:, :chosen].int()
    ids[0, 0], ids[3, 1] = count + 3, -1
    w13, s13, w2, s2 = matrices = random_matrices(count, inner)
    got, results, order = products(x, ids, weights, matrices, columns, quant=quant)
    expert, rows = ids.flatten()[order], x[order // chosen]
    gate, up = (pairwise(rows, expert, w13[i], s13[i], quant).float() for i in (0, 1))
    want = torch.nn.functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)
    want = (want * weights.flatten()[order].unsqueeze(1)).bfloat16()
    # Sums in another order, after which a value may round the other way.
    assert_close(got, want, atol=ulps(torch.bfloat16, 2))
    # The other product is of the same inputs, which a rounding to e4m3 would move by much more.
    want = pairwise(got, expert, w2, s2, quant)
    assert_close(results[order], want, atol=ulps(torch.bfloat16, 2))


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
    ("pairs", "columns"),
    [(1, 16), (17, 16), (31, 32), (33, 32), (63, 64), (64, 64), (65, 64), (130, 64)],
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


@pytest.mark.parametrize("columns", [16, 64])
def test_scales_at_the_ends_of_their_range(columns):
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
    got, want = product(x, codes, scales, columns), exact_product(x, codes, scales)
    spoiled = torch.zeros(128, dtype=torch.bool)
    spoiled[[3, 70]] = True
    assert got[:, spoiled].isnan().all()
    got, want = got[:, ~spoiled], want[:, ~spoiled]
    size = want.abs().amax(0, keepdim=True)
    assert ((got - want).abs() <= 1e-5 * size + 2.0**-140).all()


@pytest.mark.parametrize(
    ("tokens", "columns", "count", "quant"),
    [(2, 16, 3, 128), (90, 32, 3, 32), (90, 32, 3, 128), (90, 64, 3, 128), (150, 128, 9, 128)],
)
def test_operands_of_sorted_pairs(tokens, columns, count, quant):
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
    want_codes, want_scales = operands(rows, (order, table, most), columns, quant)
    for given, per_token in ((x, chosen), (rows, 0)):
        codes, scales = quantize_pairs(
            given, ids.numel(), made, columns, per_token, by_group=columns in SUMS,
            quant_block=quant,
        )  # fmt: skip
        assert_identical(codes[: len(order)], want_codes.view(torch.uint8))
        known = ~want_scales.isnan()
        assert_identical(scales[known], want_scales[known])


@pytest.mark.parametrize("columns", [16, 32, 64, 128])
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


@pytest.fixture
def on_hopper(monkeypatch):
    """Let support functions answer as on Hopper, whatever the tensors' device."""
    for name, answer in (("triton_support", Support(True)), ("runs_gluon", True)):
        monkeypatch.setattr(config, name, lambda *_, answer=answer: answer)


def calls(width, inner, count, tokens, *, even=True):
    """Arguments on "meta" of a call with two experts a token, and its sizes.

    Experts that do not lie evenly are rows of a wider tensor, which kernels get as copies.
    """

    def stack(rows, columns):
        if even:
            return torch.empty(count, rows, columns, dtype=torch.uint8, device="meta")
        shape = count, rows, columns + 16
        return torch.empty(shape, dtype=torch.uint8, device="meta")[..., :columns]

    sizes = (inner, width), (inner, width), (width, inner)
    tensors = [stack(n, k // part) for part in (2, 32) for n, k in sizes]
    x = torch.empty(tokens, width, dtype=torch.bfloat16, device="meta")
    ids = torch.empty(tokens, 2, dtype=torch.int32, device="meta")
    given = x, ids, torch.empty(tokens, 2, device="meta"), *tensors
    return given, ExpertsShape(tokens, 2, count, inner, width)


HOW = {"weight_format": "mxfp4", "swiglu_limit": LIMIT, "quantize_activations": True}


@pytest.mark.usefixtures("on_hopper")
def test_what_w4a8_runs():
    def supports(count=4, tokens=500, width=1024, even=True, **options):
        given, shape = calls(width, 1024, count, tokens, even=even)
        w4a8 = config.takes_w4a8(shape, options.get("quant_block", 128), given[3:])
        return config.gluon_support(*given, **(HOW | options)), w4a8

    assert supports() == (Support(True), True)
    # 5 pairs an expert, which persistent CTAs take.
    assert supports(tokens=11) == (Support(True), True)
    assert supports(tokens=10) == (Support(True), False)
    assert supports(quant_block=32, tokens=11) == (Support(True), True)
    # 6 to 16 pairs an expert that TMA cannot step through, which persistent CTAs take.
    assert supports(tokens=11, even=False) == (Support(True), False)
    # Blocks of 16 and 32 take whole 256 channels.
    assert supports(tokens=50, width=1024 + 256) == (Support(True), True)
    for refused, reason in (
        ({"even": False}, "even"),
        ({"width": 1024 + 128}, "512"),
        ({"quant_block": 32}, "few"),
        ({"weight_format": "fp8"}, "mxfp4"),
        ({"quantize_activations": False}, "quantised"),
    ):
        answer, _ = supports(**refused)
        assert not answer
        assert reason in answer.reason
    given, _ = calls(1024, 1024, 4, 500)
    answer = config.gluon_support(given[0].half(), *given[1:], **HOW)
    assert "bfloat16" in answer.reason
    stacks = [list(each) for each in given[3:]]
    assert config.gluon_support(*given[:3], *stacks, **HOW)
    apart = [[*each[:2], *each[3:]] for each in stacks]
    answer = config.gluon_support(*given[:3], *apart, **HOW)
    assert "even" in answer.reason


def chosen_by_two_backends(shape, quant_block, even):
    """The kernel as two backends chose it, W4A8's first; None where Triton's took the call."""
    w4a8 = config.choose_w4a8_config(shape, quant_block) is not None and even
    if w4a8 and shape.pairs > 5 * shape.experts:
        return "w4a8"
    whole = not (shape.inner % 128 or shape.d % 128)
    if whole and config.choose_sm90_config(shape, quant_block) is not None:
        return "persistent"
    return None


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("quant_block", [128, 32])
def test_one_backend_chooses_as_two_did(quant_block, even):
    found = set()
    for width, inner, count, tokens in itertools.product(
        (448, 896, 1024, 4096, 5120, 7168),
        (256, 320, 512, 1920, 2048, 2304, 3072),
        (1, 9, 32, 48, 256, 384),
        (1, 5, 6, 50, 100, 176, 177, 256, 264, 265, 528, 1408, 1409, 3328, 4992, 4993, 40000),
    ):
        given, shape = calls(width, inner, count, tokens, even=even)
        answer = config.gluon_support(*given, **HOW, quant_block=quant_block)
        assert not answer or answer.automatic
        chosen = None
        if answer:
            w4a8 = config.takes_w4a8(shape, quant_block, given[3:])
            chosen = "w4a8" if w4a8 else "persistent"
        assert chosen == chosen_by_two_backends(shape, quant_block, even), shape
        found.add(chosen)
    kinds = {None, "persistent", "w4a8"} if even else {None, "persistent"}
    assert found == kinds


@pytest.mark.parametrize("many", [True, False])
def test_the_launch_runs_the_kernel_that_was_chosen(many, monkeypatch):
    launch = importlib.import_module("anymla.ops.moe.gluon_sm90_launch")
    ran = []
    for module, name in ((launch, "_multiply"), (launch.gluon_sm90_w4a8_launch, "multiply")):
        kernel = "w4a8" if name == "multiply" else "persistent"
        monkeypatch.setattr(module, name, lambda *_, kernel=kernel: ran.append(kernel))
    given, shape = calls(512, 512, 2, 6 if many else 5)
    launch.gemms(shape, 128, given[3:]).multiply(None, None)
    assert ran == ["w4a8" if many else "persistent"]


def test_w4a8_is_no_backend_of_its_own():
    with pytest.raises(
        BackendUnavailable, match="no backend 'gluon_sm90_w4a8'; there are: gluon_sm90"
    ):
        experts(
            torch.zeros(1, 32), torch.zeros(1, 1).int(), torch.zeros(1, 1),
            *([torch.zeros(32, 32)] for _ in range(3)), [], [], [],
            weight_format="plain", swiglu_limit=LIMIT, quantize_activations=False,
            backend="gluon_sm90_w4a8",
        )  # fmt: skip


def test_experts_that_lie_anywhere_are_copied():
    codes = torch.randint(256, (5, 8, 64), dtype=torch.uint8)
    even = ExpertTensors(codes)
    assert even.evenly() is even
    found = ExpertTensors([codes[0], codes[1], codes[4]]).evenly()
    assert found.addresses.stride == 8 * 64
    assert_identical(found.first, codes[[0, 1, 4]])

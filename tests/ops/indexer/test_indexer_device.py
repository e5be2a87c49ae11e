"""The indexer on a GPU: captured in a graph without waiting, and right where the CPU cannot go."""

import pytest
import torch
from index_scores import D, assert_scores, multiplies_fp8
from paged import a_device, without_waiting

from anymla.formats.page_layout import INDEX_FP8, get_layout
from anymla.ops.indexer import (
    indexer_q_rope_quant,
    mqa_logits,
    paged_mqa_logits,
    select_topk,
    topk_per_row,
)
from anymla.ops.step_indices import compute_global_topk_indices_and_lens, slot_mapping, window_rows

pytestmark = pytest.mark.gpu


def decode_step(requests, entries, device):
    """Inputs of one decoding step over a cache of whole pages."""
    layout, pages = get_layout(INDEX_FP8), requests * entries // 64
    cache = layout.allocate(pages, 64, device=device)
    layout.write(
        cache, torch.arange(pages * 64, device=device), torch.randn(pages * 64, D).to(device)
    )
    return {
        "q": torch.randn(requests, 64, D, device=device).bfloat16(),
        "weights": torch.randn(requests, 64, device=device).bfloat16(),
        "positions": torch.full((requests,), 4 * entries - 1, device=device),
        "rope": torch.rand(4 * entries, 64, device=device),
        "cache": cache,
        "lens": torch.full((requests,), entries, dtype=torch.int32, device=device),
        "table": torch.randperm(pages, device=device).view(requests, -1).int(),
        "requests": torch.arange(requests, dtype=torch.int32, device=device),
    }


def select(step, context):
    q, _, weights = indexer_q_rope_quant(
        step["q"],
        step["weights"],
        step["positions"],
        step["rope"],
        softmax_scale=D**-0.5,
        head_scale=0.125,
        backend="triton",
    )
    lens, table = step["lens"], step["table"]
    logits = paged_mqa_logits(
        q.unsqueeze(1), step["cache"], weights, lens, table, max_context=context, backend="triton"
    )
    best = topk_per_row(logits, torch.zeros_like(lens), lens, 512, backend="triton")
    chosen = select_topk(
        q, step["cache"], weights, lens, table, 512, max_context=context, backend="triton"
    )
    valid = torch.ones_like(lens, dtype=torch.bool)
    slots, counts = compute_global_topk_indices_and_lens(
        best, step["requests"], table, 64, valid, backend="triton"
    )
    at = step["positions"] // 4
    written = slot_mapping(at, step["requests"], table, page_size=64, backend="triton")
    window, _ = window_rows(
        at, step["requests"], table, block_size=64, window=128, backend="triton"
    )
    return logits, best, chosen, slots, counts, written, window


def test_a_captured_step_follows_its_inputs():
    device = a_device()
    if device.type != "cuda":
        pytest.skip("graphs are CUDA's")
    step = decode_step(3, 8192, device)
    select(step, 8192)  # builds the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), without_waiting(device):
        captured = select(step, 8192)
    step["lens"].copy_(torch.tensor([8192, 0, 700], device=device))
    step["table"].copy_(step["table"].flip(0))
    graph.replay()
    for got, want in zip(captured, select(step, 8192), strict=True):
        assert torch.equal(got, want)


SCORING = [name for name in ("gluon_sm90", "triton") if name in mqa_logits.backends]


@pytest.mark.parametrize("backend", SCORING)
@pytest.mark.parametrize("rows", [1, 2048])
def test_scores_at_full_size(rows, backend):
    device = a_device()
    q = torch.randn(rows, 64, D, device=device).to(torch.float8_e4m3fn)
    k = torch.randn(4096, D, device=device).to(torch.float8_e4m3fn)
    scale, weights = torch.rand(4096, device=device) + 0.5, torch.randn(rows, 64, device=device)
    ends = torch.randint(0, 4097, (rows,), device=device).int()
    starts = torch.zeros_like(ends)
    if not mqa_logits.supports(q, k, scale, weights, starts, ends, backend=backend):
        pytest.skip(f"not {backend}")
    got = mqa_logits(q, k, scale, weights, starts, ends, backend=backend)
    some = slice(0, rows, max(1, rows // 16))
    dots = q[some].double() @ (k.double() * scale[:, None]).T
    want = torch.einsum("mh,mhn->mn", weights[some].double(), dots.relu())
    sizes = q[some].double().abs() @ (k.double() * scale[:, None]).abs().T
    magnitude = torch.einsum("mh,mhn->mn", weights[some].double().abs(), sizes)
    hidden = torch.arange(4096, device=device) >= ends[some, None]
    want = want.masked_fill(hidden, -torch.inf)
    assert_scores(got[some], want, magnitude, 64, fp8=multiplies_fp8(backend))


@pytest.mark.parametrize("each", [1, 2, 3])
def test_hopper_scores_pages_as_others_do(each):
    device, layout = a_device(), get_layout(INDEX_FP8)
    cache = layout.allocate(40, 64, device=device, fill=0xFF)
    table = torch.randperm(40, device=device)[:38].view(2, 19).int()
    table[1, 3] = -1
    slots = torch.arange(40 * 64, device=device)
    layout.write(cache, slots, torch.randn(len(slots), D, device=device))
    q = torch.randn(2, each, 64, D, device=device).to(torch.float8_e4m3fn)
    weights = torch.randn(2 * each, 64, device=device)
    lens = torch.randint(0, 1217, (2, each), device=device).int()
    given = (q, cache, weights, lens, table)
    if not paged_mqa_logits.supports(*given, max_context=1300, backend="gluon_sm90"):
        pytest.skip("not on this machine")
    got, want = (
        paged_mqa_logits(*given, max_context=1300, backend=name)
        for name in ("gluon_sm90", "triton")
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize("shape", [(1, 262_144), (128, 32_768), (2048, 8192)])
@pytest.mark.parametrize("k", [512, 2048])
def test_topk_at_full_size(shape, k):
    device = a_device()
    logits = torch.randn(shape, device=device).mul_(1000).round_()  # with ties
    lens = torch.randint(0, shape[1] + 1, shape[:1], device=device).int()
    starts = torch.zeros_like(lens)
    got = topk_per_row(logits, starts, lens, k, backend="triton")
    for row in range(0, shape[0], max(1, shape[0] // 8)):
        n = int(lens[row])
        order = torch.sort(logits[row, :n], descending=True, stable=True).indices[:k]
        assert torch.equal(got[row, : len(order)].long(), order)
        assert bool((got[row, len(order) :] == -1).all())


SELECTING = [name for name in ("gluon_sm90", "triton") if name in select_topk.backends]


@pytest.mark.parametrize("backend", SELECTING)
@pytest.mark.parametrize(
    ("tokens", "requests", "entries", "k"),
    [
        (4, 4, 33_000, 512),
        (6, 3, 9000, 1024),
        (2, 2, 140_000, 512),
        (700, 3, 9000, 512),
        (300, 2, 40_000, 512),
        (5, 1, 9000, 2048),
    ],
)
def test_selection_at_full_size(backend, tokens, requests, entries, k):
    # Integers have exact scores, with ties: every form must give what torch gives.
    device, layout = a_device(), get_layout(INDEX_FP8)
    pages = -(-entries // 64)
    cache = layout.allocate(requests * pages + 2, 64, device=device, fill=0xFF)
    table = torch.randperm(requests * pages + 2, device=device)[: requests * pages].int()
    slots = (table.long().unsqueeze(1) * 64 + torch.arange(64, device=device)).flatten()
    layout.write(cache, slots, torch.randint(-2, 3, (len(slots), D), device=device).float())
    owners = torch.sort(torch.randint(-1, requests, (tokens,), device=device)).values.int()
    arguments = {
        "q": torch.randint(-2, 3, (tokens, 64, D), device=device).to(torch.float8_e4m3fn),
        "index_cache": cache,
        "weights": torch.randint(-2, 3, (tokens, 64), device=device).float(),
        "lengths": torch.randint(0, entries + 1, (tokens,), device=device).int(),
        "block_table": table.view(requests, pages),
        "k": k,
        "token_to_req": owners,
    }
    if not (support := select_topk.supports(**arguments, backend=backend)):
        pytest.skip(support.reason)
    want = select_topk(**arguments, backend="torch")
    assert torch.equal(select_topk(**arguments, backend=backend), want)
    rounds = select_topk(**arguments, backend=backend, scratch_bytes=1 << 24)
    assert torch.equal(rounds, want)


def test_selection_does_not_depend_on_the_batch():
    # Real numbers: equal bits of scores are what makes equal selections.
    device = a_device()
    step = decode_step(8, 33_024, device)
    q = step["q"].to(torch.float8_e4m3fn)
    weights = torch.randn(8, 64, device=device)
    arguments = (step["cache"], weights, step["lens"], step["table"], 512)
    together = select_topk(q, *arguments, backend="triton")
    for row in range(8):
        part = slice(row, row + 1)
        alone = (step["cache"], weights[part], step["lens"][part], step["table"][part], 512)
        assert torch.equal(select_topk(q[part], *alone, backend="triton"), together[part])
    pairs = torch.repeat_interleave(torch.arange(8, dtype=torch.int32, device=device), 2)
    doubled = select_topk(
        q.repeat_interleave(2, 0),
        step["cache"],
        weights.repeat_interleave(2, 0),
        step["lens"].repeat_interleave(2),
        step["table"],
        512,
        token_to_req=pairs,
        backend="triton",
    )
    assert torch.equal(doubled[::2], together)
    assert torch.equal(doubled[1::2], together)

"""Every family on a GPU: replayed from a graph, with many tokens, and in caches beyond 4 GiB."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from device_steps import PAGE, STEPS, Step, main_cache, normal, read, tokens_of
from paged import a_device, without_waiting
from torch import Tensor

from anymla.formats.page_layout import INDEX_FP8, MAIN_FP8, get_layout
from anymla.formats.state_layout import allocate_states
from anymla.ops.attention import CacheRows, sparse_attention
from anymla.ops.compressor import compress_norm_rope_insert, save_partial_states
from anymla.ops.indexer import paged_mqa_logits
from anymla.ops.kv_cache import dequantize_and_gather_k_cache, quantize_and_insert_k_cache
from anymla.ops.norm_rope import qnorm_rope_kv_insert
from anymla.testing.generate import hostile_indices
from anymla.testing.tolerance import assert_close, ulps

pytestmark = pytest.mark.gpu
# More than a grid's second axis can count, and no multiple of any tile.
MANY = 70_001
# Weights, not addresses: nothing in them can point outside.
SHARED_INTEGERS = ("hashed",)


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    with torch.device(a_device()):
        yield


def by_family() -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "step", [pytest.param(step, id=name) for name, step in STEPS.items()]
    )


@by_family()
@pytest.mark.parametrize("tokens", [3, 150])
def test_a_replayed_graph_follows_its_inputs(step: Step, tokens: int) -> None:
    device = a_device()
    if device.type != "cuda":
        pytest.skip("graphs are CUDA's")
    inputs = step.make(tokens)
    untouched = {name: inputs[name].clone() for name in step.written}
    step.run(**inputs)  # builds the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), without_waiting(device):
        captured = step.run(**inputs)
    # Other lengths, slots, pages, positions and values, some of them padding.
    others = step.make(tokens)
    for name, tensor in inputs.items():
        tensor.copy_(untouched.get(name, others[name]))
    graph.replay()
    others |= untouched
    for got, want in zip(captured, step.run(**others), strict=True):
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


@by_family()
def test_many_tokens_are_each_as_alone(step: Step) -> None:
    inputs = step.make(MANY)
    rows = torch.tensor([0, 1, 65_534, 65_535, 65_536, MANY - 2, MANY - 1]).clamp(max=MANY - 1)
    few = step.some(inputs, rows)
    for all_, some in zip(step.run(**inputs), step.run(**few), strict=True):
        if not all_.is_floating_point():
            assert torch.equal(all_[rows], some)
            continue
        # Tiles and splits may differ, and with them the order of sums and a rounding at the end.
        size = float(some.nan_to_num(0.0, posinf=0.0, neginf=0.0).abs().max())
        slack = ulps(all_.dtype, 4) + ulps(torch.float32, 256)
        assert_close(all_[rows].float(), some.float(), atol=slack, scale=size)


@by_family()
def test_hostile_integers_lead_nowhere(step: Step) -> None:
    """What compute-sanitizer's memcheck is run on: slots, pages, lengths that are not there."""
    inputs = step.make(40)
    for name, tensor in inputs.items():
        if tensor.dtype in (torch.int32, torch.int64) and name not in SHARED_INTEGERS:
            hostile = hostile_indices(5, *tensor.shape, dtype=tensor.dtype).to(tensor.device)
            tensor.copy_(torch.where(torch.rand(tensor.shape) < 0.7, hostile, tensor))
    for result in step.run(**inputs):
        assert result.isfinite().any() or not result.numel()


# Caches beyond 4 GiB --------------------------------------------------------------------------

BEYOND = 2**32 + 2**26


def pages_beyond(page_bytes: int) -> int:
    return -(-BEYOND // page_bytes)


def near_and_far(layout: str) -> tuple[Tensor, Tensor, int]:
    """A large cache, a small one, and the page of the large one where the small one begins."""
    large_pages = pages_beyond(get_layout(layout).page_stride_bytes(PAGE))
    large, small = (
        get_layout(layout).allocate(pages, PAGE, device=a_device()) for pages in (large_pages, 4)
    )
    return large, small, large_pages - 4


def test_kv_cache_and_norm_rope_rows_beyond_4_gib() -> None:
    large, small, page = near_and_far(MAIN_FP8)
    slots = torch.randperm(4 * PAGE)[:200]
    rows = normal(200, 512)
    for cache, first in ((large, page * PAGE), (small, 0)):
        quantize_and_insert_k_cache(rows[:100], cache, slots[:100] + first, backend="triton")
    assert torch.equal(large[page:], small)
    given = tokens_of(100)
    queries = normal(100, 2, 512)
    for cache, first in ((large, page * PAGE), (small, 0)):
        qnorm_rope_kv_insert(
            queries,
            rows[100:],
            cache,
            slots[100:] + first,
            given["positions"],
            given["rope"],
            1e-6,
            backend="triton",
        )
    assert torch.equal(large[page:], small)
    assert not large[0].any()  # where an address that lost its upper bits would point
    assert torch.equal(read(large, slots + page * PAGE), read(small, slots))
    lengths = torch.tensor([150, 100]).int()
    table = torch.tensor([[2, 0, 3], [1, 3, 2]]).int()
    gathered = [torch.zeros(2, 150, 512, dtype=torch.bfloat16) for _ in range(2)]
    for out, cache, first in zip(gathered, (large, small), (page, 0), strict=True):
        dequantize_and_gather_k_cache(out, cache, lengths, None, table + first, backend="triton")
    assert torch.equal(*gathered)


@pytest.mark.parametrize("heads", [8, 64])
def test_sparse_attention_beyond_4_gib(heads: int) -> None:
    large, small, page = near_and_far(MAIN_FP8)
    quantize_and_insert_k_cache(
        normal(4 * PAGE, 512), small, torch.arange(4 * PAGE), backend="triton"
    )
    large[page:] = small
    large[:page].fill_(255)  # NaN, wherever else an address may lead
    q, indices = normal(5, heads, 512), torch.randint(0, 4 * PAGE, (5, 192)).int()
    lengths = torch.tensor([192, 1, 0, 130, 64]).int()
    far = sparse_attention(
        q,
        [
            CacheRows(large, MAIN_FP8, indices + page * PAGE, lengths),
            CacheRows(small, MAIN_FP8, indices[:, :64]),
        ],
        backend="triton",
    )
    near = sparse_attention(
        q,
        [
            CacheRows(small, MAIN_FP8, indices, lengths),
            CacheRows(large, MAIN_FP8, indices[:, :64] + page * PAGE),
        ],
        backend="triton",
    )
    for a, b in zip(far, near, strict=True):
        assert torch.equal(a, b)
        assert not a.isnan().any()


def test_indexer_keys_beyond_4_gib() -> None:
    large, small, page = near_and_far(INDEX_FP8)
    quantize_and_insert_k_cache(
        normal(4 * PAGE, 128), small, torch.arange(4 * PAGE), layout=INDEX_FP8, backend="triton"
    )
    large[page:] = small
    large[:page].fill_(255)
    q = torch.randn(3, 1, 64, 128).to(torch.float8_e4m3fn)
    weights, lens = torch.randn(3, 64), torch.tensor([130, 0, 192]).int()
    table = torch.tensor([[3, 1, 2], [0, 1, 2], [2, 3, 0]]).int()
    far, near = (
        paged_mqa_logits(q, cache, weights, lens, table + first, max_context=192, backend="triton")
        for cache, first in ((large, page), (small, 0))
    )
    assert torch.equal(far, near)
    assert not far.isnan().any()


def test_compressor_states_beyond_4_gib() -> None:
    entries, width, closing = 4, 1024, 7
    pages = pages_beyond(entries * 2 * width * 4)
    large, small = (
        allocate_states(count, entries, width, device=a_device()) for count in (pages, 4)
    )
    target, near_target, page = near_and_far(MAIN_FP8)
    kv, score, ape = torch.randn(8, width), torch.randn(8, width), torch.randn(4, width)
    positions, table = torch.arange(8), torch.tensor([[2, 3]]).int()
    weight, rope = torch.randn(512), torch.rand(16, 64)
    for state, first, cache, first_page in (
        (large, pages - 4, target, page),
        (small, 0, near_target, 0),
    ):
        slots = (table[0, positions // entries] + first).long() * entries + positions % entries
        save_partial_states(
            kv, score, ape, positions, state, slots, compress_ratio=4, backend="triton"
        )
        compress_norm_rope_insert(
            state,
            table + first,
            slots,
            torch.zeros(8).int(),
            positions,
            weight,
            1e-6,
            rope,
            cache,
            torch.where(positions % 4 == 3, first_page * PAGE + positions * 17, -1),
            compress_ratio=4,
            overlap=True,
            layout=MAIN_FP8,
            backend="triton",
        )
    assert torch.equal(large[pages - 4 :], small)
    assert torch.equal(target[page:], near_target)
    assert near_target.view(4, -1)[closing * 17 // PAGE].any()
    assert not target[0].any()
    assert main_cache(1).device == target.device

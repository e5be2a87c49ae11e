"""Index scores of paged keys by tiles of any size, in bounded memory; what is refused."""

import pytest
import torch
from index_scores import (
    D,
    i32,
    key_cache,
    score_bound,
)
from paged import (
    ALL_BACKENDS,
    INDEX_LAYOUTS,
    make_cache,
    use_backend,
)

from anymla.formats.page_layout import (
    INDEX_FP8,
    MAIN_FP8,
    ROWS_BF16_128,
    get_layout,
)
from anymla.ops.indexer import indexer_q_rope_quant, mqa_logits, paged_mqa_logits, torch_scores
from anymla.testing.tolerance import assert_close, assert_identical


@pytest.fixture(params=ALL_BACKENDS)
def run(request, monkeypatch):
    return use_backend(request.param, monkeypatch)


def big_case():
    """Two requests whose rows and keys take several tiles; also the magnitude of each score."""
    table = torch.randperm(12)[:10].view(2, 5).int()
    cache, stored = key_cache(INDEX_FP8, 12, 64, table, [320, 320])
    keys = torch.stack(stored)
    q, weights = torch.randn(2, 23, 4, D), torch.randn(46, 4)
    lens = torch.stack((torch.arange(278, 301), torch.arange(189, 212))).int()
    spread = torch.einsum("rjhd,rnd->rjhn", q.double().abs(), keys.abs())
    magnitude = torch.einsum("mh,mhn->mn", weights.double().abs(), spread.flatten(0, 1))
    return (q, cache, weights, lens, table), magnitude


def test_result_does_not_depend_on_the_tile(run, monkeypatch):
    arguments, magnitude = big_case()
    whole = paged_mqa_logits(*arguments, max_context=320, backend=run)
    tiles = {"_CPU_TILE": 3000, "_DEVICE_TILE": 9000, "_CPU_KEYS": 100, "_CPU_ROWS": 5}
    for name, value in tiles.items():
        monkeypatch.setattr(torch_scores, name, value)
    tiled = paged_mqa_logits(*arguments, max_context=320, backend=run)
    assert_close(tiled, whole, atol=2 * score_bound(4), scale=magnitude)
    again = paged_mqa_logits(*arguments, max_context=320, backend=run)
    assert_identical(tiled, again)


def test_row_does_not_depend_on_its_batch(run):
    (q, cache, weights, lens, table), magnitude = big_case()
    batch = paged_mqa_logits(q, cache, weights, lens, table, max_context=320, backend=run)
    for r, j in ((0, 0), (1, 22)):
        m = 23 * r + j
        alone = paged_mqa_logits(
            q[r : r + 1, j : j + 1],
            cache,
            weights[m : m + 1],
            lens[r : r + 1, j : j + 1],
            table[r : r + 1],
            max_context=320,
            backend=run,
        )
        assert_close(alone[0], batch[m], atol=2 * score_bound(4), scale=magnitude[m])


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Elements of the largest tensor that an operation newly makes."""

    def __init__(self, but):
        super().__init__()
        self.largest, self.but = 0, but

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.numel() != self.but and not func.is_view:
            self.largest = max(self.largest, out.numel())
        return out


def test_scratch_is_bounded_on_a_cpu():
    rows, heads, keys = 192, 16, 8192
    q, weights = torch.randn(1, rows, heads, D), torch.randn(rows, heads)
    cache = get_layout(INDEX_FP8).allocate(keys // 64, 64)
    table = torch.arange(keys // 64)[None].int()
    with LargestTensor(but=rows * keys) as seen:
        paged_mqa_logits(
            q,
            cache,
            weights,
            torch.full((1, rows), keys, dtype=torch.int32),
            table,
            max_context=keys,
            backend="torch",
        )
    # All head scores would be rows * heads * keys, 24 times as many.
    assert seen.largest <= torch_scores._CPU_TILE < rows * heads * keys / 20


def test_a_million_tokens_fit_a_device():
    # Conformance I7, on meta tensors: queries over 1 M tokens of context, 64 heads. The scores
    # themselves would take 64 times the result. Four tiles of queries show what 64 would.
    rows, heads, keys = 1024, 64, 1 << 18
    meta = {"device": "meta"}
    arguments = (
        torch.empty(1, rows, heads, D, dtype=torch.bfloat16, **meta),
        get_layout(INDEX_FP8).allocate(keys // 64, 64, device="meta"),
        torch.empty(rows, heads, **meta),
        torch.empty(1, rows, dtype=torch.int32, **meta),
        torch.empty(1, keys // 64, dtype=torch.int32, **meta),
    )
    with LargestTensor(but=rows * keys) as seen:
        out = paged_mqa_logits(*arguments, max_context=keys, backend="torch")
    assert out.shape == (rows, keys)
    # Queries are converted to float32 once.
    assert seen.largest <= max(torch_scores._DEVICE_TILE, rows * heads * D)


@pytest.mark.parametrize("layout", INDEX_LAYOUTS)
def test_nothing_waits_for_a_device(layout):
    # Meta tensors have no values: looking at one raises.
    meta = {"device": "meta"}
    q = torch.empty(3, 2, 4, D, **meta)
    cache = get_layout(layout).allocate(10, 16, device="meta")
    lens, table = (
        torch.empty(3, 2, dtype=torch.int32, **meta),
        torch.empty(3, 7, dtype=torch.int32, **meta),
    )
    weights = torch.empty(6, 4, **meta)
    logits = paged_mqa_logits(
        q, cache, weights, lens, table, max_context=99, layout=layout, backend="torch"
    )
    assert logits.shape == (6, 99)
    k = torch.empty(33, D, **meta).to(torch.float8_e4m3fn)
    scale, bounds = torch.empty(33, **meta), torch.empty(6, dtype=torch.int32, **meta)
    dense = mqa_logits(q.flatten(0, 1), k, scale, weights, bounds, bounds, backend="torch")
    assert dense.shape == (6, 33)
    for quant in ("fp8", "mxfp4", "none"):
        out, _, _ = indexer_q_rope_quant(
            q.flatten(0, 1),
            weights,
            torch.empty(6, dtype=torch.int64, **meta),
            torch.empty(50, 64, **meta),
            softmax_scale=1.0,
            head_scale=1.0,
            quant=quant,
            hadamard=True,
            backend="torch",
        )
        assert out.shape[:2] == (6, 4)


def test_paged_score_errors_name_the_argument():
    cache = get_layout(INDEX_FP8).allocate(3, 4)
    q, weights = torch.randn(2, 1, 3, D), torch.randn(2, 3)
    lens, table = i32([1, 2]), i32([[0], [1]])
    call = paged_mqa_logits
    with pytest.raises(ValueError, match="paged_mqa_logits: max_context must be >= 0"):
        call(q, cache, weights, lens, table, max_context=-1)
    with pytest.raises(ValueError, match="context_lens must be int32"):
        call(q, cache, weights, i32([[1, 2], [1, 2]]), table, max_context=4)
    with pytest.raises(ValueError, match="block_table must be"):
        call(q, cache, weights, lens, table[:1], max_context=4)
    with pytest.raises(ValueError, match="weights must be"):
        call(q, cache, weights[:1], lens, table, max_context=4)
    with pytest.raises(ValueError, match="index_cache must be"):
        call(q, cache[..., :131], weights, lens, table, max_context=4)
    with pytest.raises(TypeError, match="index_cache must be"):
        call(q, cache, weights, lens, table, max_context=4, layout=ROWS_BF16_128)
    with pytest.raises(ValueError, match="unknown cache layout"):
        call(q, cache, weights, lens, table, max_context=4, layout="no such")
    with pytest.raises(ValueError, match="layout must be one of 128 channels"):
        call(
            q,
            get_layout(MAIN_FP8).allocate(3, 4),
            weights,
            lens,
            table,
            max_context=4,
            layout=MAIN_FP8,
        )
    with pytest.raises(TypeError, match="context_lens must be a tensor"):
        call(q, cache, weights, [1, 2], table, max_context=4)


def test_triton_refuses_pages_that_it_cannot_address():
    q, weights, table = torch.randn(1, 1, 2, D), torch.randn(1, 2), i32([[0, 1]])
    cache = make_cache(INDEX_FP8, 2, 4, gap=2).tensor  # scales at odd addresses
    support = paged_mqa_logits.supports(
        q, cache, weights, i32([8]), table, max_context=8, backend="triton"
    )
    assert not support
    assert "multiples of 4 bytes" in support.reason
    wide = torch.randn(1, 1, 2, 512)
    main = get_layout(MAIN_FP8).allocate(2, 4)
    support = paged_mqa_logits.supports(
        wide, main, weights, i32([8]), table, max_context=8, layout=MAIN_FP8, backend="triton"
    )
    assert not support
    assert MAIN_FP8 in support.reason

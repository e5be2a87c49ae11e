"""Attention of few tokens and heads on a CPU, in a kernel of numba, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anymla.formats.page_layout import MAIN_FP8, V41_MAIN_FP8_SPLIT, get_layout
from anymla.ops._few_tokens import FEW_TOKENS
from anymla.ops.attention import CacheRows, sparse_attention
from anymla.ops.device import numba_problem
from anymla.ops.kv_cache import quantize_and_insert_k_cache
from anymla.ops.registry import BackendUnavailable
from anymla.testing.conformance.scene import Scene, scope
from anymla.testing.generate import hostile_indices

pytestmark = pytest.mark.skipif(bool(numba_problem()), reason=numba_problem() or "-")
SINKS = {
    "none": None,
    "ordinary": (0.0, 2.0, -2.0),
    "special": (1e4, -1e4, 3e38, -3e38, torch.inf, -torch.inf),
}


def run(scene, **more):
    arguments, keywords = scene.arguments()
    return sparse_attention(*arguments, **keywords, **more, backend="numba")


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**20),
    tokens=st.integers(1, FEW_TOKENS),
    heads=st.sampled_from([1, 2, 3, 8, 20]),
    widths=st.tuples(st.sampled_from([0, 1, 7, 40, 131]), st.sampled_from([None, 0, 1, 33, 64])),
    pages=st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 53, 64])),
    layouts=st.tuples(*(st.sampled_from([MAIN_FP8, V41_MAIN_FP8_SPLIT]) for _ in range(2))),
    sink=st.sampled_from(sorted(SINKS)),
)
def test_any_lists_in_any_caches(seed, tokens, heads, widths, pages, layouts, sink):
    torch.manual_seed(seed)
    scopes = [
        None
        if width is None
        else scope(
            tokens,
            width,
            lengths=torch.randint(0, width + 1, (tokens,)).tolist(),
            page=page,
            layout=layout,
        )
        for width, page, layout in zip(widths, pages, layouts, strict=True)
    ]
    for each in scopes:
        if each is not None and each.indices.numel():
            hit = torch.rand(each.indices.shape) < 0.1
            hostile = hostile_indices(each.cache.shape[0] * each.cache.shape[1], *hit.shape)
            each.indices = torch.where(hit, hostile, each.indices)
    logits = SINKS[sink]
    sinks = None
    if logits is not None:
        sinks = torch.tensor(logits)[torch.arange(heads) % len(logits)]
    q = (torch.randn(tokens, heads, 512) * 2).bfloat16()
    scene = Scene(q, scopes[0], scopes[1], sinks)
    out, lse = run(scene)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    scene.expected().check((out, lse))
    # A token's result is its own, whatever is beside it.
    (_, rows), keywords = scene.arguments()
    last = slice(tokens - 1, tokens)
    one = [each.part(last) for each in rows]
    alone = sparse_attention(q[last], one, backend="numba", **keywords)
    assert torch.equal(alone[0], out[last])
    assert torch.equal(alone[1], lse[last])


def test_values_out_and_empty_lists():
    scene = Scene(torch.randn(2, 3, 512).bfloat16(), scope(2, 40, lengths=[40, 0]))
    whole, lse = run(scene)
    assert lse[1].tolist() == [-torch.inf] * 3
    assert not whole[1].any()
    out = torch.empty(2, 3, 300, dtype=torch.bfloat16)
    part, named = run(scene, value_dim=300, out=out, empty_lse=7.0)
    assert part is out
    assert torch.equal(part, whole[..., :300])
    assert named[1].tolist() == [7.0] * 3
    apart = torch.empty(2, 3, 1024, dtype=torch.bfloat16)[..., ::2]
    assert torch.equal(run(scene, out=apart)[0], whole)


def test_a_listed_nan_and_no_other_reaches_a_token():
    scene = Scene(torch.randn(1, 2, 512).bfloat16(), scope(1, 33, page=64))
    clean, _ = run(scene)
    page, entry = divmod(int(scene.main.indices[0, 5]), 64)
    scene.main.cache[page].view(-1)[entry * 576 + 3] = 0x7F
    out, lse = run(scene)
    assert out[..., 3].isnan().all()
    assert lse.isnan().all()
    assert not clean.isnan().any()


def test_what_is_taken():
    few = Scene(torch.randn(1, 8, 512).bfloat16(), scope(1, 40))
    arguments, keywords = few.arguments()
    assert sparse_attention.resolve(*arguments, **keywords).name == "numba"
    with pytest.raises(BackendUnavailable, match="more tokens"):
        run(few, batch_invariant=True)
    many = Scene(torch.randn(1, 64, 512).bfloat16(), scope(1, 40))
    arguments, keywords = many.arguments()
    assert sparse_attention.resolve(*arguments, **keywords).name == "torch"
    plain = Scene(torch.randn(1, 8, 512).bfloat16(), scope(1, 9, layout="rows_bf16_512"))
    with pytest.raises(BackendUnavailable, match="plane"):
        run(plain)


def test_scores_that_overflow_weigh_nothing_though_they_come_first():
    """A whole tile of them, before rows of ordinary scores."""
    rows = torch.randn(40, 512).bfloat16()
    rows[:35, 0], rows[35:, 0] = -4.0, 0.0
    cache = get_layout(MAIN_FP8).allocate(1, 64)
    quantize_and_insert_k_cache(rows, cache, torch.arange(40))
    q = torch.randn(1, 3, 512).bfloat16() / 8
    q[0, :2, 0] = 3e38
    slots = torch.arange(40, dtype=torch.int32)[None]
    out, lse = sparse_attention(q, [CacheRows(cache, MAIN_FP8, slots)], backend="numba")
    want, exact = sparse_attention(
        q.double(), [CacheRows(cache, MAIN_FP8, slots)], backend="reference"
    )
    torch.testing.assert_close(out.double(), want, atol=0.02, rtol=0.02)
    torch.testing.assert_close(lse.double(), exact.double(), atol=1e-3, rtol=1e-3)

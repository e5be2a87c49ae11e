"""FlashMLA's interface: its signatures, its conventions, and what it leaves undefined."""

from __future__ import annotations

import functools
import importlib
import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from anymla.compat import _scheduling, flash_mla
from anymla.formats.page_layout import (
    MAIN_FP8,
    V32_FP8,
    V41_COMPRESSED_NVFP4,
    V41_COMPRESSED_NVFP4_SPLIT,
    V41_MAIN_FP8,
    V41_MAIN_FP8_SPLIT,
)
from anymla.ops.attention import sparse_attention, sparse_attention_rows
from anymla.ops.device import triton_support
from anymla.testing.conformance.expected import Attention, attend
from anymla.testing.conformance.scene import Scope, scope
from anymla.testing.generate import hostile_indices
from anymla.testing.tolerance import accumulation, assert_close, assert_identical

BACKENDS = ("torch", "triton")
CHANNELS = {MAIN_FP8: 512, V32_FP8: 576}


def test_metadata_takes_anything_and_is_not_used_up():
    meta, nothing = flash_mla.get_mla_metadata(torch.zeros(3), 128, num_heads_k=1)
    assert nothing is None
    assert isinstance(meta, flash_mla.FlashMLASchedMeta)


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    return use(request.param, monkeypatch)


def use(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if name == "triton" and not triton_support(torch.empty(0)):
        pytest.skip("triton does not run here")
    for operation in (sparse_attention, sparse_attention_rows):
        chosen = functools.partial(operation, backend=name)
        monkeypatch.setattr(flash_mla, operation.name, chosen)
    return name


def decode(q: Tensor, main: Scope, extra: Scope | None = None, **more) -> tuple[Tensor, Tensor]:
    """Call with scopes of b * s_q tokens."""
    batch, queries = q.shape[:2]

    def cache(of: Scope) -> Tensor:
        return of.cache.unsqueeze(2).view(torch.float8_e4m3fn)

    if extra is not None:
        more["extra_k_cache"] = cache(extra)
        more["extra_indices_in_kvcache"] = extra.indices.view(
            batch, queries, extra.indices.shape[1]
        )
    meta, _ = flash_mla.get_mla_metadata()
    return flash_mla.flash_mla_with_kvcache(
        q, cache(main), None, None, 512, meta, is_fp8_kvcache=True,
        indices=main.indices.view(batch, queries, main.indices.shape[1]), **more,
    )  # fmt: skip


def expected(q: Tensor, sink: Tensor | None, *scopes: Scope | None, scale=None) -> Attention:
    flat = q.flatten(0, 1)
    rows = [
        torch.cat([each.rows(token) for each in scopes if each is not None])
        for token in range(len(flat))
    ]
    return attend(flat, rows, sink, scale, value_dim=512)


def check(q: Tensor, want: Attention, result: tuple[Tensor, Tensor]) -> None:
    out, lse = result
    batch, queries, heads, _ = q.shape
    assert out.shape == (batch, queries, heads, 512)
    assert out.dtype == q.dtype
    assert lse.shape == (batch, heads, queries)
    assert lse.dtype == torch.float32
    lse = lse.transpose(1, 2).flatten(0, 1)
    empty = want.lse == -math.inf
    assert (lse[empty] == math.inf).all()
    assert (out.flatten(0, 1)[empty] == 0).all()
    want.check((out.flatten(0, 1), torch.where(empty, -math.inf, lse)))


def per_request(lengths: list[int], queries: int) -> tuple[Tensor, list[int]]:
    """Lengths of requests, and of their queries."""
    given_ = torch.tensor(lengths, dtype=torch.int32)
    return given_, given_.repeat_interleave(queries).tolist()


@given(
    seed=st.integers(0, 2**20),
    layout=st.sampled_from([MAIN_FP8, V32_FP8]),
    batch=st.integers(0, 3),
    queries=st.integers(1, 9),
    heads=st.sampled_from([1, 2, 3, 5, 7, 16, 17, 33, 63, 127, 128]),
    widths=st.tuples(st.sampled_from([1, 7, 33, 64]), st.sampled_from([None, 1, 5, 40])),
    pages=st.tuples(st.sampled_from([1, 2, 64, 256]), st.sampled_from([1, 2, 64, 256])),
    lengths=st.booleans(),
    sink=st.sampled_from([None, "finite", "infinite"]),
    name=st.sampled_from(BACKENDS),
)
def test_decode_is_attention_over_the_listed_rows(
    seed, layout, batch, queries, heads, widths, pages, lengths, sink, name
):
    torch.manual_seed(seed)
    if name == "triton":
        batch, queries, heads = min(batch, 2), min(queries, 2), min(heads, 17)
    tokens = batch * queries
    scopes: list[Scope | None] = []
    keywords: dict[str, Tensor] = {}
    for place, (width, page) in enumerate(zip(widths, pages, strict=True)):
        if width is None:
            scopes.append(None)
            continue
        short = torch.randint(-1, width + 2, (batch,)).clamp(0, width).tolist()
        given_, each = per_request(short, queries)
        made = scope(tokens, width, lengths=each if lengths else None, page=page, layout=layout)
        if lengths:
            keywords["extra_topk_length" if place else "topk_length"] = given_
        hit = torch.rand(made.indices.shape) < 0.15
        hostile = hostile_indices(made.cache.shape[0] * page, *hit.shape)
        made.indices = torch.where(hit, hostile, made.indices)
        scopes.append(made)
    q = torch.randn(batch, queries, heads, CHANNELS[layout]).bfloat16()
    sinks = None if sink is None else torch.randn(heads)
    if sink == "infinite":
        sinks[torch.rand(heads) < 0.4] = math.inf
        sinks[torch.rand(heads) < 0.4] = -math.inf
    with pytest.MonkeyPatch.context() as patch:
        use(name, patch)
        result = decode(q, *scopes, attn_sink=sinks, **keywords)
    if not tokens:
        assert result[0].shape == (0, queries, heads, 512)
        assert result[1].shape == (0, heads, queries)
        return
    check(q, expected(q, sinks, *scopes), result)


@pytest.mark.parametrize("layout", [MAIN_FP8, V32_FP8])
def test_decode_conventions(backend, layout):
    """Empty rows, infinite sinks, a scale, and lse without the sink."""
    main = scope(4, 20, lengths=[20, 20, 0, 0], layout=layout)
    q = torch.randn(2, 2, 4, CHANNELS[layout]).bfloat16()
    sink = torch.tensor([0.5, math.inf, -math.inf, -3.0])
    lengths = torch.tensor([20, 0], dtype=torch.int32)
    out, lse = decode(q, main, attn_sink=sink, topk_length=lengths, softmax_scale=0.07)
    check(q, expected(q, sink, main, scale=0.07), (out, lse))
    assert (out[:, :, 1] == 0).all()
    assert (lse[1] == math.inf).all()
    bare, same = decode(q, main, topk_length=lengths, softmax_scale=0.07)
    assert_identical(lse, same, name="lse with and without a sink")
    assert_identical(out[:, :, 2], bare[:, :, 2], name="a sink of -inf")


def test_decode_defaults_to_the_root_of_the_keys_width(backend):
    main = scope(2, 9, layout=V32_FP8)
    q = torch.randn(1, 2, 3, 576).bfloat16()
    given_, _ = decode(q, main, softmax_scale=576**-0.5)
    assert_identical(decode(q, main)[0], given_, name="default scale")


@pytest.mark.parametrize("layout", [MAIN_FP8, V32_FP8])
def test_decode_writes_into_out(backend, layout):
    main = scope(6, 12, layout=layout)
    q = torch.randn(2, 3, 2, CHANNELS[layout]).bfloat16()
    want, _ = decode(q, main)
    for out in (
        torch.full((2, 3, 2, 512), torch.nan, dtype=torch.bfloat16),
        torch.full((2, 5, 2, 512), torch.nan, dtype=torch.bfloat16)[:, :3],
        torch.full((2, 3, 2, 640), torch.nan, dtype=torch.bfloat16)[..., :512],
    ):
        got, _ = decode(q, main, out=out)
        assert got is out
        assert_identical(out, want, name="out")


def test_decode_takes_strided_queries_and_lists(backend):
    """FlashMLA's own tests hand over slices of larger tensors."""
    main = scope(4, 11)
    main.lengths[:] = 11
    q = torch.randn(3, 5, 4, 640).bfloat16()[:2, :2, :3, :512]
    wide = torch.zeros(3, 4, 30, dtype=torch.int32)[:2, :2, :11]
    wide.copy_(main.indices.view(2, 2, 11))
    meta, _ = flash_mla.get_mla_metadata()
    result = flash_mla.flash_mla_with_kvcache(
        q, main.cache.unsqueeze(2), None, None, 512, meta, None, None, False, True, wide
    )
    check(q, expected(q, None, main), result)


def test_the_first_call_of_a_shape_makes_the_plan(monkeypatch):
    class Lengths:
        is_cuda, device = True, "cuda:0"

        def __init__(self, count):
            self.count = count

        def __len__(self):
            return self.count

    made, capturing = [], [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(
        _scheduling, "sparse_attention_plan", lambda *args, **sizes: made.append(sizes) or len(made)
    )
    meta, _ = flash_mla.get_mla_metadata()
    assert meta.plan(None, None, 64, 128, None) is None
    assert meta.plan(torch.zeros(2), None, 64, 128, None) is None
    plans = [meta.plan(Lengths(2), None, 64, 128, None) for _ in range(3)]
    plans += [meta.plan(Lengths(2), Lengths(2), 64, 128, 512), meta.plan(Lengths(3), None, 1, 2, 3)]
    capturing[0] = True
    plans += [meta.plan(Lengths(3), None, 1, 2, 3) for _ in range(2)]
    assert plans == [1, 1, 1, 2, 3, 4, 4]
    assert made[1] == {"heads": 64, "width": 128, "extra_width": 512}


def test_metadata_may_be_reused_with_other_lengths_and_shapes(backend):
    meta, _ = flash_mla.get_mla_metadata()
    for tokens, width, lengths in ((2, 16, [16, 3]), (2, 16, [0, 9]), (3, 5, [5, 5, 1])):
        main = scope(tokens, width, lengths=lengths, page=2)
        q = torch.randn(tokens, 1, 2, 512).bfloat16()
        result = flash_mla.flash_mla_with_kvcache(
            q, main.cache.unsqueeze(2), None, None, 512, meta, None, None, False, True,
            main.indices.unsqueeze(1), topk_length=torch.tensor(lengths, dtype=torch.int32),
        )  # fmt: skip
        check(q, expected(q, None, main), result)


# What the rows of a scope that nobody lists hold is 0xFF bytes: NaN in every format. The tests
# above would see it. Here lists point at them, behind the length.
@pytest.mark.parametrize("layout", [MAIN_FP8, V32_FP8])
def test_nan_behind_the_length_stays_there(backend, layout):
    main = scope(2, 24, lengths=[10, 24], layout=layout, poison_behind=True)
    q = torch.randn(2, 1, 2, CHANNELS[layout]).bfloat16()
    lengths = torch.tensor([10, 24], dtype=torch.int32)
    check(q, expected(q, None, main), decode(q, main, topk_length=lengths))


@given(
    seed=st.integers(0, 2**20),
    channels=st.sampled_from([512, 576]),
    tokens=st.integers(0, 9),
    heads=st.sampled_from([1, 3, 16, 65, 128]),
    rows=st.sampled_from([1, 7, 60]),
    width=st.sampled_from([1, 8, 70]),
    lengths=st.booleans(),
    sink=st.booleans(),
    name=st.sampled_from(BACKENDS),
)
def test_prefill_is_attention_over_the_listed_rows(
    seed, channels, tokens, heads, rows, width, lengths, sink, name
):
    torch.manual_seed(seed)
    if name == "triton":
        tokens, heads = min(tokens, 3), min(heads, 16)
    q = torch.randn(tokens, heads, channels).bfloat16()
    kv = torch.randn(rows + 1, 2, channels).bfloat16()[:rows, :1]
    indices = torch.randint(0, rows, (tokens, 1, width), dtype=torch.int32)
    hit = torch.rand(indices.shape) < 0.3
    indices = torch.where(hit, hostile_indices(rows, *indices.shape), indices)
    counts = torch.randint(-1, width + 2, (tokens,), dtype=torch.int32) if lengths else None
    sinks = torch.randn(heads) if sink else None
    if sinks is not None:
        sinks[::3] = math.inf
        sinks[1::3] = -math.inf
    with pytest.MonkeyPatch.context() as patch:
        use(name, patch)
        out, peaks, lse = flash_mla.flash_mla_sparse_fwd(
            q, kv, indices, 0.05, attn_sink=sinks, topk_length=counts
        )
    assert out.shape == (tokens, heads, 512)
    assert peaks.shape == lse.shape == (tokens, heads)
    assert peaks.dtype == lse.dtype == torch.float32
    if not tokens:
        return
    listed = []
    for token in range(tokens):
        row = indices[token, 0, : width if counts is None else max(int(counts[token]), 0)]
        listed.append(kv[row[(row >= 0) & (row < rows)].long(), 0].double())
    want = attend(q, listed, sinks, 0.05, value_dim=512)
    highest = torch.stack(
        [
            (q[t].double() @ listed[t].T * 0.05).amax(1)
            if len(listed[t])
            else torch.full((heads,), -math.inf, dtype=torch.float64)
            for t in range(tokens)
        ]
    )
    empty = want.lse == -math.inf
    assert (lse[empty] == math.inf).all()
    want.check((out, torch.where(empty, -math.inf, lse)))
    # A score is a dot product of ``channels`` terms in float32.
    slack = accumulation(channels, torch.float32, c=4.0)
    assert_close(peaks, highest, atol=slack, rtol=slack, scale=8.0, name="max_logits")


def test_prefill_writes_into_out_and_counts_a_row_as_often_as_it_is_listed(backend):
    q, kv = torch.randn(3, 2, 576).bfloat16(), torch.randn(9, 1, 576).bfloat16()
    indices = torch.tensor([[[4, 4, 4, 1]], [[0, -1, 0, 9]], [[2, 3, 5, 7]]], dtype=torch.int32)
    out = torch.full((3, 2, 512), torch.nan, dtype=torch.bfloat16)
    got, peaks, lse = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.1, out=out)
    assert got is out
    rows = [kv[[4, 4, 4, 1], 0], kv[[0, 0], 0], kv[[2, 3, 5, 7], 0]]
    attend(q, [each.double() for each in rows], None, 0.1, value_dim=512).check((out, lse))
    alone = (q[1].double() @ kv[0, 0].double()) * 0.1
    slack = accumulation(576, torch.float32, c=4.0)
    assert_close(peaks[1], alone, atol=slack, rtol=slack, scale=8.0, name="max_logits")


def test_rows_behind_the_length_are_not_read_in_prefill(backend):
    """FlashMLA leaks a NaN from there, its documentation says."""
    q, kv = torch.randn(2, 2, 512).bfloat16(), torch.randn(6, 1, 512).bfloat16()
    kv[4:] = torch.nan
    indices = torch.tensor([[[0, 1, 4, 5]], [[4, 5, 0, 1]]], dtype=torch.int32)
    lengths = torch.tensor([2, 0], dtype=torch.int32)
    out, peaks, lse = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.1, topk_length=lengths)
    assert out.isfinite().all()
    assert (out[1] == 0).all()
    assert (peaks[1] == -math.inf).all()
    assert (lse[1] == math.inf).all()


def test_any_default_dtype(backend):
    """FlashMLA's tests make bfloat16 the default."""
    main, q = scope(3, 40, lengths=[40, 7, 0]), torch.randn(3, 1, 16, 512).bfloat16()
    lengths = torch.tensor([40, 7, 0], dtype=torch.int32)
    want = decode(q, main, topk_length=lengths)
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = decode(q, main, topk_length=lengths)
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(got, want, strict=True):
        assert_identical(one, other, name="with another default dtype")


def test_a_compiler_sees_through():
    main, meta = scope(4, 9, layout=V32_FP8), flash_mla.get_mla_metadata()[0]
    cache, indices = main.cache.unsqueeze(2), main.indices.view(2, 2, 9)
    kv, rows = torch.randn(20, 1, 576).bfloat16(), torch.randint(0, 20, (4, 1, 7)).int()

    def both(q: Tensor) -> tuple[Tensor, ...]:
        out, lse = flash_mla.flash_mla_with_kvcache(
            q, cache, None, None, 512, meta, None, None, False, True, indices
        )
        return out * 2, lse, *flash_mla.flash_mla_sparse_fwd(q.flatten(0, 1), kv, rows, 0.1)

    q = torch.randn(2, 2, 3, 576).bfloat16()
    compiled = torch.compile(both, backend="eager", fullgraph=True)
    for got, want in zip(compiled(q), both(q), strict=True):
        assert_identical(got, want)


# Today's arguments -------------------------------------------------------------------------------


def decode_arguments(layout=MAIN_FP8, batch=3, width=20, **more):
    """Positional arguments up to the metadata, and keywords, of one query a request."""
    main = scope(batch, width, layout=layout, **more)
    q = torch.randn(batch, 1, 4, CHANNELS.get(layout, 512)).bfloat16()
    meta, _ = flash_mla.get_mla_metadata()
    given_ = (q, main.cache.unsqueeze(2), None, None, 512, meta)
    return given_, {"indices": main.indices.unsqueeze(1)}, expected(q, None, main)


def test_a_call_with_todays_defaults_works(backend):
    given_, keywords, want = decode_arguments()
    check(given_[0], want, flash_mla.flash_mla_with_kvcache(*given_, **keywords))
    told = {
        "num_splits": None, "softmax_scale": None, "causal": False, "is_fp8_kvcache": None,
        "attn_sink": None, "extra_k_cache": None, "extra_indices_in_kvcache": None,
        "topk_length": None, "extra_topk_length": None, "enable_batch_invariant": False,
        "use_legacy": False, "kv_format": None, "descale_q": None, "descale_k": None,
    }  # fmt: skip
    for changed in ({}, {"is_fp8_kvcache": True}, {"use_legacy": True}, {"kv_format": "V4"}):
        result = flash_mla.flash_mla_with_kvcache(*given_, **keywords, **told | changed)
        check(given_[0], want, result)


def test_out_may_stand_where_older_builds_have_it(backend):
    given_, keywords, want = decode_arguments()
    out = torch.full((3, 1, 4, 512), torch.nan, dtype=torch.bfloat16)
    older = (None, None, False, True, keywords["indices"], *[None] * 5)
    got, lse = flash_mla.flash_mla_with_kvcache(*given_, *older, out)
    assert got is out
    check(given_[0], want, (got, lse))
    check(given_[0], want, flash_mla.flash_mla_with_kvcache(*given_, *older, None))
    with pytest.raises(ValueError, match="out must be given once"):
        flash_mla.flash_mla_with_kvcache(*given_, *older, out, out=out)

    q, kv = torch.randn(3, 2, 512).bfloat16(), torch.randn(9, 1, 512).bfloat16()
    rows = torch.tensor([[[4, 1]], [[0, -1]], [[2, 7]]], dtype=torch.int32)
    out = torch.full((3, 2, 512), torch.nan, dtype=torch.bfloat16)
    got = flash_mla.flash_mla_sparse_fwd(q, kv, rows, 0.1, 512, None, None, out)
    assert got[0] is out
    for again in ((), (None,), (False, None), (True,)):
        other = flash_mla.flash_mla_sparse_fwd(q, kv, rows, 0.1, 512, None, None, *again)
        for one, two in zip(got, other, strict=True):
            assert_identical(one, two)
    with pytest.raises(ValueError, match="out must be given once"):
        flash_mla.flash_mla_sparse_fwd(q, kv, rows, 0.1, 512, None, None, out, out=out)


def test_batch_invariant_results_do_not_see_the_batch(backend):
    (q, *rest), keywords, _ = decode_arguments(batch=5, width=200)
    lengths = torch.tensor([200, 3, 0, 77, 130], dtype=torch.int32)
    keywords |= {"topk_length": lengths, "enable_batch_invariant": True}
    together = flash_mla.flash_mla_with_kvcache(q, *rest, **keywords)
    for request in range(5):
        some = slice(request, request + 1)
        alone = flash_mla.flash_mla_with_kvcache(
            q[some], *rest, indices=keywords["indices"][some], topk_length=lengths[some],
            enable_batch_invariant=True,
        )  # fmt: skip
        for one, all_ in zip(alone, together, strict=True):
            assert_identical(one[0], all_[request])


def test_batch_invariance_is_passed_on(monkeypatch):
    seen = []

    def attend_(*args, batch_invariant, plan, **keywords):
        seen.append((batch_invariant, plan))
        return sparse_attention(*args, batch_invariant=batch_invariant, **keywords)

    monkeypatch.setattr(flash_mla, "sparse_attention", attend_)
    monkeypatch.setattr(_scheduling.FlashMLASchedMeta, "plan", lambda *sizes: "a plan")
    given_, keywords, _ = decode_arguments()
    for invariant in (True, False):
        flash_mla.flash_mla_with_kvcache(*given_, **keywords, enable_batch_invariant=invariant)
    assert seen == [(True, None), (False, "a plan")]


@pytest.mark.parametrize(
    ("kv_format", "legacy", "layout"),
    [
        ("V4", False, MAIN_FP8),
        ("V4", True, MAIN_FP8),
        ("V32", False, V32_FP8),
        ("V32", True, V32_FP8),
        ("V41", False, V41_MAIN_FP8),
        ("V41", True, V41_MAIN_FP8_SPLIT),
        ("V41_FP4", False, V41_COMPRESSED_NVFP4),
        ("V41_FP4", True, V41_COMPRESSED_NVFP4_SPLIT),
    ],
)
def test_formats_by_name_and_by_width(backend, kv_format, legacy, layout):
    """V4.1's legacy pages hold all values and then all scales."""
    given_, keywords, want = decode_arguments(layout, page=8)
    extra = scope(3, 9, layout=layout, page=2)
    second = {
        "extra_k_cache": extra.cache.unsqueeze(2),
        "extra_indices_in_kvcache": extra.indices.unsqueeze(1),
    }
    for named in (kv_format, None):
        told = {"kv_format": named, "use_legacy": legacy}
        check(given_[0], want, flash_mla.flash_mla_with_kvcache(*given_, **keywords, **told))
    main = scope(3, 20, layout=layout, page=8)
    keywords = {"indices": main.indices.unsqueeze(1), "use_legacy": legacy}
    given_ = (given_[0], main.cache.unsqueeze(2), *given_[2:])
    result = flash_mla.flash_mla_with_kvcache(*given_, **keywords, **second)
    check(given_[0], expected(given_[0], None, main, extra), result)


def test_statistics_in_base_two_or_none(backend):
    q, kv = torch.randn(3, 2, 512).bfloat16(), torch.randn(9, 1, 512).bfloat16()
    rows = torch.tensor([[[4, 1]], [[-1, -1]], [[2, 7]]], dtype=torch.int32)
    natural = flash_mla.flash_mla_sparse_fwd(q, kv, rows, 0.1)
    base_two = flash_mla.flash_mla_sparse_fwd(q, kv, rows, 0.1, return_log2_lse=True)
    nothing = flash_mla.flash_mla_sparse_fwd(q, kv, rows, 0.1, return_log2_lse=False)
    assert nothing[1:] == (None, None)
    for result in (base_two, nothing):
        assert_identical(result[0], natural[0])
    listed = [kv[row[0][row[0] >= 0].long(), 0].double() for row in rows]
    for token in (0, 2):
        scores = q[token].double() @ listed[token].T * 0.1 / math.log(2)
        slack = accumulation(512, torch.float32, c=8.0)
        assert_close(base_two[1][token], scores.amax(1), atol=slack, rtol=slack, scale=8.0)
        lse = torch.logsumexp(scores * math.log(2), 1) / math.log(2)
        assert_close(base_two[2][token], lse, atol=slack, rtol=slack, scale=8.0)
    assert (base_two[1][1] == -math.inf).all()
    assert (base_two[2][1] == math.inf).all()


def test_scheduling_may_be_asked_for_beforehand(backend):
    lengths = torch.tensor([20, 7, 9], dtype=torch.int32)
    schedule, splits = flash_mla.get_mla_decoding_metadata(lengths, 4, 1)
    assert (schedule.dtype, splits.dtype) == (torch.int32, torch.int32)
    assert schedule.shape[1:] == (8,)
    assert splits.shape == (4,)
    more = flash_mla.get_mla_decoding_metadata(lengths, 4, 1, 4, True, topk=20, use_legacy=True)
    assert more[0].shape == schedule.shape
    given_, keywords, want = decode_arguments()
    meta = flash_mla.FlashMLASchedMeta(tile_scheduler_metadata=schedule, num_splits=splits)
    check(given_[0], want, flash_mla.flash_mla_with_kvcache(*given_[:5], meta, **keywords))
    assert flash_mla.has_legacy()


# Errors ------------------------------------------------------------------------------------------


def call(**changes):
    main = scope(2, 4)
    arguments = {
        "q": torch.randn(2, 1, 2, 512).bfloat16(),
        "k_cache": main.cache.unsqueeze(2),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": flash_mla.get_mla_metadata()[0],
        "is_fp8_kvcache": True,
        "indices": main.indices.unsqueeze(1),
    }
    return flash_mla.flash_mla_with_kvcache(**arguments | changes)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"causal": True}, ValueError, "causal must be False"),
        ({"is_fp8_kvcache": False}, ValueError, "is_fp8_kvcache must be True"),
        ({"descale_q": torch.ones(1)}, ValueError, "descale_q must be None with indices"),
        ({"descale_k": torch.ones(1)}, ValueError, "descale_k must be None with indices"),
        ({"kv_format": "V3"}, ValueError, "kv_format must be None or one of V4, V32, V41, V41_FP4"),
        ({"kv_format": "V32"}, ValueError, r"k_cache must be \[P, B, 1, 656\] for kv_format='V32'"),
        ({"kv_format": "V32_NO_ROPE"}, NotImplementedError, "V32_NO_ROPE.* is not provided"),
        ({"num_splits": torch.zeros(1)}, ValueError, "num_splits must be None"),
        ({"tile_scheduler_metadata": None}, TypeError, "what get_mla_metadata returns"),
        ({"head_dim_v": 513}, ValueError, "value_dim must be from 1 to D=512"),
        ({"k_cache": torch.zeros(2, 2, 1, 512)}, TypeError, "k_cache must be a tensor of bytes"),
        (
            {"k_cache": torch.zeros(2, 2, 1, 592, dtype=torch.uint8)},
            ValueError,
            r"\[P, B, 1, 584\] or \[P, B, 1, 656\] or .* 528\] or .* 288\]",
        ),
        (
            {"k_cache": torch.zeros(2, 2, 1, 656, dtype=torch.uint8)},
            ValueError,
            "one of 512 channels",
        ),
        ({"topk_length": torch.zeros(3, dtype=torch.int32)}, ValueError, "topk_length"),
        ({"indices": torch.zeros(2, 1, 4, dtype=torch.int64)}, TypeError, "indices must be int32"),
        ({"extra_topk_length": torch.zeros(2, dtype=torch.int32)}, ValueError, "extra_topk"),
        (
            {"extra_indices_in_kvcache": torch.zeros(2, 1, 4, dtype=torch.int32)},
            ValueError,
            "extra_indices_in_kvcache must be given together with extra_k_cache",
        ),
    ],
)
def test_what_does_not_fit_is_named(changes, kind, words):
    with pytest.raises(kind, match=words):
        call(**changes)


@pytest.mark.parametrize("extra", [V41_COMPRESSED_NVFP4, V41_MAIN_FP8, None])
@pytest.mark.parametrize("backend", BACKENDS)
def test_v41_caches_are_known_by_the_width_of_their_entries(backend, extra, monkeypatch):
    """A window of 528 bytes an entry, pages of 32; entries of 288 or 528, pages of 64."""
    if backend == "triton" and not triton_support(torch.empty(0)):
        pytest.skip("Triton kernels do not run here")
    monkeypatch.setattr(
        flash_mla, "sparse_attention", functools.partial(sparse_attention, backend=backend)
    )
    window = scope(2, 32, lengths=[32, 7], page=32, layout=V41_MAIN_FP8)
    q, more, rows = torch.randn(2, 1, 16, 512).bfloat16(), {}, [window.rows(0), window.rows(1)]
    if extra is not None:
        entries = scope(2, 20, lengths=[20, 3], page=64, layout=extra)
        more = {
            "extra_k_cache": entries.cache.unsqueeze(2),
            "extra_indices_in_kvcache": entries.indices.unsqueeze(1),
            "extra_topk_length": entries.lengths,
        }
        rows = [torch.cat((row, entries.rows(token))) for token, row in enumerate(rows)]
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, window.cache.unsqueeze(2).view(torch.float8_e4m3fn), None, None, 512,
        flash_mla.get_mla_metadata()[0], is_fp8_kvcache=True, indices=window.indices.unsqueeze(1),
        topk_length=window.lengths, attn_sink=torch.zeros(16), **more,
    )  # fmt: skip
    attend(q[:, 0], rows, torch.zeros(16)).check((out[:, 0], lse[..., 0]))


def test_dense_attention_is_not_provided():
    some = torch.zeros(1)
    with pytest.raises(NotImplementedError, match="without indices"):
        call(indices=None, is_fp8_kvcache=False)
    for name, count in (
        ("flash_attn_varlen_func", 7),
        ("flash_attn_varlen_qkvpacked_func", 4),
        ("flash_attn_varlen_kvpacked_func", 7),
    ):
        with pytest.raises(NotImplementedError, match=f"{name}.*list the slots in indices"):
            getattr(flash_mla, name)(*[some] * count)


def test_it_stands_in_for_the_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_mla", flash_mla)
    assert importlib.import_module("flash_mla") is flash_mla

"""Norms and cache rows of few tokens on a CPU, in kernels of numba."""

from __future__ import annotations

import pytest
import torch
from norm_rope_float64 import TABLE, norm64, rope64
from paged import make_cache

from anymla.ops._few_tokens import FEW_TOKENS
from anymla.ops.device import numba_problem
from anymla.ops.kv_cache import quantize_and_insert_k_cache
from anymla.ops.norm_rope import fused_q_kv_rmsnorm, qnorm_rope_kv_insert, rms_norm, rope
from anymla.ops.registry import BackendUnavailable
from anymla.testing.tolerance import accumulation, assert_close, ulps

pytestmark = pytest.mark.skipif(bool(numba_problem()), reason=numba_problem() or "-")
LAYOUTS = ("v4_main_fp8", "v41_main_fp8_split")
D = 512


def stored(layout, rows, slots):
    cache = make_cache(layout, 3, 4)
    quantize_and_insert_k_cache(rows, cache.tensor, slots, layout=layout, backend="reference")
    return cache.storage


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", range(1, FEW_TOKENS + 1))
@pytest.mark.parametrize("heads", [1, 8])
def test_queries_and_rows(layout, tokens, heads):
    q, kv = (torch.randn(tokens, heads, D) * 3).bfloat16(), torch.randn(tokens, D).bfloat16()
    slots = torch.tensor([11, -1, 2, 12])[:tokens]
    positions = torch.tensor([3000, 0, 127, 2**40])[:tokens]
    cache, before = make_cache(layout, 3, 4), q.clone()
    options = {"layout": layout, "backend": "numba"}
    got = qnorm_rope_kv_insert(q, kv, cache.tensor, slots, positions, TABLE, 1e-6, **options)
    assert torch.equal(q, before)
    known = positions.clamp(max=len(TABLE) - 1)
    want = rope64(norm64(q, None, 1e-6), known, TABLE)
    size = norm64(q, None, 1e-6).abs().unflatten(-1, (-1, 2)).sum(-1).repeat_interleave(2, dim=-1)
    bound = accumulation(D, torch.float32, c=1.0) + ulps(torch.float32, 4)
    assert_close(got, want, atol=bound, rtol=ulps(torch.bfloat16, 0.5), scale=size)
    rows = rope(kv.float().unsqueeze(1), known, TABLE, backend="reference").squeeze(1)
    assert torch.equal(cache.storage, stored(layout, rows, slots))
    again = qnorm_rope_kv_insert(
        q, kv, cache.tensor, slots, positions, TABLE, 1e-6, out=q, **options
    )
    assert again is q
    assert torch.equal(again, got)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e-30, 0.0, 3e38])
def test_rows_that_need_care(layout, value):
    """Infinities and NaN saturate as everywhere else; blocks may be all but zero."""
    kv = torch.randn(2, D).bfloat16()
    kv[0, :64] = value
    slots, positions = torch.tensor([1, 6]), torch.tensor([0, 9])
    cache = make_cache(layout, 3, 4)
    q = torch.randn(2, 1, D).bfloat16()
    qnorm_rope_kv_insert(
        q, kv, cache.tensor, slots, positions, TABLE, 1e-6, layout=layout, backend="numba"
    )
    rows = rope(kv.float().unsqueeze(1), positions, TABLE, backend="reference").squeeze(1)
    assert torch.equal(cache.storage, stored(layout, rows, slots))


@pytest.mark.parametrize("tokens", [1, 3])
def test_norms(tokens):
    both = torch.randn(tokens, 128 + D).bfloat16()
    qr, kv = both.split((128, D), dim=1)
    weights = torch.rand(128) + 0.5, torch.rand(D) + 0.5
    bound = ulps(torch.bfloat16, 0.5) + accumulation(D, torch.float32)
    for x, weight, got in zip(
        (qr, kv), weights, fused_q_kv_rmsnorm(qr, kv, *weights, 1e-6, backend="numba"), strict=True
    ):
        assert_close(got, norm64(x, weight, 1e-6), rtol=bound)
        assert torch.equal(got, rms_norm(x, weight, 1e-6, backend="numba"))
    assert rms_norm(torch.full((1, 8), torch.nan).bfloat16(), torch.ones(8), 1e-6).isnan().all()


def test_what_is_taken():
    cache, q = make_cache("v4_main_fp8", 3, 4), torch.randn(FEW_TOKENS + 1, 1, D).bfloat16()
    slots = torch.arange(len(q))
    given = q[:, 0].clone(), cache.tensor, slots, slots, TABLE, 1e-6
    with pytest.raises(BackendUnavailable, match="tokens"):
        qnorm_rope_kv_insert(q, *given, backend="numba")
    one = torch.arange(1)
    assert qnorm_rope_kv_insert.resolve(
        q[:1], q[:1, 0], cache.tensor, one, one, TABLE, 1e-6
    ).name == "numba"  # fmt: skip
    plain = make_cache("rows_bf16_512", 3, 4).tensor
    assert qnorm_rope_kv_insert.resolve(
        q[:1], q[:1, 0], plain, one, one, TABLE, 1e-6, layout="rows_bf16_512"
    ).name == "torch"  # fmt: skip

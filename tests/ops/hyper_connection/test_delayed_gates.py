"""Gates and collapse apart are what both are together."""

import pytest
import torch

from anymla.ops.hyper_connection import hc_collapse_norm, hc_gates, hc_pre


def _site(tokens, streams=4, width=48, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens)
    rows = (2 + streams) * streams
    return {
        "h": torch.randn(tokens, streams, width, generator=generator, dtype=dtype),
        "fn": torch.randn(rows, streams * width, generator=generator) / width**0.5,
        "base": torch.randn(rows, generator=generator),
        "scale": torch.rand(3, generator=generator),
        "norm_eps": 1e-20,
        "hc_eps": 1e-6,
        "iters": 20,
    }


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize(("tokens", "streams"), [(0, 4), (1, 4), (2, 4), (9, 4), (5, 2)])
def test_apart_they_are_the_whole_site(backend, tokens, streams):
    site = _site(tokens, streams)
    weight = torch.rand(48, generator=torch.Generator().manual_seed(1))
    y, post, comb = hc_pre(**site, norm_weight=weight, backend=backend)
    pre, *others = hc_gates(**site, backend=backend)
    x = hc_collapse_norm(site["h"], pre, weight, norm_eps=1e-20, backend=backend)
    for apart, together in zip((x, *others), (y, post, comb), strict=True):
        torch.testing.assert_close(apart, together, rtol=1e-6, atol=1e-6)
    # Without a norm the sum is left as it is.
    y, _, _ = hc_pre(**site, backend=backend)
    x = hc_collapse_norm(site["h"], pre, None, norm_eps=1e-20, backend=backend)
    torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_blocks_of_tokens_give_what_all_give(monkeypatch, backend, tokens):
    from anymla.ops.hyper_connection import torch_streams

    site = _site(tokens)
    whole = hc_gates(**site, backend=backend)
    monkeypatch.setattr(torch_streams, "_CPU_BLOCK", 4 * 48 * 7)
    for part, one in zip(hc_gates(**site, backend=backend), whole, strict=True):
        torch.testing.assert_close(part, one, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_stream_of_zeros_gives_zeros(backend):
    # 1 / sqrt(eps) is 1e10; nothing of it may come through.
    site = _site(3) | {"h": torch.zeros(3, 4, 48)}
    pre, _, _ = hc_gates(**site, backend=backend)
    assert pre.isfinite().all()
    x = hc_collapse_norm(site["h"], pre, torch.ones(48), norm_eps=1e-20, backend=backend)
    assert torch.equal(x, torch.zeros(3, 48))

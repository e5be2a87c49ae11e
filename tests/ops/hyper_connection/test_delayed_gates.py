"""Gates and collapse apart are what both are together."""

import pytest
import torch

from anymla.formats.fp8_block import quantize_fp8_rows
from anymla.formats.quantized_rows import QuantizedRows
from anymla.ops.device import has_triton
from anymla.ops.hyper_connection import hc_collapse_norm, hc_gates, hc_pre

no_triton = pytest.mark.skipif(not has_triton(), reason="needs triton")
BACKENDS = ["reference", "torch", pytest.param("triton", marks=no_triton)]


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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("tokens", "streams"), [(0, 4), (1, 4), (2, 4), (9, 4), (5, 2), (515, 4)])
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


@no_triton
def test_many_tokens_of_equal_streams(monkeypatch):
    """Where products are a matrix instruction's; before the first layer streams are one tensor."""
    from anymla.ops.hyper_connection import triton_delayed

    site = _site(515, 4)
    site["h"] = site["h"][:, :1].bfloat16().expand(-1, 4, -1)
    expected = hc_gates(**site, backend="reference")
    monkeypatch.setattr(triton_delayed, "takes_many_tokens", lambda h: True)
    for gates, one in zip(hc_gates(**site, backend="triton"), expected, strict=True):
        torch.testing.assert_close(gates, one.to(gates.dtype), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_blocks_of_tokens_give_what_all_give(monkeypatch, backend, tokens):
    from anymla.ops.hyper_connection import torch_streams

    site = _site(tokens)
    whole = hc_gates(**site, backend=backend)
    monkeypatch.setattr(torch_streams, "_CPU_BLOCK", 4 * 48 * 7)
    for part, one in zip(hc_gates(**site, backend=backend), whole, strict=True):
        torch.testing.assert_close(part, one, rtol=1e-6, atol=1e-6)


@no_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [128, 256], ids=["streams read twice", "at once"])
def test_kernels_are_the_reference(monkeypatch, dtype, columns):
    """Streams that are one row, and rows anywhere; gates to float32's last bits."""
    from anymla.ops.hyper_connection import triton_delayed

    monkeypatch.setattr(triton_delayed, "collapse_columns", lambda *of: (columns, 4))
    triton_delayed._collapse_known.cache_clear()
    width = 200
    site = _site(7, width=width)
    weight = 1 + torch.rand(width, generator=torch.Generator().manual_seed(1))
    rows = site["h"].to(dtype)
    for h in (rows, rows[:, :1].expand(-1, 4, -1), rows.repeat(1, 2, 1)[:, ::2]):
        call = site | {"h": h}
        for one, other in zip(
            hc_gates(**call, backend="triton"), hc_gates(**call, backend="reference"), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        pre = hc_gates(**call, backend="reference")[0]
        for norm in (weight, None):
            codes = QuantizedRows.empty(7, width, h.device)
            named = {"codes": codes.codes, "code_scales": codes.scales}
            x = hc_collapse_norm(h, pre, norm, norm_eps=1e-20, backend="triton", **named)
            want = hc_collapse_norm(h, pre, norm, norm_eps=1e-20, backend="reference")
            last = 1 / 64 if dtype == torch.bfloat16 else 2e-3 if dtype == torch.float16 else 1e-5
            torch.testing.assert_close(x, want, rtol=last, atol=1e-6)
            found, scales = quantize_fp8_rows(x)
            assert torch.equal(codes.codes[:7], found)
            assert torch.equal(codes.scales[:7], scales)
    triton_delayed._collapse_known.cache_clear()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stream_of_zeros_gives_zeros(backend):
    # 1 / sqrt(eps) is 1e10; nothing of it may come through.
    site = _site(3) | {"h": torch.zeros(3, 4, 48)}
    pre, _, _ = hc_gates(**site, backend=backend)
    assert pre.isfinite().all()
    x = hc_collapse_norm(site["h"], pre, torch.ones(48), norm_eps=1e-20, backend=backend)
    assert torch.equal(x, torch.zeros(3, 48))

"""Products, mixes and choices with the tiles of Intel's GPUs, interpreted."""

import pytest
import torch
from paged import ARC_A, INTEL, use_backend

from anymla.formats.fp8_block import quantize_fp8_weight
from anymla.formats.mxfp4 import quantize_mxfp4
from anymla.ops.hyper_connection import hc_pre
from anymla.ops.indexer import topk_per_row
from anymla.ops.linear import fp8_block_linear
from anymla.ops.moe import experts, route_biased
from anymla.testing.tolerance import accumulation, assert_close, ulps


@pytest.fixture(params=[INTEL, ARC_A])
def backend(request, monkeypatch):
    return use_backend(request.param, monkeypatch)


# What has a tile of its own there: both formats with rows of the weight first, float16 twice.
@pytest.mark.parametrize(
    ("weight_format", "dtype", "quantized"),
    [
        ("mxfp4", torch.bfloat16, False),
        ("mxfp4", torch.float16, False),
        ("fp8", torch.float16, True),
    ],
)
def test_experts(backend, weight_format, dtype, quantized):
    d, inner, count, chosen, tokens = 128, 128, 2, 2, 1
    quantize = quantize_mxfp4 if weight_format == "mxfp4" else quantize_fp8_weight
    pairs = [
        [quantize(torch.randn(rows, columns) / columns**0.5) for _ in range(count)]
        for rows, columns in ((inner, d), (inner, d), (d, inner))
    ]
    w1, w3, w2 = ([torch.as_tensor(p[0]) for p in each] for each in pairs)
    s1, s3, s2 = ([torch.as_tensor(p[1]) for p in each] for each in pairs)
    ids = torch.rand(tokens, count).argsort(1)[:, :chosen].int()
    x, weights = torch.randn(tokens, d).to(dtype), torch.rand(tokens, chosen)
    options = {"weight_format": weight_format, "swiglu_limit": 2.0}
    options["quantize_activations"] = quantized
    given = (ids, weights, w1, w3, w2, s1, s3, s2)
    got = experts(x, *given, **options, backend=backend)
    want = experts(x, *given, **options, backend="torch")
    # Sums in another order; w2's input and the result are rounded, the input perhaps to another
    # code, of which one in 128 is 2^-4 of its value.
    bound = 2 * accumulation(d, torch.float32, 4) + ulps(dtype, 4) + quantized * 2**-4 / 8
    assert_close(got, want.double(), atol=bound, scale=max(1.0, float(want.abs().max())))


@pytest.mark.parametrize("quantized", [False, True])
def test_a_linear_layer_of_float16(backend, quantized):
    stored = quantize_fp8_weight(torch.randn(72, 256) / 16)
    x = torch.randn(20, 256).half()
    options = {"quantize_activations": quantized}
    want = fp8_block_linear(x.double(), *stored, **options, backend="reference")
    got = fp8_block_linear(x, *stored, **options, backend=backend)
    assert_close(got, want, atol=accumulation(256, torch.float32, 4), rtol=ulps(torch.float16, 0.5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_mixes_of_streams_one_by_one(backend, dtype):
    h, fn = torch.randn(3, 4, 64).to(dtype), torch.randn(24, 256) / 16
    given = {"fn": fn, "base": torch.randn(24), "scale": torch.ones(3)}
    options = {"norm_eps": 1e-6, "hc_eps": 1e-6, "iters": 20}
    want = hc_pre(h.double(), **{k: v.double() for k, v in given.items()}, **options)
    got = hc_pre(h, **given, **options, backend=backend)
    for mine, other in zip(got[1:], want[1:], strict=True):
        assert_close(mine, other, atol=ulps(torch.float32, 64))
    assert_close(got[0], want[0], atol=ulps(torch.float32, 128), rtol=ulps(dtype, 0.5))


def test_routers(backend):
    x, gate, bias = torch.randn(4, 160).bfloat16(), torch.randn(24, 160) / 12, torch.zeros(24)
    ids, weights = route_biased(x, gate.bfloat16(), bias, k=6, scale=1.0, backend=backend)
    other, want = route_biased(x.double(), gate.bfloat16().double(), bias.double(), k=6, scale=1.0)
    assert torch.equal(ids, other)
    assert_close(weights, want, atol=ulps(torch.float32, 16))


def test_sorted_winners(backend):
    logits = torch.randn(2, 1500)
    bounds = torch.zeros(2, dtype=torch.int32), torch.tensor([1500, 700], dtype=torch.int32)
    got = topk_per_row(logits, *bounds, 256, backend=backend)
    assert torch.equal(got, topk_per_row(logits, *bounds, 256, backend="reference"))

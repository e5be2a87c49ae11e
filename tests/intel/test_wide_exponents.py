"""Products of bfloat16 beyond float16's exponents, which the compiler cuts off for Arc A.

Where it has no matrix instruction, it makes float16 of bfloat16 operands before they are float32.
"""

import pytest
import torch

from anymla.formats.mxfp4 import quantize_mxfp4
from anymla.ops.hyper_connection import hc_pre
from anymla.ops.indexer import mqa_logits
from anymla.ops.linear import mxfp4_linear
from anymla.ops.moe import route_biased
from anymla.testing.tolerance import accumulation, assert_close, ulps

SMALL, LARGE = 2.0**-20, 2.0**20
BOTH = pytest.mark.parametrize(("left", "right"), [(SMALL, LARGE), (LARGE, SMALL)])


def numbers(*shape, size=1.0):
    return (torch.randn(shape) * size).bfloat16()


def close(got, want, terms):
    size = float(want.double().abs().max())
    allowed = ulps(got.dtype, 1) + accumulation(terms, torch.float32, c=4.0)
    assert_close(got, want, atol=allowed, scale=max(size, 1.0))


@BOTH
def test_linear(runtime, left, right):
    x, (weight, scale) = numbers(5, 128, size=left), quantize_mxfp4(torch.randn(40, 128) * right)
    want = mxfp4_linear(x.double(), weight, scale, backend="reference")
    close(mxfp4_linear(x, weight, scale, backend="triton"), want, 128)


@BOTH
def test_scores(runtime, left, right):
    q, k, weights = numbers(3, 2, 128, size=left), numbers(7, 128, size=right), torch.rand(3, 2)
    starts, ends = torch.zeros(3, dtype=torch.int32), torch.full((3,), 7, dtype=torch.int32)
    given = k, None, weights, starts, ends
    want = mqa_logits(q.double(), k.double(), None, weights.double(), starts, ends)
    close(mqa_logits(q, *given, backend="triton"), want, 256)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_routers(runtime, left, right, dtype):
    x, gate, bias = numbers(4, 160, size=left), numbers(24, 160, size=right / 12), torch.zeros(24)
    gate = gate.to(dtype) + (torch.rand(24, 160).to(dtype) * 2**-12 * right)
    given = {"k": 6, "scale": 1.0}
    ids, weights = route_biased(x, gate, bias, **given, backend="triton")
    other, want = route_biased(x.double(), gate.double(), bias.double(), **given)
    assert torch.equal(ids, other)
    assert_close(weights, want, atol=ulps(torch.float32, 16))


@pytest.mark.parametrize("size", [1.0, LARGE])
def test_mixes(runtime, size):
    h, fn = numbers(3, 4, 64, size=size), torch.randn(24, 256) / 16
    base, scale = torch.randn(24), torch.rand(3)
    options = {"norm_eps": 1e-6, "hc_eps": 1e-6, "iters": 3}
    found = hc_pre(h, fn, base, scale, **options, backend="triton")
    right = hc_pre(h.double(), *(each.double() for each in (fn, base, scale)), **options)
    for got, want in zip(found, right, strict=True):
        close(got, want, 256)

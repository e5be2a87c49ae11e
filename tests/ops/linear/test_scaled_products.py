"""Products by instructions with blocks of scales, interpreted."""

import pytest
import torch

from anymla.formats.mxfp4 import quantize_mxfp4
from anymla.ops.linear import mxfp4_linear
from anymla.testing.tolerance import ulps

INTERPRETER = "the interpreter knows no products with scales"


@pytest.mark.parametrize(("tokens", "n", "k"), [(1, 130, 160), (20, 96, 256)])
def test_products_with_scales_are_the_reference(tokens, n, k):
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    if not hasattr(interpreter.InterpreterBuilder, "create_dot_scaled"):
        pytest.skip(INTERPRETER)
    # Tokens and rows of very different sizes, a row of zeros, and scales at either end.
    x = (torch.randn(tokens, k) * 10.0 ** torch.randint(-3, 4, (tokens, 1))).bfloat16()
    weight, scale = quantize_mxfp4(torch.randn(n, k))
    weight[3] = 0
    scale[5], scale[6] = 100, 150
    arguments = {"quantize_activations": True}
    want = mxfp4_linear(x, weight, scale, **arguments, backend="reference")
    got = mxfp4_linear(x, weight, scale, **arguments, backend="triton_scaled")
    assert got.dtype == x.dtype
    # Exact products, added in float32 in another order, rounded once.
    size = want.float().abs().amax(1, keepdim=True)
    error = (got.float() - want.float()).abs()
    assert (
        error <= ulps(torch.bfloat16, 1) * want.float().abs() + ulps(torch.float32, k) * size
    ).all()


def test_it_is_not_chosen_and_says_what_it_takes():
    x = torch.randn(2, 64).bfloat16()
    weight, scale = quantize_mxfp4(torch.randn(4, 64))
    assert mxfp4_linear.explain(x, weight, scale, quantize_activations=True)[0] != "triton_scaled"
    found = mxfp4_linear.supports(x, weight, scale, backend="triton_scaled")
    assert not found

"""torch.compile sees the blocks whole and gives the eager gradients."""

import pytest
import torch

from anymla import train

TABLE = torch.randn(16, 64)
PLAN = train.Plan([0, 8], 4)


def site(h, fn, base, scale):
    y, post, comb = train.hyper_pre(h, fn, base, scale, norm_eps=1e-6, hc_eps=1e-6, iters=3)
    return train.hyper_post(2 * y, h, post, comb)


def pool(kv, gate, ape, weight):
    entries = train.compress(kv, gate, ape, weight, PLAN, eps=1e-6, rope=TABLE)
    return train.round_rows(entries, "v4_main_fp8")


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("run", "shapes"),
    [
        (site, [(8, 4, 16), (24, 64), (24,), (3,)]),
        (pool, [(8, 1024), (8, 1024), (4, 1024), (512,)]),
    ],
)
def test_compiled_gradients_are_the_eager_ones(run, shapes):
    with torch.enable_grad():
        inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        # Eager first: a plan's windows are numbered then.
        want, got = (
            torch.autograd.grad(f(*inputs).square().sum(), inputs) for f in (run, compiled)
        )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)

"""Gradients of hyper-connections against autograd of the reference, in float64."""

import pytest
import torch

from anymla.ops.hyper_connection import (
    hc_gates,
    hc_head,
    hc_post,
    hc_pre,
    reference,
)
from anymla.ops.hyper_connection.reference import sinkhorn_grad
from anymla.train.hyper_connection import (
    hyper_collapse,
    hyper_gates,
    hyper_head,
    hyper_post,
    hyper_pre,
)

EPS = {"norm_eps": 1e-6, "hc_eps": 1e-6}
SITE = {**EPS, "iters": 20}

pytestmark = pytest.mark.usefixtures("gradients")


@pytest.fixture
def gradients():
    with torch.enable_grad():
        yield


def leaves(*shapes, spread=1.0, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(s, generator=g, dtype=dtype) * spread).requires_grad_() for s in shapes]


def site(tokens=5, n=4, d=8, spread=1.0, dtype=torch.float64):
    h, fn, base, scale, norm = leaves(
        (tokens, n, d), ((2 + n) * n, n * d), ((2 + n) * n,), (3,), (d,), dtype=dtype
    )
    with torch.no_grad():
        base *= spread
        scale += 1
    return h, fn, base, scale, norm


def same(ours, theirs, inputs, rtol=1e-9):
    """Compare outputs, and the gradients of all inputs for random gradients of the outputs."""
    ours, theirs = ((x,) if isinstance(x, torch.Tensor) else x for x in (ours, theirs))
    g = torch.Generator().manual_seed(1)
    pull = [torch.randn(x.shape, generator=g, dtype=x.dtype) for x in theirs]
    got = torch.autograd.grad(ours, inputs, pull, retain_graph=True)
    want = torch.autograd.grad(theirs, inputs, pull, retain_graph=True)
    for a, b in zip((*ours, *got), (*theirs, *want), strict=True):
        assert a.dtype == b.dtype
        assert (a - b).norm() <= rtol * b.norm()


@pytest.mark.parametrize("iters", [1, 2, 20])
@pytest.mark.parametrize("spread", [0.5, 3.0, 10.0])
def test_sinkhorn_is_differentiated_through_every_step(iters, spread):
    (logits, pull) = leaves((200, 4, 4), (200, 4, 4), spread=spread)
    out = reference.sinkhorn(logits, eps=1e-6, iters=iters)
    (want,) = torch.autograd.grad(out, logits, pull.detach())
    got = sinkhorn_grad(logits.detach(), pull.detach(), eps=1e-6, iters=iters)
    assert (got - want).norm() <= 1e-9 * want.norm()


def test_the_gradient_of_sinkhorns_limit_is_another():
    """Twenty steps have not converged: a form for the limit must not pass for this one."""
    logits, pull = leaves((400, 4, 4), (400, 4, 4), spread=5.0)
    steps = [sinkhorn_grad(logits.detach(), pull.detach(), eps=1e-6, iters=n) for n in (20, 2000)]
    assert (steps[0] - steps[1]).norm() > 1e-3 * steps[0].norm()


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("n", [2, 4])
def test_pre(normed, n):
    h, fn, base, scale, norm = site(n=n, spread=2.0)
    norm = norm if normed else None
    ours = hyper_pre(h, fn, base, scale, norm_weight=norm, **SITE)
    theirs = reference.hc_pre(h, fn, base, scale, norm_weight=norm, **SITE)
    same(ours, theirs, [x for x in (h, fn, base, scale, norm) if x is not None])


def test_gates_and_collapse():
    h, fn, base, scale, norm = site()
    pre, post, comb = hyper_gates(h, fn, base, scale, **SITE)
    want = reference.hc_gates(h, fn, base, scale, **SITE)
    same((pre, post, comb), want, [h, fn, base, scale])
    (other,) = leaves((5, 4, 8), spread=2.0)
    for weight in (None, norm):
        ours = hyper_collapse(other, pre, weight, norm_eps=1e-6)
        theirs = reference.hc_collapse_norm(other, want[0], weight, norm_eps=1e-6)
        same(ours, theirs, [other, h, fn] + ([] if weight is None else [norm]))


def test_head():
    h, fn, base, scale = leaves((5, 4, 8), (4, 32), (4,), (1,))
    same(hyper_head(h, fn, base, scale, **EPS), reference.hc_head(h, fn, base, scale, **EPS),
         [h, fn, base, scale])  # fmt: skip


def test_post():
    inputs = leaves((5, 8), (5, 4, 8), (5, 4), (5, 4, 4))
    same(hyper_post(*inputs), reference.hc_post(*inputs), inputs)


def test_finite_differences():
    h, fn, base, scale, norm = site(tokens=2, d=3, spread=2.0)

    def run(h, fn, base, scale, norm):
        y, post, comb = hyper_pre(h, fn, base, scale, norm_weight=norm, **SITE)
        return hyper_post(y, h, post, comb)

    assert torch.autograd.gradcheck(run, (h, fn, base, scale, norm))


def test_blocks_of_tokens_change_nothing_but_the_order_of_sums(monkeypatch):
    h, fn, base, scale, norm = site(tokens=7)
    whole = torch.autograd.grad(
        hyper_pre(h, fn, base, scale, norm_weight=norm, **SITE)[0].sum(), (h, fn, base, scale, norm)
    )
    monkeypatch.setattr(reference, "_CPU_BLOCK", 2 * 4 * 8)
    parts = torch.autograd.grad(
        hyper_pre(h, fn, base, scale, norm_weight=norm, **SITE)[0].sum(), (h, fn, base, scale, norm)
    )
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_forward_is_the_operation_that_serves(dtype):
    h, fn, base, scale, norm = (x.detach() for x in site(tokens=6, dtype=torch.float32))
    h, u = h.to(dtype), h[:, 0].to(dtype)
    ours = hyper_pre(h, fn.requires_grad_(), base, scale, norm_weight=norm, **SITE)
    fn = fn.detach()
    serve = hc_pre(h, fn, base, scale, norm_weight=norm, **SITE)
    assert all(map(torch.equal, ours, serve))
    assert torch.equal(hyper_post(u, h, *ours[1:]), hc_post(u, h, *serve[1:]))
    gates = hc_gates(h, fn, base, scale, **SITE)
    assert all(map(torch.equal, hyper_gates(h, fn, base, scale, **SITE), gates))
    head = fn[:4], base[:4], scale[:1]
    assert torch.equal(hyper_head(h, *head, **EPS), hc_head(h, *head, **EPS))


def test_equal_streams_in_shared_memory_and_no_tokens():
    h, fn, base, scale, _ = site()
    (x,) = leaves((5, 8))
    ours = hyper_pre(x.unsqueeze(1).expand(-1, 4, -1), fn, base, scale, **SITE)
    theirs = reference.hc_pre(x.unsqueeze(1).expand(-1, 4, -1), fn, base, scale, **SITE)
    same(ours, theirs, [x, fn, base, scale])
    empty = h[:0]
    got = torch.autograd.grad(hyper_pre(empty, fn, base, scale, **SITE)[0].sum(), (h, fn))
    assert not any(map(torch.any, got))


def test_a_second_derivative_is_refused():
    inputs = leaves((5, 8), (5, 4, 8), (5, 4), (5, 4, 4))
    (g,) = torch.autograd.grad(hyper_post(*inputs).square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        g.sum().backward()

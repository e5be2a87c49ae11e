"""Gradients of hyper-connections by every backend against autograd of the reference, in float64."""

import pytest
import torch

from anymla.ops.device import has_triton
from anymla.ops.hyper_connection import (
    hc_post_backward,
    hc_pre_backward,
    reference,
)

no_triton = pytest.mark.skipif(not has_triton(), reason="needs triton")
BACKENDS = ["reference", "torch", pytest.param("triton", marks=no_triton)]
SITE = {"norm_eps": 1e-6, "hc_eps": 1e-6, "iters": 20}
# Back through Sinkhorn's steps float32 errs by 2e-7 in the median, and by 4e-5 for the worst token;
# bfloat16 rounds dh, and y before its norm.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 6e-3}


def draw(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def drawn_site(tokens, n=4, d=48, dtype=torch.float32):
    rows = (2 + n) * n
    h, fn, base, scale, norm = draw((tokens, n, d), (rows, n * d), (rows,), (3,), (d,))
    return h.to(dtype), fn / (n * d) ** 0.5, base, scale + 1, norm.to(dtype)


def wanted(function, inputs, pulls):
    """Gradients in float64; inputs that are None have none."""
    with torch.enable_grad():
        wide = [None if x is None else x.double().requires_grad_() for x in inputs]
        outs = function(*wide)
        outs = (outs,) if isinstance(outs, torch.Tensor) else outs
        pulls = [pull.double() for pull in pulls]
        return torch.autograd.grad(outs, [x for x in wide if x is not None], pulls)


def close(got, want, tolerance):
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize(
    ("tokens", "n", "d", "iters", "normed"),
    [(1, 4, 48, 20, True), (37, 4, 100, 20, True), (70, 4, 48, 3, False), (9, 2, 40, 1, True)],
)
def test_whole_sites(backend, dtype, tokens, n, d, iters, normed):
    h, fn, base, scale, norm = drawn_site(tokens, n, d, dtype)
    norm, options = norm if normed else None, SITE | {"iters": iters}
    dy, dpost, dcomb = draw((tokens, d), (tokens, n), (tokens, n, n))
    dy = dy.to(dtype)
    want = wanted(
        lambda h, fn, base, scale, norm: reference.hc_pre(
            h, fn, base, scale, norm_weight=norm, **options
        ),
        (h, fn, base, scale, norm), (dy, dpost, dcomb),
    )  # fmt: skip
    given = dy, None, dpost, dcomb
    got = hc_pre_backward(h, fn, base, scale, *given, norm_weight=norm, **options, backend=backend)
    inputs = h, fn, base, scale, fn[:0, 0] if norm is None else norm
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in inputs]
    close(got[: 5 if normed else 4], want, TOLERANCES[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
def test_gates_alone_and_with_streams_that_share_memory(backend):
    h, fn, base, scale, _ = drawn_site(20)
    h = h[:, :1].expand(-1, 4, -1)
    pulls = draw((20, 4), (20, 4), (20, 4, 4))
    want = wanted(lambda *x: reference.hc_gates(*x, **SITE), (h, fn, base, scale), pulls)
    got = hc_pre_backward(h, fn, base, scale, None, *pulls, **SITE, backend=backend)
    close(got[:4], want, 2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_of_pre_is_added(backend):
    h, fn, base, scale, _ = drawn_site(20)
    dy, *pulls = draw((20, 48), (20, 4), (20, 4), (20, 4, 4))

    def both(h, fn, base, scale):
        gates = reference.hc_gates(h, fn, base, scale, **SITE)
        return reference.hc_collapse_norm(h, gates[0], None, norm_eps=0), *gates

    want = wanted(both, (h, fn, base, scale), (dy, *pulls))
    got = hc_pre_backward(h, fn, base, scale, dy, *pulls, **SITE, backend=backend)
    close(got[:4], want, 2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_head(backend):
    h, fn, base, scale = draw((21, 4, 48), (4, 192), (4,), (1,))
    (dy,) = draw((21, 48))
    eps = {"norm_eps": 1e-6, "hc_eps": 1e-6}
    want = wanted(lambda *x: reference.hc_head(*x, **eps), (h, fn, base, scale), (dy,))
    nothing = dy, None, None, None
    got = hc_pre_backward(h, fn, base, scale, *nothing, **eps, iters=1, backend=backend)
    close(got[:4], want, 2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize(("tokens", "n", "d"), [(1, 4, 48), (37, 4, 100), (9, 2, 40)])
def test_post(backend, dtype, tokens, n, d):
    u, h, dout, post, comb = draw(
        (tokens, d), (tokens, n, d), (tokens, n, d), (tokens, n), (tokens, n, n)
    )
    u, h, dout = (x.to(dtype) for x in (u, h, dout))
    want = wanted(reference.hc_post, (u, h, post, comb), (dout,))
    got = hc_post_backward(dout, u, h, post, comb, backend=backend)
    assert [x.dtype for x in got] == [dtype, dtype, torch.float32, torch.float32]
    close(got, want, TOLERANCES[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens(backend):
    h, fn, base, scale, norm = drawn_site(0)
    dy, dpost, dcomb = h[:, 0], h[:, :, 0], torch.empty(0, 4, 4)
    got = hc_pre_backward(
        h, fn, base, scale, dy, None, dpost, dcomb, norm_weight=norm, **SITE, backend=backend
    )
    assert got[0].shape == h.shape
    assert not any(x.any() for x in got[1:])
    got = hc_post_backward(h, dy, h, dpost, dcomb, backend=backend)
    assert [len(x) for x in got] == [0] * 4


def test_blocks_of_tokens_change_nothing_but_the_order_of_sums(monkeypatch):
    h, fn, base, scale, norm = (x.double() for x in drawn_site(7))
    dy, dpost, dcomb = (x.double() for x in draw((7, 48), (7, 4), (7, 4, 4)))

    def run():
        given = dy, None, dpost, dcomb
        site = hc_pre_backward(
            h, fn, base, scale, *given, norm_weight=norm, **SITE, backend="torch"
        )
        return *site, *hc_post_backward(h, dy, h, dpost, dcomb, backend="torch")

    whole = run()
    monkeypatch.setattr(reference, "_CPU_BLOCK", 2 * 4 * 48)
    assert len(reference.blocks(h)) == 4
    for a, b in zip(whole, run(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("missing", "words"), [("dy", "given without dpre"), ("dcomb", "given unless fn has N rows")]
)
def test_gradients_that_are_missing_are_named(missing, words):
    h, fn, base, scale, _ = drawn_site(3)
    dy, dpost, dcomb = draw((3, 48), (3, 4), (3, 4, 4))
    given = {"dy": dy, "dpre": None, "dpost": dpost, "dcomb": dcomb} | {missing: None}
    with pytest.raises(ValueError, match=words):
        hc_pre_backward(h, fn, base, scale, *given.values(), **SITE)

"""Cases M1 .. M3: hyper-connections."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from anymla.testing.conformance.expected import v4_config
from anymla.testing.conformance.ops import Ops
from anymla.testing.conformance.registry import case
from anymla.testing.oracle.blocks import Site, collapse, hyper_post, rms_norm
from anymla.testing.tolerance import accumulation, assert_close

_STREAMS = 4


def _site(width: int) -> Site:
    gates = _STREAMS * (2 + _STREAMS)
    return Site(
        torch.randn(gates, _STREAMS * width) / (_STREAMS * width) ** 0.5,
        torch.randn(gates),
        1 + torch.rand(3),
    )


def _check_site(ops: Ops, h: Tensor, name: str) -> None:
    tokens, _, width = h.shape
    site, u = _site(width), torch.randn(tokens, width)
    y, post, comb = ops.hc_pre(
        h, site.fn, site.base, site.scale, norm_eps=1e-6, hc_eps=1e-6, iters=20
    )
    wide = Site(site.fn.double(), site.base.double(), site.scale.double())
    want_y, want_post, want_comb = wide.pre(h.double(), v4_config())
    # Gate logits are dot products as wide as all streams, of unit-size terms / sqrt(width); gates
    # pass them on with a slope below 2, and forty normalisations round once each.
    slack = 4 * accumulation(_STREAMS * width, torch.float32)
    assert_close(post, want_post, atol=slack, name=f"{name}: post")
    assert_close(comb, want_comb, atol=slack, name=f"{name}: comb")
    magnitude = h.double().abs().sum(1)
    assert_close(y, want_y, atol=slack, scale=magnitude, name=f"{name}: y")
    out = ops.hc_post(u, h, post, comb)
    want = hyper_post(u.double(), h.double(), want_post, want_comb)
    magnitude = (h.double().abs().sum(1) + 2 * u.double().abs()).unsqueeze(1).expand_as(want)
    assert_close(out, want, atol=slack, scale=magnitude, name=f"{name}: streams")


@case("M1", "more than 8192 tokens", "hc_pre", "hc_post", bulk=True)
def many_tokens(ops: Ops) -> None:
    _check_site(ops, torch.randn(8192 + 5, _STREAMS, 32), "8197 tokens")


@case(
    "M2",
    "20 Sinkhorn iterations ending on columns, epsilons as DeepSeek's",
    "hc_pre",
    "hc_post",
    quick=True,
)
def sinkhorn(ops: Ops) -> None:
    h = torch.randn(16, _STREAMS, 64)
    _check_site(ops, h, "16 tokens")
    _check_site(ops, h * 1e-4, "tiny streams, where the norm's epsilon shows")
    # For gates that are far from uniform, twenty iterations do not converge.
    site = _site(64)
    scale = site.scale * 30
    _, _, comb = ops.hc_pre(h, site.fn, site.base, scale, norm_eps=1e-6, hc_eps=1e-6, iters=20)
    wide = Site(site.fn.double(), site.base.double(), scale.double())
    _, _, want = wide.pre(h.double(), v4_config())
    # Logits are up to 100 times larger, and so are their errors.
    slack = 100 * accumulation(_STREAMS * 64, torch.float32)
    assert_close(comb, want, atol=slack, name="comb far from uniform")
    one = torch.ones(16, _STREAMS, dtype=torch.float64)
    # The last step divides by column sums plus 1e-6.
    assert_close(comb.sum(1), one, atol=3e-6, name="column sums")


@case(
    "M3",
    "V4.1 takes the pre-mix of the previous sub-layer",
    "hc_gates",
    "hc_post",
    "hc_collapse_norm",
    quick=True,
)
def delayed_sites(ops: Ops) -> None:
    width, eps = 64, 1e-20
    h, u = torch.randn(16, _STREAMS, width), torch.randn(16, width)
    for size, name in ((1.0, "16 tokens"), (1e-4, "tiny streams, which V4's epsilon would shrink")):
        _check_delayed(ops, size * h, size * u, eps, name)


def _check_delayed(ops: Ops, h: Tensor, u: Tensor, eps: float, name: str) -> None:
    width = h.shape[2]
    site, weight = _site(width), 1 + torch.rand(width)
    pre, post, comb = ops.hc_gates(
        h, site.fn, site.base, site.scale, norm_eps=eps, hc_eps=1e-6, iters=20
    )
    wide = Site(site.fn.double(), site.base.double(), site.scale.double())
    want_pre, want_post, want_comb = wide.gates(
        h.double(), dataclasses.replace(v4_config(), norm_eps=eps)
    )
    slack = 4 * accumulation(_STREAMS * width, torch.float32)
    assert_close(pre, want_pre, atol=slack, name=f"{name}: pre")
    assert_close(post, want_post, atol=slack, name=f"{name}: post")
    assert_close(comb, want_comb, atol=slack, name=f"{name}: comb")
    # Input of the next sub-layer: the streams after this one, read through this one's gates.
    x = ops.hc_collapse_norm(ops.hc_post(u, h, post, comb), pre, weight, norm_eps=eps)
    streams = hyper_post(u.double(), h.double(), want_post, want_comb)
    collapsed = collapse(streams, want_pre)
    want = rms_norm(collapsed, weight.double(), eps)
    # Gates err by the slack, and are used twice; the norm divides by the root mean square.
    magnitude = (h.double().abs().sum(1) + 2 * u.double().abs()) * _STREAMS
    magnitude = magnitude * weight / collapsed.square().mean(1, keepdim=True).sqrt()
    assert_close(x, want, atol=2 * slack, scale=magnitude, name=f"{name}: input")

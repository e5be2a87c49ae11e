"""Cases T7 .. T9: gradients of pooled entries, of the indexer and of hyper-connections."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla import train
from anymla.testing.conformance.ops import Ops
from anymla.testing.conformance.registry import case, expect
from anymla.testing.tolerance import relative_l2

_EPS = 1e-6


def _leaves(*shapes: tuple[int, ...], spread: float = 1.0) -> list[Tensor]:
    drawn = [torch.randn(shape, dtype=torch.float64) * spread for shape in shapes]
    return [each.requires_grad_() for each in drawn]


def _same(name: str, got: Tensor, want: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Compare results and all gradients in float64; return those that were judged."""
    pull = torch.randn_like(want)
    ours, right = (torch.autograd.grad(y, inputs, pull) for y in (got, want))
    for a, b in zip((got, *ours), (want, *right), strict=True):
        off = relative_l2(a, b)
        expect(off < 1e-9, f"{name}: off by {off:.1e} of its length")
    return list(ours)


@case("T7", "gradients of entries: the first window of a sequence pools no window before it")
@torch.enable_grad()
def gradients_of_entries(ops: Ops) -> None:
    lengths, width = [9, 3, 14, 4], 6
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    for ratio in (4, 8):
        wide = 2 * width if ratio == 4 else width
        kv, gate, ape, weight = _leaves(
            (starts[-1], wide), (starts[-1], wide), (ratio, wide), (width,)
        )
        rows, pooled = [], torch.zeros(starts[-1], dtype=torch.bool)
        for start, length in zip(starts, lengths, strict=False):
            for window in range(length // ratio):
                own = torch.arange(ratio) + start + window * ratio
                pooled[own] = True
                parts = [(own, slice(wide - width, None))]
                if ratio == 4 and window:
                    parts.append((own - ratio, slice(width)))
                scores = torch.cat([gate[t, half] + ape[:, half] for t, half in parts])
                values = torch.cat([kv[t, half] for t, half in parts])
                rows.append((scores.softmax(0) * values).sum(0))
        entries = torch.stack(rows)
        want = entries * (entries.square().mean(1, keepdim=True) + _EPS).rsqrt() * weight
        plan = train.Plan(starts, ratio)
        got = train.compress(kv, gate, ape, weight, plan, eps=_EPS, rope=None)
        grads = _same(f"ratio {ratio}", got, want, [kv, gate, ape, weight])
        expect(not grads[0][~pooled].any(), "tokens without an entry must have gradient 0")


@case("T8", "the indexer learns from attention whose denominator has window and sink")
@torch.enable_grad()
def gradients_of_the_indexer(ops: Ops) -> None:
    plan, heads, channels = train.Plan([0, 21, 33], 4, 5), 3, 8
    tokens, count = plan.tokens, plan.num_entries
    iq, ik, weights = _leaves((tokens, 2, 6), (count, 6), (tokens, 2))
    q, rows, entries, sink = (
        each.detach()
        for each in _leaves((tokens, heads, channels), (tokens, channels), (count, channels), (3,))
    )
    parts, lse = [], torch.zeros(tokens, heads, dtype=torch.float64)
    for token, (start, near, base, seen) in enumerate(plan.ranges.tolist()):
        members = torch.arange(seen) + base - tokens
        keys = torch.cat((rows[start : start + near], entries[members]))
        scores = q[token] @ keys.T * channels**-0.5
        lse[token] = scores.logsumexp(1)
        if not seen:
            continue
        mass = torch.cat((scores, sink[:, None]), 1).softmax(1)[:, near:-1].sum(0)
        target = mass / mass.sum()
        dots = (iq[token] @ ik[members].T).relu()
        log_q = (weights[token] @ dots).log_softmax(0)
        parts.append((target * (target.log() - log_q)).sum() / tokens)
    got = train.index_loss(iq, ik, weights, plan, q, entries, lse, sink)
    _same("all visible entries", got, torch.stack(parts).sum(), [iq, ik, weights])


@case("T9", "hyper-connections are differentiated through every Sinkhorn step, not at the limit")
@torch.enable_grad()
def gradients_of_hyper_connections(ops: Ops) -> None:
    tokens, n, channels, iters = 40, 4, 6, 20
    h, fn, base = _leaves((tokens, n, channels), (24, n * channels), (24,), spread=3.0)
    (scale,) = _leaves((3,))
    flat = h.flatten(1)
    mix = flat * (flat.square().mean(1, keepdim=True) + _EPS).rsqrt() @ fn.T
    gates = mix * scale.repeat_interleave(torch.tensor([n, n, n * n])) + base
    pre, post = gates[:, :n].sigmoid() + _EPS, 2 * gates[:, n : 2 * n].sigmoid()
    comb = gates[:, 2 * n :].unflatten(1, (n, n)).softmax(2) + _EPS
    for step in range(2 * iters - 1):
        comb = comb / (comb.sum(1 + step % 2, keepdim=True) + _EPS)
    y = (pre.unsqueeze(2) * h).sum(1)
    want = post.unsqueeze(2) * y.unsqueeze(1) + torch.einsum("tij,tid->tjd", comb, h)
    collapsed, *rest = train.hyper_pre(h, fn, base, scale, norm_eps=_EPS, hc_eps=_EPS, iters=iters)
    _same("a site", train.hyper_post(collapsed, h, *rest), want, [h, fn, base, scale])

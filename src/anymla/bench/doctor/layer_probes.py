"""Probes of the rest of a model: linear, hyper_connection, engram, moe, choice."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from anymla.bench.doctor.trial import Probe, Trial, host
from anymla.formats.fp8_block import quantize_fp8_weight
from anymla.formats.mxfp4 import quantize_mxfp4
from anymla.ops.choice import best_logits
from anymla.ops.engram import engram_gate, engram_rows
from anymla.ops.hyper_connection import hc_post, hc_pre
from anymla.ops.linear import fp8_block_linear, grouped_output_projection
from anymla.ops.moe import experts, route_biased
from anymla.testing.conformance.expected import EngramGate, table, v4_config
from anymla.testing.oracle import rounding
from anymla.testing.oracle.blocks import Site, hyper_post
from anymla.testing.oracle.rope import frequencies, rotate
from anymla.testing.oracle.row_formats import RowFormat
from anymla.testing.tolerance import accumulation, assert_close, ulps

_HIDDEN, _STREAMS, _HEADS, _DIM, _GROUPS, _RANK = 2048, 4, 16, 512, 2, 512
_EXPERTS, _CHOSEN, _INNER, _LIMIT = 16, 4, 512, 10.0
_COLUMNS, _WIDTH = 24, 256  # rows that a token's n-grams name, channels of each
_VOCABULARY = 32320
_GATES = (2 + _STREAMS) * _STREAMS
_FEW = {"check": 3, "cpu": 16, "gpu": 256}


def probes() -> Iterator[Probe]:
    """In the order in which a layer calls them."""
    many = {"check": 5, "cpu": 256, "gpu": 8192}
    yield Probe("linear", "inverse RoPE, grouped product", _projection, _FEW)
    yield Probe("linear", "FP8 weights, 128 x 128 scales", _linear, _FEW, fp8=True)
    yield Probe("hyper_connection", "collapse and gates", _pre, many)
    yield Probe("hyper_connection", "expand", _post, many)
    yield Probe("engram", "rows of n-grams", _rows, many, fp8=True)
    yield Probe("engram", "gates", _gate, many)
    yield Probe("moe", "router", _route, many)
    yield Probe("moe", "MXFP4 experts", _experts, _FEW)
    yield Probe("choice", "the best of 32,320 tokens", _choose, _FEW)


def _normal(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).bfloat16()


def _product_error(terms: int) -> tuple[float, float]:
    """Relative to the terms' magnitudes, and to the result: float32 sums, one rounding."""
    return accumulation(terms, torch.float32), ulps(torch.bfloat16, 1)


def _projection(tokens: int, device: torch.device) -> Trial:
    width = _HEADS // _GROUPS * _DIM
    o = _normal(tokens, _HEADS, _DIM, device=device)
    weight = _normal(_GROUPS, _RANK, width, device=device)
    positions = torch.arange(500, 500 + tokens, device=device)

    def verify(got: Tensor) -> float:
        inv_freq = frequencies(v4_config(), compressed=True)
        rotated = rotate(host(o).double(), host(positions), inv_freq, inverse=True)
        groups = rotated.reshape(tokens, _GROUPS, width)
        wide = host(weight).double()
        want = torch.einsum("tgj,grj->tgr", groups, wide).flatten(1)
        size = torch.einsum("tgj,grj->tgr", groups.abs(), wide.abs()).flatten(1)
        atol, rtol = _product_error(width)
        # The rotated heads may be rounded to bfloat16 before the product: independent errors.
        atol = atol + ulps(torch.bfloat16, 1) * (4 / width**0.5)
        return assert_close(host(got), want, atol=atol, rtol=rtol, scale=size, name="projection")

    moved = o.nbytes + weight.nbytes + tokens * 2 * _GROUPS * _RANK
    flops = 2 * tokens * _HEADS * _DIM * _RANK
    args = (o, positions, table(500 + tokens, compressed=True).to(device), weight)
    return Trial(grouped_output_projection, args, {}, moved, verify, flops)


def _linear(tokens: int, device: torch.device) -> Trial:
    x = _normal(tokens, _HIDDEN, device=device)
    codes, scale = quantize_fp8_weight(torch.randn(_HIDDEN, _HIDDEN) / _HIDDEN**0.5)

    def verify(got: Tensor) -> float:
        blocks = rounding.decode_ue8m0(scale)
        wide = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
        weight = rounding.decode_e4m3(codes) * wide[:_HIDDEN, :_HIDDEN]
        want = host(x).double() @ weight.T
        size = host(x).double().abs() @ weight.abs().T
        atol, rtol = _product_error(_HIDDEN)
        return assert_close(host(got), want, atol=atol, rtol=rtol, scale=size, name="product")

    moved = codes.nbytes + scale.nbytes + 2 * x.nbytes
    flops = 2 * tokens * _HIDDEN * _HIDDEN
    args = (x, codes.to(device), scale.to(device))
    return Trial(fp8_block_linear, args, {"quantize_activations": False}, moved, verify, flops)


def _site(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    width = _STREAMS * _HIDDEN
    fn = torch.randn(_GATES, width, device=device) / width**0.5
    return fn, torch.randn(_GATES, device=device), 1 + torch.rand(3, device=device)


def _pre(tokens: int, device: torch.device) -> Trial:
    h = _normal(tokens, _STREAMS, _HIDDEN, device=device)
    site = _site(device)

    def verify(result: tuple[Tensor, Tensor, Tensor]) -> float:
        wide = Site(*(host(each).double() for each in site))
        exact = host(h).double()
        y, post, comb = wide.pre(exact, v4_config())
        # As in case M2: gate logits are dot products as wide as all streams.
        slack = 4 * accumulation(_STREAMS * _HIDDEN, torch.float32)
        worst = assert_close(host(result[1]), post, atol=slack, name="post")
        worst = max(worst, assert_close(host(result[2]), comb, atol=slack, name="comb"))
        size, rtol = exact.abs().sum(1), ulps(torch.bfloat16, 1)
        collapsed = assert_close(host(result[0]), y, atol=slack, rtol=rtol, scale=size, name="y")
        return max(worst, collapsed)

    moved = h.nbytes + site[0].nbytes + tokens * (2 * _HIDDEN + 4 * _STREAMS * (1 + _STREAMS))
    keywords = {"norm_eps": 1e-6, "hc_eps": 1e-6, "iters": 20}
    return Trial(hc_pre, (h, *site), keywords, moved, verify)


def _post(tokens: int, device: torch.device) -> Trial:
    u, h = (
        _normal(tokens, _HIDDEN, device=device),
        _normal(tokens, _STREAMS, _HIDDEN, device=device),
    )
    post = torch.rand(tokens, _STREAMS, device=device)
    comb = torch.rand(tokens, _STREAMS, _STREAMS, device=device)

    def verify(got: Tensor) -> float:
        wide = [host(each).double() for each in (u, h, post, comb)]
        want, size = hyper_post(*wide), hyper_post(*(each.abs() for each in wide))
        atol, rtol = _product_error(_STREAMS + 1)
        return assert_close(host(got), want, atol=atol, rtol=rtol, scale=size, name="streams")

    moved = 2 * h.nbytes + u.nbytes + post.nbytes + comb.nbytes
    return Trial(hc_post, (u, h, post, comb), {}, moved, verify)


def _rows(tokens: int, device: torch.device) -> Trial:
    codes = torch.randint(0, 256, (tokens, _COLUMNS, _WIDTH), device=device).byte()
    codes = torch.where(codes & 127 == 127, 0, codes)  # no NaN
    shape = (tokens, _COLUMNS, _WIDTH // 32)
    scales = torch.randint(110, 125, shape, device=device).byte()
    out = torch.empty(tokens, _COLUMNS * _WIDTH, dtype=torch.bfloat16, device=device)

    def verify(_: None) -> float:
        each = rounding.decode_ue8m0(host(scales)).repeat_interleave(32, 2)
        want = (rounding.decode_e4m3(host(codes)) * each).flatten(1)
        # Four bits times a power of two are bfloat16.
        return assert_close(host(out), want, atol=0, name="rows")

    moved = codes.nbytes + scales.nbytes + out.nbytes
    return Trial(engram_rows, (out, codes, scales), {}, moved, verify)


def _gate(tokens: int, device: torch.device) -> Trial:
    h = _normal(tokens, _STREAMS, _HIDDEN, device=device)
    projected = _normal(tokens, (_STREAMS + 1) * _HIDDEN, device=device)
    weight = 1 + 0.2 * torch.randn(_STREAMS, _HIDDEN, device=device)

    def verify(got: Tensor) -> float:
        want = EngramGate.of(host(h), host(projected), host(weight), 1e-20)
        return want.check(host(got), "streams")

    moved = 2 * h.nbytes + projected.nbytes + weight.nbytes
    return Trial(engram_gate, (h, projected, weight), {"eps": 1e-20}, moved, verify)


def _choose(tokens: int, device: torch.device) -> Trial:
    logits = 5 * torch.randn(tokens, _VOCABULARY, device=device)

    def verify(result: tuple[Tensor, Tensor, Tensor]) -> float:
        value, token, log_sum = map(host, result)
        wide = host(logits).double()
        assert torch.equal(token, wide.argmax(1)), "a token that is not the best"
        assert torch.equal(value.double(), wide.amax(1)), "another value than the best's"
        atol = accumulation(_VOCABULARY, torch.float32) + ulps(torch.float32, 2) * 20
        return assert_close(log_sum, wide.logsumexp(1), atol=atol, name="log-sum")

    return Trial(best_logits, (logits,), {}, logits.nbytes, verify)


def _route(tokens: int, device: torch.device) -> Trial:
    x = _normal(tokens, _HIDDEN, device=device)
    gate = (torch.randn(_EXPERTS, _HIDDEN, device=device) / _HIDDEN**0.5).bfloat16()
    bias = torch.randn(_EXPERTS, device=device)

    def verify(result: tuple[Tensor, Tensor]) -> float:
        logits = host(x).double() @ host(gate).double().T
        scores = torch.nn.functional.softplus(logits, threshold=1e9).sqrt()
        ids, weights = host(result[0]).long(), host(result[1])
        biased = scores + host(bias).double()
        slack = accumulation(_HIDDEN, torch.float32) * 64.0  # |x| |gate| over 2048 channels
        kth = biased.topk(_CHOSEN).values[:, -1:]
        assert (biased.gather(1, ids) >= kth - slack).all(), "an expert below the best was chosen"
        assert all(len(set(row)) == _CHOSEN for row in ids.tolist()), "an expert chosen twice"
        share = scores.gather(1, ids)
        want = share / share.sum(1, keepdim=True) * 1.5
        return assert_close(weights, want, atol=slack, name="weights")

    moved = x.nbytes + gate.nbytes + tokens * 8 * _CHOSEN
    keywords = {"k": _CHOSEN, "scale": 1.5}
    return Trial(route_biased, (x, gate, bias), keywords, moved, verify)


def _packed(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    return quantize_mxfp4(torch.randn(rows, columns) / columns**0.5)


def _decoded(packed: Tensor, scales: Tensor) -> Tensor:
    channels = 2 * packed.shape[1]
    kind = RowFormat(channels, packed.shape[1], scales.shape[1], channels, 32, "e2m1")
    return kind.decode(packed, scales)


def _experts(tokens: int, device: torch.device) -> Trial:
    x = _normal(tokens, _HIDDEN, device=device)
    made = [
        (_packed(_INNER, _HIDDEN), _packed(_INNER, _HIDDEN), _packed(_HIDDEN, _INNER))
        for _ in range(_EXPERTS)
    ]
    ids = torch.stack([torch.randperm(_EXPERTS)[:_CHOSEN] for _ in range(tokens)]).int()
    share = torch.rand(tokens, _CHOSEN)

    def verify(got: Tensor) -> float:
        exact = host(x).double()
        want, size = torch.zeros_like(exact), torch.zeros_like(exact)
        for token, row in enumerate(ids.tolist()):
            for place, expert in enumerate(row):
                w1, w3, w2 = (_decoded(*each) for each in made[expert])
                gate = (w1 @ exact[token]).clamp(max=_LIMIT)
                up = (w3 @ exact[token]).clamp(-_LIMIT, _LIMIT)
                inner = gate * torch.sigmoid(gate) * up * float(share[token, place])
                want[token] += w2 @ inner
                size[token] += w2.abs() @ inner.abs()
        # Between the products values are bfloat16: independent errors of half a unit.
        atol = accumulation(_HIDDEN, torch.float32) + ulps(torch.bfloat16, 2) * 0.25
        rtol = ulps(torch.bfloat16, 1)
        return assert_close(host(got), want, atol=atol, rtol=rtol, scale=size, name="experts")

    lists = [[each[i][part].to(device) for each in made] for part in (0, 1) for i in range(3)]
    used = len(set(ids.flatten().tolist()))
    moved = used * sum(part.nbytes for pair in made[0] for part in pair) + 2 * x.nbytes
    keywords = {
        "weight_format": "mxfp4",
        "swiglu_limit": _LIMIT,
        "quantize_activations": False,
    }
    flops = 2 * tokens * _CHOSEN * 3 * _INNER * _HIDDEN
    args = (x, ids.to(device), share.to(device), *lists)
    return Trial(experts, args, keywords, moved, verify, flops)

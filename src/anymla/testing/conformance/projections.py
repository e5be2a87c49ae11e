"""Cases M7 .. M12: linear layers, experts, their router and the greedy choice."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.fp8_block import quantize_fp8_weight
from anymla.formats.mxfp4 import quantize_mxfp4
from anymla.testing.conformance.expected import table, v4_config
from anymla.testing.conformance.ops import Ops
from anymla.testing.conformance.registry import NotApplicable, case, expect
from anymla.testing.far_memory import GIB, large_memory, tensor_at
from anymla.testing.oracle import rounding
from anymla.testing.oracle.rope import frequencies, rotate
from anymla.testing.oracle.row_formats import RowFormat
from anymla.testing.tolerance import accumulation, assert_close, ulps

_HIDDEN = 512
_BF16 = ulps(torch.bfloat16, 1)


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


@case(
    "M7",
    "FP8 weights take the scale of their own block of 128 x 128, the cut last one too",
    "fp8_block_linear",
    quick=True,
)
def block_scales(ops: Ops) -> None:
    rows = 320
    # Blocks of very different sizes, so that another block's scale shows.
    size = torch.randint(-3, 4, (-(-rows // 128), _HIDDEN // 128)).double().exp2()
    blocks = size.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows]
    x = _normal(3, _HIDDEN)
    codes, scale = quantize_fp8_weight((torch.randn(rows, _HIDDEN) * blocks).float())
    wide = rounding.decode_ue8m0(scale).repeat_interleave(128, 0).repeat_interleave(128, 1)
    weight = rounding.decode_e4m3(codes) * wide[:rows]
    magnitude = x.double().abs() @ weight.abs().T
    assert_close(
        ops.fp8_block_linear(x, codes, scale, quantize_activations=False),
        x.double() @ weight.T,
        atol=accumulation(_HIDDEN, torch.float32),
        rtol=_BF16,
        scale=magnitude,
        name="products",
    )


@case(
    "M8",
    "heads are rotated back before each group's own projection",
    "grouped_output_projection",
    quick=True,
)
def grouped_projection(ops: Ops) -> None:
    tokens, heads, groups, rank, channels = 3, 4, 2, 64, 512
    width = heads // groups * channels
    o, weight = _normal(tokens, heads, channels), _normal(groups, rank, width)
    positions = torch.arange(500, 500 + tokens)
    cos_sin = table(500 + tokens, compressed=True)
    inv_freq = frequencies(v4_config(), compressed=True)
    rotated = rotate(o.double(), positions, inv_freq, inverse=True).reshape(tokens, groups, width)
    wide = weight.double()
    magnitude = torch.einsum("tgj,grj->tgr", rotated.abs(), wide.abs()).flatten(1)
    assert_close(
        ops.grouped_output_projection(o, positions, cos_sin, weight),
        torch.einsum("tgj,grj->tgr", rotated, wide).flatten(1),
        # The rotated heads may be rounded to bfloat16 before the product: independent errors.
        atol=accumulation(width, torch.float32) + _BF16 * (4 / width**0.5),
        rtol=_BF16,
        scale=magnitude,
        name="projections",
    )


@case(
    "M9",
    "experts are chosen by biased scores and weighted by the scores without the bias",
    "route_biased",
    quick=True,
)
def biased_router(ops: Ops) -> None:
    chosen, scaling = 4, 1.5
    x = _normal(5, _HIDDEN)
    gate, bias = (torch.randn(16, _HIDDEN) / _HIDDEN**0.5).bfloat16(), torch.randn(16)
    ids, weights = ops.route_biased(x, gate, bias, k=chosen, scale=scaling)
    logits = x.double() @ gate.double().T
    scores = torch.nn.functional.softplus(logits, threshold=1e9).sqrt()
    biased = scores + bias.double()
    # The magnitudes of a logit's terms add up to about 2 / pi * sqrt(512) = 14.4.
    slack = accumulation(_HIDDEN, torch.float32) * 32.0
    least = biased.topk(chosen).values[:, -1:] - slack
    expect(bool((biased.gather(1, ids.long()) >= least).all()), "an expert below the best")
    expect(all(len(set(row)) == chosen for row in ids.tolist()), "an expert twice")
    share = scores.gather(1, ids.long())
    want = share / share.sum(1, keepdim=True) * scaling
    assert_close(weights, want, atol=slack, name="weights")


def _decoded(packed: Tensor, scales: Tensor) -> Tensor:
    """Weights [..., 2 * bytes] in float64, from MXFP4's bytes and scales by the oracle's tables."""
    channels = 2 * packed.shape[1]
    kind = RowFormat(channels, packed.shape[1], scales.shape[1], channels, 32, "e2m1")
    return kind.decode(packed, scales)


@case(
    "M10",
    "MXFP4 experts: the earlier channel in the low nibble, gates clamped above, others on both "
    "sides, weighted before the down projection",
    "experts",
    quick=True,
)
def mxfp4_experts(ops: Ops) -> None:
    tokens, count, chosen, inner, limit = 5, 8, 2, 256, 1.0
    x, share = _normal(tokens, _HIDDEN), torch.rand(tokens, chosen)
    ids = torch.stack([torch.randperm(count)[:chosen] for _ in range(tokens)]).int()
    shapes = ((inner, _HIDDEN), (inner, _HIDDEN), (_HIDDEN, inner))
    made = [
        [quantize_mxfp4(torch.randn(shape) / shape[1] ** 0.5) for shape in shapes]
        for _ in range(count)
    ]
    weights = [tuple(_decoded(*each) for each in expert) for expert in made]
    lists = [[each[which][part] for each in made] for part in (0, 1) for which in range(3)]
    got = ops.experts(
        x,
        ids,
        share,
        *lists,
        weight_format="mxfp4",
        swiglu_limit=limit,
        quantize_activations=False,
    )
    _check_experts(got, x, ids, share, weights, limit)


def _check_experts(
    got: Tensor,
    x: Tensor,
    ids: Tensor,
    share: Tensor,
    weights: list[tuple[Tensor, ...]],
    limit: float,
) -> None:
    """Compare outputs with float64, given w1, w3 and w2 of each expert in float64."""
    want = torch.zeros(x.shape, dtype=torch.float64)
    magnitude = torch.zeros_like(want)
    for token, row in enumerate(ids.tolist()):
        for place, expert in enumerate(row):
            w1, w3, w2 = weights[expert]
            gate = (w1 @ x[token].double()).clamp(max=limit)
            up = (w3 @ x[token].double()).clamp(-limit, limit)
            product = gate * torch.sigmoid(gate) * up * float(share[token, place])
            want[token] += w2 @ product
            magnitude[token] += w2.abs() @ product.abs()
    # Between the products values are bfloat16: independent errors of half a unit.
    atol = accumulation(_HIDDEN, torch.float32) + ulps(torch.bfloat16, 2) * 0.25
    assert_close(got, want, atol=atol, rtol=_BF16, scale=magnitude, name="outputs")


@case(
    "M11",
    "the lowest token among equal logits, with its value and the row's log-sum",
    "best_logits",
    quick=True,
)
def greedy_choice(ops: Ops) -> None:
    vocabulary = 32320
    logits = 5 * torch.randn(3, vocabulary)
    logits[1, [vocabulary - 1, 20000, 70]] = 40.0
    value, token, log_sum = ops.best_logits(logits)
    wide = logits.double()
    best = wide.amax(1)
    expect(torch.equal(value.double(), best), "another value than the best's")
    first = [int(row.eq(top).nonzero()[0]) for row, top in zip(wide, best, strict=True)]
    expect(token.tolist() == first, f"tokens {token.tolist()}, the lowest best are {first}")
    # Exponentials are all positive; their sum's logarithm is some tens at most.
    atol = accumulation(vocabulary, torch.float32) + ulps(torch.float32, 2) * 40
    assert_close(log_sum, wide.logsumexp(1), atol=atol, name="log-sum")


def _stored(weight: Tensor, weight_format: str) -> tuple[Tensor, ...]:
    """Return a weight as stored: bfloat16, or MXFP4 with its scales."""
    return (weight.bfloat16(),) if weight_format == "plain" else quantize_mxfp4(weight)


def _wide(parts: tuple[Tensor, ...]) -> Tensor:
    """Return a stored weight in float64."""
    return parts[0].double() if len(parts) == 1 else _decoded(*parts)


# Where each of four experts lies: far before the first one, far behind it, and beside it.
_MIB = 1 << 20
_PLACES = (5 * GIB // 2, 0, 5 * GIB, 5 * GIB // 2 + 16 * _MIB)


@case(
    "M12",
    "experts in tensors of their own are found 2 GiB and more before the first one and behind it",
    "experts",
)
def experts_far_apart(ops: Ops) -> None:
    tokens, inner, limit = 3, 128, 1.0
    device = ops.device or torch.device("cpu")
    try:
        memory = large_memory(max(_PLACES) + 8 * _MIB, device)
    except (MemoryError, NotImplementedError) as reason:
        raise NotApplicable(str(reason) or "too little memory for 5 GiB of addresses") from None
    x, share = _normal(tokens, _HIDDEN), torch.rand(tokens, 2)
    ids = torch.tensor([[0, 1], [2, 3], [1, 2]], dtype=torch.int32)
    shapes = ((inner, _HIDDEN), (inner, _HIDDEN), (_HIDDEN, inner))
    made = [[torch.randn(shape) / shape[1] ** 0.5 for shape in shapes] for _ in _PLACES]
    for weight_format in ("plain", "mxfp4"):
        stored = [[_stored(weight, weight_format) for weight in expert] for expert in made]
        weights = [tuple(_wide(parts) for parts in expert) for expert in stored]
        lists: list[list[Tensor]] = []
        for part in range(len(stored[0][0])):
            for which in range(3):
                start = len(lists) * _MIB
                placed = zip(_PLACES, stored, strict=True)
                lists.append([tensor_at(memory, at + start, e[which][part]) for at, e in placed])
        lists += [[] for _ in range(6 - len(lists))]
        got = ops.experts(
            *(each.to(device) for each in (x, ids, share)),
            *lists,
            weight_format=weight_format,
            swiglu_limit=limit,
            quantize_activations=False,
        )
        _check_experts(got.cpu(), x, ids, share, weights, limit)

"""The float64 result of each method of a layer, and the largest error of a correct implementation.

A check reads nothing but its case. Each bound is derived next to its use; ``docs/audit.md`` lists
them. Rows of a cache are judged by the values that could have been rounded to their bytes,
selections by their scores, all else by the distance to the float64 result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from anymla.audit.case import Case
from anymla.audit.looks import kind_of, looks_of, places, same_bytes
from anymla.formats.fp8_block import dequantize_fp8_weight
from anymla.formats.interchange import ocp_codes
from anymla.formats.mxfp4 import dequantize_mxfp4
from anymla.formats.page_layout import INDEX_FP8, MAIN_FP8
from anymla.testing.oracle.row_formats import ROW_FORMATS
from anymla.testing.oracle.selection import Selections

_EPS32 = torch.finfo(torch.float32).eps
# Unit roundoff of TF32 tensor cores' operands: 10 explicit fraction bits.
_TF32 = 2.0**-11
# FP8 tensor cores of sm_90 keep 13 fraction bits of a sum (DeepSeek-V3's report, section 3.3.2).
_FP8_SUM = 2.0**-13
# Rounding to e4m3 errs by at most half a unit, 1/16 of a value; the error is uniform in it.
_E4M3_DEVIATION = 2.0**-4 / math.sqrt(3)
# For independent errors, none of 1e14 values deviates by eight standard deviations.
_DEVIATIONS = 8.0


@dataclasses.dataclass(frozen=True)
class Finding:
    """Result of a check.

    Attributes:
        method: name of the method.
        ok: True if every value is within its bound.
        worst: largest error in units of the allowed error; inf for faults without a distance.
        token: index in the case of the token with that error.
        what: one line with the value, the expected value and the allowed error.
        mean: root mean square of the errors in units of the allowed error; 0 if not applicable.
        first: the first value that is wrong in the order of memory, as ``what``; "" if it is that.
        looks: description of the wrong values and of what they look like; "" if nothing is said.
    """

    method: str
    ok: bool
    worst: float
    token: int
    what: str
    mean: float = 0.0
    first: str = ""
    looks: str = ""


def judge(case: Case) -> Finding:
    """Judge a case.

    Raises:
        ValueError: the method has no check, or the case lacks an input of the check.
    """
    try:
        check = CHECKS[case.method]
    except KeyError:
        known = ", ".join(sorted(CHECKS))
        raise ValueError(f"no check of {case.method!r}; known: {known}") from None
    try:
        return check(case)
    except KeyError as error:
        raise ValueError(f"a case of {case.method} lacks {error.args[0]!r}") from None


def _right(case: Case) -> Finding:
    return Finding(case.method, True, 0.0, 0, "")


def _wrong(case: Case, token: int, what: str, looks: str = "") -> Finding:
    """Return the finding of a fault that has no distance."""
    return Finding(case.method, False, math.inf, token, what, looks=looks)


def _names(case: Case) -> list[str]:
    """Return the name of each token of a case."""
    pairs = zip(case.requests, case.positions, strict=True)
    return [f"request {request}, position {position}" for request, position in pairs]


def _distance(case: Case, pairs: Mapping[str, tuple[Tensor, ...]]) -> Finding:
    """Compare (got, want, allowed) by name; the first dimension counts tokens."""
    worst, token, what, squares, count = -1.0, 0, "", 0.0, 0
    first = looks = ""
    for name, (got, want, allowed) in pairs.items():
        got, want = got.double(), want.double()
        ratio = (got - want).abs() / allowed.expand_as(want).clamp(min=1e-300)
        ratio = torch.where(got == want, 0.0, ratio).nan_to_num(nan=math.inf)
        squares, count = squares + float(ratio.square().sum()), count + ratio.numel()
        if not ratio.numel():
            continue
        allowed = allowed.expand_as(want)
        if float(ratio.max()) > worst:
            worst, at = float(ratio.max()), int(ratio.argmax())
            token, what = _value(name, at, got, want, allowed)
        if not first and float(ratio.max()) > 1:
            at = int((ratio > 1).flatten().nonzero()[0])
            one, first = _value(name, at, got, want, allowed)
            names = _names(case) if len(case.positions) == len(got) else [""] * len(got)
            heads = "head" if case.method in ("attention", "query", "index_query") else "row"
            looks = f"{name}, {looks_of(got, want, allowed, one, names, heads)}"
    mean = math.sqrt(squares / count) if count else 0.0
    first = "" if first == what else first
    return Finding(case.method, worst <= 1, max(worst, 0.0), token, what, mean, first, looks)


def _value(name: str, at: int, got: Tensor, want: Tensor, allowed: Tensor) -> tuple[int, str]:
    """Return the token of a value, by its index in memory, and a line about it."""
    token, *place = (int(i) for i in torch.unravel_index(torch.tensor(at), got.shape))
    held, should, off = (float(each.flatten()[at]) for each in (got, want, allowed))
    return token, f"{name}{place} is {held:.6g}, should be {should:.6g}, may be off by {off:.3g}"


def _rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _rope(x: Tensor, cos_sin: Tensor, *, inverse: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate x [M, .., D] by rows [M, R] (cosines, then sines); also return each pair's size."""
    width = cos_sin.shape[-1]
    shape = (len(x), *([1] * (x.ndim - 2)), width // 2)
    cos, sin = (each.double().view(shape) for each in cos_sin.chunk(2, dim=-1))
    if inverse:
        sin = -sin
    start = x.shape[-1] - width
    even, odd = x[..., start::2], x[..., start + 1 :: 2]
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    pair = torch.hypot(even, odd).repeat_interleave(2, -1)
    return torch.cat((x[..., :start], rotated), -1), torch.cat((x[..., :start].abs(), pair), -1)


def _unit(dtype: torch.dtype) -> float:
    """Return a unit in the last place of an activation, relative to its value."""
    return torch.finfo(dtype).eps


def _qkv_norm(case: Case) -> Finding:
    """RMS norms of the query's latent and of the row: two roundings to the activations' dtype."""
    pairs, eps = {}, case.number("eps")
    for name in ("qr", "kv"):
        given, weight, got = (case.tensors[f"{name}{end}"] for end in ("", "_weight", "_out"))
        want = _rms(given.double(), eps) * weight.double()
        pairs[name] = (got, want, 1.5 * _unit(got.dtype) * want.abs() + 1e-30)
    return _distance(case, pairs)


def _query(case: Case) -> Finding:
    """RMS norm of each head without a weight, then RoPE; the value in between may be rounded."""
    got = case.tensors["out"]
    want, size = _rope(
        _rms(case.tensors["q"].double(), case.number("eps")), case.tensors["cos_sin"]
    )
    return _distance(case, {"query": (got, want, 1.5 * _unit(got.dtype) * size + 1e-30)})


def _rows(case: Case, exact: Tensor, slack: Tensor, layout: str) -> Finding:
    """Check that stored rows are the rounding of a value within ``slack`` of ``exact``."""
    row_format = ROW_FORMATS[layout]
    data, scales = case.tensors["data"].cpu(), case.tensors["scales"].cpu()
    exact, slack = exact.cpu(), slack.cpu()
    explained = row_format.explains(data, scales, exact - slack, exact + slack)
    if bool(explained.all()):
        return _right(case)
    stored = row_format.decode(data, scales)
    row, channel = (int(i) for i in (~explained).nonzero()[0])
    count = int((~explained).sum())
    what = (
        f"{count} of {explained.numel()} channels; first [{channel}]: stored "
        f"{float(stored[row, channel]):.6g}, computed {float(exact[row, channel]):.6g} "
        f"+- {float(slack[row, channel]):.3g}"
    )
    held = torch.cat((data, scales.view(torch.uint8).view(len(data), -1)), 1)
    wrong, may = ~explained[row], slack + exact.abs() / 8  # a code's step
    looks = same_bytes(held, row, _names(case))
    looks = looks or kind_of(stored.double(), exact, may, row, wrong, _names(case))
    return _wrong(case, row, what, ": ".join(filter(None, (places(wrong), looks))))


def _window_row(case: Case) -> Finding:
    """RoPE in float32 and exact quantisation: only RoPE's channels may deviate."""
    kv, cos_sin = case.tensors["kv"].double(), case.tensors["cos_sin"]
    exact, size = _rope(kv, cos_sin)
    slack = 4 * _EPS32 * size
    slack[..., : kv.shape[-1] - cos_sin.shape[-1]] = 0
    return _rows(case, exact, slack, str(case.numbers.get("layout", MAIN_FP8)))


def _compressor_state(case: Case) -> Finding:
    """Unchanged projections, and the score with its bias: one addition in float32."""
    kv, score = case.tensors["kv_score"].double().chunk(2, dim=-1)
    ratio = int(case.numbers["ratio"])
    ape = case.tensors["ape"].double()
    bias = torch.stack([ape[position % ratio] for position in case.positions])
    want = torch.cat((kv, score + bias), -1)
    got = case.tensors["state"]
    allowed = torch.cat((torch.zeros_like(kv), _EPS32 * (score.abs() + bias.abs())), -1)
    return _distance(case, {"state": (got, want, allowed)})


def _compressed_row(case: Case) -> Finding:
    """Softmax over the rows of the states, their sum, norm, RoPE, quantisation; float32 sums."""
    state = case.tensors["state"].double()
    present = case.tensors["present"]
    ratio, overlap = int(case.numbers["ratio"]), bool(case.numbers["overlap"])
    kv, score = state.chunk(2, dim=-1)
    if overlap:  # an older token's first half belongs to the window after its own
        width = kv.shape[-1] // 2
        kv, score = (
            torch.cat((each[:, :ratio, :width], each[:, ratio:, width:]), 1) for each in (kv, score)
        )
    score = score.masked_fill(~present.unsqueeze(-1), -math.inf)
    share = torch.softmax(score, dim=1)
    kv = kv.masked_fill(~present.unsqueeze(-1), 0.0)
    pooled, size = (share * kv).sum(1), (share * kv.abs()).sum(1)
    weight, eps = case.tensors["norm_weight"].double(), case.number("eps")
    scale = torch.rsqrt(pooled.square().mean(-1, keepdim=True) + eps) * weight
    rounding = (2 * math.sqrt(kv.shape[1]) + 16) * _EPS32
    error = rounding * (size * scale.abs() + (pooled * scale).abs())
    exact, pair = _rope(pooled * scale, case.tensors["cos_sin"])
    width = case.tensors["cos_sin"].shape[-1]
    slack = error.clone()
    slack[:, -width:] = error[:, -width:].unflatten(1, (-1, 2)).norm(dim=-1).repeat_interleave(2, 1)
    layout = str(case.numbers["layout"])
    half = _unit(torch.bfloat16) / 2
    if layout == MAIN_FP8:  # some implementations round before RoPE, others do not
        slack[:, -width:] += half * pair[:, -width:]
    else:
        slack += half * pair
    return _rows(case, exact, slack, layout)


def _index_query(case: Case) -> Finding:
    """RoPE and one FP8 scale a head, which is folded into the weight.

    Codes are e4m3fnuz if the case's number ``fnuz`` is 1.
    """
    q, weights = case.tensors["q"].double(), case.tensors["weights"].double()
    exact, size = _rope(q, case.tensors["cos_sin"])
    factor = case.number("softmax_scale") * case.number("head_scale")
    codes, got = case.tensors["codes"].view(torch.uint8), case.tensors["weights_out"].double()
    fnuz = bool(case.numbers.get("fnuz", 0))
    scale = got / (weights * factor)
    # A power of two; the weight's own rounding is far smaller than the step to the next power.
    scale = torch.exp2(torch.log2(scale.abs()).round()).nan_to_num(nan=1.0, posinf=1.0)
    heads = exact.flatten(0, 1).cpu()
    slack = (_unit(torch.bfloat16) / 2 * size).flatten(0, 1).cpu()
    row_format = ROW_FORMATS[INDEX_FP8]
    data = (ocp_codes(codes) if fnuz else codes).flatten(0, 1).cpu()
    held = scale / 2 if fnuz else scale  # of OCP codes, which mean twice as much
    planes = held.float().flatten().unsqueeze(1).cpu().contiguous().view(torch.uint8)
    silent = (weights == 0).flatten().cpu()
    explained = row_format.explains(data, planes, heads - slack, heads + slack)
    explained |= silent.unsqueeze(1)
    want = weights * factor * scale
    found = _distance(case, {"weights": (got, want, 4 * _unit(torch.float32) * want.abs() + 1e-30)})
    if bool(explained.all()):
        return found
    row, channel = (int(i) for i in (~explained).nonzero()[0])
    token, head = divmod(row, q.shape[1])
    what = (
        f"{int((~explained).sum())} of {explained.numel()} channels; "
        f"first head {head} [{channel}]: "
        f"{float(row_format.decode(data, planes)[row, channel]):.6g}, computed "
        f"{float(heads[row, channel]):.6g}"
    )
    return _wrong(case, token, what)


def _selection(case: Case) -> Finding:
    """Every selected entry is as good as the best one left out, up to the scores' error."""
    layout, k = str(case.numbers["layout"]), int(case.numbers["k"])
    chosen = case.tensors["chosen"].cpu().long().flatten()
    if not len(case.tensors["data"]):  # before the first entry is complete
        taken = chosen[chosen >= 0].tolist()
        worst = math.inf if taken else 0.0
        return Finding(case.method, not taken, worst, 0, f"{taken} chosen, none can be seen")
    keys = ROW_FORMATS[layout].decode(case.tensors["data"].cpu(), case.tensors["scales"].cpu())
    q, weights = case.tensors["q"].cpu().double(), case.tensors["weights"].cpu().double()
    dots, sizes = q @ keys.T, q.abs() @ keys.abs().T
    scores = (weights @ dots.relu()).unsqueeze(0)
    # A sum in FP8 tensor cores, then one over the heads in float32.
    error = (weights.abs() @ (_FP8_SUM * sizes + 2 * math.sqrt(len(q)) * _EPS32 * dots.abs())).max()
    order = torch.cat((chosen[chosen >= 0], chosen[chosen < 0])).unsqueeze(0)
    found = Selections()
    visible = torch.ones_like(scores, dtype=torch.bool)
    found.judge(scores, visible, order, k, error.view(1), "selection")
    if found.violations:
        return _wrong(case, 0, "; ".join(found.violations))
    return Finding(case.method, True, found.worst, 0, f"{found.swapped} of a near tie")


def _slots(case: Case) -> Finding:
    """Listed slots are those that the block table gives for the wanted places, each once.

    The places from ``first`` to before ``last`` are wanted. ``length``, if present, says how many
    of the list count; negative slots never do.
    """
    page_size = int(case.numbers["page_size"])
    table = case.tensors["table"].cpu().long().flatten()
    wanted = torch.arange(int(case.numbers["first"]), int(case.numbers["last"]))
    listed = case.tensors["listed"].cpu().long().flatten()
    if (length := case.tensors.get("length")) is not None:
        listed = listed[: int(length)]
    listed = listed[listed >= 0]
    want = table[wanted // page_size] * page_size + wanted % page_size
    want, got = want.sort().values, listed.sort().values
    if want.shape == got.shape and torch.equal(want, got):
        return _right(case)
    missing = sorted(set(want.tolist()) - set(got.tolist()))
    strange = sorted(set(got.tolist()) - set(want.tolist()))
    what = (
        f"{case.numbers['what']}: {len(got)} listed, {len(want)} wanted; "
        f"missing {missing[:4]}, strange {strange[:4]}"
    )
    return _wrong(case, 0, what, _slots_look(got, missing, strange, page_size))


def _slots_look(got: Tensor, missing: list[int], strange: list[int], page_size: int) -> str:
    """Describe a wrong list of slots."""
    if not len(got):
        return "an empty list"
    pages = sorted({slot // page_size for slot in strange})
    twice = len(got) - len(got.unique())
    parts = [
        f"slots of page {pages[0]}, which is not the request's place" if len(pages) == 1 else "",
        f"slots of {len(pages)} pages" if len(pages) > 1 else "",
        f"{twice} listed twice" if twice else "",
        f"{len(missing)} left out" if missing and not strange else "",
    ]
    return ", ".join(part for part in parts if part)


def _attention(case: Case) -> Finding:
    """Softmax over the listed rows and the sink, from the bytes in both caches.

    Scores are float32 sums of products of bf16 values (a row's e4m3 code times its power of two is
    one). Probabilities are rounded to bf16 before the second product, and so is the result. A
    missing term of the sum (the sink, a row) scales all channels of a head by one factor, while the
    channels' independent roundings nearly cancel in the estimate of such a factor; so that factor
    is judged as well. With a rotary table the result was rotated back, perhaps between two
    roundings.
    """
    rows = [
        ROW_FORMATS[MAIN_FP8].decode(data.cpu(), scales.cpu())
        for data, scales in attended(case.tensors).values()
    ]
    keys = torch.cat(rows)
    q, scale = case.tensors["q"].cpu().double(), case.number("scale")
    scores = q @ keys.T * scale
    sizes = q.abs() @ keys.abs().T * scale
    sink = case.tensors["sink"].cpu().double()[: len(q)]
    largest = torch.maximum(scores.amax(-1), sink).unsqueeze(-1)
    weight = torch.exp(scores - largest)
    total = weight.sum(-1, keepdim=True) + torch.exp(sink.unsqueeze(-1) - largest)
    share = weight / total
    want = share @ keys
    got, unit = case.tensors["out"].cpu(), _unit(case.tensors["out"].dtype)
    sizes_rounded = [want.abs()]
    if (table := case.tensors.get("cos_sin")) is not None:
        table = table.cpu()
        got = _rope(got.double().unsqueeze(0), table)[0][0]
        sizes_rounded.append(_rope(want.unsqueeze(0), table)[1][0])
    # exp(x (1 + e)) has a relative error of |x| e.
    relative = 2 * math.sqrt(q.shape[-1]) * _EPS32 * sizes + 4 * _EPS32 * (scores - largest).abs()
    error = (share * (relative + _unit(torch.bfloat16) / 2)) @ keys.abs()
    error += (share * relative).sum(-1, keepdim=True) * want.abs()
    allowed = error + unit / len(sizes_rounded) * sum(sizes_rounded)
    size = want.square().sum(-1)
    factor = (got.double() * want).sum(-1) / size
    # Rounding errors are uniform in half a unit either way.
    half = [each / 2 / math.sqrt(3) for each in (_unit(torch.bfloat16), unit)]
    along = (share * (want @ keys.T)).square().sum(-1) * half[0] ** 2
    spread = along + sum((want * each).square().sum(-1) for each in sizes_rounded) * half[1] ** 2
    exact = (share * relative).sum(-1) + (share * relative * (want @ keys.T).abs()).sum(-1) / size
    may = _DEVIATIONS * spread.sqrt() / size + exact
    pairs = {"out": (got, want, allowed), "factor of": (factor, torch.ones_like(factor), may)}
    return _distance(case, {n: tuple(x.unsqueeze(0) for x in each) for n, each in pairs.items()})


def attended(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return bytes and scales of the window's rows and of the selected entries, if any.

    Entries are in the order of the selection; a negative ``chosen`` has no entry.
    """
    found = {}
    for name in ("window", "entries"):
        if f"{name}_scales" in tensors:
            found[name] = tensors[f"{name}_data"], tensors[f"{name}_scales"]
    chosen = tensors.get("chosen")
    if chosen is not None and "entries" in found:
        there = chosen >= 0
        found["entries"] = found["entries"][0][there], found["entries"][1][there]
    return found


def dense_weight(case: Case, name: str) -> Tensor:
    """Decode a linear weight to float64: plain, or codes with scales of 128 x 128 blocks."""
    weight, scale = case.tensors[name], case.tensors.get(f"{name}_scale")
    if scale is None:
        return weight.double()
    codes = weight.view(torch.uint8)
    parts = codes.flatten(0, -2), scale.flatten(0, -2) if scale.ndim > 2 else scale
    if parts[1].dtype == torch.float8_e8m0fnu:
        parts = parts[0], parts[1].view(torch.uint8)
    return dequantize_fp8_weight(*parts, torch.float64).view(weight.shape)


def _projection(case: Case) -> Finding:
    """Inverse RoPE and ``wo_a`` by groups; the heads may be rounded to e4m3.

    Those errors are independent and add as squares, whatever the product's precision.
    """
    o = case.tensors["o"].double()
    rotated, size = _rope(o, case.tensors["cos_sin"], inverse=True)
    weight = dense_weight(case, "wo_a")  # [G, R, J]
    groups = rotated.reshape(len(o), len(weight), -1)
    want = torch.einsum("tgj,grj->tgr", groups, weight).flatten(1)
    spread = size.reshape(groups.shape).square()
    deviation = torch.einsum("tgj,grj->tgr", spread, weight.square()).flatten(1).sqrt()
    got = case.tensors["out"]
    allowed = _DEVIATIONS * _E4M3_DEVIATION * deviation + _unit(got.dtype) * want.abs()
    return _distance(case, {"out": (got, want, allowed)})


def _mixes(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return streams, products of the normed streams with ``fn``, and roots of summed squares."""
    h, fn = (each.double() for each in case.take("h", "fn"))
    flat = _rms(h.flatten(1), case.number("norm_eps"))
    return h, flat @ fn.T, (flat.square() @ fn.square().T).sqrt()


def _hc_pre(case: Case) -> Finding:
    """Gates from the normed streams, Sinkhorn, the collapsed streams and their norm.

    A kernel that computes the streams as well (``fused``) may use them before their rounding.
    """
    h, mix, spread = _mixes(case)
    base, scale = (each.double() for each in case.take("base", "scale"))
    n, eps, hc_eps = h.shape[1], case.number("norm_eps"), case.number("hc_eps")
    # Both factors are rounded to TF32, independently; the sum is float32.
    unit = _unit(case.tensors["y"].dtype)
    early = unit / 2 if case.numbers.get("fused") else 0.0
    deviation = math.sqrt((2 * _TF32**2 + early**2) / 3)
    error = _DEVIATIONS * deviation * spread + 1e-6 * mix.abs()
    parts = [each.split([n, n, n * n], -1) for each in (mix, error, base.unsqueeze(0))]
    (pre, post, comb), errors, bases = parts
    e_pre, e_post, e_comb = (each * float(s) for each, s in zip(errors, scale.abs(), strict=True))
    pre = torch.sigmoid(pre * scale[0] + bases[0]) + hc_eps
    post = 2 * torch.sigmoid(post * scale[1] + bases[1])
    comb = (comb * scale[2] + bases[2]).unflatten(1, (n, n)).softmax(-1) + hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    for _ in range(int(case.numbers["iters"]) - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    y = (pre.unsqueeze(-1) * h).sum(1)
    size = (pre.unsqueeze(-1) * h.abs()).sum(1)
    shift = (e_pre.unsqueeze(-1) * h.abs()).sum(1)
    got = case.tensors["y"]
    allowed = shift + unit / 2 * y.abs() + (8 * _EPS32 + early) * size
    weight = case.tensors.get("norm_weight")
    if weight is not None:
        root = torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
        # The norm of an inexact y adds an error of the same size along y.
        along = (allowed * y.abs()).mean(-1, keepdim=True) * root.square()
        y = y * root * weight.double()
        allowed = allowed * root * weight.double().abs() + (along + 1.5 * unit) * y.abs()
    # A doubly stochastic scaling amplifies at most the errors of a row and of a column.
    worst = e_comb.amax(-1).view(-1, 1, 1)
    wanted = {
        "y": (got, y, allowed + 1e-30),
        "post": (case.tensors["post"].view_as(post), post, e_post * post / 2 + 4 * _EPS32),
        "comb": (case.tensors["comb"].view_as(comb), comb, 4 * worst * comb + 64 * _EPS32),
    }
    return _distance(case, wanted)


def _at_rest(case: Case) -> Finding:
    """Written rows are unchanged, and none of their codes is NaN.

    A row whose slot has changed is not judged.
    """
    before, after = case.tensors["before"], case.tensors["after"]
    moved = case.tensors["slots"] != case.tensors["slots_before"]
    before = torch.where(moved.unsqueeze(1), after, before)
    wrong = before != after
    count = int(case.numbers["codes"])
    nan = (after[:, :count] & 0x7F) == 0x7F
    bad = wrong.any(1) | nan.any(1)
    if not bool(bad.any()):
        return _right(case)
    row = int(bad.nonzero()[0])
    where = f"{case.numbers['what']} entry {int(case.tensors['entries'][row])}"
    if not bool(wrong[row].any()):
        return _wrong(case, row, f"{where}: a code is NaN")
    first = int(wrong[row].nonzero()[0])
    what = (
        f"{where}: {int(wrong[row].sum())} of {before.shape[1]} bytes differ from step "
        f"{int(case.tensors['since'][row])}; first [{first}]: {int(before[row, first])}, now "
        f"{int(after[row, first])}"
    )
    names = [f"entry {int(entry)}" for entry in case.tensors["entries"]]
    looks = same_bytes(after, row, names)
    rows = f"{int(bad.sum())} of {len(bad)} rows looked at again"
    return _wrong(case, row, what, f"{rows}: {looks}" if looks else rows)


def _hc_post(case: Case) -> Finding:
    """Streams after a sublayer: float32 sums, one rounding."""
    u, h, post, comb = (each.double() for each in case.take("u", "h", "post", "comb"))
    post, comb = post.view(h.shape[:2]), comb.view(len(h), h.shape[1], h.shape[1])
    want = post.unsqueeze(-1) * u.unsqueeze(1) + torch.einsum("tij,tid->tjd", comb, h)
    size = (post.unsqueeze(-1) * u.unsqueeze(1)).abs() + torch.einsum(
        "tij,tid->tjd", comb.abs(), h.abs()
    )
    got = case.tensors["streams"]
    return _distance(
        case, {"streams": (got, want, _unit(got.dtype) / 2 * want.abs() + 8 * _EPS32 * size)}
    )


def _hc_head(case: Case) -> Finding:
    """Streams collapsed after the last layer: float32 sums, one rounding."""
    h, mix, spread = _mixes(case)
    base, scale = (each.double() for each in case.take("base", "scale"))
    error = _DEVIATIONS * _TF32 * spread * scale.abs()
    pre = torch.sigmoid(mix * scale + base) + case.number("hc_eps")
    want = (pre.unsqueeze(-1) * h).sum(1)
    size = ((error + 8 * _EPS32).unsqueeze(-1) * h.abs()).sum(1)
    got = case.tensors["y"]
    return _distance(case, {"y": (got, want, size + _unit(got.dtype) / 2 * want.abs() + 1e-30)})


def _linear(case: Case) -> Finding:
    """A block of a linear layer's outputs: float32 sums, one rounding of the result.

    An FP8 layer also rounds its input to e4m3, by groups of 128 channels: independent errors, which
    add as squares. A wrong scale of a block of the weight moves many outputs by less than eight
    deviations each, but their mean square by far more than roundings can: over R outputs whose
    errors have correlations c, the expected mean square is at most one, and its deviation at most
    ``sqrt(2 sum c^2) / R``.
    """
    x, weight = case.tensors["x"].double(), dense_weight(case, "weight")
    got = case.tensors["y"]
    want, sizes = x @ weight.T, x.abs() @ weight.abs().T
    unit = float(case.numbers.get("unit", _unit(got.dtype)))
    # Partial sums may be rounded as the result is (split-K).
    deviation = unit / 2 / math.sqrt(3) * (x.square() @ weight.square().T).sqrt()
    allowed = unit * want.abs() + _DEVIATIONS * deviation
    allowed += 2 * math.sqrt(x.shape[1]) * _EPS32 * sizes + 1e-30
    pairs: dict[str, tuple[Tensor, ...]] = {}
    if "weight_scale" in case.tensors:
        # Below e4m3's normal numbers the absolute error is constant.
        groups = x.unflatten(1, (-1, 128)).abs()
        least = groups.amax(-1, keepdim=True) * 2.0**-13
        squares = torch.maximum(groups, least).square().flatten(1)
        variance = _E4M3_DEVIATION**2 * (squares @ weight.square().T)
        allowed += _DEVIATIONS * variance.sqrt() + _FP8_SUM * sizes
        variance += deviation.square() + (unit / 2 * want.abs()).square() / 3 + 1e-60
        mean = ((got.double() - want).square() / variance).mean(1)
        scaled = squares.sqrt().unsqueeze(1) * (_E4M3_DEVIATION * weight)
        scaled = (scaled / variance.sqrt().unsqueeze(-1)).float()
        correlation = (scaled @ scaled.mT).square().sum((1, 2)).clamp(min=weight.shape[0])
        most = 1 + _DEVIATIONS * (2 * correlation).sqrt() / weight.shape[0]
        pairs["mean square of all"] = mean, torch.zeros_like(mean), most
    return _distance(case, {"y": (got, want, allowed), **pairs})


def _experts(case: Case) -> Finding:
    """Outputs of the routed experts of one token: SwiGLU between two products, and their sum.

    The inputs of a product may be rounded to e4m3. An input's rounding error reaches an output
    through both halves of every expert, linearly, so that its whole effect is one number; errors of
    different channels are independent. Gates, and SwiGLU's result, are rounded to bf16 as well.
    """
    x, unit = case.tensors["x"].double().flatten(), _unit(case.tensors["x"].dtype) / 2
    limit, coded = case.number("limit"), "w13_scale" in case.tensors
    enters = math.sqrt((_E4M3_DEVIATION**2 if coded else 0.0) + unit**2 / 3)
    got = case.tensors["out"].flatten()
    want = torch.zeros(len(got), dtype=torch.float64)
    if "shared" in case.tensors:
        want += case.tensors["shared"].double().flatten()
    size, through = want.abs(), torch.zeros(len(got), len(x), dtype=torch.float64)
    variance = torch.zeros_like(want)
    for each, factor in enumerate(case.tensors["weights"].double().flatten()):
        first, second = (_expert_weight(case, name, each) for name in ("w13", "w2"))
        half = len(first) // 2
        products = first @ x
        gate, up = products[:half].clamp(max=limit), products[half:].clamp(-limit, limit)
        share = torch.sigmoid(gate)
        inner, open_gate = gate * share * up, products[:half] < limit
        slopes = (
            (share + gate * share * (1 - share)) * up * open_gate,
            gate * share * (products[half:].abs() < limit),
        )
        second = second * factor
        want += second @ inner
        size += second.abs() @ inner.abs()
        through += (second * slopes[0]) @ first[:half] + (second * slopes[1]) @ first[half:]
        rounded = sum((s * p).square() for s, p in zip(slopes, products.split(half), strict=True))
        variance += second.square() @ (rounded * unit**2 / 3 + (enters * inner).square())
        variance += (second @ inner).square() * unit**2 / 3
    groups = x.abs().view(-1, 128) if coded else x.abs().unsqueeze(1)
    least = groups.amax(-1, keepdim=True) * 2.0**-13
    variance += through.square() @ (enters * torch.maximum(groups, least)).square().flatten()
    allowed = _DEVIATIONS * variance.sqrt() + 2 * unit * want.abs()
    allowed += (_FP8_SUM if coded else 2 * math.sqrt(len(x)) * _EPS32) * size + 1e-30
    return _distance(case, {"out": tuple(y.unsqueeze(0) for y in (got, want, allowed))})


def _expert_weight(case: Case, name: str, expert: int) -> Tensor:
    """Decode a matrix of one expert to float64: plain, or MXFP4."""
    weight, scale = case.tensors[name][expert], case.tensors.get(f"{name}_scale")
    if scale is None:
        return weight.double()
    return dequantize_mxfp4(weight.view(torch.uint8), scale[expert].view(torch.uint8)).double()


def _router(case: Case) -> Finding:
    """The experts of a token and their weights, from the router's logits or its inputs.

    ``sqrt(softplus(logit))`` is the score; the best by score plus bias are chosen, or those that
    are ``known`` by the token's id; weights are their scores, normed to the sum ``scale``.
    """
    if "logits" in case.tensors:
        logits = case.tensors["logits"].double()
        error = torch.zeros_like(logits)
    else:
        x, weight = case.tensors["x"].double(), case.tensors["weight"].double()
        logits = x @ weight.T
        error = 2 * math.sqrt(x.shape[1]) * _EPS32 * (x.abs() @ weight.abs().T)
    # Bounds of log(1 + exp) in float32 in any formulation, then a root and a sum.
    low, high = (
        (torch.nn.functional.softplus(each, threshold=40) + by).clamp(min=0).sqrt()
        for each, by in ((logits - error, -_EPS32), (logits + error, _EPS32))
    )
    low, high = low * (1 - 8 * _EPS32), high * (1 + 8 * _EPS32)
    ids, weights = case.tensors["ids"].long(), case.tensors["weights"]
    for token, row in enumerate(ids):
        if wrong := _wrong_experts(case, token, row, low[token], high[token]):
            return _wrong(case, token, wrong)
    scores = torch.nn.functional.softplus(logits, threshold=40).sqrt().gather(1, ids)
    spread = (high - low).gather(1, ids)
    total = scores.sum(1, keepdim=True)
    want = scores / total * case.number("scale")
    allowed = (spread / scores + spread.sum(1, keepdim=True) / total + 8 * _EPS32) * want
    return _distance(case, {"weight": (weights, want, allowed + 1e-30)})


def _wrong_experts(case: Case, token: int, ids: Tensor, low: Tensor, high: Tensor) -> str:
    """Explain why these cannot be a token's experts; "" if they can."""
    chosen = ids.tolist()
    if len(set(chosen)) < len(chosen) or min(chosen) < 0 or max(chosen) >= len(low):
        return f"experts {chosen}: one twice, or none"
    known = case.tensors.get("known")
    if known is not None:
        wanted = known[token].tolist()
        return "" if sorted(wanted) == sorted(chosen) else f"experts {chosen}, known are {wanted}"
    bias = case.tensors["bias"].double()
    others = torch.ones_like(low, dtype=torch.bool)
    others[ids] = False
    size = _EPS32 * (high + bias.abs())
    worst = int(ids[(high + bias + size)[ids].argmin()])
    best = int((low + bias - size).masked_fill(~others, -math.inf).argmax())
    left, kept = float((low + bias - size)[best]), float((high + bias + size)[worst])
    if kept >= left:
        return ""
    return f"expert {worst} chosen with {kept:.6g} at most, {best} left out with {left:.6g}"


CHECKS: dict[str, Callable[[Case], Finding]] = {
    "at_rest": _at_rest,
    "attention": _attention,
    "compressed_row": _compressed_row,
    "compressor_state": _compressor_state,
    "experts": _experts,
    "hc_head": _hc_head,
    "hc_post": _hc_post,
    "hc_pre": _hc_pre,
    "index_query": _index_query,
    "linear": _linear,
    "projection": _projection,
    "qkv_norm": _qkv_norm,
    "query": _query,
    "router": _router,
    "selection": _selection,
    "slots": _slots,
    "window_row": _window_row,
}

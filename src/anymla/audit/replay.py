"""Replay of a case on anymla's own backends, to compare their results with the engine's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anymla.audit.case import Case
from anymla.audit.case_forms import check_form
from anymla.audit.checks import Finding, attended, dense_weight, judge
from anymla.formats.interchange import fnuz_codes
from anymla.formats.page_layout import INDEX_FP8, MAIN_FP8, get_layout
from anymla.ops.attention import CacheRows, sparse_attention
from anymla.ops.compressor import compress_norm_rope_insert, save_partial_states
from anymla.ops.hyper_connection import hc_head, hc_post, hc_pre
from anymla.ops.indexer import indexer_q_rope_quant, select_topk
from anymla.ops.linear import fp8_block_linear, grouped_output_projection, linear
from anymla.ops.moe import experts, route_biased, route_hash
from anymla.ops.norm_rope import fused_q_kv_rmsnorm, qnorm_rope_kv_insert, rope
from anymla.ops.registry import BackendUnavailable

BACKENDS = ("reference", "torch", "triton")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Judgement of one result of a case.

    Attributes:
        who: "engine", or the backend of anymla's operation.
        found: finding of the check; None if that backend cannot compute the case.
        why: reason why it cannot, or "".
    """

    who: str
    found: Finding | None
    why: str = ""


def replay(case: Case, device: torch.device | str = "cpu") -> list[Verdict]:
    """Judge the engine's result, and the results of all backends that compute the method.

    Args:
        case: case as dumped.
        device: device of the backends' computations.

    Raises:
        ValueError: see ``judge``; or tensors and numbers do not fit each other, see ``check_form``.
    """
    check_form(case)
    verdicts = [Verdict("engine", _judged(case))]
    for backend in BACKENDS if case.method in _METHODS else ():
        try:
            again = recompute(case.to(device), backend).to("cpu")
        except (*_UNFIT, BackendUnavailable, NotImplementedError, ImportError) as error:
            verdicts.append(Verdict(backend, None, " ".join(str(error).split())[:200]))
        else:
            verdicts.append(Verdict(backend, _judged(again)))
    return verdicts


# Errors that torch and operations raise for values that no form check excludes.
_UNFIT = (ArithmeticError, IndexError, RuntimeError, TypeError, ValueError)


def _judged(case: Case) -> Finding:
    try:
        return judge(case)
    except _UNFIT as error:
        why = " ".join(str(error).split())[:200]
        raise ValueError(f"a case of {case.method} cannot be judged: {why}") from error


def recompute(case: Case, backend: str) -> Case:
    """Return the case with the results of anymla's operation on that backend.

    Raises:
        ValueError: no operation computes this method, or the case lacks an input.
        BackendUnavailable: the backend cannot compute it.
    """
    try:
        made = _METHODS[case.method](case, backend)
    except KeyError as error:
        raise ValueError(f"a case of {case.method} lacks {error.args[0]!r}") from None
    return dataclasses.replace(case, tensors=case.tensors | made)


def _places(case: Case) -> Tensor:
    """Return the tokens' row numbers in a table with one row for each token."""
    return torch.arange(len(case.tensors["cos_sin"]), device=case.tensors["cos_sin"].device)


def _empty_page(layout: str, entries: int, device: torch.device) -> Tensor:
    return get_layout(layout).allocate(1, max(1, entries), device)


def _page(layout: str, data: Tensor, scales: Tensor) -> Tensor:
    """Build a cache of one page that holds these rows."""
    cache = _empty_page(layout, len(data), data.device)
    planes = get_layout(layout).planes(cache)
    assert planes[1] is not None
    planes[0][0, : len(data)], planes[1][0, : len(data)] = data, scales
    return cache


def _read(layout: str, cache: Tensor, entries: int) -> dict[str, Tensor]:
    data, scales = get_layout(layout).planes(cache)
    assert scales is not None
    return {"data": data[0, :entries].clone(), "scales": scales[0, :entries].clone()}


def _qkv_norm(case: Case, backend: str) -> dict[str, Tensor]:
    q, row, q_weight, weight = case.take("qr", "kv", "qr_weight", "kv_weight")
    eps = case.number("eps")
    qr, kv = fused_q_kv_rmsnorm(q, row, q_weight, weight, eps, backend=backend)
    return {"qr_out": qr, "kv_out": kv}


def _insert(case: Case, backend: str) -> dict[str, Tensor]:
    places, table = _places(case), case.tensors["cos_sin"]
    count = len(places)
    like: dict[str, Any] = {"dtype": torch.bfloat16, "device": places.device}
    q = case.tensors.get("q", torch.zeros(count, 1, 512, **like))
    kv = case.tensors.get("kv", torch.zeros(count, 512, **like))
    cache = _empty_page(MAIN_FP8, count, places.device)
    eps = float(case.numbers.get("eps", 1e-6))
    out = qnorm_rope_kv_insert(q.clone(), kv, cache, places, places, table, eps, backend=backend)
    return {"out": out} if case.method == "query" else _read(MAIN_FP8, cache, count)


def _compressor_state(case: Case, backend: str) -> dict[str, Tensor]:
    kv, score = case.tensors["kv_score"].float().chunk(2, dim=-1)
    positions = torch.tensor(case.positions, device=kv.device)
    state = torch.zeros(1, len(kv), 2 * kv.shape[1], device=kv.device)
    slots = torch.arange(len(kv), device=kv.device)
    ape = case.tensors["ape"].float()
    ratio = int(case.numbers["ratio"])
    save_partial_states(
        kv, score, ape, positions, state, slots, compress_ratio=ratio, backend=backend
    )
    return {"state": state[0]}


def _compressed_row(case: Case, backend: str) -> dict[str, Tensor]:
    rows = []
    layout, ratio = str(case.numbers["layout"]), int(case.numbers["ratio"])
    for token in range(len(case.tensors["state"])):
        present = case.tensors["present"][token]
        state = case.tensors["state"][token][present].float()
        last, device = len(state) - 1, state.device
        table = state.new_zeros(len(state), case.tensors["cos_sin"].shape[1])
        table[last + 1 - ratio] = case.tensors["cos_sin"][token]
        cache = _empty_page(layout, 1, device)
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        compress_norm_rope_insert(
            state.unsqueeze(0),
            zero.int().unsqueeze(0),
            zero + last,
            zero.int(),
            zero + last,
            case.tensors["norm_weight"],
            case.number("eps"),
            table,
            cache,
            zero,
            compress_ratio=ratio,
            overlap=bool(case.numbers["overlap"]),
            layout=layout,
            backend=backend,
        )
        rows.append(_read(layout, cache, 1))
    return {name: torch.cat([row[name] for row in rows]) for name in ("data", "scales")}


def _index_query(case: Case, backend: str) -> dict[str, Tensor]:
    codes, _, weights = indexer_q_rope_quant(
        case.tensors["q"],
        case.tensors["weights"],
        _places(case),
        case.tensors["cos_sin"],
        softmax_scale=case.number("softmax_scale"),
        head_scale=case.number("head_scale"),
        backend=backend,
    )
    codes = codes.view(torch.uint8)
    if case.numbers.get("fnuz"):
        return {"codes": fnuz_codes(codes), "weights_out": weights * 2}
    return {"codes": codes, "weights_out": weights}


def _selection(case: Case, backend: str) -> dict[str, Tensor]:
    cache = _page(INDEX_FP8, case.tensors["data"], case.tensors["scales"])
    count, device = len(case.tensors["data"]), cache.device
    q = case.tensors["q"]
    if q.dtype == torch.float8_e4m3fnuz:  # twice the value, which changes no choice
        q = q.float() * 2
    chosen = select_topk(
        q.unsqueeze(0).to(torch.float8_e4m3fn),
        cache,
        case.tensors["weights"].unsqueeze(0),
        torch.tensor([count], dtype=torch.int32, device=device),
        torch.zeros(1, 1, dtype=torch.int32, device=device),
        int(case.numbers["k"]),
        backend=backend,
    )
    return {"chosen": chosen[0]}


def _attention(case: Case, backend: str) -> dict[str, Tensor]:
    found = attended(case.tensors)

    def listed(data: Tensor, scales: Tensor) -> CacheRows:
        indices = torch.arange(len(data), dtype=torch.int32, device=data.device)
        return CacheRows(_page(MAIN_FP8, data, scales), MAIN_FP8, indices.unsqueeze(0))

    out, _ = sparse_attention(
        case.tensors["q"].unsqueeze(0),
        [listed(*found[name]) for name in ("window", "entries") if name in found],
        sink=case.tensors["sink"],
        scale=float(case.numbers["scale"]),
        backend=backend,
    )
    if (table := case.tensors.get("cos_sin")) is not None:
        first = torch.zeros(1, dtype=torch.int64, device=out.device)
        out = rope(out, first, table.float(), inverse=True, backend=backend)
    return {"out": out[0]}


def _projection(case: Case, backend: str) -> dict[str, Tensor]:
    weight = dense_weight(case, "wo_a").to(case.tensors["o"].dtype)
    table, places = case.tensors["cos_sin"], _places(case)
    z = grouped_output_projection(case.tensors["o"], places, table, weight, backend=backend)
    return {"out": z}


def _linear(case: Case, backend: str) -> dict[str, Tensor]:
    x, weight = case.tensors["x"], case.tensors["weight"]
    scale = case.tensors.get("weight_scale")
    if scale is None:
        return {"y": linear(x.to(weight.dtype), weight, backend=backend)}
    scale = scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale
    return {"y": fp8_block_linear(x, weight, scale, quantize_activations=True, backend=backend)}


def _experts(case: Case, backend: str) -> dict[str, Tensor]:
    x, w13, w2 = case.take("x", "w13", "w2")
    half, count = w13.shape[1] // 2, w2.shape[1]
    plain = "w13_scale" not in case.tensors
    # Only some of the outputs are in the case; the values of the others do not matter.
    names = ("w2",) if plain else ("w2", "w2_scale")
    down = {n: _with_rows(case.tensors[n], x.shape[1]) for n in names}
    lists = {
        "w1": w13[:, :half],
        "w3": w13[:, half:],
        "w2": down["w2"],
        **({} if plain else _scales(case.tensors["w13_scale"], half, down["w2_scale"])),
    }
    parts: dict[str, Any] = {name: list(part.contiguous().unbind()) for name, part in lists.items()}
    parts |= {name: [] for name in ("s1", "s3", "s2") if plain}
    shared = case.tensors.get("shared")
    out = experts(
        x,
        torch.arange(len(w13), dtype=torch.int32, device=x.device).unsqueeze(0),
        case.tensors["weights"].float().view(1, -1),
        **parts,
        weight_format="plain" if plain else "mxfp4",
        swiglu_limit=case.number("limit"),
        quantize_activations=not plain,
        shared=None if shared is None else _with_rows(shared, x.shape[1], 1),
        backend=backend,
    )
    return {"out": out[:, :count]}


def _with_rows(tensor: Tensor, count: int, dim: int = 1) -> Tensor:
    """Pad with zeros to ``count`` rows."""
    shape = list(tensor.shape)
    shape[dim] = count - shape[dim]
    return torch.cat((tensor, tensor.new_zeros(shape)), dim)


def _scales(first: Tensor, half: int, second: Tensor) -> dict[str, Tensor]:
    return {"s1": first[:, :half], "s3": first[:, half:], "s2": second}


def _router(case: Case, backend: str) -> dict[str, Tensor]:
    scale = case.number("scale")
    if "logits" in case.tensors:
        x = case.tensors["logits"].float()
        gate = torch.eye(x.shape[1], device=x.device)
    else:
        x, gate = case.tensors["x"], case.tensors["weight"]
    known = case.tensors.get("known")
    if known is not None:
        places = torch.arange(len(x), device=x.device)
        ids, weights = route_hash(x, gate, places, known.long(), scale=scale, backend=backend)
    else:
        k = int(case.numbers["k"])
        bias = case.tensors["bias"].float()
        ids, weights = route_biased(x, gate, bias, k=k, scale=scale, backend=backend)
    return {"ids": ids, "weights": weights}


_GATES = ("h", "fn", "base", "scale")


def _epsilons(case: Case) -> dict[str, Any]:
    return {name: case.number(name) for name in ("norm_eps", "hc_eps")}


def _hc_pre(case: Case, backend: str) -> dict[str, Tensor]:
    y, post, comb = hc_pre(
        *case.take(*_GATES),
        **_epsilons(case),
        iters=int(case.numbers["iters"]),
        norm_weight=case.tensors.get("norm_weight"),
        backend=backend,
    )
    return {"y": y, "post": post, "comb": comb}


def _hc_post(case: Case, backend: str) -> dict[str, Tensor]:
    u, h, post, comb = case.take("u", "h", "post", "comb")
    n = h.shape[1]
    gates = post.view(-1, n).contiguous(), comb.view(-1, n, n).contiguous()
    return {"streams": hc_post(u, h, *gates, backend=backend)}


def _hc_head(case: Case, backend: str) -> dict[str, Tensor]:
    return {"y": hc_head(*case.take(*_GATES), **_epsilons(case), backend=backend)}


_METHODS: dict[str, Callable[[Case, str], dict[str, Tensor]]] = {
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
    "query": _insert,
    "router": _router,
    "selection": _selection,
    "window_row": _insert,
}

"""Speed cases of what a layer does besides attention: hyper-connections, projections, experts.

Sizes are those of DeepSeek-V4 Flash: hidden size 4096, 4 streams, 64 heads of 512 in 8 groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from anymla.bench.kernels import TimedCall, backend, normal, step_call
from anymla.bench.random_weights import random_experts
from anymla.formats.fp8_block import quantize_fp8_weight
from anymla.formats.mxfp4 import quantize_mxfp4
from anymla.formats.nvfp4 import quantize_nvfp4
from anymla.formats.quantized_rows import QuantizedRows
from anymla.ops.hyper_connection import hc_head, hc_post, hc_post_pre_norm, hc_pre
from anymla.ops.linear import (
    fp8_block_linear,
    grouped_output_projection,
    grouped_output_projection_fp8,
    inverse_rope_fp8_quant,
    mxfp4_linear,
    nvfp4_linear,
)
from anymla.ops.linear.shapes import V4_FLASH
from anymla.ops.moe import experts, route_biased, swiglu
from anymla.ops.moe.shapes import flash

TOKENS = (1, 64, 4096, 32768)
SITE_TOKENS = (1, 8, 16, 32, 64, 128, 512, 4096, 32768)
LINEAR_TOKENS = (1, 16, 256)
_HIDDEN, _HEADS, _GROUPS = V4_FLASH.hidden, V4_FLASH.heads, V4_FLASH.groups
_DIM, _RANK, _INNER = V4_FLASH.head_dim, V4_FLASH.o_rank, V4_FLASH.inner
_STREAMS, _ROPE = 4, 64
_EXPERTS, _CHOSEN = flash(1).experts, flash(1).experts_per_token
_MIXES = (2 + _STREAMS) * _STREAMS
_WEIGHTS = _MIXES * _STREAMS * _HIDDEN * 4
_GATES = (_STREAMS + _STREAMS * _STREAMS) * 4
_OPTIONS: dict[str, Any] = {"norm_eps": 1e-6, "hc_eps": 1e-6, "backend": backend()}
_Call = Callable[[], object]


def cases(
    tokens: Sequence[int] = TOKENS,
    linear_tokens: Sequence[int] = LINEAR_TOKENS,
    site_tokens: Sequence[int] = SITE_TOKENS,
) -> Iterator[TimedCall]:
    """Yield every operation at every number of tokens, with codes where layers have them."""
    for count in site_tokens:
        yield from _site_cases(count)
    for count in tokens:
        setup = functools.partial(_swiglu, count)
        moved = count * (3 * 2 + 1) * _INNER
        yield step_call(f"swiglu, {count} tokens", setup, moved, count)
        yield from _head_cases(count)
    for count in linear_tokens:
        yield from _linear_cases(count)
        yield from _expert_cases(count)


def _site_cases(tokens: int) -> Iterator[TimedCall]:
    row = 2 * _HIDDEN
    streams, result = _STREAMS * row, row + _HIDDEN
    for name, setup, moved in (
        ("hc_pre", _pre, tokens * (streams + result + _GATES) + _WEIGHTS),
        ("hc_post", _post, tokens * (2 * streams + row + _GATES)),
        (
            "hc_post_pre_norm",
            _fused,
            tokens * (2 * streams + row + result + 2 * _GATES) + _WEIGHTS,
        ),
        ("hc_head", _head, tokens * (streams + row) + _WEIGHTS // 6),
    ):
        label = f"{name}, {tokens} tokens"
        yield step_call(label, functools.partial(setup, tokens), moved, tokens)


def _head_cases(tokens: int) -> Iterator[TimedCall]:
    values = tokens * _HEADS * _DIM
    angles = tokens * (8 + 4 * _ROPE)
    codes = values + values // 128 * 4
    setup = functools.partial(_quantised_heads, tokens)
    moved, label = 2 * values + codes + angles, f"inverse_rope_fp8_quant, {tokens} tokens"
    yield step_call(label, setup, moved, tokens)
    weight = _GROUPS * _RANK * _HEADS // _GROUPS * _DIM
    result = 2 * tokens * _GROUPS * _RANK
    flops = 2 * values * _RANK
    for name, projected, moved in (
        ("grouped_output_projection", _projected, 2 * values + angles + 2 * weight + result),
        ("grouped_output_projection_fp8", _projected_codes, codes + weight + result),
    ):
        setup = functools.partial(projected, tokens)
        yield TimedCall(f"{name}, {tokens} tokens", setup, moved, flops)


def _linear_cases(tokens: int) -> Iterator[TimedCall]:
    weight, activations = _HIDDEN * _HIDDEN, 2 * 2 * tokens * _HIDDEN
    flops = 2 * tokens * weight
    for kind, stored in (
        ("fp8", weight + weight // 128**2),
        ("fp8, quantised", weight + weight // 128**2),
        ("mxfp4", weight // 2 + weight // 32),
        ("nvfp4", weight // 2 + weight // 16),
    ):
        setup = functools.partial(_linear, kind, tokens)
        label = f"{kind} linear 4096 x 4096, {tokens} tokens"
        yield TimedCall(label, setup, stored + activations, flops)


def _expert_cases(tokens: int) -> Iterator[TimedCall]:
    setup = functools.partial(_route, tokens)
    gate = 2 * _EXPERTS * _HIDDEN
    moved = gate + tokens * (2 * _HIDDEN + 8 * _CHOSEN)
    yield TimedCall(f"route_biased, {tokens} tokens", setup, moved)
    used = min(_EXPERTS, tokens * _CHOSEN)
    matrices = 3 * _INNER * _HIDDEN
    moved = used * (matrices // 2 + matrices // 32) + tokens * 4 * _HIDDEN
    setup = functools.partial(_routed_experts, tokens)
    flops = 2 * tokens * _CHOSEN * matrices
    yield TimedCall(f"experts mxfp4, {tokens} tokens", setup, moved, flops)


def _site(tokens: int) -> dict[str, Any]:
    fn = torch.randn(_MIXES, _STREAMS * _HIDDEN) / 128
    return {
        "h": normal(tokens, _STREAMS, _HIDDEN),
        "fn": fn,
        "base": torch.randn(_MIXES),
        "scale": torch.ones(3),
    }


def _left(tokens: int) -> dict[str, Any]:
    return {
        "u": normal(tokens, _HIDDEN),
        "post": torch.rand(tokens, _STREAMS),
        "comb": torch.rand(tokens, _STREAMS, _STREAMS),
    }


def _codes(tokens: int, width: int) -> dict[str, Any]:
    quantised = QuantizedRows.empty(tokens, width, torch.get_default_device())
    return {"codes": quantised.codes, "code_scales": quantised.scales}


def _norm(tokens: int) -> dict[str, Any]:
    return {"norm_weight": normal(_HIDDEN), **_codes(tokens, _HIDDEN)}


def _pre(tokens: int) -> _Call:
    site, norm = _site(tokens), _norm(tokens)
    return functools.partial(hc_pre, **site, **norm, **_OPTIONS, iters=20)


def _post(tokens: int) -> _Call:
    h = normal(tokens, _STREAMS, _HIDDEN)
    return functools.partial(hc_post, h=h, **_left(tokens), backend=backend())


def _fused(tokens: int) -> _Call:
    given = {**_site(tokens), **_left(tokens), **_norm(tokens)}
    return functools.partial(hc_post_pre_norm, **given, **_OPTIONS, iters=20)


def _head(tokens: int) -> _Call:
    site = _site(tokens)
    head = {"fn": site["fn"][:4], "base": site["base"][:4], "scale": site["scale"][:1]}
    return functools.partial(hc_head, site["h"], **head, **_OPTIONS)


def _swiglu(tokens: int) -> _Call:
    gate, up = (normal(tokens, _INNER) for _ in range(2))
    codes = _codes(tokens, _INNER)
    return functools.partial(swiglu, gate, up, 10.0, **codes, backend=backend())


def _heads(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    positions = torch.arange(tokens)
    table = torch.rand(max(2, tokens), _ROPE)
    return normal(tokens, _HEADS, _DIM), positions, table


def _quantised_heads(tokens: int) -> _Call:
    heads = _heads(tokens)
    return functools.partial(inverse_rope_fp8_quant, *heads, n_groups=_GROUPS, backend=backend())


def _projected(tokens: int) -> _Call:
    wo_a = normal(_GROUPS, _RANK, _HEADS // _GROUPS * _DIM)
    heads = _heads(tokens)
    return functools.partial(grouped_output_projection, *heads, wo_a, backend=backend())


def _projected_codes(tokens: int) -> _Call:
    heads = _heads(tokens)
    codes, scales = inverse_rope_fp8_quant(*heads, n_groups=_GROUPS, backend=backend())
    pairs = [
        quantize_fp8_weight(torch.randn(_RANK, _HEADS // _GROUPS * _DIM)) for _ in range(_GROUPS)
    ]
    weight, weight_scales = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    return functools.partial(
        grouped_output_projection_fp8, codes, scales, weight, weight_scales, backend=backend()
    )


def _linear(kind: str, tokens: int) -> _Call:
    x = normal(tokens, _HIDDEN)
    weight = torch.randn(_HIDDEN, _HIDDEN)
    if kind == "nvfp4":
        return functools.partial(nvfp4_linear, x, *quantize_nvfp4(weight), backend=backend())
    if kind == "mxfp4":
        return functools.partial(mxfp4_linear, x, *quantize_mxfp4(weight), backend=backend())
    stored = quantize_fp8_weight(weight)
    quantize = kind.endswith("quantised")
    return functools.partial(
        fp8_block_linear, x, *stored, quantize_activations=quantize, backend=backend()
    )


def _route(tokens: int) -> _Call:
    x, gate = normal(tokens, _HIDDEN), normal(_EXPERTS, _HIDDEN)
    bias = torch.zeros(_EXPERTS)
    return functools.partial(route_biased, x, gate, bias, k=_CHOSEN, scale=1.5, backend=backend())


def _routed_experts(tokens: int) -> _Call:
    ids = torch.rand(tokens, _EXPERTS).argsort(1)[:, :_CHOSEN].int()
    return functools.partial(
        experts,
        normal(tokens, _HIDDEN),
        ids,
        torch.rand(tokens, _CHOSEN),
        **random_experts(_EXPERTS, _HIDDEN, _INNER),
        weight_format="mxfp4",
        swiglu_limit=10.0,
        quantize_activations=False,
        backend=backend(),
    )

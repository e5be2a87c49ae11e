"""Hyper-connection calls whose kernels are built, and the requirements on their code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.ops.device import Target
from anymla.ops.hyper_connection.interface import (
    hc_collapse_norm,
    hc_gates,
    hc_head,
    hc_post,
    hc_post_backward,
    hc_post_pre_norm,
    hc_pre,
    hc_pre_backward,
)
from anymla.ops.hyper_connection.shapes import (
    FEW,
    TOKENS,
    V4_FLASH,
    V4_PRO,
    V41_FLASH,
    StreamsShape,
)
from lab.build import Build, Judgement, dtype_name, empty, float32

_EPS: dict[str, Any] = {"norm_eps": 1e-6, "hc_eps": 1e-6}


def calls(target: Target) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield named calls, with tensors on the meta device."""
    for name, shape in (("V4-Flash", V4_FLASH), ("V4-Pro", V4_PRO)):
        for tokens in TOKENS:
            site = functools.partial(_site, shape, tokens, torch.bfloat16)
            yield f"{name}, {tokens} tokens", site
            if tokens in FEW:
                yield f"{name}, {tokens} tokens, codes", functools.partial(site, coded=True)
                yield f"{name}, {tokens} tokens, no norm", functools.partial(_plain, shape, tokens)
    for tokens in TOKENS:
        yield f"V4.1-Flash, {tokens} tokens", functools.partial(_delayed, V41_FLASH, tokens)
    for dtype in (torch.bfloat16, torch.float32):
        label = f"V4-Flash, gradients, {dtype_name(dtype)}"
        yield label, functools.partial(_differentiate, V4_FLASH, dtype)
    for dtype in (torch.float16, torch.float32):
        for tokens in (1, 33, 129, 513):
            label = f"V4-Flash, {tokens} tokens, {dtype_name(dtype)}"
            yield label, functools.partial(_site, V4_FLASH, tokens, dtype)


def _site(shape: StreamsShape, tokens: int, dtype: torch.dtype, *, coded: bool = False) -> None:
    """Call a model's first site, a later site, and the head."""
    n, d = shape.streams, shape.hidden
    h, u = empty((tokens, n, d), dtype=dtype), empty((tokens, d), dtype=dtype)
    post, comb = float32((tokens, n)), float32((tokens, n, n))
    site, norm = _weights(shape, shape.mixes, 3), empty(d, dtype=dtype)
    options = {**_EPS, "iters": 20}
    if coded:
        options["codes"] = empty((tokens, d), dtype=torch.uint8)
        options["code_scales"] = float32((tokens, -(-d // FP8_BLOCK)))
    # At the first site, every stream is the embedding.
    hc_pre(u[:, None].expand(-1, n, -1), *site, norm_weight=norm, **options)
    hc_post_pre_norm(u, h, post, comb, *site, norm, **options)
    hc_post(u, h, post, comb)
    hc_head(h, *_weights(shape, n, 1), **_EPS)


def _delayed(shape: StreamsShape, tokens: int) -> None:
    """Call a model's first delayed site, a later one, and the head's streams for a drafter."""
    n, d = shape.streams, shape.hidden
    h, u = (empty(size, dtype=torch.bfloat16) for size in ((tokens, n, d), (tokens, d)))
    options: dict[str, Any] = {"norm_eps": 1e-20, "hc_eps": 1e-6, "iters": 20}
    pre, norm = float32((tokens, n)), float32(d)
    for streams in (u[:, None].expand(-1, n, -1), h):
        hc_gates(streams, *_weights(shape, shape.mixes, 3), **options)
        for weight in (norm, None):
            hc_collapse_norm(streams, pre, weight, norm_eps=1e-20)
    hc_post(u, h, pre, float32((tokens, n, n)))


def _differentiate(shape: StreamsShape, dtype: torch.dtype) -> None:
    """Differentiate the expansion of many tokens, a site, a delayed site's gates and the head."""
    tokens, n, d = 4096, shape.streams, shape.hidden
    h, u = empty((tokens, n, d), dtype=dtype), empty((tokens, d), dtype=dtype)
    post, comb, options = float32((tokens, n)), float32((tokens, n, n)), {**_EPS, "iters": 20}
    hc_post_backward(h, u, h, post, comb)
    site = h, *_weights(shape, shape.mixes, 3)
    hc_pre_backward(*site, u, None, post, comb, norm_weight=float32(d), **options)
    hc_pre_backward(*site, None, post, post, comb, **options)
    hc_pre_backward(h, *_weights(shape, n, 1), u, None, None, None, **options)


def _plain(shape: StreamsShape, tokens: int) -> None:
    """Call a site whose sublayer applies its norm elsewhere."""
    h = empty((tokens, shape.streams, shape.hidden), dtype=torch.bfloat16)
    hc_pre(h, *_weights(shape, shape.mixes, 3), iters=20, **_EPS)


def _weights(shape: StreamsShape, mixes: int, scales: int) -> tuple[Tensor, Tensor, Tensor]:
    width = shape.streams * shape.hidden
    return float32((mixes, width)), float32(mixes), float32(scales)


def judgement(build: Build, target: Target) -> Judgement:
    """Return the accepted spills and required matrix instructions of a build."""
    single = build.types.get("h") == "*fp32"
    if build.name == "mix_kernel":
        return Judgement(False if single else "bf16", spills=16)
    if build.name == "many_kernel":
        return Judgement("bf16")
    if build.name == "streams_backward_kernel":
        # Weights and sums of four streams fill the registers, float32's and RDNA's more than all.
        spills = (361 if target.narrow else 300) if single else 92 if target.narrow else 48
        return Judgement(False if single else "bf16", spills=spills)
    return Judgement(spills=4 if build.name == "collapse_kernel" and single else 0)

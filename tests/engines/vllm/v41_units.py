"""Parts of V4.1's adapters by themselves, in steps that vLLM's CPU worker does not make:
``v41_units.py ANSWER.json``.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kept_layer import bare
from torch import Tensor, nn

from anymla.engines.vllm import attention, hyper_connection, v41_compressor, v41_rows
from anymla.engines.vllm.v41_engram import AnymlaNgrams
from anymla.formats.fp8_block import dequantize_fp8_weight, quantize_fp8_weight
from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.layers.engram import NgramHash
from anymla.layers.hyper_connection import (
    DelayedHead,
    HyperConnection,
    HyperConnectionOptions,
    Mix,
    Streams,
)

LENGTHS = (17, 12)  # tokens of two requests
CHUNKS = ((5, 4), (1, 1), (4, 0), (7, 7))  # of each in a step; entries close in another chunk
WIDTH, PAGE, STATE_PAGE = 512, 8, 8
EPS = 1e-20


class Steps:
    """Steps of two requests, each with pages of its own in every cache."""

    def __init__(self) -> None:
        self.table = torch.tensor([[3, 1, 6], [2, 5, 4]], dtype=torch.int32)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Requests and positions of the tokens, and where requests start."""
        done = [0, 0]
        for lengths in CHUNKS:
            request = torch.tensor([r for r, n in enumerate(lengths) for _ in range(n)])
            position = [done[r] + i for r, n in enumerate(lengths) for i in range(n)]
            starts = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32)
            yield request.int(), torch.tensor(position), starts
            done = [a + b for a, b in zip(done, lengths, strict=True)]

    def slots(self, request: Tensor, positions: Tensor, page: int, ratio: int = 1) -> Tensor:
        entry = positions // ratio
        slots = self.table[request.long(), entry // page].long() * page + entry % page
        return torch.where((positions + 1) % ratio == 0, slots, -1)


def entries() -> dict[str, float]:
    """Largest differences of entries of ratio 2 in steps from those of the whole text."""
    steps, ratio = Steps(), 2
    scores = [torch.randn(length, 2 * WIDTH) for length in LENGTHS]
    norm = torch.rand(WIDTH) + 0.5
    state = torch.full((8, STATE_PAGE, 2 * WIDTH), torch.nan)
    cache = get_layout(MAIN_FP8).allocate(8, PAGE // ratio)
    angles = torch.arange(64).unsqueeze(1) * 0.1 ** torch.arange(32)
    rotary = types.SimpleNamespace(cos_sin_cache=torch.cat((angles.cos(), angles.sin()), 1).float())
    compressor = bare(
        v41_compressor.AnymlaV41Compressor,
        compress_ratio=ratio,
        head_dim=WIDTH,
        rms_norm_eps=EPS,
        k_cache_prefix="main",
        _static_forward_context={"main": types.SimpleNamespace(kv_cache=cache)},
        norm=types.SimpleNamespace(weight=nn.Parameter(norm)),
        fused_wkv_wgate=types.SimpleNamespace(weight=torch.empty(0)),  # float32, as its latent
        state_cache=types.SimpleNamespace(prefix="state", kv_cache=state),
        ape=torch.zeros(ratio, WIDTH),
    )
    worst = 0.0
    for request, positions, _ in steps:
        metadata = {
            "state": types.SimpleNamespace(
                block_table=steps.table,
                slot_mapping=steps.slots(request, positions, STATE_PAGE),
                token_to_req_indices=request,
            ),
            "main": types.SimpleNamespace(
                slot_mapping=steps.slots(request, positions, PAGE // ratio, ratio)
            ),
        }
        given = torch.stack([scores[r][p] for r, p in zip(request, positions, strict=True)])
        context = types.SimpleNamespace(attn_metadata=metadata)
        with mock.patch.object(v41_compressor, "get_forward_context", lambda c=context: c):
            latent = compressor(given, positions)
            compressor.insert_cache(latent, positions, rotary)
        for token, (r, p) in enumerate(zip(request, positions, strict=True)):
            if p % ratio == 1:
                pair = scores[r][p - 1 : p + 1].double()
                weight = pair[:, WIDTH:].softmax(0)
                pooled = (weight * pair[:, :WIDTH]).sum(0)
                wanted = pooled / pooled.square().mean().sqrt() * norm
                worst = max(worst, float((latent[token] - wanted).abs().max()))
    rows = 0.0
    for r, length in enumerate(LENGTHS):
        closing = torch.arange(1, length, ratio)
        of = torch.full((len(closing),), r)
        read = get_layout(MAIN_FP8).read(
            cache, steps.slots(of, closing, PAGE // ratio, ratio), torch.float32
        )
        pairs = torch.stack([scores[r][p - 1 : p + 1] for p in closing.tolist()]).double()
        pooled = (pairs[..., WIDTH:].softmax(1) * pairs[..., :WIDTH]).sum(1)
        wanted = pooled / pooled.square().mean(-1, keepdim=True).sqrt() * norm
        turned = torch.view_as_complex(wanted[:, -64:].unflatten(-1, (32, 2)).contiguous())
        turn = torch.polar(torch.ones(32, dtype=torch.float64), angles[closing - 1].double())
        wanted[:, -64:] = torch.view_as_real(turned * turn).flatten(-2)
        rows = max(rows, float(((read - wanted).abs() / wanted.abs().amax(-1, True)).max()))
    return {"latent": worst, "rows": rows}


def padded_rows() -> list[int]:
    """Slots that are written of a step whose slots end before its rows."""
    cache = get_layout(MAIN_FP8).allocate(2, PAGE)
    cache.zero_()
    metadata = types.SimpleNamespace(slot_mapping=torch.tensor([9, -1, 3]))
    table = torch.zeros(4, 64)
    v41_rows.insert(
        torch.ones(5, WIDTH),
        torch.arange(5),
        cache,
        metadata,
        table,
        ratio=1,
        layout=MAIN_FP8,
    )
    written = get_layout(MAIN_FP8).read(cache, torch.arange(2 * PAGE), torch.float32)
    return written[:, 0].nonzero().flatten().tolist()


def ngrams(*, kept: bool) -> dict[str, Any]:
    """Whether rows of n-grams in steps are those of the whole text; with how many tokens before.

    vLLM tells the tokens before a step's where they are of the prompt, here the first six; the
    others are read from what earlier steps have kept. Without that all are told.
    """
    steps, vocab, depth = Steps(), 50, 3
    texts = [torch.randint(vocab, (length,)) for length in LENGTHS]
    dead = [torch.arange(length) == 8 for length in LENGTHS]  # an image's
    primes = torch.tensor([[[503, 509], [521, 523], [541, 547]]])
    offsets = torch.cat((torch.zeros(1, dtype=torch.long), primes.flatten().cumsum(0)[:-1]))
    multipliers = torch.randint(1 << 40, (1, depth + 1)) * 2 + 1
    token_map = torch.randperm(vocab).int()
    made = bare(
        AnymlaNgrams,
        token_map=token_map,
        primes=primes,
        offsets=offsets.unsqueeze(0),
        multipliers=multipliers,
        pad_id=7,
        lookback_depth=depth,
        block_size=PAGE,
        use_slot_cache=kept,
        _cache=torch.zeros(8 * PAGE, dtype=torch.int32) if kept else None,
    )
    rows = NgramHash(token_map.long(), 7, multipliers[0], primes[0], offsets.view_as(primes[0]))
    same, told = True, 0
    for request, positions, starts in steps:
        spans = [positions[starts[r] : starts[r + 1]] for r in range(2)]
        before = torch.full((2, depth), -1)
        hidden = torch.zeros(2, depth, dtype=torch.bool)
        for r, span in enumerate(spans):
            for column in range(depth):
                at = int(span[0]) - 1 - column if len(span) else -1
                if at >= 0 and (at < 6 or not kept):
                    before[r, column], hidden[r, column] = texts[r][at], dead[r][at]
                    told += 1
        ids = torch.stack([texts[r][p] for r, p in zip(request, positions, strict=True)])
        gone = torch.stack([dead[r][p] for r, p in zip(request, positions, strict=True)])
        slots = steps.slots(request, positions, PAGE)
        found = made(ids.int(), positions, starts, gone, before.int(), hidden, slots, steps.table)
        for token, (r, p) in enumerate(zip(request.tolist(), positions.tolist(), strict=True)):
            seen = torch.where(dead[r], -1, texts[r])
            previous = [seen[p - k] if p >= k else torch.tensor(-1) for k in range(1, depth + 1)]
            wanted = rows(seen[p : p + 1], torch.stack(previous).unsqueeze(0))
            same &= bool((found[token, 0] == wanted[0]).all())
    return {"same": same, "told": told}


def sites() -> dict[str, bool]:
    """Whether functions give what anymla's delayed sites do, to the bit."""
    streams, hidden, tokens = 4, 64, 5
    options = HyperConnectionOptions(EPS, 1e-6, 20, delayed=True)
    gates = (2 + streams) * streams
    site = HyperConnection(
        fn=torch.randn(gates, streams * hidden),
        base=torch.randn(gates),
        scale=torch.rand(3),
        norm=torch.rand(hidden),
        options=options,
    )
    h = torch.randn(tokens, streams, hidden).bfloat16()
    numbers = site.fn, site.scale, site.base, EPS, 1e-6, 1e-6, 2.0, 20
    norm = {"norm_weight": site.norm, "norm_eps": EPS}
    first = site.enter(Streams(h))
    post, comb, x, pre = hyper_connection.pre_delayed(h, *numbers, x=h[:, 0], **norm)
    found = {"first": _same((post.squeeze(-1), comb, x, pre), first)}
    u = torch.randn(tokens, hidden).bfloat16()
    second = site.enter(Streams(h, u, Mix(first.mix.post, first.mix.comb), first.pre))
    made = hyper_connection.shifted_post_pre(
        u, h, post, comb, *numbers, pre_mix=pre, capture_aux=True, **norm
    )
    residual, post, comb, x, pre, mean = made
    found["second"] = _same((post.squeeze(-1), comb, x, pre), second)
    found["streams"] = torch.equal(residual, second.h)
    found["mean"] = torch.equal(mean, second.h.mean(1))
    head = DelayedHead(norm=site.norm, options=options)
    wanted = head.collapse(Streams(residual, pre=pre))
    found["head"] = torch.equal(hyper_connection.collapse(residual, pre), wanted)
    return found


def _same(ours: tuple[Tensor, ...], entered: Any) -> bool:
    wanted = entered.mix.post, entered.mix.comb, entered.x, entered.pre
    return all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))


def grouped_weight() -> bool:
    """Whether ``wo_a`` in blocks of 32 is decoded as it was stored."""
    codes, scales = quantize_fp8_weight(torch.randn(64, 96), block=32)
    layer = types.SimpleNamespace(
        weight=nn.Parameter(codes.view(torch.float8_e4m3fn), requires_grad=False),
        weight_scale=nn.Parameter(scales.repeat_interleave(32, 0), requires_grad=False),
    )
    wanted = dequantize_fp8_weight(codes, scales, torch.bfloat16, 32)
    return torch.equal(attention._decoded(layer), wanted)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    found = {
        "entries": entries(),
        "padded rows": padded_rows(),
        "n-grams": {name: ngrams(kept=name == "kept") for name in ("kept", "told")},
        "sites": sites(),
        "grouped weight": grouped_weight(),
    }
    Path(sys.argv[1]).write_text(json.dumps(found))

"""Probes of what writes and reads caches: kv_cache, norm_rope, compressor, selection."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from anymla.bench.doctor.trial import Probe, Trial, host
from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.ops.compressor import compress_norm_rope_insert
from anymla.ops.compressor.shapes import V4_RATIO4
from anymla.ops.kv_cache import dequant_gather_slots, quantize_and_insert_k_cache
from anymla.ops.kv_cache.shapes import PAGE_SIZE
from anymla.ops.norm_rope import qnorm_rope_kv_insert
from anymla.ops.norm_rope.shapes import V4_FLASH
from anymla.ops.step_indices import window_rows
from anymla.testing.conformance.expected import EPS, table, v4_config
from anymla.testing.oracle.attention import compress
from anymla.testing.oracle.blocks import rms_norm
from anymla.testing.oracle.rope import frequencies, rotate
from anymla.testing.oracle.row_formats import ROW_FORMATS, read_entries
from anymla.testing.tolerance import accumulation, assert_close, assert_identical, ulps

_DIM, _HEADS = V4_FLASH.channels, V4_FLASH.heads
_WINDOW = 128
_ROW = get_layout(MAIN_FP8).entry_bytes


def probes() -> Iterator[Probe]:
    """In the order in which a layer calls them."""
    many = {"check": 40, "cpu": 4096, "gpu": 65536}
    few = {"check": 5, "cpu": 64, "gpu": 4096}
    yield Probe("kv_cache", "quantise and insert", _insert, many, fp8=True)
    yield Probe("kv_cache", "gather and decode", _gather, many, fp8=True)
    yield Probe("norm_rope", "norm, rope, insert", _norm_rope, few, fp8=True)
    yield Probe("compressor", "pool, norm, rope, insert", _compress, many, fp8=True)
    yield Probe("selection", "window rows", _window, {"check": 300, "cpu": 4096, "gpu": 8192})


def _cache(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A cache with room for ``rows``, full of NaN, and as many of its slots at random."""
    pages = -(-rows // PAGE_SIZE) + 2
    cache = get_layout(MAIN_FP8).allocate(pages, PAGE_SIZE, device, fill=0xFF)
    return cache, torch.randperm(pages * PAGE_SIZE, device=device)[:rows]


def _stored(cache: Tensor, slots: Tensor) -> Tensor:
    """Float64 rows, decoded by the oracle's tables."""
    wanted = slots.long().to(cache.device)
    data, scales = get_layout(MAIN_FP8).planes(cache)
    assert scales is not None
    page, offset = wanted // cache.shape[1], wanted % cache.shape[1]
    return ROW_FORMATS[MAIN_FP8].decode(host(data[page, offset]), host(scales[page, offset]))


def _insert(tokens: int, device: torch.device) -> Trial:
    rows = torch.randn(tokens, _DIM, device=device).bfloat16()
    cache, slots = _cache(tokens, device)

    def verify(_: object) -> float:
        want = ROW_FORMATS[MAIN_FP8].round(host(rows).double())
        assert_identical(_stored(cache, slots), want, name="rows read back")
        return 0.0

    moved = tokens * (rows[0].nbytes + _ROW + 8)
    return Trial(quantize_and_insert_k_cache, (rows, cache, slots), {}, moved, verify)


def _gather(tokens: int, device: torch.device) -> Trial:
    cache, slots = _cache(tokens, device)
    rows = torch.randn(tokens, _DIM, device=device)
    get_layout(MAIN_FP8).write(cache, slots, rows)
    out = torch.empty(tokens, _DIM, dtype=torch.bfloat16, device=device)

    def verify(_: object) -> float:
        assert_identical(host(out).double(), _stored(cache, slots), name="decoded rows")
        return 0.0

    moved = tokens * (_ROW + out[0].nbytes + 4)
    return Trial(dequant_gather_slots, (out, cache, slots.int()), {}, moved, verify)


def _norm_rope(tokens: int, device: torch.device) -> Trial:
    q = torch.randn(tokens, _HEADS, _DIM, device=device).bfloat16()
    kv = torch.randn(tokens, _DIM, device=device).bfloat16()
    cache, slots = _cache(tokens, device)
    positions = torch.arange(1000, 1000 + tokens, device=device)
    cos_sin = table(1000 + tokens, compressed=True).to(device)

    def verify(rotated: Tensor) -> float:
        inv_freq = frequencies(v4_config(), compressed=True)
        want = rotate(rms_norm(host(q).double(), None, EPS), host(positions), inv_freq)
        error = ulps(torch.bfloat16, 1) + accumulation(_DIM, torch.float32)
        worst = assert_close(host(rotated), want, atol=error, rtol=error, name="queries")
        row = rotate(host(kv).double().unsqueeze(1), host(positions), inv_freq).squeeze(1)
        slack = ulps(torch.float32, 4) * 4.0
        data, scales = (host(each) for each in read_entries(cache.cpu(), host(slots), MAIN_FP8))
        good = ROW_FORMATS[MAIN_FP8].explains(data, scales, row - slack, row + slack)
        assert good.all(), f"{int((~good).sum())} cache bytes are no rounding of the oracle's rows"
        return worst

    moved = 2 * q.nbytes + kv.nbytes + tokens * (_ROW + 16 + 4 * V4_FLASH.rope)
    args = (q, kv, cache, slots, positions, cos_sin, EPS)
    return Trial(qnorm_rope_kv_insert, args, {}, moved, verify)


def _compress(tokens: int, device: torch.device) -> Trial:
    ratio, width, page = V4_RATIO4.window.ratio, V4_RATIO4.window.width, 8
    pages = -(-tokens // page)
    states = torch.randn(pages, page, 2 * width, device=device)
    positions = torch.arange(tokens, device=device)
    weight = 1 + 0.1 * torch.randn(_DIM, device=device)
    entries = tokens // ratio
    cache, slots = _cache(entries, device)
    closes = (positions + 1) % ratio == 0
    targets = torch.where(closes, slots[(positions // ratio).clamp(max=entries - 1)], -1)

    def verify(_: object) -> None:
        flat = host(states).flatten(0, 1)[:tokens].double()
        kv, gate = flat.split(width, 1)
        inv_freq = frequencies(v4_config(), compressed=True)
        nothing = torch.zeros(ratio, width, dtype=torch.float64)  # states hold score + ape already
        row = compress(kv, gate, nothing, host(weight).double(), inv_freq, EPS)
        slack = accumulation(2 * ratio, torch.float32) * (4 * (2 * ratio) ** 0.5)
        data, scales = (host(each) for each in read_entries(cache.cpu(), host(slots), MAIN_FP8))
        good = ROW_FORMATS[MAIN_FP8].explains(data, scales, row - slack, row + slack)
        assert good.all(), f"{int((~good).sum())} cache bytes are no rounding of the oracle's rows"

    args = (
        states,
        torch.arange(pages, dtype=torch.int32, device=device).unsqueeze(0),
        positions,
        torch.zeros(tokens, dtype=torch.int32, device=device),
        positions,
        weight,
        EPS,
        table(tokens, compressed=True).to(device),
        cache,
        targets,
    )
    keywords = {"compress_ratio": ratio, "overlap": True, "layout": MAIN_FP8}
    # Each entry reads half of the channels of eight tokens.
    moved = entries * (2 * ratio * 2 * _DIM * 4 + _ROW)
    return Trial(compress_norm_rope_insert, args, keywords, moved, verify)


def _window(tokens: int, device: torch.device) -> Trial:
    pages = -(-tokens // PAGE_SIZE)
    order = torch.randperm(pages, device=device).int()
    positions = torch.arange(tokens, device=device)
    owner = torch.zeros(tokens, dtype=torch.int32, device=device)

    def verify(result: tuple[Tensor, Tensor]) -> float:
        slots, lens = (host(each).long() for each in result)
        for token in range(tokens):
            seen = torch.arange(max(0, token - _WINDOW + 1), token + 1)
            want = host(order)[seen // PAGE_SIZE].long() * PAGE_SIZE + seen % PAGE_SIZE
            assert lens[token] == len(seen), f"token {token}: {int(lens[token])} rows"
            assert_identical(slots[token, : len(seen)], want, name=f"window of token {token}")
            assert (slots[token, len(seen) :] == -1).all(), f"token {token}: -1 behind the window"
        return 0.0

    keywords = {"block_size": PAGE_SIZE, "window": _WINDOW}
    moved = tokens * (4 * _WINDOW + 16)
    return Trial(window_rows, (positions, owner, order.unsqueeze(0)), keywords, moved, verify)

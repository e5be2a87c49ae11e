"""A step of every family on a device: inputs for any number of tokens, and what comes out.

Every tensor of ``inputs`` named in ``by_token`` has a row a token; the other ones are shared, and
those in ``written`` are modified by the step. Results have a row a token as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from anymla.formats.fp8_block import quantize_fp8_weight
from anymla.formats.mxfp4 import quantize_mxfp4
from anymla.formats.nvfp4 import quantize_nvfp4
from anymla.formats.page_layout import INDEX_FP8, MAIN_FP8, get_layout
from anymla.formats.state_layout import allocate_states
from anymla.ops.attention import CacheRows, sparse_attention, sparse_attention_rows
from anymla.ops.compressor import compress_norm_rope_insert, save_partial_states
from anymla.ops.engram import engram_gate, engram_rows
from anymla.ops.hyper_connection import hc_head, hc_post, hc_post_pre_norm, hc_pre
from anymla.ops.indexer import indexer_q_rope_quant, mqa_logits, paged_mqa_logits, topk_per_row
from anymla.ops.kv_cache import (
    dequant_gather_slots,
    dequantize_and_gather_k_cache,
    quantize_and_insert_k_cache,
)
from anymla.ops.linear import (
    fp8_block_linear,
    grouped_output_projection,
    inverse_rope_fp8_quant,
    mxfp4_linear,
    nvfp4_linear,
)
from anymla.ops.moe import experts, route_biased, route_hash, swiglu
from anymla.ops.norm_rope import fused_q_kv_rmsnorm, qnorm_rope_kv_insert, rms_norm, rope
from anymla.ops.step_indices import (
    compressed_rows,
    compute_global_topk_indices_and_lens,
    slot_mapping,
    window_rows,
)

PAGE, REQUESTS, POSITIONS, EPS = 64, 3, 4096, 1e-6
SITE = {"norm_eps": EPS, "hc_eps": EPS, "iters": 20}
Inputs = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Step:
    """See the module; ``make`` takes a number of tokens and makes inputs on the default device."""

    make: Callable[[int], Inputs]
    run: Callable[..., tuple[Tensor, ...]]
    by_token: tuple[str, ...]
    written: tuple[str, ...] = ()

    def some(self, inputs: Inputs, rows: Tensor) -> Inputs:
        """Inputs of some tokens, with copies of what is written."""
        return {
            name: value[rows]
            if name in self.by_token
            else value.clone()
            if name in self.written
            else value
            for name, value in inputs.items()
        }


def normal(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def tokens_of(count: int) -> Inputs:
    """Positions and requests of tokens, some of them padding, and the requests' pages."""
    pages = POSITIONS // PAGE
    requests = torch.randint(0, REQUESTS, (count,)).int()
    requests[::7] = -1
    return {
        "positions": torch.randint(0, POSITIONS, (count,)),
        "requests": requests,
        "tables": torch.randperm(REQUESTS * pages).view(REQUESTS, pages).int(),
        "rope": torch.rand(POSITIONS, 64) * 2 - 1,
    }


def own_slots(count: int) -> Tensor:
    """A slot for each token, in any order; every fifth token has none."""
    slots = torch.randperm(-(-count // PAGE) * PAGE)[:count]
    slots[::5] = torch.where(slots[::5] % 2 == 0, -1, 2**40)
    return slots


def main_cache(slots: int, fill: int = 0) -> Tensor:
    return get_layout(MAIN_FP8).allocate(
        -(-slots // PAGE), PAGE, device=torch.get_default_device(), fill=fill
    )


def read(cache: Tensor, slots: Tensor) -> Tensor:
    """Rows at int64 slots; zeros for tokens without one."""
    out = torch.full((len(slots), 512), 7.0, dtype=torch.bfloat16, device=cache.device)
    ids = torch.where((slots >= 0) & (slots < 2**31), slots, -1).int()
    dequant_gather_slots(out, cache, ids, backend="triton")
    return out


def make_kv_cache(count: int) -> Inputs:
    return {"k": normal(count, 512), "slots": own_slots(count), "cache": main_cache(count)}


def run_kv_cache(k: Tensor, slots: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
    quantize_and_insert_k_cache(k, cache, slots, backend="triton")
    return (read(cache, slots),)


def make_gather(count: int) -> Inputs:
    cache = main_cache(40 * PAGE)
    quantize_and_insert_k_cache(
        normal(40 * PAGE, 512), cache, torch.arange(40 * PAGE), backend="triton"
    )
    # Requests are the tokens of this one.
    return {
        "cache": cache,
        "stops": torch.randint(0, 3 * PAGE, (count,)).int(),
        "lengths": torch.randint(0, 9, (count,)).int(),
        "tables": torch.randint(-1, 41, (count, 3)).int(),
    }


def run_gather(cache: Tensor, stops: Tensor, lengths: Tensor, tables: Tensor) -> tuple[Tensor, ...]:
    out = torch.zeros(len(stops), 8, 512, dtype=torch.bfloat16, device=cache.device)
    dequantize_and_gather_k_cache(out, cache, stops, lengths, tables, backend="triton")
    return (out,)


def make_norm_rope(count: int) -> Inputs:
    given = tokens_of(count)
    return {
        "q": normal(count, 2, 512),
        "kv": normal(count, 512),
        "weight": normal(512),
        "slots": own_slots(count),
        "cache": main_cache(count),
        "positions": given["positions"],
        "table": given["rope"],
    }


def run_norm_rope(
    q: Tensor,
    kv: Tensor,
    weight: Tensor,
    slots: Tensor,
    cache: Tensor,
    positions: Tensor,
    table: Tensor,
) -> tuple[Tensor, ...]:
    normed = rms_norm(kv, weight, EPS, backend="triton")
    pair = fused_q_kv_rmsnorm(q[:, 0], kv, weight, weight, EPS, backend="triton")
    turned = rope(q, positions, table, inverse=True, backend="triton")
    inserted = qnorm_rope_kv_insert(
        q, normed, cache, slots, positions, table, EPS, backend="triton"
    )
    return normed, *pair, turned, inserted, read(cache, slots)


def make_compressor(count: int, ratio: int = 4) -> Inputs:
    parts = 2 if ratio == 4 else 1
    given, entries = tokens_of(count), 4
    columns = POSITIONS // entries
    states = allocate_states(
        REQUESTS * columns, entries, parts * 512, device=torch.get_default_device()
    )
    states.normal_()
    closing = given["positions"] // ratio * ratio + ratio - 1
    given["positions"] = torch.where(given["positions"] % 3 > 0, closing, given["positions"])
    return {
        **{name: given[name] for name in ("positions", "requests", "rope")},
        "kv": torch.randn(count, parts * 512),
        "score": torch.randn(count, parts * 512),
        "ape": torch.randn(ratio, parts * 512),
        "states": states,
        "tables": torch.randperm(REQUESTS * columns).view(REQUESTS, columns).int(),
        # Tokens are stored where no window looks, so that each is on its own.
        "saved": allocate_states(
            -(-count // entries), entries, parts * 512, device=torch.get_default_device()
        ),
        "own": torch.randperm(-(-count // entries) * entries)[:count],
        "weight": torch.randn(512),
        "slots": own_slots(count),
        "cache": main_cache(count),
    }


def run_compressor(ratio: int) -> Callable[..., tuple[Tensor, ...]]:
    def run(
        positions: Tensor,
        requests: Tensor,
        rope: Tensor,
        kv: Tensor,
        score: Tensor,
        ape: Tensor,
        states: Tensor,
        tables: Tensor,
        saved: Tensor,
        own: Tensor,
        weight: Tensor,
        slots: Tensor,
        cache: Tensor,
    ) -> tuple[Tensor, ...]:
        save_partial_states(
            kv, score, ape, positions, saved, own, compress_ratio=ratio, backend="triton"
        )
        compress_norm_rope_insert(
            states,
            tables,
            torch.zeros_like(positions),
            requests,
            positions,
            weight,
            EPS,
            rope,
            cache,
            slots,
            compress_ratio=ratio,
            overlap=ratio == 4,
            layout=MAIN_FP8,
            backend="triton",
        )
        rows = saved.flatten(0, 1)
        return rows[own.clamp(0, len(rows) - 1)], read(cache, slots)

    return run


def make_selection(count: int) -> Inputs:
    given = tokens_of(count)
    del given["rope"]
    return {
        **given,
        "chosen": torch.randint(-1, POSITIONS, (count, 24)).int(),
        "valid": torch.rand(count) < 0.8,
    }


def run_selection(
    positions: Tensor, requests: Tensor, tables: Tensor, chosen: Tensor, valid: Tensor
) -> tuple[Tensor, ...]:
    which = {"is_valid_token": valid, "backend": "triton"}
    return (
        slot_mapping(positions, requests, tables, page_size=PAGE, backend="triton"),
        slot_mapping(positions, requests, tables, page_size=2, ratio=128, backend="triton"),
        *compute_global_topk_indices_and_lens(
            chosen, requests, tables, PAGE, valid, backend="triton"
        ),
        *window_rows(positions, requests, tables, block_size=PAGE, window=128, **which),
        *compressed_rows(positions, requests, tables, ratio=128, block_size=2, width=32, **which),
    )


def make_sparse_attention(count: int) -> Inputs:
    cache, extra = main_cache(4 * PAGE), main_cache(4 * PAGE)
    for each in (cache, extra):
        quantize_and_insert_k_cache(
            normal(4 * PAGE, 512), each, torch.arange(4 * PAGE), backend="triton"
        )
    return {
        "q": normal(count, 8, 512),
        "cache": cache,
        "extra": extra,
        "indices": torch.randint(-1, 4 * PAGE + 1, (count, 128)).int(),
        "more": torch.randint(-1, 4 * PAGE + 1, (count, 64)).int(),
        "lengths": torch.randint(0, 129, (count,)).int(),
        "more_lengths": torch.randint(0, 65, (count,)).int(),
        "sink": torch.randn(8),
    }


def run_sparse_attention(
    q: Tensor,
    cache: Tensor,
    extra: Tensor,
    indices: Tensor,
    more: Tensor,
    lengths: Tensor,
    more_lengths: Tensor,
    sink: Tensor,
) -> tuple[Tensor, ...]:
    paged = sparse_attention(
        q,
        [
            CacheRows(cache, MAIN_FP8, indices, lengths),
            CacheRows(extra, MAIN_FP8, more, more_lengths),
        ],
        sink=sink,
        backend="triton",
    )
    rows = read(cache, torch.arange(4 * PAGE, device=q.device))
    return *paged, *sparse_attention_rows(q, rows, indices, lengths, sink=sink, backend="triton")


def make_indexer(count: int) -> Inputs:
    given, layout = tokens_of(count), get_layout(INDEX_FP8)
    cache = layout.allocate(8, PAGE, device=torch.get_default_device())
    quantize_and_insert_k_cache(
        normal(8 * PAGE, 128), cache, torch.arange(8 * PAGE), layout=INDEX_FP8, backend="triton"
    )
    return {
        "q": normal(count, 8, 128),
        "weights": normal(count, 8),
        "positions": given["positions"],
        "rope": given["rope"],
        "keys": normal(96, 128),
        "ends": torch.randint(0, 97, (count,)).int(),
        "cache": cache,
        "lens": torch.randint(0, 2 * PAGE, (count,)).int(),
        "tables": torch.randint(-1, 9, (count, 2)).int(),
    }


def run_indexer(
    q: Tensor,
    weights: Tensor,
    positions: Tensor,
    rope: Tensor,
    keys: Tensor,
    ends: Tensor,
    cache: Tensor,
    lens: Tensor,
    tables: Tensor,
) -> tuple[Tensor, ...]:
    codes, _, scaled = indexer_q_rope_quant(
        q, weights, positions, rope, softmax_scale=0.1, head_scale=0.3, backend="triton"
    )
    starts = torch.zeros_like(ends)
    logits = mqa_logits(q, keys, None, scaled, starts, ends, backend="triton")
    paged = paged_mqa_logits(
        codes.unsqueeze(1), cache, scaled, lens, tables, max_context=2 * PAGE, backend="triton"
    )
    # The choice among equal numbers, so that it does not depend on how they were summed.
    best = topk_per_row(
        positions[:, None] * keys[:16, 0].float(), starts, ends, 9, backend="triton"
    )
    return codes.view(torch.uint8), scaled, logits, paged, best


def make_output_projection(count: int) -> Inputs:
    given = tokens_of(count)
    return {
        "o": normal(count, 4, 512),
        "positions": given["positions"],
        "rope": given["rope"],
        "wo_a": normal(2, 16, 1024) / 32,
    }


def run_output_projection(
    o: Tensor, positions: Tensor, rope: Tensor, wo_a: Tensor
) -> tuple[Tensor, ...]:
    codes, scales = inverse_rope_fp8_quant(o, positions, rope, n_groups=2, backend="triton")
    projected = grouped_output_projection(o, positions, rope, wo_a, backend="triton")
    return codes.view(torch.uint8), scales, projected


def make_linear(count: int) -> Inputs:
    weight = torch.randn(128, 256) / 16
    fp8, four, nv = quantize_fp8_weight(weight), quantize_mxfp4(weight), quantize_nvfp4(weight)
    return {
        "x": normal(count, 256),
        **dict(zip(("codes", "scales"), fp8, strict=True)),
        **dict(zip(("packed", "blocks"), four, strict=True)),
        **dict(zip(("nv_packed", "nv_blocks", "nv_scale"), nv, strict=True)),
    }


def run_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    packed: Tensor,
    blocks: Tensor,
    nv_packed: Tensor,
    nv_blocks: Tensor,
    nv_scale: Tensor,
) -> tuple[Tensor, ...]:
    return (
        fp8_block_linear(x, codes, scales, backend="triton"),
        fp8_block_linear(x, codes, scales, quantize_activations=True, backend="triton"),
        mxfp4_linear(x, packed, blocks, backend="triton"),
        nvfp4_linear(x, nv_packed, nv_blocks, nv_scale, backend="triton"),
    )


def make_hyper_connection(count: int) -> Inputs:
    return {
        "h": normal(count, 4, 128),
        "u": normal(count, 128),
        "fn": torch.randn(24, 512) / 22,
        "base": torch.randn(24),
        "scale": torch.ones(3),
        "weight": normal(128),
    }


def run_hyper_connection(
    h: Tensor, u: Tensor, fn: Tensor, base: Tensor, scale: Tensor, weight: Tensor
) -> tuple[Tensor, ...]:
    y, post, comb = hc_pre(h, fn, base, scale, **SITE, backend="triton")
    after = hc_post(u, h, post, comb, backend="triton")
    fused = hc_post_pre_norm(u, h, post, comb, fn, base, scale, weight, **SITE, backend="triton")
    head = hc_head(h, fn[:4], base[:4], scale[:1], norm_eps=EPS, hc_eps=EPS, backend="triton")
    return y, post, comb, after, *fused, head


def make_engram(count: int) -> Inputs:
    return {
        "codes": torch.randint(0, 126, (count, 3, 64)).to(torch.uint8),
        "scales": torch.randint(120, 130, (count, 3, 2)).to(torch.uint8),
        "h": normal(count, 4, 128),
        "projected": normal(count, 5 * 128),
        "weight": torch.rand(4, 128),
    }


def run_engram(
    codes: Tensor, scales: Tensor, h: Tensor, projected: Tensor, weight: Tensor
) -> tuple[Tensor, ...]:
    rows = torch.empty(len(h), 3 * 64, dtype=torch.bfloat16, device=h.device)
    engram_rows(rows, codes, scales, backend="triton")
    return rows, engram_gate(h, projected, weight, eps=EPS, backend="triton")


def make_moe(count: int) -> Inputs:
    def packed(rows: int, width: int) -> Inputs:
        codes, scales = zip(
            *(quantize_mxfp4(torch.randn(rows, width) / width**0.5) for _ in range(6)), strict=True
        )
        return {"codes": torch.stack(codes), "scales": torch.stack(scales)}

    banks = {"w1": packed(64, 128), "w3": packed(64, 128), "w2": packed(128, 64)}
    return {
        "x": normal(count, 128),
        "gate": normal(6, 128),
        "bias": torch.randn(6) / 8,
        "token_ids": torch.randint(-1, 31, (count,)),
        "hashed": torch.stack([torch.randperm(6)[:2] for _ in range(30)]),
        "ids": torch.randint(-1, 7, (count, 2)).int(),
        "weights": torch.rand(count, 2),
        **{f"{name}_{part}": value for name, bank in banks.items() for part, value in bank.items()},
    }


def run_moe(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    token_ids: Tensor,
    hashed: Tensor,
    ids: Tensor,
    weights: Tensor,
    **banks: Tensor,
) -> tuple[Tensor, ...]:
    routed = route_hash(x, gate, token_ids, hashed, scale=1.5, backend="triton")
    _, chosen = route_biased(x, gate, bias, k=2, scale=1.5, backend="triton")
    y = experts(
        x,
        ids,
        weights,
        *(list(banks[f"{name}_codes"]) for name in ("w1", "w3", "w2")),
        *(list(banks[f"{name}_scales"]) for name in ("w1", "w3", "w2")),
        weight_format="mxfp4",
        swiglu_limit=10.0,
        quantize_activations=False,
        backend="triton",
    )
    return *routed, chosen, y, swiglu(x, y, 10.0, backend="triton")


STEPS = {
    "kv_cache insert": Step(make_kv_cache, run_kv_cache, ("k", "slots"), ("cache",)),
    "kv_cache gather": Step(make_gather, run_gather, ("stops", "lengths", "tables")),
    "norm_rope": Step(make_norm_rope, run_norm_rope, ("q", "kv", "slots", "positions"), ("cache",)),
    **{
        f"compressor {ratio}": Step(
            lambda count, ratio=ratio: make_compressor(count, ratio),
            run_compressor(ratio),
            ("positions", "requests", "kv", "score", "own", "slots"),
            ("saved", "cache"),
        )
        for ratio in (4, 128)
    },
    "selection": Step(make_selection, run_selection, ("positions", "requests", "chosen", "valid")),
    "sparse_attention": Step(
        make_sparse_attention,
        run_sparse_attention,
        ("q", "indices", "more", "lengths", "more_lengths"),
    ),
    "indexer": Step(
        make_indexer, run_indexer, ("q", "weights", "positions", "ends", "lens", "tables")
    ),
    "output_projection": Step(make_output_projection, run_output_projection, ("o", "positions")),
    "linear": Step(make_linear, run_linear, ("x",)),
    "hyper_connection": Step(make_hyper_connection, run_hyper_connection, ("h", "u")),
    "engram": Step(make_engram, run_engram, ("codes", "scales", "h", "projected")),
    "moe": Step(make_moe, run_moe, ("x", "token_ids", "ids", "weights")),
}

"""Deliberate faults of DeepSeek-V4.1's own parts, each with its intended cases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anymla.testing.conformance.expected import table
from anymla.testing.conformance.faults.fault import GOOD, fault


@fault("rope", "C11")
def heads_normed_as_in_v4(x: Tensor, *args: Any, **rest: Any) -> Tensor:
    if x.shape[1] > 1 and not rest.get("inverse"):
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return GOOD.rope(x, *args, **rest)


@fault("compress_norm", "C10", "C11")
def entries_rotated_before_keys_are_made_of_them(*args: Any, **rest: Any) -> Tensor:
    positions, rows = args[4], GOOD.compress_norm(*args, **rest)
    first = (positions + 1 - rest["compress_ratio"]).clamp(min=0)
    turns = table(int(positions.max()) + 1, compressed=True)
    return GOOD.rope(rows.unsqueeze(1), first, turns).squeeze(1)


@fault("save_partial_states", "C10", "C11")
def a_bias_by_position(kv: Tensor, score: Tensor, ape: Tensor, *args: Any, **rest: Any) -> None:
    bias = torch.arange(len(ape), dtype=ape.dtype).unsqueeze(1).expand_as(ape).contiguous()
    GOOD.save_partial_states(kv, score, ape + bias, *args, **rest)


@fault("compress_norm", "C10", "C11")
def the_mean_of_two_tokens(state_cache: Tensor, *args: Any, **rest: Any) -> Tensor:
    half = state_cache.shape[2] // 2
    flat = state_cache.clone()
    flat[..., half:] = 0
    return GOOD.compress_norm(flat, *args, **rest)


@fault("compress_norm", "C10")
def epsilon_of_v4_in_the_entry(*args: Any, **rest: Any) -> Tensor:
    return GOOD.compress_norm(*args[:6], 1e-6, **rest)


@fault("compress_norm", "C10", "C11")
def overlap_as_in_v4(state_cache: Tensor, *args: Any, **rest: Any) -> Tensor:
    # Both halves of a row alike: an entry pools the tokens of the one before it as well.
    doubled = torch.cat([half.repeat(1, 1, 2) for half in state_cache.chunk(2, 2)], 2)
    return GOOD.compress_norm(doubled, *args, **(rest | {"overlap": True}))


@fault("select_candidate_blocks", "I15", "C11")
def the_newest_block_is_like_any_other(
    logits: Tensor, lengths: Tensor, count: int, *, block_size: int
) -> Tensor:
    width = logits.shape[1]
    seen = torch.arange(width) < lengths.unsqueeze(1)
    scores = torch.where(seen, logits, -torch.inf)
    scores = torch.nn.functional.pad(scores, (0, -width % block_size), value=-torch.inf)
    best = scores.unflatten(1, (-1, block_size)).amax(2)
    held = ((lengths + block_size - 1) // block_size).int()
    chosen = GOOD.topk_per_row(best, torch.zeros_like(held), held, count).long()
    chosen[best.gather(1, chosen.clamp(min=0)) == -torch.inf] = -1
    spare = best.shape[1]
    ordered = torch.where(chosen < 0, spare, chosen).sort(1).values
    return torch.where(ordered == spare, -1, ordered).int()


@fault("select_candidate_blocks", "I15")
def a_block_behind_the_end_is_the_newest(
    logits: Tensor, lengths: Tensor, count: int, *, block_size: int
) -> Tensor:
    return GOOD.select_candidate_blocks(logits, lengths + block_size, count, block_size=block_size)


@fault("select_candidate_blocks", "I15")
def a_block_is_as_good_as_its_first_entry(
    logits: Tensor, lengths: Tensor, count: int, *, block_size: int
) -> Tensor:
    first = logits[:, ::block_size].repeat_interleave(block_size, 1)[:, : logits.shape[1]]
    return GOOD.select_candidate_blocks(first, lengths, count, block_size=block_size)


@fault("select_candidate_blocks", "I15")
def a_block_is_kept_where_nothing_is_visible(
    logits: Tensor, lengths: Tensor, count: int, *, block_size: int
) -> Tensor:
    blocks = GOOD.select_candidate_blocks(logits, lengths, count, block_size=block_size)
    blocks[lengths < 1, 0] = (logits.shape[1] - 1) // block_size
    return blocks


@fault("select_candidate_blocks", "C11")
def the_source_selects_within_its_own_blocks(
    logits: Tensor, lengths: Tensor, count: int, *, block_size: int
) -> Tensor:
    blocks = GOOD.select_candidate_blocks(logits, lengths, count, block_size=block_size)
    GOOD.mask_candidates(logits, blocks, block_size=block_size)
    return blocks


@fault("mask_candidates", "I15", "C11")
def selection_in_one_level(*args: Any, **rest: Any) -> None:
    pass


@fault("mask_candidates", "I15", "C11")
def a_missing_block_is_the_first(logits: Tensor, blocks: Tensor, *, block_size: int) -> None:
    GOOD.mask_candidates(logits, blocks.roll(1, 0), block_size=block_size)


@fault("indexer_q_rope_quant", "I16")
def hadamard_as_in_v4(*args: Any, **rest: Any) -> Any:
    if rest["quant"] == "mxfp4":
        rest["hadamard"] = True
    return GOOD.indexer_q_rope_quant(*args, **rest)


@fault("hc_gates", "M3", "C11")
def comb_of_a_delayed_site_transposed(*args: Any, **rest: Any) -> Any:
    pre, post, comb = GOOD.hc_gates(*args, **rest)
    return pre, post, comb.transpose(1, 2).contiguous()


@fault("engram_gate", "M6")
def epsilon_of_v4_in_the_gate(*args: Any, eps: float) -> Tensor:
    return GOOD.engram_gate(*args, eps=1e-6)


@fault("engram_gate", "M6", "C11")
def all_streams_have_one_key(h: Tensor, projected: Tensor, *args: Any, **rest: Any) -> Tensor:
    parts = projected.unflatten(1, (h.shape[1] + 1, -1))
    keys = parts[:, :1].expand(-1, h.shape[1], -1)
    return GOOD.engram_gate(h, torch.cat((keys, parts[:, -1:]), 1).flatten(1), *args, **rest)


@fault("engram_gate", "M6", "C11")
def the_value_stands_before_the_keys(
    h: Tensor, projected: Tensor, *args: Any, **rest: Any
) -> Tensor:
    return GOOD.engram_gate(h, projected.roll(-h.shape[2], 1), *args, **rest)


def gated(h: Tensor, projected: Tensor, weight: Tensor, eps: float, least: float) -> Tensor:
    """Compute ``engram_gate`` with another lower bound of the dot product's size."""
    parts = projected.unflatten(1, (h.shape[1] + 1, -1))
    keys, value = parts[:, :-1], parts[:, -1:]
    dot = (h * weight * keys).sum(2, keepdim=True) / h.shape[2] ** 0.5
    for each in (h, keys):
        dot = dot * (each.square().mean(2, keepdim=True) + eps).rsqrt()
    root = dot.abs().clamp(min=least).sqrt()
    return h + torch.sigmoid(torch.where(dot < 0, -root, root)) * value


@fault("engram_gate", "M6")
def no_least_size_of_a_dot(h: Tensor, projected: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return gated(h, projected, weight, eps, 0.0)


@fault("engram_gate", "M6", "C11")
def what_disagrees_counts_as_what_agrees(
    h: Tensor, projected: Tensor, weight: Tensor, *, eps: float
) -> Tensor:
    agrees = gated(h, projected, weight, eps, 1e-6) - h
    value = projected[:, -h.shape[2] :].unsqueeze(1)
    share = agrees / value
    return h + torch.where(share < 0.5, 1 - share, share) * value


@fault("engram_rows", "Q10")
def scales_of_the_block_beside(out: Tensor, codes: Tensor, scales: Tensor) -> None:
    GOOD.engram_rows(out, codes, scales.flip(2).contiguous())


@fault("engram_rows", "Q10")
def rows_of_a_token_in_another_order(out: Tensor, codes: Tensor, scales: Tensor) -> None:
    GOOD.engram_rows(out, codes.roll(1, 1), scales.roll(1, 1))


@fault("engram_rows", "Q10")
def subnormal_codes_are_zero(out: Tensor, codes: Tensor, scales: Tensor) -> None:
    GOOD.engram_rows(out, torch.where(codes & 0x78 == 0, codes & 0x80, codes), scales)

"""Deliberate faults in the operations, each with the cases that must notice it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anymla.formats.page_layout import get_layout
from anymla.testing.conformance import Ops

GOOD = Ops("torch")


@dataclasses.dataclass(frozen=True)
class Fault:
    name: str
    cases: tuple[str, ...]
    replacements: dict[str, Callable[..., Any]]


FAULTS: list[Fault] = []


def fault(operation: str, *cases: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a faulty version of one operation."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        FAULTS.append(Fault(run.__name__, cases, {operation: run}))
        return run

    return register


def dense_pages(cache: Tensor) -> Tensor:
    return cache.as_strided(
        cache.shape, (cache.shape[1] * cache.shape[2], cache.shape[2], 1), cache.storage_offset()
    )


# --- attention


@fault("sparse_attention", "A1", "A2")
def sink_dropped(*args: Any, sink: Tensor | None = None, **rest: Any) -> Any:
    out, lse = GOOD.sparse_attention(*args, **rest)
    return out, lse.nan_to_num(0.0) if sink is not None else lse


@fault("sparse_attention", "A1")
def sink_counted_twice(*args: Any, sink: Tensor | None = None, **rest: Any) -> Any:
    sink = None if sink is None else sink + math.log(2)
    return GOOD.sparse_attention(*args, sink=sink, **rest)


@fault("sparse_attention", "A1")
def sink_multiplied_by_the_scale(*args: Any, sink: Tensor | None = None, **rest: Any) -> Any:
    sink = None if sink is None else sink * 512**-0.5
    return GOOD.sparse_attention(*args, sink=sink, **rest)


@fault("sparse_attention", "A2")
def lse_in_base_two(*args: Any, **rest: Any) -> Any:
    out, lse = GOOD.sparse_attention(*args, **rest)
    return out, lse / math.log(2)


@fault("sparse_attention", "A2")
def lse_with_the_sink(*args: Any, sink: Tensor | None = None, **rest: Any) -> Any:
    out, lse = GOOD.sparse_attention(*args, sink=sink, **rest)
    return out, lse if sink is None else torch.logaddexp(lse, sink.expand_as(lse))


@fault("sparse_attention", "A2")
def empty_row_has_an_lse_of_plus_infinity(*args: Any, **rest: Any) -> Any:
    out, lse = GOOD.sparse_attention(*args, **rest)
    return out, torch.where(lse == -torch.inf, torch.inf, lse)


@fault("sparse_attention", "A3")
def heads_in_blocks_of_eight(*args: Any, **rest: Any) -> Any:
    out, lse = GOOD.sparse_attention(*args, **rest)
    out[:, out.shape[1] // 8 * 8 :] = 0
    return out, lse


@fault("sparse_attention", "A4", "I9")
def columns_in_blocks_of_64(
    q: Tensor, cache: Tensor, indices: Tensor, lengths: Tensor | None = None, **rest: Any
) -> Any:
    width = max(64, indices.shape[1] // 64 * 64)
    return GOOD.sparse_attention(
        q, cache, indices[:, :width], None if lengths is None else lengths.clamp(max=width), **rest
    )


@fault("sparse_attention", "A5")
def other_kernel_forgets_a_column(
    q: Tensor, cache: Tensor, indices: Tensor, lengths: Tensor | None = None, **rest: Any
) -> Any:
    if len(q) > 64 and lengths is not None:
        lengths = lengths - 1
    return GOOD.sparse_attention(q, cache, indices, lengths, **rest)


@fault("sparse_attention", "A7")
def result_depends_on_the_batch(*args: Any, **rest: Any) -> Any:
    out, lse = GOOD.sparse_attention(*args, **rest)
    return out * (1 + 0.003 * len(out)), lse


@fault("sparse_attention", "A8")
def grid_of_65535_tokens(*args: Any, **rest: Any) -> Any:
    out, lse = GOOD.sparse_attention(*args, **rest)
    out[65535:] = 0
    return out, lse


@fault("sparse_attention", "A10", "A4", "L6")
def lengths_ignored(
    q: Tensor, cache: Tensor, indices: Tensor, lengths: Tensor | None = None, **rest: Any
) -> Any:
    indices = torch.where(indices < 0, indices, indices.clamp(max=0))
    return GOOD.sparse_attention(q, cache, indices, None, **rest)


@fault("sparse_attention", "A10", "I9")
def negative_indices_wrap_around(
    q: Tensor, cache: Tensor, indices: Tensor, lengths: Tensor | None = None, **rest: Any
) -> Any:
    limit = cache.shape[0] * cache.shape[1]
    return GOOD.sparse_attention(q, cache, indices % limit, lengths, **rest)


@fault("sparse_attention_rows", "A10")
def rows_past_the_end_are_clamped(
    q: Tensor, kv: Tensor, indices: Tensor, *args: Any, **rest: Any
) -> Any:
    return GOOD.sparse_attention_rows(q, kv, indices.clamp(max=len(kv) - 1), *args, **rest)


@fault("sparse_attention", "L6")
def masked_rows_are_multiplied_by_zero(q: Tensor, cache: Tensor, *args: Any, **rest: Any) -> Any:
    out, lse = GOOD.sparse_attention(q, cache, *args, **rest)
    layout = get_layout(rest.get("layout", "v4_main_fp8"))
    slots = torch.arange(cache.shape[0] * cache.shape[1])
    return out + 0 * layout.read(cache, slots, torch.float32).sum(), lse


@fault("sparse_attention", "R3")
def softmax_with_mscale(*args: Any, **rest: Any) -> Any:
    return GOOD.sparse_attention(*args, **{**rest, "scale": 512**-0.5 * 1.277**2})


@fault("sparse_attention", "Q2")
def one_format_flag_for_both_caches(*args: Any, **rest: Any) -> Any:
    if rest.get("extra_layout", "") != rest.get("layout", ""):
        rest = {key: value for key, value in rest.items() if not key.startswith("extra")}
    return GOOD.sparse_attention(*args, **rest)


@fault("sparse_attention", "L8")
def layout_not_compared(*args: Any, **rest: Any) -> Any:
    try:
        return GOOD.sparse_attention(*args, **rest)
    except (TypeError, ValueError):
        return None


# --- cache


def _rolled_scales(cache: Tensor, layout: str) -> None:
    _, scales = get_layout(layout).planes(cache)
    if scales is not None:
        scales.copy_(scales.roll(1, 1))


@fault("quantize_and_insert_k_cache", "L1", "L2", "L3", "L5", "Q3")
def scale_plane_shifted(
    k: Tensor, cache: Tensor, slots: Tensor, *, layout: str = "v4_main_fp8"
) -> None:
    GOOD.quantize_and_insert_k_cache(k, cache, slots, layout=layout)
    _rolled_scales(cache, layout)


@fault("quantize_and_insert_k_cache", "L1", "L2")
def records_lie_one_after_the_other(
    k: Tensor, cache: Tensor, slots: Tensor, *, layout: str = "v4_main_fp8"
) -> None:
    data, scales = get_layout(layout).encode(k)
    if scales is None:
        return
    row = torch.cat((data, scales), 1)
    cache[slots // cache.shape[1], slots % cache.shape[1]] = row


@fault("quantize_and_insert_k_cache", "L3", "L5")
def page_stride_taken_from_the_shape(
    k: Tensor, cache: Tensor, slots: Tensor, *, layout: str = "v4_main_fp8"
) -> None:
    GOOD.quantize_and_insert_k_cache(k, dense_pages(cache), slots, layout=layout)


@fault("dequant_gather_slots", "L4")
def offsets_of_32_bits(
    out: Tensor, cache: Tensor, indices: Tensor, *, layout: str = "v4_main_fp8"
) -> None:
    pages = 2**31 // cache.stride(0)
    GOOD.dequant_gather_slots(out, cache, indices % (pages * cache.shape[1]), layout=layout)


@fault("dequant_gather_slots", "L6")
def minus_one_reads_the_last_row(
    out: Tensor, cache: Tensor, indices: Tensor, *, layout: str = "v4_main_fp8"
) -> None:
    limit = cache.shape[0] * cache.shape[1]
    GOOD.dequant_gather_slots(out, cache, indices % limit, layout=layout)


@fault("dequantize_and_gather_k_cache", "L2", "L5")
def gather_assumes_pages_of_64(
    out: Tensor, cache: Tensor, lens: Tensor, gathered: Any, table: Tensor, **rest: Any
) -> None:
    GOOD.dequantize_and_gather_k_cache(out, cache, lens.clamp(max=64), gathered, table, **rest)


@fault("dequant_gather_slots", "Q1")
def codes_read_as_fnuz(
    out: Tensor, cache: Tensor, indices: Tensor, *, layout: str = "v4_main_fp8"
) -> None:
    GOOD.dequant_gather_slots(out, cache, indices, layout=layout)
    out[:, :448] /= 2


@fault("quantize_and_insert_k_cache", "Q3")
def codes_are_truncated(
    k: Tensor, cache: Tensor, slots: Tensor, *, layout: str = "v4_main_fp8"
) -> None:
    GOOD.quantize_and_insert_k_cache(k * (1 - 2**-5), cache, slots, layout=layout)


@fault("mxfp4_linear", "Q4")
def scales_are_cast_to_bytes(x: Tensor, packed: Tensor, scale: Tensor, **rest: Any) -> Any:
    return GOOD.mxfp4_linear(x, packed, scale.to(torch.uint8), **rest)


@fault("qnorm_rope_kv_insert", "Q7")
def only_packed_caches_are_rotated(
    q: Tensor, kv: Tensor, cache: Tensor, slots: Tensor, positions: Tensor, *args: Any, **rest: Any
) -> Any:
    if rest.get("layout") != "v4_main_fp8":
        return GOOD.qnorm_rope_kv_insert(q, kv, cache, slots, positions * 0, *args, **rest)
    return GOOD.qnorm_rope_kv_insert(q, kv, cache, slots, positions, *args, **rest)


# --- rope


@fault("rope", "R4", "R1")
def halves_instead_of_pairs(x: Tensor, positions: Tensor, table: Tensor, **rest: Any) -> Any:
    order = torch.arange(64).view(2, 32).T.flatten()
    shuffled = torch.cat((x[..., :448], x[..., 448:][..., order]), -1)
    turned = GOOD.rope(shuffled, positions, table, **rest)
    return torch.cat((turned[..., :448], turned[..., 448:][..., order.argsort()]), -1)


@fault("rope", "R4")
def inverse_turns_forward(x: Tensor, positions: Tensor, table: Tensor, **rest: Any) -> Any:
    return GOOD.rope(x, positions, table)


@fault("rope", "R1")
def bases_swapped(x: Tensor, positions: Tensor, table: Tensor, **rest: Any) -> Any:
    return GOOD.rope(x, positions.clamp(max=4), table, **rest)


def _compress(change: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
    names = (
        "state_cache",
        "state_block_table",
        "state_slot_mapping",
        "token_to_req",
        "positions",
        "norm_weight",
        "eps",
        "cos_sin_cache",
        "k_cache",
        "k_slot_mapping",
    )

    def run(*args: Any, **keywords: Any) -> Any:
        arguments = dict(zip(names, args, strict=True)) | keywords
        change(arguments)
        return GOOD.compress_norm_rope_insert(**arguments)

    return run


def _rotate_at_the_end(a: dict[str, Any]) -> None:
    a["cos_sin_cache"] = a["cos_sin_cache"].roll(1 - a["compress_ratio"], 0)


def _swap_halves(a: dict[str, Any]) -> None:
    if a["overlap"]:
        kv_and_score = a["state_cache"].unflatten(-1, (2, 2, -1))
        a["state_cache"] = kv_and_score.flip(-2).flatten(-3).contiguous()


def _one_sided_hadamard(a: dict[str, Any]) -> None:
    a["hadamard"] = False


def _reads_what_was_left(a: dict[str, Any]) -> None:
    a["norm_weight"] = a["norm_weight"] * (1 + 1e-6 * a["state_cache"].nan_to_num().mean())


def _keeps_what_is_there(a: dict[str, Any]) -> None:
    cache, slots = a["k_cache"], a["k_slot_mapping"]
    entries = cache.shape[1]
    first = cache[slots.clamp(min=0) // entries, slots.clamp(min=0) % entries, 0]
    a["k_slot_mapping"] = torch.where(first != 0, -1, slots)


FAULTS += [
    Fault(name, cases, {"compress_norm_rope_insert": _compress(change)})
    for name, cases, change in (
        ("entries_rotated_at_the_windows_end", ("R2", "C1", "C4"), _rotate_at_the_end),
        ("overlap_halves_swapped", ("C1", "R2"), _swap_halves),
        ("hadamard_on_queries_only", ("I1",), _one_sided_hadamard),
        ("stale_state_is_read", ("C9",), _reads_what_was_left),
        ("drafted_entries_are_kept", ("C5", "C6", "C7"), _keeps_what_is_there),
    )
]


# --- compressor state


@fault("save_partial_states", "C1", "C4", "C8")
def position_embedding_missing(
    kv: Tensor, score: Tensor, ape: Tensor, *args: Any, **rest: Any
) -> None:
    GOOD.save_partial_states(kv, score, ape * 0, *args, **rest)


@fault("save_partial_states", "C4")
def state_reset_at_every_step(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    positions: Tensor,
    state: Tensor,
    *args: Any,
    **rest: Any,
) -> None:
    state.zero_()
    GOOD.save_partial_states(kv, score, ape, positions, state, *args, **rest)


@fault("save_partial_states", "C8")
def padding_is_stored(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    positions: Tensor,
    state: Tensor,
    slots: Tensor,
    **rest: Any,
) -> None:
    GOOD.save_partial_states(kv, score, ape, positions, state, slots, **rest)
    nobody = slots < 0
    if nobody.any():
        state[int(slots[0]) // state.shape[1]] = kv[nobody][0, 0]


@fault("compressed_rows", "C2")
def entry_visible_a_token_early(positions: Tensor, *args: Any, **rest: Any) -> Any:
    return GOOD.compressed_rows(positions + 1, *args, **rest)


@fault("compressed_rows", "C2")
def entry_visible_a_token_late(positions: Tensor, *args: Any, **rest: Any) -> Any:
    return GOOD.compressed_rows(positions - 1, *args, **rest)


@fault("slot_mapping", "C3")
def entry_written_at_the_windows_start(positions: Tensor, *args: Any, **rest: Any) -> Any:
    return GOOD.slot_mapping(positions + rest["ratio"] - 1, *args, **rest)


@fault("window_rows", "A9")
def window_without_its_own_token(positions: Tensor, *args: Any, **rest: Any) -> Any:
    return GOOD.window_rows(positions - 1, *args, **rest)


@fault("window_rows", "A9")
def window_one_token_short(*args: Any, window: int, **rest: Any) -> Any:
    slots, lens = GOOD.window_rows(*args, window=window - 1, **rest)
    return torch.nn.functional.pad(slots, (0, 1), value=-1), lens


# --- indexer


def _without_relu(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(q: Tensor, *args: Any, **rest: Any) -> Tensor:
        # relu(x) - relu(-x) = x
        positive, negative = operation(q, *args, **rest), operation(-q, *args, **rest)
        return torch.where(positive == -torch.inf, positive, positive - negative)

    return run


FAULTS += [
    Fault("relu_missing", ("I2",), {"mqa_logits": _without_relu(GOOD.mqa_logits)}),
    Fault(
        "relu_missing_in_pages", ("I2",), {"paged_mqa_logits": _without_relu(GOOD.paged_mqa_logits)}
    ),
]


@fault("mqa_logits", "I2")
def heads_are_averaged(q: Tensor, *args: Any, **rest: Any) -> Tensor:
    return GOOD.mqa_logits(q, *args, **rest) / q.shape[1]


@fault("paged_mqa_logits", "I2")
def weights_through_a_sigmoid(
    q: Tensor, cache: Tensor, weights: Tensor, *args: Any, **rest: Any
) -> Tensor:
    return GOOD.paged_mqa_logits(q, cache, weights.sigmoid(), *args, **rest)


@fault("paged_mqa_logits", "L1", "I2")
def one_length_for_all_rows_of_a_request(
    q: Tensor, cache: Tensor, weights: Tensor, lens: Tensor, *args: Any, **rest: Any
) -> Tensor:
    return GOOD.paged_mqa_logits(q, cache, weights, lens.reshape(len(q), -1)[:, 0], *args, **rest)


@fault("paged_mqa_logits", "C3")
def length_rounded_up(
    q: Tensor, cache: Tensor, weights: Tensor, lens: Tensor, *args: Any, **rest: Any
) -> Tensor:
    return GOOD.paged_mqa_logits(q, cache, weights, lens + 1, *args, **rest)


@fault("paged_mqa_logits", "I6")
def behind_the_end_is_zero(*args: Any, **rest: Any) -> Tensor:
    return GOOD.paged_mqa_logits(*args, **rest).nan_to_num(neginf=0.0)


@fault("paged_mqa_logits", "I7")
def scratch_of_all_heads_at_once(q: Tensor, *args: Any, **rest: Any) -> Tensor:
    torch.zeros(q.shape[1], q.shape[2], rest["max_context"])
    return GOOD.paged_mqa_logits(q, *args, **rest)


@fault("indexer_q_rope_quant", "I8")
def queries_of_two_bits(q: Tensor, *args: Any, **rest: Any) -> Any:
    return GOOD.indexer_q_rope_quant(q.sign() * q.abs().round().clamp(max=1), *args, **rest)


@fault("topk_per_row", "I3", "I10", "Q6", "I8")
def selection_with_holes(*args: Any, **rest: Any) -> Tensor:
    chosen = GOOD.topk_per_row(*args, **rest)
    chosen[:, 0] = -1
    return chosen


@fault("topk_per_row", "Q6")
def nan_is_dropped(logits: Tensor, *args: Any, **rest: Any) -> Tensor:
    return GOOD.topk_per_row(logits.nan_to_num(-torch.inf), *args, **rest)


@fault("topk_per_row", "I3")
def indices_not_relative_to_the_start(
    logits: Tensor, starts: Tensor, *args: Any, **rest: Any
) -> Tensor:
    chosen = GOOD.topk_per_row(logits, starts, *args, **rest)
    return torch.where(chosen < 0, chosen, chosen + starts.unsqueeze(1))


@fault("topk_per_row", "I4")
def later_entry_first_among_equals(
    logits: Tensor, starts: Tensor, ends: Tensor, k: int, **rest: Any
) -> Tensor:
    chosen = GOOD.topk_per_row(logits.flip(1), starts, ends, k, **rest)
    return torch.where(chosen < 0, chosen, logits.shape[1] - 1 - chosen)


@fault("topk_per_row", "I10", "I3")
def length_ignored(logits: Tensor, starts: Tensor, ends: Tensor, k: int, **rest: Any) -> Tensor:
    return GOOD.topk_per_row(logits, starts, torch.full_like(ends, logits.shape[1]), k, **rest)


@fault("topk_per_row", "I10")
def callers_buffer_not_used(*args: Any, out: Tensor | None = None, **rest: Any) -> Tensor:
    return GOOD.topk_per_row(*args, **rest)


@fault("topk_per_row", "C3", "I8")
def an_entry_swapped_far_down(*args: Any, **rest: Any) -> Tensor:
    chosen = GOOD.topk_per_row(*args, **rest)
    everything = set(range(int(chosen.max()) + 1)) - set(chosen[0].tolist())
    chosen[0, 0] = everything.pop()
    return chosen


@fault("compute_global_topk_indices_and_lens", "I5")
def rebased_twice(local: Tensor, owner: Tensor, table: Tensor, size: int, valid: Tensor) -> Any:
    slots, lens = GOOD.compute_global_topk_indices_and_lens(local, owner, table, size, valid)
    return torch.where(slots < 0, slots, slots + owner.unsqueeze(1) * size), lens


@fault("combine_topk_swa_indices", "I5")
def lengths_of_another_request(
    local: Tensor, starts: Tensor, lens: Tensor, *args: Any, **rest: Any
) -> Any:
    return GOOD.combine_topk_swa_indices(local, starts, lens.flip(0), *args, **rest)


# --- hyper-connections


@fault("hc_post", "M1", "M2")
def comb_transposed(u: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return GOOD.hc_post(u, h, post, comb.transpose(1, 2).contiguous())


@fault("hc_pre", "M2")
def one_iteration_less(*args: Any, iters: int, **rest: Any) -> Any:
    return GOOD.hc_pre(*args, iters=iters - 1, **rest)


@fault("hc_pre", "M2")
def epsilon_of_the_norm_missing(*args: Any, norm_eps: float, **rest: Any) -> Any:
    return GOOD.hc_pre(*args, norm_eps=0.0, **rest)


@fault("hc_pre", "M1")
def tokens_after_8192_forgotten(*args: Any, **rest: Any) -> Any:
    y, post, comb = GOOD.hc_pre(*args, **rest)
    y[8192:] = 0
    return y, post, comb

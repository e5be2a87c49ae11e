"""Deliberate faults of index scores and selection, each with its intended cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anymla.formats.page_layout import get_layout
from anymla.testing.conformance.faults.fault import FAULTS, GOOD, Fault, fault


def _without_relu(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(q: Tensor, *args: Any, **rest: Any) -> Tensor:
        # relu(x) - relu(-x) = x
        positive, negative = operation(q, *args, **rest), operation(-q, *args, **rest)
        return torch.where(positive == -torch.inf, positive, positive - negative)

    return run


FAULTS += [
    Fault("relu_missing", ("I2",), "mqa_logits", _without_relu(GOOD.mqa_logits)),
    Fault(
        "relu_missing_in_pages", ("I2",), "paged_mqa_logits", _without_relu(GOOD.paged_mqa_logits)
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


@fault("paged_mqa_logits", "L1")
def scales_taken_from_the_next_entry(q: Tensor, cache: Tensor, *args: Any, **rest: Any) -> Tensor:
    shifted = cache.clone()
    _, scales = get_layout(rest.get("layout", "v4_index_fp8")).planes(shifted)
    assert scales is not None
    scales.copy_(scales.roll(-1, 1))
    return GOOD.paged_mqa_logits(q, shifted, *args, **rest)


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


def _selection_by_scores(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    lengths: Tensor,
    table: Tensor,
    k: int,
    *,
    later_first: bool = False,
    nan_lost: bool = False,
    **rest: Any,
) -> Tensor:
    """Select for one request from all scores at once."""
    entries = table.shape[1] * cache.shape[1]
    logits = GOOD.paged_mqa_logits(
        q.unsqueeze(0),
        cache,
        weights,
        lengths.view(1, -1),
        table,
        max_context=entries,
        layout=rest.get("layout", "v4_index_fp8"),
    )
    if nan_lost:
        logits = logits.nan_to_num(-torch.inf)
    zeros = torch.zeros_like(lengths)
    if later_first:
        logits = logits.flip(1)
        chosen = GOOD.topk_per_row(logits, zeros + entries - lengths, zeros + entries, k)
        chosen = torch.where(chosen < 0, chosen, lengths.unsqueeze(1) - 1 - chosen)
    else:
        chosen = GOOD.topk_per_row(logits, zeros, lengths, k)
    top = torch.iinfo(torch.int32).max
    ascending = torch.where(chosen < 0, top, chosen).sort(1).values
    return torch.where(ascending == top, -1, ascending)


@fault("select_topk", "I11")
def later_entry_first_in_the_cache(*args: Any, **rest: Any) -> Tensor:
    return _selection_by_scores(*args, later_first=True, **rest)


@fault("select_topk", "I11")
def nan_is_dropped_in_the_cache(*args: Any, **rest: Any) -> Tensor:
    return _selection_by_scores(*args, nan_lost=True, **rest)


@fault("select_topk", "I14")
def all_scores_at_once(*args: Any, **rest: Any) -> Tensor:
    return _selection_by_scores(*args, **rest)


@fault("select_topk", "I12")
def tokens_of_the_next_request(
    *args: Any, token_to_req: Tensor | None = None, **rest: Any
) -> Tensor:
    owners = None if token_to_req is None else token_to_req.roll(-1)
    chosen: Tensor = GOOD.select_topk(*args, token_to_req=owners, **rest)
    return chosen


@fault("select_topk", "I13")
def negative_lengths_wrap(
    q: Tensor, cache: Tensor, weights: Tensor, lengths: Tensor, *args: Any, **rest: Any
) -> Tensor:
    chosen: Tensor = GOOD.select_topk(q, cache, weights, lengths.abs(), *args, **rest)
    return chosen


@fault("select_topk", "I17")
def blocks_are_overlooked(*args: Any, **rest: Any) -> Tensor:
    rest.pop("blocks", None)
    chosen: Tensor = GOOD.select_topk(*args, **rest)
    return chosen


@fault("select_topk", "I17")
def the_last_block_is_whole(
    q: Tensor, cache: Tensor, weights: Tensor, lengths: Tensor, *args: Any, **rest: Any
) -> Tensor:
    if rest.get("blocks") is not None:
        size = rest["block_size"]
        lengths = (lengths + size - 1) // size * size
    chosen: Tensor = GOOD.select_topk(q, cache, weights, lengths, *args, **rest)
    return chosen


@fault("select_topk", "I17")
def no_block_is_the_first(*args: Any, blocks: Tensor | None = None, **rest: Any) -> Tensor:
    if blocks is not None:
        blocks = blocks.clamp(min=0)
    chosen: Tensor = GOOD.select_topk(*args, blocks=blocks, **rest)
    return chosen

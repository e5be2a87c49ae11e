"""Deliberate faults of entries, of their states, and of visible rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anymla.testing.conformance.expected import table
from anymla.testing.conformance.faults.fault import FAULTS, GOOD, Fault, fault


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


def _other_base(a: dict[str, Any]) -> None:
    a["cos_sin_cache"] = table(len(a["cos_sin_cache"]), compressed=False)


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
    Fault(name, cases, "compress_norm_rope_insert", _compress(change))
    for name, cases, change in (
        ("entries_rotated_at_the_windows_end", ("R2", "C1", "C4"), _rotate_at_the_end),
        ("overlap_halves_swapped", ("C1", "R2"), _swap_halves),
        ("hadamard_on_queries_only", ("I1",), _one_sided_hadamard),
        ("stale_state_is_read", ("C9",), _reads_what_was_left),
        ("entries_rotated_with_the_windows_base", ("R2", "C1"), _other_base),
        ("drafted_entries_are_kept", ("C5", "C6", "C7"), _keeps_what_is_there),
    )
]


@fault("save_partial_states", "C1", "C4", "C8")
def position_embedding_missing(
    kv: Tensor, score: Tensor, ape: Tensor, *args: Any, **rest: Any
) -> None:
    GOOD.save_partial_states(kv, score, ape * 0, *args, **rest)


@fault("save_partial_states", "C9", "C1")
def first_row_of_a_request_is_a_stale_one(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    positions: Tensor,
    state: Tensor,
    slots: Tensor,
    **rest: Any,
) -> None:
    slots = torch.where(positions == 0, -1, slots)
    GOOD.save_partial_states(kv, score, ape, positions, state, slots, **rest)


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

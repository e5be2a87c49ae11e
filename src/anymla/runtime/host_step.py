"""The step of a few tokens on a CPU, computed from Python integers without calls on tensors.

It gives the same step as ``StepPlanner.build`` does through the selection operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anymla.layers.rows import GroupStep, Rows
from anymla.layers.step import Step
from anymla.runtime.cache_groups import CacheGroup
from anymla.runtime.cache_store import CacheStore
from anymla.runtime.span import Span

# (row of the step's block tables, position) of every token.
Tokens = Sequence[tuple[int, int]]


def host_step(
    store: CacheStore, spans: Sequence[Span], num_decodes: int, *, window_only: bool
) -> Step:
    """Build the step of ``StepPlanner.build`` on the host."""
    counts = [len(span.token_ids) for span in spans]
    rows = [span.state.row for span in spans]
    stops = [span.stop for span in spans]
    tokens = [(r, p) for r, span in enumerate(spans) for p in range(span.start, span.stop)]
    positions = [position for _, position in tokens]
    max_seq_len = max(stops)

    groups: dict[str, GroupStep] = {}
    dense: dict[str, Rows] = {}
    index_lens: dict[str, Tensor] = {}
    window = None
    for group in store.groups:
        if window_only and group.kind != "window":
            continue
        block_table = store.tables[group.name]
        for row, stop in zip(rows, stops, strict=True):
            block_table.extend(row, stop)
        table = block_table.host_rows(rows, max_seq_len)
        slots = [_slot(table, group, row, position) for row, position in tokens]
        groups[group.name] = GroupStep(torch.from_numpy(table), _int64(slots), group.page_size)
        if group.kind == "window":
            assert group.retention is not None
            window = _newest(table, group, tokens, group.retention)
        elif group.kind == "index":
            visible = [(position + 1) // group.ratio for position in positions]
            index_lens[group.name] = _int32(visible)
        elif group.lists_entries(max_seq_len):
            dense[group.name] = _newest(table, group, tokens, max_seq_len // group.ratio)
    assert window is not None
    return Step(
        token_ids=_int64([token_id for span in spans for token_id in span.token_ids]),
        positions=_int64(positions),
        token_to_req=_int32([row for row, _ in tokens]),
        is_valid=torch.from_numpy(np.ones(len(tokens), np.bool_)),
        seq_lens=_int32(stops),
        query_start_loc=_int32([0, *accumulate(counts)]),
        query_lens=tuple(counts),
        num_decodes=num_decodes,
        max_seq_len=max_seq_len,
        groups=groups,
        window=window,
        dense=dense,
        index_lens=index_lens,
    )


def _slot(table: NDArray[np.int32], group: CacheGroup, row: int, position: int) -> int:
    """Return the slot of the token, or of the entry that it completes; -1 if it completes none."""
    entry, place = divmod(position, group.ratio)
    if place != group.ratio - 1:
        return -1
    column, offset = divmod(entry, group.page_size)
    return table.item(row, column) * group.page_size + offset


def _newest(table: NDArray[np.int32], group: CacheGroup, tokens: Tokens, width: int) -> Rows:
    """List the newest ``width`` entries that each token sees, or all if there are fewer."""
    indices = np.full((len(tokens), width), -1, np.int32)
    lengths = []
    for target, (row, position) in zip(indices, tokens, strict=True):
        visible = (position + 1) // group.ratio
        first = max(0, visible - width)
        _list_slots(target, table[row], group.page_size, first, visible)
        lengths.append(visible - first)
    return Rows(torch.from_numpy(indices), _int32(lengths))


def _list_slots(
    target: NDArray[np.int32], table: NDArray[np.int32], page_size: int, first: int, stop: int
) -> None:
    """Write the slots of entries first .. stop - 1 to the head of ``target``."""
    column, skip = divmod(first, page_size)
    pages = table[column : -(-stop // page_size), None]
    slots = (pages * np.int32(page_size) + np.arange(page_size, dtype=np.int32)).ravel()
    target[: stop - first] = slots[skip : skip + stop - first]


def _int32(values: list[int]) -> Tensor:
    array: NDArray[Any] = np.array(values, np.int32)
    return torch.from_numpy(array)


def _int64(values: list[int]) -> Tensor:
    array: NDArray[Any] = np.array(values, np.int64)
    return torch.from_numpy(array)

"""A step's metadata, built on the device from a few integers per request and the block tables.

The selection operations build it, shapes depend on the sizes alone, and nothing is read back. So
the same calls serve a batch of any size and a batch of fixed size inside a CUDA graph.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from anymla.layers.request_rows import request_rows
from anymla.layers.rows import GroupStep, RequestRows, Rows
from anymla.layers.step import Step
from anymla.ops.step_indices import compressed_rows, slot_mapping, token_to_request, window_rows
from anymla.runtime.cache_groups import CacheGroup


@dataclasses.dataclass(frozen=True)
class Batch:
    """Device tensors that describe a step of T token rows and R requests.

    Attributes:
        token_ids: int32 [T], token id of each row.
        first_rows: int32 [R + 1], first row of each request, then T.
        counts: int32 [R], number of each request's leading rows that are tokens, the rest being
            padding; None if there is no padding.
        starts: int32 [R], position of each request's first token.
        tables: block tables int32 [R, P] by cache group.
    """

    token_ids: Tensor
    first_rows: Tensor
    counts: Tensor | None
    starts: Tensor
    tables: Mapping[str, Tensor]


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """Sizes of a step that the host knows; see the fields of ``Step``."""

    query_lens: tuple[int, ...]
    num_decodes: int
    max_seq_len: int


class Reads(enum.Enum):
    """Ways in which queries of a request read the rows that they share."""

    SLOTS = "each by a list of its own"
    DECODED = "decoded beforehand, once for all of the queries"


# Maps the number of compressed entries that a request may see to a way to read; 0 for the window.
ChooseReads = Callable[[int], Reads]


def device_step(
    batch: Batch,
    groups: Sequence[CacheGroup],
    sizes: BatchSizes,
    *,
    backend: str | None = None,
    reads: ChooseReads | None = None,
) -> Step:
    """Build the metadata of a step.

    Args:
        batch: tensors of the step on the device.
        groups: cache groups that ``batch.tables`` has, the window among them.
        sizes: sizes of the step. ``max_seq_len`` may exceed the longest request; it sets the
            widths.
        backend: name of the backend of the selection operations; None for the best.
        reads: choice of how layers read rows that a request's queries share. All requests must have
            the same number of rows. None: by slots.
    """
    positions, token_to_req, is_valid, counts = _places_of_tokens(batch, sizes, backend)

    index_lens: dict[str, Tensor] = {}
    window = None
    grouped: dict[str, GroupStep] = {}
    dense: dict[str, Rows] = {}
    for group in groups:
        table = batch.tables[group.name]
        where = (positions, token_to_req, table)
        slots = slot_mapping(*where, page_size=group.page_size, ratio=group.ratio, backend=backend)
        grouped[group.name] = GroupStep(table, slots, group.page_size)
        if group.kind == "window":
            assert group.retention is not None
            window = Rows(
                *window_rows(
                    *where, block_size=group.page_size, window=group.retention, backend=backend
                )
            )
        elif group.kind == "index":
            visible = (positions + 1) // group.ratio
            # Padding is at position 0, where no entry of several tokens is complete.
            if batch.counts is not None and group.ratio == 1:
                visible = visible * is_valid
            index_lens[group.name] = visible.int()
        elif group.lists_entries(sizes.max_seq_len):
            indices, _, lengths = compressed_rows(
                *where,
                ratio=group.ratio,
                block_size=group.page_size,
                width=sizes.max_seq_len // group.ratio,
                backend=backend,
            )
            dense[group.name] = Rows(indices, lengths)
    assert window is not None
    stops = batch.starts + counts
    chunks: dict[str, RequestRows] = {}
    if reads is not None:
        chunks = _chunks(positions, token_to_req, stops, groups, grouped, dense, sizes, reads)
    return Step(
        token_ids=batch.token_ids.long(),
        positions=positions,
        token_to_req=token_to_req,
        is_valid=is_valid,
        seq_lens=stops,
        query_start_loc=batch.first_rows,
        query_lens=sizes.query_lens,
        num_decodes=sizes.num_decodes,
        max_seq_len=sizes.max_seq_len,
        groups=grouped,
        window=window,
        dense=dense,
        index_lens=index_lens,
        padded=batch.counts is not None,
        chunks=chunks,
    )


def _places_of_tokens(
    batch: Batch, sizes: BatchSizes, backend: str | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return positions int64 [T], requests int32 [T], the mask of tokens, tokens a request [R].

    Padding is at position 0 of request -1.
    """
    rows, device = len(batch.token_ids), batch.token_ids.device
    if batch.counts is None:
        token_to_req = token_to_request(batch.first_rows, rows, backend=backend)
        starts = (batch.starts - batch.first_rows[:-1]).index_select(0, token_to_req)
        positions = torch.arange(rows, device=device) + starts
        return positions, token_to_req, token_to_req >= 0, batch.first_rows.diff()
    if len(set(sizes.query_lens)) == 1:
        offset = numbers(0, sizes.query_lens[0], torch.int64, device)
        request = numbers(1, 1 + len(sizes.query_lens), torch.int32, device)
        is_token = offset < batch.counts.unsqueeze(1)
        positions = (batch.starts.unsqueeze(1) + offset) * is_token
        token_to_req = request.unsqueeze(1) * is_token - 1
        return positions.flatten(), token_to_req.flatten(), is_token.flatten(), batch.counts
    token_to_req = token_to_request(batch.first_rows, rows, backend=backend)
    offset = torch.arange(rows, device=device) - batch.first_rows.index_select(0, token_to_req)
    is_token = offset < batch.counts.index_select(0, token_to_req)
    positions = torch.where(is_token, offset + batch.starts.index_select(0, token_to_req), 0)
    return positions, torch.where(is_token, token_to_req, -1), is_token, batch.counts


@functools.cache
def numbers(
    first: int, stop: int, dtype: torch.dtype, device: torch.device, step: int = 1
) -> Tensor:
    """Return the cached tensor first, first + step, ...; recorded steps keep its address."""
    return torch.arange(first, stop, step, dtype=dtype, device=device)


def _chunks(
    positions: Tensor,
    token_to_req: Tensor,
    stops: Tensor,
    groups: Sequence[CacheGroup],
    grouped: Mapping[str, GroupStep],
    dense: Mapping[str, Rows],
    sizes: BatchSizes,
    reads: ChooseReads,
) -> dict[str, RequestRows]:
    """Build ``Step.chunks`` by group, for requests that attend to decoded workspaces."""
    own = _window_of(groups)
    see = functools.partial(
        request_rows, positions, token_to_req, stops, grouped[own.name], window=_retained(own),
        queries=max(sizes.query_lens),
    )  # fmt: skip
    chunks = {}
    if reads(0) == Reads.DECODED:
        chunks[own.name] = see()
    for group in groups:
        entries = sizes.max_seq_len // group.ratio
        if group.name in dense and entries and reads(entries) == Reads.DECODED:
            compressed = grouped[group.name]
            chunks[group.name] = see(compressed=compressed, ratio=group.ratio, entries=entries)
    return chunks


def _window_of(groups: Sequence[CacheGroup]) -> CacheGroup:
    return next(group for group in groups if group.kind == "window")


def _retained(group: CacheGroup) -> int:
    assert group.retention is not None
    return group.retention

"""Turns spans of tokens into a ``Step``: the metadata that every layer of a forward pass shares.

All of it is built once per step, as tensors on the model's device, from a few integers per request;
nothing is read back. See ``anymla.layers.step`` for what each field means.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from anymla.layers.step import GroupStep, Rows, Step
from anymla.ops.selection import compressed_rows, slot_mapping, token_to_request, window_rows
from anymla.runtime.cache_groups import CacheGroup
from anymla.runtime.cache_store import CacheStore
from anymla.runtime.host_step import host_step
from anymla.runtime.span import Span

# Up to so many tokens, numbers on the host are cheaper than calls on tensors, if no device waits.
HOST_TOKENS = 16


class StepPlanner:
    """Builds steps over the caches of one store.

    Attributes:
        store: the caches and their block tables.
        backend: of the selection operations.
    """

    def __init__(self, store: CacheStore, *, backend: str | None = None) -> None:
        self.store = store
        self.backend = backend

    def build(self, spans: Sequence[Span], *, window_only: bool = False) -> Step:
        """Take the pages that the tokens need and build their step.

        Args:
            spans: at least one; decode spans first.
            window_only: for draft layers, which keep no other cache.
        """
        num_decodes = sum(span.is_decode for span in spans)
        assert spans
        assert all(span.is_decode for span in spans[:num_decodes])
        device = self.store.device
        counts = [len(span.token_ids) for span in spans]
        if device.type == "cpu" and sum(counts) <= HOST_TOKENS:
            return host_step(self.store, spans, num_decodes, window_only=window_only)
        max_seq_len = max(span.stop for span in spans)
        token_ids = torch.tensor([id_ for span in spans for id_ in span.token_ids], device=device)
        rows = torch.tensor([span.state.row for span in spans], device=device)
        starts = torch.tensor([span.start for span in spans], device=device)
        offsets = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
        token_to_req = token_to_request(offsets, len(token_ids), backend=self.backend)
        positions = torch.arange(len(token_ids), device=device)
        positions += (starts - offsets[:-1]).index_select(0, token_to_req)

        groups: dict[str, GroupStep] = {}
        dense: dict[str, Rows] = {}
        window = index_lens = None
        for group in self.store.groups:
            if window_only and group.kind != "window":
                continue
            table = self.store.tables[group.name]
            for span in spans:
                table.extend(span.state.row, span.stop)
            block_table = table.rows(rows, max_seq_len)
            groups[group.name] = GroupStep(
                block_table=block_table,
                slot_mapping=slot_mapping(
                    positions,
                    token_to_req,
                    block_table,
                    page_size=group.page_size,
                    ratio=group.ratio,
                    backend=self.backend,
                ),
                page_size=group.page_size,
            )
            if group.kind == "window":
                window = self._window(group, positions, token_to_req, block_table)
            elif group.kind == "index":
                index_lens = ((positions + 1) // group.ratio).int()
            elif group.lists_entries(max_seq_len):
                width = max_seq_len // group.ratio
                dense[group.name] = self._dense(group, positions, token_to_req, block_table, width)
        assert window is not None
        return Step(
            token_ids=token_ids,
            positions=positions,
            token_to_req=token_to_req,
            is_valid=token_to_req >= 0,
            seq_lens=(starts + offsets.diff()).int(),
            query_start_loc=offsets,
            query_lens=tuple(counts),
            num_decodes=num_decodes,
            max_seq_len=max_seq_len,
            groups=groups,
            window=window,
            dense=dense,
            index_lens=index_lens,
        )

    def _window(
        self, group: CacheGroup, positions: Tensor, token_to_req: Tensor, block_table: Tensor
    ) -> Rows:
        assert group.retention is not None
        indices, lengths = window_rows(
            positions,
            token_to_req,
            block_table,
            block_size=group.page_size,
            window=group.retention,
            backend=self.backend,
        )
        return Rows(indices, lengths)

    def _dense(
        self,
        group: CacheGroup,
        positions: Tensor,
        token_to_req: Tensor,
        block_table: Tensor,
        width: int,
    ) -> Rows:
        indices, _, lengths = compressed_rows(
            positions,
            token_to_req,
            block_table,
            ratio=group.ratio,
            block_size=group.page_size,
            width=width,
            backend=self.backend,
        )
        return Rows(indices, lengths)

"""Rows at rest: a row of a cache that was once written keeps its bytes while its request runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anymla.audit.caches import planes_at
from anymla.audit.packet import Held
from anymla.engines.vllm.audit.sample import Sample, on_device
from anymla.formats.page_layout import INDEX_FP8, MAIN_FP8

_ROWS = 16  # rows of a kind in a layer that are kept
_KINDS = 8  # kinds of layers whose rows are kept; the oldest give way
_CODES = {"main": 448, "index": 128}  # bytes of a row that are FP8 codes


@dataclasses.dataclass
class _Kept:
    """Cache rows of one kind in one layer that have been seen.

    Attributes:
        requests: request that each row belongs to.
        entries: its number in the request's compressed cache.
        since: step in which it was seen.
        slots: slot of each row in the cache, on the device.
        rows: its bytes, values before scales, on the device.
    """

    requests: list[str]
    entries: list[int]
    since: list[int]
    slots: Tensor
    rows: Tensor

    def only(self, places: list[int]) -> _Kept:
        """Select the rows at these places."""
        if places == list(range(len(self.requests))):
            return self
        index = on_device(self.slots.device, places)
        return _Kept(
            [self.requests[i] for i in places],
            [self.entries[i] for i in places],
            [self.since[i] for i in places],
            self.slots[index],
            self.rows[index],
        )

    def with_more(self, new: _Kept) -> _Kept:
        """Return these rows and the new ones after them."""
        return _Kept(
            self.requests + new.requests,
            self.entries + new.entries,
            self.since + new.since,
            torch.cat((self.slots, new.slots)),
            torch.cat((self.rows, new.rows)),
        )


class RowsAtRest:
    """Rows that are kept from audited steps, and looked at again in later ones."""

    judged_by = ("at_rest",)

    def __init__(self, attentions: Mapping[str, Any]) -> None:
        """Keep nothing yet; take the attention layers by their prefixes."""
        self._attentions = attentions
        self._kept: dict[tuple[str, str], _Kept] = {}
        self._gone: set[str] = set()

    def forget(self, requests: set[str]) -> None:
        """Drop the rows of requests that have ended, or that will be computed again."""
        if self._kept:
            self._gone |= requests

    def visit(self, sample: Sample, metadata: dict[str, Any]) -> None:
        """Look at kept rows again, and keep some of the chosen tokens' requests."""
        owner_of = {name: owner for owner, name in enumerate(sample.names)}
        owners, first = np.unique(sample.owners, return_index=True)
        token_of = dict(zip(owners.tolist(), first.tolist(), strict=True))
        gone, self._gone = self._gone, set()
        for (layer, kind), kept in list(self._kept.items()):
            if gone & set(kept.requests):
                held = [i for i, name in enumerate(kept.requests) if name not in gone]
                kept = self._kept[layer, kind] = kept.only(held)
            here = [i for i, name in enumerate(kept.requests) if owner_of.get(name, -1) in token_of]
            if here:
                seen = kept.only(here)
                of = [owner_of[name] for name in seen.requests]
                tokens = [token_of[owner] for owner in of]
                tensors = self._again(sample, metadata, layer, kind, seen, of)
                sample.plan("at_rest", layer, tensors, tokens, what=kind, codes=_CODES[kind])
        self._keep(sample, metadata, token_of)

    def _again(
        self,
        sample: Sample,
        metadata: dict[str, Any],
        layer: str,
        kind: str,
        seen: _Kept,
        owners: list[int],
    ) -> dict[str, Held]:
        """Return rows as they were and as they are, with their slots."""
        slots, rows = self._rows(metadata, layer, kind, owners, seen.entries)
        entries, since = on_device(slots.device, [seen.entries, seen.since])
        return sample.hold(
            before=seen.rows,
            after=rows,
            slots_before=seen.slots,
            slots=slots,
            entries=entries,
            since=since,
        )

    def _keep(self, sample: Sample, metadata: dict[str, Any], token_of: dict[int, int]) -> None:
        """Remember a row of each chosen token's request, of an entry that earlier steps closed."""
        numbers, step = sample.auditor.random("rows at rest"), sample.auditor.step
        for layer in sorted(sample.layers):
            attention = self._attentions[layer]
            owners, entries = [], []
            for token in sample.chosen if attention.compress_ratio > 1 else ():
                owner = sample.owner(token)
                closed = sample.position(token_of[owner]) // attention.compress_ratio
                if closed and owner < len(sample.names):
                    owners.append(owner)
                    entries.append(numbers.randrange(closed))
            for kind in ("main", "index") if attention.indexer is not None else ("main",):
                if owners:
                    slots, rows = self._rows(metadata, layer, kind, owners, entries)
                    names, since = [sample.names[owner] for owner in owners], [step] * len(owners)
                    self._add((layer, kind), _Kept(names, entries, since, slots, rows))

    def _add(self, key: tuple[str, str], new: _Kept) -> None:
        old = self._kept.pop(key, None)
        new = new if old is None else old.with_more(new)
        count = len(new.requests)
        self._kept[key] = new.only(list(range(max(0, count - _ROWS), count)))
        while len(self._kept) > _KINDS:
            del self._kept[next(iter(self._kept))]

    def _rows(
        self, metadata: dict[str, Any], layer: str, kind: str, owners: list[int], entries: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Return slots and bytes of entries of requests."""
        attention = self._attentions[layer]
        cache = attention.kv_cache if kind == "main" else attention.indexer.k_cache.kv_cache
        table, page = metadata[layer].block_table, cache.shape[1]
        owner, entry = on_device(table.device, [owners, entries])
        pages = table[owner, (entry // page).clamp(max=table.shape[1] - 1)].long()
        slots = pages * page + entry % page
        planes = planes_at(cache, slots, MAIN_FP8 if kind == "main" else INDEX_FP8)
        return slots, torch.cat(tuple(planes.values()), -1)

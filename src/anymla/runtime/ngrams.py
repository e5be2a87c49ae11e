"""Rows of n-grams, read for a step's tokens before it runs.

Which rows they are follows from tokens alone, which the host knows: what a request has computed,
and the drafts behind it. Nothing is kept between steps, so that nothing is undone when drafts turn
out wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from anymla.layers.engram import Engram
from anymla.layers.rows import NgramRows
from anymla.runtime.span import Span
from anymla.runtime.upload import to_device


class NgramReader:
    """Reads the rows of some layers' tables."""

    def __init__(self, engrams: Sequence[Engram], device: torch.device) -> None:
        """See ``read``.

        Args:
            engrams: what reads n-grams; may be none.
            device: where rows are wanted.
        """
        self._engrams = engrams
        self._device = device

    @property
    def token_bytes(self) -> int:
        """Of a token's rows in all layers."""
        tables = ((each.ngrams.moduli.numel(), each.table) for each in self._engrams)
        return sum(
            columns * part.shape[1] * part.itemsize
            for columns, table in tables
            for part in (table.weight, table.scale)
            if part is not None
        )

    def read(self, spans: Sequence[Span]) -> dict[int, NgramRows]:
        """Rows of the spans' tokens, one after the other, by layer."""
        return _each(self.found(spans), lambda host: to_device(host, self._device))

    def found(self, spans: Sequence[Span]) -> dict[int, NgramRows]:
        """The same, where the tables lie; nothing without spans."""
        if not spans or not self._engrams:
            return {}
        # The longest n-gram and the table's device are the same in all layers.
        first = self._engrams[0]
        tokens = _tokens(spans, len(first.ngrams.multipliers) - 1)
        given = tuple(each.to(first.table.weight.device) for each in tokens)
        return {each.layer: each.read(*given) for each in self._engrams}

    def nothing(self, tokens: int) -> dict[int, NgramRows]:
        """Rows of as many tokens that are padding, which may be written to."""
        rows = {}
        for each in self._engrams:
            columns = each.ngrams.moduli.numel()
            rows[each.layer] = NgramRows(
                each.table.weight.new_zeros(tokens, columns, each.table.weight.shape[1]),
                None
                if each.table.scale is None
                else each.table.scale.new_zeros(tokens, columns, each.table.scale.shape[1]),
            )
        return _each(rows, lambda host: host.to(self._device))


@dataclasses.dataclass(frozen=True)
class NgramBuffers:
    """Rows at fixed addresses, for steps of fixed size, of which one runs at a time.

    Attributes:
        reader: of the tables.
        rows: by layer; what is not written holds rows of an earlier step.
        host: what ``rows`` are copied from; the same where they are the host's.
    """

    reader: NgramReader
    rows: Mapping[int, NgramRows]
    host: Mapping[int, NgramRows]

    @classmethod
    def allocate(cls, reader: NgramReader, tokens: int) -> NgramBuffers:
        """Buffers for so many tokens."""
        rows = reader.nothing(tokens)
        if all(part.is_cpu for each in rows.values() for part in _parts(each)):
            return cls(reader, rows, rows)
        # Copies from memory that is not pinned would wait for the device.
        return cls(reader, rows, _each(rows, _pinned))

    def first(self, tokens: int) -> NgramBuffers:
        """The first of them, in the same memory."""
        rows = _each(self.rows, lambda part: part[:tokens])
        host = rows if self.host is self.rows else _each(self.host, lambda part: part[:tokens])
        return NgramBuffers(self.reader, rows, host)

    def fill(self, spans: Sequence[Span], places: Sequence[int]) -> None:
        """Read the rows of the spans' tokens into ``places``.

        What was filled before must have been copied.
        """
        at = torch.tensor(places)
        for layer, found in self.reader.found(spans).items():
            parts = (_parts(each) for each in (self.host[layer], found, self.rows[layer]))
            for host, read, device in zip(*parts, strict=True):
                host.index_copy_(0, at, read)
                if self.host is not self.rows:
                    device.copy_(host, non_blocking=True)


def _tokens(spans: Sequence[Span], before: int) -> tuple[Tensor, Tensor]:
    """The spans' tokens int64 [T], and the ``before`` of each, the nearest first; -1 for none."""
    texts: list[int] = []
    places: list[int] = []
    for span in spans:
        known = span.state.tokens[max(0, span.start - before) : span.start]
        texts += [-1] * (before - len(known)) + known
        places += range(len(texts), len(texts) + len(span.token_ids))
        texts += span.token_ids
    nearest = torch.tensor(places).unsqueeze(1) - torch.arange(before + 1)
    tokens = torch.tensor(texts)[nearest]
    return tokens[:, 0], tokens[:, 1:]


def _parts(rows: NgramRows) -> list[Tensor]:
    return [part for part in (rows.weight, rows.scale) if part is not None]


def _each(
    rows: Mapping[int, NgramRows], change: Callable[[Tensor], Tensor]
) -> dict[int, NgramRows]:
    return {
        layer: NgramRows(change(each.weight), None if each.scale is None else change(each.scale))
        for layer, each in rows.items()
    }


def _pinned(device: Tensor) -> Tensor:
    return torch.zeros_like(device, device="cpu", pin_memory=device.device.type == "cuda")

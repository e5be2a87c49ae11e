"""Rows of n-grams, read for a step's tokens before it runs.

The tokens alone determine these rows, and the host knows the tokens: a request's computed tokens
and the drafts after them. No state is kept between steps, so wrong drafts leave nothing to undo.
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
    """Reads the rows of some layers' n-gram tables."""

    def __init__(self, engrams: Sequence[Engram], device: torch.device) -> None:
        """Hold the tables; ``read`` reads them.

        Args:
            engrams: modules that read n-grams; may be empty.
            device: device on which rows are wanted.
        """
        self._engrams = engrams
        self._device = device

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's rows in all layers."""
        tables = ((each.ngrams.moduli.numel(), each.table) for each in self._engrams)
        return sum(
            columns * part.shape[1] * part.itemsize
            for columns, table in tables
            for part in (table.weight, table.scale)
            if part is not None
        )

    def read(self, spans: Sequence[Span]) -> dict[int, NgramRows]:
        """Return the rows of the spans' tokens, one after the other, by layer."""
        return _each(self.found(spans), lambda host: to_device(host, self._device))

    def found(self, spans: Sequence[Span]) -> dict[int, NgramRows]:
        """Return the same rows on the tables' device; empty without spans."""
        if not spans or not self._engrams:
            return {}
        # The longest n-gram and the tables' device are the same in all layers.
        first = self._engrams[0]
        tokens = _tokens(spans, len(first.ngrams.multipliers) - 1)
        given = tuple(each.to(first.table.weight.device) for each in tokens)
        return {each.layer: each.read(*given) for each in self._engrams}

    def nothing(self, tokens: int) -> dict[int, NgramRows]:
        """Return writable rows for ``tokens`` padding tokens."""
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
    """N-gram rows at fixed addresses, for steps of fixed size, of which one runs at a time.

    Attributes:
        reader: reader of the tables.
        rows: rows by layer; places that are not written hold rows of an earlier step.
        host: source of the copies to ``rows``; the same tensors if the device is the host.
    """

    reader: NgramReader
    rows: Mapping[int, NgramRows]
    host: Mapping[int, NgramRows]

    @classmethod
    def allocate(cls, reader: NgramReader, tokens: int) -> NgramBuffers:
        """Allocate buffers for ``tokens`` tokens."""
        rows = reader.nothing(tokens)
        if all(part.is_cpu for each in rows.values() for part in _parts(each)):
            return cls(reader, rows, rows)
        # Copies from memory that is not pinned would wait for the device.
        return cls(reader, rows, _each(rows, _pinned))

    def first(self, tokens: int) -> NgramBuffers:
        """Return a view of the first ``tokens`` rows."""
        rows = _each(self.rows, lambda part: part[:tokens])
        host = rows if self.host is self.rows else _each(self.host, lambda part: part[:tokens])
        return NgramBuffers(self.reader, rows, host)

    def fill(self, spans: Sequence[Span], places: Sequence[int]) -> None:
        """Read the rows of the spans' tokens into ``places``.

        The copy of the previous contents must have finished.
        """
        at = torch.tensor(places)
        for layer, found in self.reader.found(spans).items():
            parts = (_parts(each) for each in (self.host[layer], found, self.rows[layer]))
            for host, read, device in zip(*parts, strict=True):
                host.index_copy_(0, at, read)
                if self.host is not self.rows:
                    device.copy_(host, non_blocking=True)


def _tokens(spans: Sequence[Span], before: int) -> tuple[Tensor, Tensor]:
    """Return the spans' tokens int64 [T], and the ``before`` preceding ones; -1 for none."""
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

"""A step of fixed size: everything it reads lies in buffers that never move.

The host writes a few integers a request into one buffer; the rest of the step, metadata included,
happens on the device and is the same for any batch that fits. Requests and rows that are not there
are padding: they have no request, write no cache row, and their results mean nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anymla.layers.side_stream import INLINE, SideStream
from anymla.layers.step import Step
from anymla.runtime.bucket import Bucket
from anymla.runtime.cache_groups import CacheGroup, ceil_div
from anymla.runtime.cache_store import CacheStore
from anymla.runtime.device_step import Batch, BatchSizes, ChooseReads, device_step
from anymla.runtime.graphs import Graph
from anymla.runtime.ngrams import NgramBuffers
from anymla.runtime.page_pool import NULL_PAGE
from anymla.runtime.span import Span

Body = Callable[[Step], tuple[Tensor, ...]]


class FixedStep:
    """One bucket's step, recorded where that is possible.

    Row ``i * bucket.tokens + j`` of every result belongs to token j of span i.

    Attributes:
        bucket: the sizes.
    """

    def __init__(
        self,
        store: CacheStore,
        bucket: Bucket,
        body: Body,
        *,
        record: bool,
        window_only: bool = False,
        backend: str | None = None,
        pool: Any = None,
        side: SideStream = INLINE,
        reads: ChooseReads | None = None,
        ngrams: NgramBuffers | None = None,
    ) -> None:
        """Allocate the buffers.

        Args:
            store: the caches, whose block tables are read and kept up to date.
            bucket: the sizes.
            body: from the step to the results that are wanted.
            record: replay a CUDA graph.
            window_only: for draft layers, which keep no other cache.
            backend: of the selection operations.
            pool: see ``Graph``.
            side: see ``Step``.
            reads: see ``device_step``.
            ngrams: for as many tokens as the bucket has; None where no layer reads any.
        """
        self.bucket = bucket
        self._store = store
        self._body = body
        self._backend = backend
        self._side = side
        self._reads = reads
        self._ngrams = ngrams
        self._groups = store.step_groups(window_only=window_only)
        self._sizes = BatchSizes(
            (bucket.tokens,) * bucket.requests, bucket.requests, bucket.max_seq_len
        )
        device = store.device
        self._first_rows = torch.arange(
            0, bucket.rows + 1, bucket.tokens, dtype=torch.int32, device=device
        )
        fields = {"token_ids": bucket.rows}
        fields |= dict.fromkeys(("starts", "counts", "rows"), bucket.requests)
        for group in self._groups:
            fields |= dict.fromkeys(_change_fields(group), _most_changes(group, bucket))
        self._host = torch.zeros(
            sum(fields.values()), dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self._buffer = torch.zeros_like(self._host, device=device)
        sizes = list(fields.values())
        parts = np.split(self._host.numpy(), np.cumsum(sizes)[:-1])
        self._written = dict(zip(fields, parts, strict=True))
        self._read = dict(zip(fields, self._buffer.split(sizes), strict=True))
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._graph = Graph(self._run, device, record=record, pool=pool)

    def rehearse(self) -> None:
        """Run once, with nothing but padding."""
        self._fill([])
        self._run()

    def prepare(self) -> None:
        """Record, with nothing but padding."""
        self._fill([])
        self._graph.prepare()

    def __call__(self, spans: Sequence[Span]) -> tuple[Tensor, ...]:
        """Take the pages that the tokens need and run; results last until the next call."""
        assert self.bucket.holds(spans)
        if not self._graph.prepared:
            self.prepare()
        for group in self._groups:
            table = self._store.tables[group.name]
            for span in spans:
                table.extend(span.state.row, span.stop)
        self._fill(spans)
        return self._graph()

    def _fill(self, spans: Sequence[Span]) -> None:
        """Write the batch, and the block tables' changes, to the device's buffer."""
        if self._copied is not None:
            self._copied.synchronize()  # of the last step, which is long over
        written = self._written
        written["token_ids"][:] = -1
        written["starts"][:] = written["counts"][:] = 0
        written["rows"][:] = self._store.absent_row
        for i, span in enumerate(spans):
            count = len(span.token_ids)
            first = i * self.bucket.tokens
            written["token_ids"][first : first + count] = span.token_ids
            written["starts"][i] = span.start
            written["counts"][i] = count
            written["rows"][i] = span.state.row
        for group in self._groups:
            self._write_changes(group)
        if self._ngrams is not None:
            at = [
                i * self.bucket.tokens + j
                for i, span in enumerate(spans)
                for j in range(len(span.token_ids))
            ]
            self._ngrams.fill(spans, at)
        # Without an event nothing says when the host's memory may be written again.
        self._buffer.copy_(self._host, non_blocking=self._copied is not None)
        if self._copied is not None:
            self._copied.record()

    def _write_changes(self, group: CacheGroup) -> None:
        table = self._store.tables[group.name]
        places, pages = (self._written[name] for name in _change_fields(group))
        if table.num_changes > len(places):  # a prompt's pages, or a request that has left
            table.write_changes()
        changed, taken = table.take_changes()
        places[:] = self._store.absent_row * table.device_table.shape[1]
        pages[:] = NULL_PAGE
        places[: len(changed)] = changed
        pages[: len(taken)] = taken

    def _run(self) -> tuple[Tensor, ...]:
        tables = {}
        for group in self._groups:
            places, pages = (self._read[name] for name in _change_fields(group))
            table = self._store.tables[group.name]
            table.device_table.view(-1).scatter_(0, places.long(), pages)
            columns = table.device_table[:, : table.columns(self.bucket.max_seq_len)]
            tables[group.name] = columns.index_select(0, self._read["rows"])
        batch = Batch(
            self._read["token_ids"],
            self._first_rows,
            self._read["counts"],
            self._read["starts"],
            tables,
        )
        step = device_step(
            batch, self._groups, self._sizes, backend=self._backend, reads=self._reads
        )
        ngrams = {} if self._ngrams is None else self._ngrams.rows
        return self._body(dataclasses.replace(step, side=self._side, ngrams=ngrams))


def _change_fields(group: CacheGroup) -> tuple[str, str]:
    return f"{group.name} places", f"{group.name} pages"


def _most_changes(group: CacheGroup, bucket: Bucket) -> int:
    """Block table entries that change between two decode steps: taken, and returned."""
    return 2 * bucket.requests * (ceil_div(bucket.tokens, group.tokens_per_page) + 1)

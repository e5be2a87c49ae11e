"""A step of fixed size: all of its inputs lie in buffers that never move.

The host writes a few integers a request into one buffer. The rest of the step, metadata included,
happens on the device and is the same for any batch that fits. Missing requests and rows are
padding: they belong to no request, write no cache row, and their results are undefined.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
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


@dataclasses.dataclass(frozen=True)
class Carry:
    """Tokens of the next step, chosen by the step itself.

    Attributes:
        token_ids: integers [R, bucket.tokens] token ids; a negative one ends a request's tokens.
        advance: integers [R], positions from a request's first token to its next one.
    """

    token_ids: Tensor
    advance: Tensor


Body = Callable[[Step], tuple[Any, ...]]


class FixedStep:
    """One bucket's step, recorded as a graph where that is possible.

    Row ``i * bucket.tokens + j`` of every result belongs to token j of span i.

    Attributes:
        bucket: sizes of the step.
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
        carries: bool = False,
    ) -> None:
        """Allocate the buffers.

        Args:
            store: caches whose block tables are read and kept up to date.
            bucket: sizes of the step.
            body: function that maps the step to the wanted results.
            record: True to replay a CUDA graph.
            window_only: True for draft layers, which keep no other cache.
            backend: name of the backend of the selection operations; None for the best.
            pool: memory pool shared by graphs, see ``Graph``.
            side: further streams, see ``Step``.
            reads: choice of how shared rows are read, see ``device_step``.
            ngrams: n-gram buffers for as many tokens as the bucket has; None if no layer reads
                n-grams.
            carries: True if the body's last result is a ``Carry``, from which ``advance`` runs the
                next step.
        """
        self.bucket = bucket
        self._store = store
        self._body = body
        self._backend = backend
        self._side = side
        self._reads = reads
        self._ngrams = ngrams
        self._carries = carries
        self._groups = store.step_groups(window_only=window_only)
        self._sizes = BatchSizes(
            (bucket.tokens,) * bucket.requests, bucket.requests, bucket.max_seq_len
        )
        device = store.device
        self._first_rows = torch.arange(
            0, bucket.rows + 1, bucket.tokens, dtype=torch.int32, device=device
        )
        fields = {"token_ids": bucket.rows}
        fields |= dict.fromkeys(("starts", "counts", "rows", "limits"), bucket.requests)
        self._of_requests = sum(fields.values())
        changes = sum(_most_changes(group, bucket) for group in self._groups)
        fields |= dict.fromkeys(("places", "pages"), changes)
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
        """Run once on padding alone."""
        self._fill([])
        self._run()

    def prepare(self) -> tuple[Tensor, ...]:
        """Record on padding alone, and return the tensors that will hold the results."""
        self._fill([])
        return self._graph.prepare()

    def __call__(self, spans: Sequence[Span]) -> tuple[Tensor, ...]:
        """Take the pages that the tokens need and run; results last until the next call."""
        assert self.bucket.holds(spans)
        if not self._graph.prepared:
            self.prepare()
        self._extend((span.state.row, span.stop) for span in spans)
        self._fill(spans)
        return self._graph()

    def advance(self, stops: Iterable[tuple[int, int]]) -> tuple[Tensor, ...]:
        """Run the step after the last one, for the same requests and the tokens that it carries.

        Args:
            stops: for each request, its row in the block tables and the position before which its
                tokens end.
        """
        assert self._carries
        self._extend(stops)
        self._wait()
        self._write_changes()
        self._send(slice(self._of_requests, None))
        return self._graph()

    def _extend(self, stops: Iterable[tuple[int, int]]) -> None:
        stops = list(stops)
        for group in self._groups:
            table = self._store.tables[group.name]
            for row, stop in stops:
                table.extend(row, stop)

    def _wait(self) -> None:
        """Wait until the device has read the buffer of the last step."""
        if self._copied is not None:
            self._copied.synchronize()

    def _send(self, part: slice) -> None:
        """Copy a part of the host's buffer to the device."""
        # Without an event the host cannot tell when its memory may be written again, so that copy
        # waits.
        self._buffer[part].copy_(self._host[part], non_blocking=self._copied is not None)
        if self._copied is not None:
            self._copied.record()

    def _fill(self, spans: Sequence[Span]) -> None:
        """Write the batch, and the changes of the block tables, to the device's buffer."""
        self._wait()
        written = self._written
        written["token_ids"][:] = -1
        written["starts"][:] = written["counts"][:] = written["limits"][:] = 0
        written["rows"][:] = self._store.absent_row
        for i, span in enumerate(spans):
            count = len(span.token_ids)
            first = i * self.bucket.tokens
            written["token_ids"][first : first + count] = span.token_ids
            written["starts"][i] = span.start
            written["counts"][i] = count
            written["rows"][i] = span.state.row
            written["limits"][i] = span.state.request.max_written
        self._write_changes()
        if self._ngrams is not None:
            at = [
                i * self.bucket.tokens + j
                for i, span in enumerate(spans)
                for j in range(len(span.token_ids))
            ]
            self._ngrams.fill(spans, at)
        self._send(slice(None))

    def _write_changes(self) -> None:
        places, pages = (self._written[name] for name in ("places", "pages"))
        # Unused places write to the row of padding requests.
        places[:] = self._store.absent_row * self._store.joint_tables.shape[1]
        pages[:] = NULL_PAGE
        count = 0
        for group in self._groups:
            table = self._store.tables[group.name]
            # true for a prompt's pages, and for those of requests that ended
            if count + table.num_changes > len(places):
                table.write_changes()
            changed, taken = table.take_changes()
            places[count : count + len(changed)] = changed
            pages[count : count + len(taken)] = taken
            count += len(changed)

    def _run(self) -> tuple[Tensor, ...]:
        tables = self._tables()
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
        results = list(self._body(dataclasses.replace(step, side=self._side, ngrams=ngrams)))
        if self._carries:
            self._carry(results.pop())
        return tuple(results)

    def _tables(self) -> dict[str, Tensor]:
        """Apply the block tables' changes, and gather the requests' tables by group."""
        store, requests = self._store, self._read["rows"]
        joint = store.joint_tables
        joint.view(-1).scatter_(0, self._read["places"].long(), self._read["pages"])
        parts = {}
        for group in self._groups:
            table = store.tables[group.name]
            first = table.joint_columns.start
            parts[group.name] = slice(first, first + table.columns(self.bucket.max_seq_len))
        wanted = sum(part.stop - part.start for part in parts.values())
        if 2 * wanted < joint.shape[1]:  # in a short bucket most columns are unused
            return {name: joint[:, part].index_select(0, requests) for name, part in parts.items()}
        rows = joint.index_select(0, requests)
        return {name: rows[:, part] for name, part in parts.items()}

    def _carry(self, carry: Carry) -> None:
        """Write the next step's requests to the inputs that this one has read.

        Tokens end before a request's limit; all tokens that it may generate are computed by then.
        """
        starts, counts = self._read["starts"], self._read["counts"]
        starts += carry.advance * (counts > 0)
        place = torch.arange(self.bucket.tokens, device=starts.device)
        room = (self._read["limits"] - starts) * (counts > 0)
        is_token = (carry.token_ids >= 0).cumprod(1) * (place < room.unsqueeze(1))
        ids = torch.where(is_token > 0, carry.token_ids, -1)
        self._read["token_ids"].view(ids.shape).copy_(ids)
        counts.copy_(is_token.sum(1))


def _most_changes(group: CacheGroup, bucket: Bucket) -> int:
    """Return the most block table entries that change between two decode steps: taken and returned.

    A step that follows one whose results are not known yet takes the pages of both.
    """
    return 2 * bucket.requests * (ceil_div(2 * bucket.tokens, group.tokens_per_page) + 1)

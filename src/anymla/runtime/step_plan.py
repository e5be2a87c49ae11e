"""The planner of steps: turns spans of tokens into the ``Step`` that every layer shares.

A step is built once per forward pass, as tensors on the model's device, from a few integers per
request; nothing is read back. ``anymla.layers.step`` explains the fields.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from itertools import accumulate

from anymla.layers.prefill_rows import prefill_rows
from anymla.layers.step import Step
from anymla.ops.attention.plan import ENTRIES_PER_QUERY, decoding_pays
from anymla.runtime.cache_groups import ceil_div
from anymla.runtime.cache_store import CacheStore
from anymla.runtime.device_step import Batch, BatchSizes, device_step
from anymla.runtime.host_step import host_step
from anymla.runtime.ngrams import NgramReader
from anymla.runtime.span import Span
from anymla.runtime.upload import upload

# Up to this many tokens, Python integers are faster than tensor calls if no device waits.
HOST_TOKENS = 16
# On devices, widths of lists and scores follow from the longest request. Rounding it up leaves few
# sizes, so that kernels are rarely compiled again. In entries the step is 512 (ratio 4) or 16
# (ratio 128), all multiples of 16.
_DEVICE_CONTEXT_STEP = 2048


class StepPlanner:
    """Builds steps over the caches of one store.

    Attributes:
        store: caches and their block tables.
        backend: name of the backend of the selection operations; None for the best.
        context_step: multiple to which ``Step.max_seq_len`` is rounded up.
        chunks: True if prefill requests attend to workspaces (``Step.chunks``) instead of by slots.
        ngrams: reader of the rows of ``Step.ngrams``.
    """

    def __init__(
        self,
        store: CacheStore,
        *,
        backend: str | None = None,
        chunks: bool = False,
        ngrams: NgramReader | None = None,
    ) -> None:
        self.store = store
        self.ngrams = NgramReader((), store.device) if ngrams is None else ngrams
        self.backend = backend
        self.chunks = chunks
        self.context_step = 1 if store.device.type == "cpu" else _DEVICE_CONTEXT_STEP

    def build(self, spans: Sequence[Span], *, window_only: bool = False) -> Step:
        """Take the pages that the tokens need and build their step.

        Args:
            spans: spans of the step, at least one, decode spans first.
            window_only: True for draft layers, which keep no other cache.
        """
        num_decodes = sum(span.is_decode for span in spans)
        assert spans
        assert all(span.is_decode for span in spans[:num_decodes])
        device = self.store.device
        counts = [len(span.token_ids) for span in spans]
        if device.type == "cpu" and sum(counts) <= HOST_TOKENS:
            step = host_step(self.store, spans, num_decodes, window_only=window_only)
            step = self.with_ngrams(step, spans, window_only=window_only)
            return self.with_chunks(step, [span.stop for span in spans])
        longest = max(span.stop for span in spans)
        max_seq_len = self.rounded(longest)
        token_ids, first_rows, starts, rows = upload(
            [
                [token_id for span in spans for token_id in span.token_ids],
                [0, *accumulate(counts)],
                [span.start for span in spans],
                [span.state.row for span in spans],
            ],
            device,
        )
        groups = self.store.step_groups(window_only=window_only)
        tables = {}
        for group in groups:
            table = self.store.tables[group.name]
            for span in spans:
                table.extend(span.state.row, span.stop)
            tables[group.name] = table.rows(rows, max_seq_len)
        step = device_step(
            Batch(token_ids, first_rows, None, starts, tables),
            groups,
            BatchSizes(tuple(counts), num_decodes, max_seq_len),
            backend=self.backend,
        )
        step = self.with_ngrams(step, spans, window_only=window_only)
        return self.with_chunks(step, [span.stop for span in spans])

    def with_ngrams(self, step: Step, spans: Sequence[Span], *, window_only: bool = False) -> Step:
        """Add the n-gram rows of the step's tokens; draft layers read none.

        Without spans the step is all padding.
        """
        if window_only:
            return step
        found = self.ngrams.read(spans) if spans else self.ngrams.nothing(len(step.token_ids))
        return dataclasses.replace(step, ngrams=found)

    def rounded(self, length: int) -> int:
        """Return ``Step.max_seq_len`` for a longest request of ``length`` tokens."""
        return ceil_div(length, self.context_step) * self.context_step

    def longest_chunks(self, tokens: int, max_seq_len: int) -> list[int]:
        """Return the lengths at which a prompt's workspaces are largest; [] without workspaces."""
        if not self.chunks or tokens < 2:
            return []
        ratios = {group.ratio for group in self.store.groups if group.kind == "compressed"}
        caps = {min(max_seq_len, ratio * ENTRIES_PER_QUERY * tokens) for ratio in ratios}
        return sorted({max(tokens, cap) for cap in {max_seq_len, *caps}}, reverse=True)

    def with_chunks(self, step: Step, stops: Sequence[int]) -> Step:
        """Add workspaces for the step's prefill requests, if ``chunks`` is set.

        Args:
            step: step without workspaces.
            stops: position after the last token of each request.
        """
        if not self.chunks or step.num_decodes == len(stops):
            return step
        window = next(group for group in self.store.groups if group.kind == "window")
        assert window.retention is not None
        sees = functools.partial(
            prefill_rows, step, stops, step.groups[window.name], window=window.retention
        )
        chunks = {window.name: sees()}
        tokens = sum(step.query_lens[step.num_decodes :])
        for group in self.store.groups:
            if group.kind != "compressed" or group.name not in step.groups:
                continue
            if decoding_pays(tokens, stops[step.num_decodes :], group.ratio):
                chunks[group.name] = sees(compressed=step.groups[group.name], ratio=group.ratio)
        return dataclasses.replace(step, chunks=chunks)

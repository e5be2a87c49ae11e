"""A draft layer's step of fixed size: maps streams to the streams and logits of the last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anymla.layers.caches import LayerCache
from anymla.layers.side_stream import INLINE, SideStream
from anymla.layers.step import Step
from anymla.model.transformer import Transformer
from anymla.runtime.bucket import Bucket
from anymla.runtime.cache_store import CacheStore
from anymla.runtime.fixed_step import FixedStep
from anymla.runtime.forwarded import place_rows
from anymla.runtime.span import Span


class DraftStep:
    """Step of the draft layer for one bucket."""

    def __init__(
        self,
        model: Transformer,
        store: CacheStore,
        cache: LayerCache,
        bucket: Bucket,
        *,
        record: bool,
        pool: Any = None,
        side: SideStream = INLINE,
    ) -> None:
        self._model = model
        self._cache = cache
        self._bucket = bucket
        shape = (bucket.rows, model.config.hc_mult, model.config.hidden_size)
        self._hidden = torch.zeros(shape, dtype=model.dtype, device=store.device)
        self._ends = torch.arange(0, bucket.rows, bucket.tokens, device=store.device) - 1
        self._step = FixedStep(
            store,
            bucket,
            self._body,
            record=record,
            window_only=True,
            backend=model.backend,
            pool=pool,
            side=side,
        )

    def prepare(self) -> None:
        """Record the step, unless that has been done."""
        self._step.prepare()

    def run(
        self, spans: Sequence[Span], hidden: Tensor, rows: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Run ``DecodeRunner.draft`` in this bucket; the results last until the next run."""
        place_rows(hidden, rows, spans, self._bucket, self._hidden)
        streams, logits = self._step(spans)
        return streams, logits

    def _body(self, step: Step) -> tuple[Tensor, ...]:
        streams = self._model.mtp_forward(self._hidden, step.token_ids, step, self._cache)
        if self._bucket.tokens > 1:
            counts = step.is_valid.view(self._bucket.requests, -1).sum(1)
            # For a padding request this is the row before its own, or row 0; its value is never
            # read.
            last = (self._ends + counts).clamp(min=0)
            streams = streams.index_select(0, last)
        return streams, self._model.mtp_logits(streams)

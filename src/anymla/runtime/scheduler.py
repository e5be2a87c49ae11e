"""Who runs in the next step: decode first, then chunks of prompts, within a token budget."""

from __future__ import annotations

import time
from collections import deque

from anymla.runtime.cache_store import CacheStore
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request, RequestState
from anymla.runtime.sizing import pages_needed
from anymla.runtime.span import Span, decode_span


class Scheduler:
    """Continuous batching, first come, first served.

    A waiting request is admitted as soon as a row and its worst case of pages are free; one that
    does not fit yet holds back those behind it, so that none starves.

    Attributes:
        waiting: submitted, not admitted.
        running: admitted, in that order.
    """

    def __init__(self, store: CacheStore, options: EngineOptions) -> None:
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []
        self._store = store
        self._options = options

    def submit(self, state: RequestState) -> None:
        """Queue a request.

        Raises:
            ValueError: its worst case exceeds a page pool.
        """
        self._store.check_fits(state.request, self._needs(state.request))
        self.waiting.append(state)

    def next_spans(self) -> list[Span]:
        """Choose the tokens of the next step and admit requests; empty if nothing is left."""
        spans = [decode_span(state) for state in self.running if not state.is_prefill]
        budget = self._options.batch_tokens - sum(len(span.token_ids) for span in spans)
        prefilling = [state for state in self.running if state.is_prefill]
        while budget > 0:
            if not prefilling:
                if not self._admit():
                    break
                prefilling.append(self.running[-1])
            state = prefilling.pop(0)
            stop = state.computed + min(self._options.chunk_size, budget)
            token_ids = state.tokens[state.computed : min(stop, state.prompt_length)]
            spans.append(Span(state, state.computed, token_ids, is_decode=False))
            budget -= len(token_ids)
        return spans

    def can_admit(self) -> bool:
        """Whether the request that waits longest would be admitted now."""
        return bool(self.waiting) and self._store.has_room(self._needs(self.waiting[0].request))

    def finish(self, state: RequestState) -> None:
        """Drop a request; return its row and pages if it has any."""
        if state in self.waiting:
            self.waiting.remove(state)
            return
        self.running.remove(state)
        self._store.release(state)

    def _admit(self) -> bool:
        if not self.waiting:
            return False
        state = self.waiting[0]
        if not self._store.admit(state, self._needs(state.request)):
            return False
        self.running.append(self.waiting.popleft())
        state.timings.started = time.perf_counter()
        return True

    def _needs(self, request: Request) -> dict[str, int]:
        return pages_needed(self._store.groups, request, self._options)

"""The scheduler: decoding requests first, then prompt chunks, within a token budget."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

from anymla.runtime.cache_store import CacheStore
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request, RequestState
from anymla.runtime.sizing import pages_needed
from anymla.runtime.span import Span, decode_span

# Templates end a prompt with a few tokens that say how to answer (for example to think), so the
# next prompt of a dialogue differs there.
_KEPT_BEFORE_END = 16


class Scheduler:
    """Continuous batching, first come, first served.

    A waiting request is admitted as soon as a row and its worst case of pages are free; one that
    does not fit yet holds back those behind it, so that none starves.

    Attributes:
        waiting: requests submitted but not admitted.
        running: admitted requests, in the order of admission.
        kept: ended requests that still have their caches, the oldest first.
    """

    def __init__(self, store: CacheStore, options: EngineOptions) -> None:
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []
        self.kept: list[RequestState] = []
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
        """True if the request that waits longest would be admitted now."""
        return bool(self.waiting) and self._store.has_room(self._needs(self.waiting[0].request))

    def finish(self, state: RequestState) -> None:
        """Drop a request, and return its row and pages unless its caches are kept."""
        if state in self.waiting:
            self.waiting.remove(state)
            return
        self.running.remove(state)
        if self._options.keep_caches and state.computed:
            self.kept.append(state)
        else:
            self._store.release(state)

    def _admit(self) -> bool:
        if not self.waiting:
            return False
        state = self.waiting[0]
        needs = self._needs(state.request)
        if not self._take_over(state, needs):
            while not self._store.admit(state, needs):
                if not self.kept:
                    return False
                self._store.release(self.kept.pop(0))
        if self._options.keep_caches:
            state.kept_at = max(0, state.prompt_length - _KEPT_BEFORE_END)
        self.running.append(self.waiting.popleft())
        state.timings.started = time.perf_counter()
        return True

    def _take_over(self, state: RequestState, needs: Mapping[str, int]) -> bool:
        """Start a request after the tokens that it has in common with a request that has ended."""
        if state.request.prompt_logprobs:  # every token has to run for its log-probability
            return False
        lengths = [self._common(each, state) for each in self.kept]
        length = max(lengths, default=0)
        if not length:
            return False
        kept = self.kept[lengths.index(length)]
        if not self._store.take_over(kept, state, needs, length):
            return False
        self.kept.remove(kept)
        return True

    def _common(self, kept: RequestState, state: RequestState) -> int:
        """Return the most tokens of an ended request after which this one can continue."""
        # The last token of a prompt always runs, because the next token is chosen after it.
        most = min(kept.computed, len(state.tokens) - 1)
        pairs = zip(kept.tokens[:most], state.tokens[:most], strict=True)
        same = next((place for place, (a, b) in enumerate(pairs) if a != b), most)
        lengths = [same] if kept.kept_at is None else [same, min(same, kept.kept_at)]
        return next((each for each in lengths if self._store.can_rewind(kept, each)), 0)

    def _needs(self, request: Request) -> dict[str, int]:
        return pages_needed(self._store.groups, request, self._options)

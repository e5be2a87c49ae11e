"""The interface of drafters, and the MTP drafter, whose layer guesses the tokens after the next.

At position p the layer takes the backbone's stream at p and the embedding of token p + 1, and its
logits guess token p + 2. For a further guess its own output stands in for the backbone's stream.
Rows that were written from a guess are overwritten once the backbone has seen the position.

Source: semantics of vLLM's DeepSeek-V4 drafter; DeepSeek-V4 reference, inference/model.py (layer).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from anymla.layers.caches import LayerCache
from anymla.layers.dspark import Taps
from anymla.model.transformer import Transformer
from anymla.runtime.decode_runner import DecodeRunner
from anymla.runtime.forwarded import Forwarded, rows_of
from anymla.runtime.request import RequestState
from anymla.runtime.sampler import guess_tokens
from anymla.runtime.span import Span
from anymla.runtime.step_plan import StepPlanner


@dataclasses.dataclass(frozen=True)
class Guess:
    """Output of the MTP layer at the last token of each of some spans.

    Attributes:
        streams: output streams of the layer, [n, N, D].
        logits: float32 [n, V], logits of the next token.
    """

    streams: Tensor
    logits: Tensor


class Drafter(Protocol):
    """Interface between an engine and a drafter."""

    def taps(self, spans: Sequence[Span]) -> tuple[Taps | None, list[int]]:
        """Return the taps that a backbone step must record, and each span's first tapped row."""

    def run(self, spans: Sequence[Span], forwarded: Forwarded) -> None:
        """Process the step's final tokens, and set the drafts of requests that go on.

        Args:
            spans: spans of the last step; their requests hold the chosen tokens.
            forwarded: results of the backbone.
        """


class MtpDrafter:
    """Keeps the MTP layer's window cache in step with the requests, and drafts from it.

    A checkpoint with several MTP layers drafts with its first one only.

    Attributes:
        draft_tokens: most tokens guessed ahead.
    """

    def __init__(
        self,
        model: Transformer,
        planner: StepPlanner,
        cache: LayerCache,
        *,
        window: int,
        draft_tokens: int,
        runner: DecodeRunner | None = None,
    ) -> None:
        self.draft_tokens = draft_tokens
        self._model = model
        self._planner = planner
        self._cache = cache
        self._window = window
        self._runner = runner

    def taps(self, spans: Sequence[Span]) -> tuple[Taps | None, list[int]]:
        """Return no taps: the layer takes the backbone's last streams."""
        return None, []

    def run(self, spans: Sequence[Span], forwarded: Forwarded) -> None:
        """Process a step as ``Drafter.run`` requires."""
        guess = self.follow(spans, forwarded)
        if guess is None:
            return
        drafting = [span.state for span in spans if can_draft(span.state)]
        # The guesses write ahead of the confirmed length, into pages that the next step needs as
        # well. Obsolete pages must be returned first.
        for state in drafting:
            self._planner.store.slide(state)
        self.draft(drafting, guess)

    def follow(self, spans: Sequence[Span], forwarded: Forwarded) -> Guess | None:
        """Run the MTP layer over the step's tokens that turned out final.

        Args:
            spans: spans of the last step; their requests hold the chosen tokens.
            forwarded: results of the backbone.

        Returns:
            The layer's output for each request that ``can_draft``, in the order of ``spans``; None
            if no request can.
        """
        followed: list[Span] = []
        source: list[int] = []
        wanted: list[int] = []
        for span, first_row in zip(spans, forwarded.first_rows, strict=True):
            final = final_tokens(span, self._window)
            if final is not None:
                if can_draft(span.state):
                    wanted.append(len(followed))
                followed.append(final)
                first = first_row + final.start - span.start
                source += range(first, first + len(final.token_ids))
        if not followed:
            return None
        return self._run(followed, forwarded.hidden, source, wanted)

    def draft(self, states: Sequence[RequestState], guess: Guess) -> None:
        """Set the drafts of each request.

        Args:
            states: states of requests that ``can_draft``.
            guess: output of ``follow``. Drafts end at the first row whose logits are not finite.
        """
        limits = [min(self.draft_tokens, state.remaining - 1) for state in states]
        drafting = list(range(len(states)))
        for depth in range(max(limits, default=0)):
            if depth:
                still = [i for i, state in enumerate(drafting) if limits[state] > depth]
                drafting = [drafting[i] for i in still]
                if not drafting:
                    return
                spans = [
                    Span(
                        states[i],
                        len(states[i].tokens) + depth - 2,
                        states[i].drafts[-1:],
                        is_decode=True,
                    )
                    for i in drafting
                ]
                further = self._run(spans, guess.streams, still, range(len(spans)))
                assert further is not None
                guess = further
            logits = guess.logits
            if any(states[i].request.sampling.is_penalised for i in drafting):
                rows = zip(drafting, logits.split(1), strict=True)
                logits = torch.cat([states[i].penalised(row, states[i].drafts) for i, row in rows])
            tokens = guess_tokens(
                logits,
                [states[i].request.sampling for i in drafting],
                [len(states[i].tokens) + depth for i in drafting],
            )
            tokens = self._model.ranks.agree(tokens, guess.logits.device)
            for i, token in zip(drafting, tokens, strict=True):
                if token == guess.logits.shape[-1]:
                    limits[i] = depth
                else:
                    states[i].drafts.append(token)

    def _run(
        self, spans: Sequence[Span], hidden: Tensor, source: Sequence[int], wanted: Sequence[int]
    ) -> Guess | None:
        """Run the MTP layer over spans, and return guesses for some of them.

        Args:
            spans: tokens of each request, in the order of the step.
            hidden: hidden states from which the spans' tokens start.
            source: row of ``hidden`` for each token of the spans.
            wanted: indices of the spans whose last token's guess is returned.
        """
        if self._runner is not None and all(span.is_decode for span in spans):
            fixed = self._runner.draft(spans, hidden, source)
            if fixed is not None:
                streams, logits = (rows_of(result, wanted) for result in fixed)
                return Guess(streams, logits) if wanted else None
        step = self._planner.build(spans, window_only=True)
        streams = self._model.mtp_forward(
            rows_of(hidden, source), step.token_ids, step, self._cache
        )
        if not wanted:
            return None
        ends = list(accumulate(len(span.token_ids) for span in spans))
        streams = rows_of(streams, [ends[i] - 1 for i in wanted])
        return Guess(streams, self._model.mtp_logits(streams))


def final_tokens(span: Span, window: int) -> Span | None:
    """Return the final part of a span that a drafter must see, tokens replaced by successors.

    A draft sees the window only, so older tokens of a prompt are skipped. A request that will not
    draft again is skipped as well, unless its caches are kept.

    Args:
        span: span of the last step.
        window: number of positions that a drafter sees.

    Returns:
        A span that begins at or after the given one's start, whose ``token_ids`` are the successors
        of its positions; None if no token is needed.
    """
    state = span.state
    start = max(span.start, state.drafted_from - window)
    stop = min(span.stop, state.computed)
    ends = state.finish_reason is not None or state.remaining <= 1
    if start >= stop or (ends and state.kept_at is None):
        return None
    return Span(state, start, state.tokens[start + 1 : stop + 1], span.is_decode)


def can_draft(state: RequestState) -> bool:
    """True if the request will run another step in which a draft could be verified."""
    return not state.is_prefill and state.finish_reason is None and state.remaining > 1

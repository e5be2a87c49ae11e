"""Drafting with the MTP layer, which guesses the tokens after the next.

At position p the layer takes the backbone's stream at p and the embedding of token p + 1, and its
logits guess token p + 2. For a further guess its own output stands in for the backbone's stream.
Rows that were written from a guess are overwritten once the backbone has seen the position.

Source: semantics of vLLM's DeepSeek-V4 drafter; DeepSeek-V4 reference, inference/model.py (layer).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anymla.layers.caches import LayerCache
from anymla.model.transformer import Transformer
from anymla.runtime.request import RequestState
from anymla.runtime.sampler import choose_tokens
from anymla.runtime.span import Span
from anymla.runtime.step_plan import StepPlanner


class Drafter:
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
    ) -> None:
        self.draft_tokens = draft_tokens
        self._model = model
        self._planner = planner
        self._cache = cache
        self._window = window

    def follow(self, spans: Sequence[Span], hidden: Tensor) -> Tensor | None:
        """Run the MTP layer over the step's tokens that turned out final.

        Args:
            spans: of the step just run; their requests hold what was chosen.
            hidden: [T, N, D], the backbone's stream.

        Returns:
            [n, N, D], the layer's stream at the last final token of each request that
            ``can_draft``, in the order of ``spans``; None if there is none.
        """
        followed: list[Span] = []
        source: list[int] = []
        last: list[int] = []
        offset = 0
        for span in spans:
            state = span.state
            # A draft sees the window only, so older rows of a prompt are never read.
            start = max(span.start, state.prompt_length - self._window)
            stop = min(span.stop, state.computed)
            if start < stop and state.finish_reason is None and state.remaining > 1:
                # The embedding is that of the token after.
                next_ids = state.tokens[start + 1 : stop + 1]
                followed.append(Span(state, start, next_ids, span.is_decode))
                source += range(offset + start - span.start, offset + stop - span.start)
                if can_draft(state):
                    last.append(len(source) - 1)
            offset += len(span.token_ids)
        if not followed:
            return None
        output = self._run(followed, hidden[_index(source, hidden)])
        return output[_index(last, hidden)] if last else None

    def draft(self, states: Sequence[RequestState], hidden: Tensor) -> None:
        """Set the drafts of each request.

        Args:
            states: those that ``can_draft``.
            hidden: [n, N, D], as ``follow`` returned it.
        """
        limits = [min(self.draft_tokens, state.remaining - 1) for state in states]
        drafting = list(range(len(states)))
        for depth in range(max(limits, default=0)):
            if depth:
                still = [i for i, state in enumerate(drafting) if limits[state] > depth]
                drafting = [drafting[i] for i in still]
                spans = [
                    Span(
                        states[i],
                        len(states[i].tokens) + depth - 2,
                        states[i].drafts[-1:],
                        is_decode=True,
                    )
                    for i in drafting
                ]
                hidden = self._run(spans, hidden[_index(still, hidden)])
            tokens = choose_tokens(
                self._model.mtp_logits(hidden),
                [states[i].request.sampling for i in drafting],
                [len(states[i].tokens) + depth for i in drafting],
            )
            for i, token in zip(drafting, tokens, strict=True):
                states[i].drafts.append(token)

    def _run(self, spans: Sequence[Span], hidden: Tensor) -> Tensor:
        step = self._planner.build(spans, window_only=True)
        return self._model.mtp_forward(hidden, step.token_ids, step, self._cache)


def can_draft(state: RequestState) -> bool:
    """Whether the request will run another step in which a draft could be verified."""
    return not state.is_prefill and state.finish_reason is None and state.remaining > 1


def _index(rows: list[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=like.device)

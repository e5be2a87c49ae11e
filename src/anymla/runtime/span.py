"""A run of one request's tokens, the unit of scheduling."""

from __future__ import annotations

import dataclasses

from anymla.runtime.request import RequestState


@dataclasses.dataclass(frozen=True)
class Span:
    """Consecutive tokens of one request in a step.

    Attributes:
        state: state of the request.
        start: position of the first token.
        token_ids: token ids of the span.
        is_decode: True for the newest token and its drafts, False for a chunk of the prompt.
    """

    state: RequestState
    start: int
    token_ids: list[int]
    is_decode: bool

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + len(self.token_ids)

    @property
    def num_choices(self) -> int:
        """Number of the last tokens whose successor is chosen in this step."""
        if self.is_decode:
            return len(self.token_ids)
        ends_prompt = self.stop == self.state.prompt_length
        return int(ends_prompt and self.state.request.max_new_tokens > 0)


def decode_span(state: RequestState) -> Span:
    """Return the span of a request's newest token and its drafts."""
    return Span(state, state.computed, [state.tokens[-1], *state.drafts], is_decode=True)

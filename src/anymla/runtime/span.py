"""A run of one request's tokens: what the scheduler hands out and a step is made of."""

from __future__ import annotations

import dataclasses

from anymla.runtime.request import RequestState


@dataclasses.dataclass(frozen=True)
class Span:
    """Consecutive tokens of one request in a step.

    Attributes:
        state: the request.
        start: position of the first token.
        token_ids: the tokens.
        is_decode: the newest token and its drafts, rather than a chunk of the prompt.
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
        """How many of the last tokens have their successor chosen in this step."""
        if self.is_decode:
            return len(self.token_ids)
        ends_prompt = self.stop == self.state.prompt_length
        return int(ends_prompt and self.state.request.max_new_tokens > 0)


def decode_span(state: RequestState) -> Span:
    """A request's newest token and its drafts."""
    return Span(state, state.computed, [state.tokens[-1], *state.drafts], is_decode=True)

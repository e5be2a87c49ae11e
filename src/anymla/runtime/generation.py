"""The result of generating a text."""

from __future__ import annotations

import dataclasses
from typing import Any

from anymla.model.answers import ToolCall
from anymla.runtime.request import Completion, FinishReason


@dataclasses.dataclass(frozen=True)
class Generation:
    """A generated text.

    Attributes:
        text: generated text without the prompt and without the stop string; in a chat, without
            thinking and tool calls.
        token_ids: generated tokens, a stop token included; for a stop string, up to the token that
            completes it.
        logprobs: natural log-probabilities of these tokens, before temperature and restrictions.
        finish_reason: "stop" after a stop token or string, else "length".
        prompt_token_ids: token ids of the prompt.
        drafted: number of draft tokens that were verified.
        accepted: number of draft tokens that were right.
        reasoning: thinking before the text, in a chat.
        tool_calls: tool calls after the text, in a chat, as the OpenAI API writes them.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    prompt_token_ids: tuple[int, ...]
    drafted: int
    accepted: int
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @classmethod
    def of(cls, done: Completion, text: str, **chat: Any) -> Generation:
        """Return the result of a completed request, with ``chat`` for the fields of chats."""
        names = ("token_ids", "logprobs", "finish_reason", "drafted", "accepted")
        same = {name: getattr(done, name) for name in names}
        return cls(text, prompt_token_ids=done.request.token_ids, **same, **chat)

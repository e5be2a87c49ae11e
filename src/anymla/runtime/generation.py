"""The result of generating a text."""

from __future__ import annotations

import dataclasses

from anymla.model.answers import ToolCall
from anymla.runtime.request import FinishReason


@dataclasses.dataclass(frozen=True)
class Generation:
    """A text that was generated.

    Attributes:
        text: without the prompt, and without the stop string; of a chat, without thinking and
            tool calls.
        token_ids: the tokens generated, a stop token included; of a stop string, up to the token
            that completes it.
        logprobs: of these tokens, before temperature and restrictions.
        finish_reason: "stop" after a stop token or string, else "length".
        prompt_token_ids: the prompt.
        drafted: draft tokens that were verified.
        accepted: those that were right.
        reasoning: of a chat, the thinking before the text.
        tool_calls: of a chat, the calls behind the text, as the OpenAI API writes them.
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

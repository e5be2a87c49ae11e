"""Writers of dialogues: a chat template, else the format that the models were trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from anymla.model.config_fields import ConfigError
from anymla.model.encoding import (
    ASSISTANT,
    BOS,
    DSML,
    ENCODINGS,
    EOS,
    REMINDER,
    SYSTEM,
    TASKS,
    THINK,
    THOUGHT,
    USER,
    Encoding,
)
from anymla.model.generation import ChatTemplate
from anymla.model.messages import read_content, read_tools
from anymla.model.tokenizer import Tokenizer

# Names of the same switch in different makers' templates.
_THINKING_NAMES = ("thinking", "enable_thinking")
_EFFORT_NAME, _DROP_NAME = "reasoning_effort", "drop_thinking"


@dataclasses.dataclass(frozen=True)
class ChatOptions:
    """Options of a dialogue's answer.

    Attributes:
        tools: functions that may be called, in the OpenAI API's form.
        thinking: True to think before the answer; None for the format's default: a chat template
            decides, the families' own encodings do not think.
        reasoning_effort: thoroughness of the thinking, which it turns on; "none" turns it off.
        continue_final_message: True to continue the last message, an assistant's, instead of
            beginning an answer; None to do so if the last message is an assistant's.
        template_options: further variables of a chat template.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    thinking: bool | None = None
    reasoning_effort: str | int | None = None
    continue_final_message: bool | None = None
    template_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def continues(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """True if the last message is to be continued.

        Raises:
            ValueError: there are no messages, or one is no mapping.
        """
        if not messages:
            raise ValueError("messages must hold at least one message, got none")
        for place, message in enumerate(messages):
            if not isinstance(message, Mapping):
                raise ValueError(
                    f'messages[{place}] must be a mapping with "role" and "content", '
                    f"got {message!r}"
                )
        if self.continue_final_message is not None:
            return self.continue_final_message
        last = messages[-1]
        if last.get("role") != "assistant" or last.get("task") is not None:
            return False
        return bool(last.get("prefix")) or not last.get("tool_calls")


@dataclasses.dataclass(frozen=True)
class ChatText:
    """A dialogue as text.

    Attributes:
        text: text up to where the next answer begins.
        thinks: True if the answer begins inside the thinking.
    """

    text: str
    thinks: bool


class ChatFormat(Protocol):
    """Interface of a format that writes dialogues as text."""

    def write(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> ChatText:
        """Write a dialogue as text, up to where the next answer begins.

        Args:
            messages: mappings with "role", and "content" or "tool_calls".
            options: options of the answer.

        Raises:
            ValueError: the format does not support the messages or options.
        """


def chat_format(directory: str | Path, encoding: str, tokenizer: Tokenizer) -> ChatFormat:
    """Return the format of a checkpoint's dialogues.

    Args:
        directory: directory of the checkpoint; code in it is never run.
        encoding: name of the family's own format, for a checkpoint without a chat template.
        tokenizer: tokenizer of the checkpoint.

    Raises:
        ConfigError: the chat template cannot be read.
    """
    template = ChatTemplate.find(directory)
    if template is not None:
        return _TemplateFormat(template)
    return _OwnFormat(str(directory), ENCODINGS[encoding], tokenizer)


class _TemplateFormat:
    """Dialogues in the format of a chat template."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def write(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> ChatText:
        continues = options.continues(messages)
        if "messages" in options.template_options:
            raise ValueError("chat_template_kwargs must not hold messages")
        tools = list(options.tools) if read_tools(options.tools) and options.tools else None
        names: dict[str, Any] = {"tools": tools}
        effort = options.reasoning_effort
        thinking = options.thinking
        if effort is not None:
            thinking = effort != "none" if thinking is None else thinking
            names[_EFFORT_NAME] = effort
        if thinking is not None:
            names |= dict.fromkeys(_THINKING_NAMES, thinking)
        names |= options.template_options
        # Templates concatenate strings, so text in parts is passed as one string.
        flat = [
            {**message, "content": read_content(message["content"], f"messages[{place}].content")}
            if isinstance(message.get("content"), list | tuple)
            else message
            for place, message in enumerate(messages)
        ]
        if not continues:
            text = self._template.render(flat, **names)
            thinks = text.rstrip().endswith(THINK)
            if tools and text == self._template.render(flat, **names | {"tools": None}):
                raise ConfigError("the chat template has no place for tools")
            calm: dict[str, Any] = dict.fromkeys(_THINKING_NAMES, False)
            if effort is not None:
                calm[_EFFORT_NAME] = None
            if thinking and not thinks and text == self._template.render(flat, **names | calm):
                raise ConfigError("the chat template has no switch for thinking")
            return ChatText(text, thinks)
        last = flat[-1].get("content")
        if not isinstance(last, str) or not last.strip():
            raise ValueError("to be continued, the last message must hold text, got none")
        text = self._template.render(flat, **names | {"continue_final_message": True})
        return ChatText(text, thinks=THINK in last and THOUGHT not in last)


class _OwnFormat:
    """Dialogues in the format that a family of models was trained on."""

    def __init__(self, directory: str, encoding: Encoding, tokenizer: Tokenizer) -> None:
        self._directory = directory
        self._encoding = encoding
        self._tokenizer = tokenizer

    def write(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> ChatText:
        continues = options.continues(messages)
        known = (*_THINKING_NAMES, _EFFORT_NAME, _DROP_NAME)
        named = options.template_options
        if unknown := [name for name in named if name not in known]:
            raise ValueError(
                f"chat_template_kwargs may hold {', '.join(known)} for a checkpoint without a "
                f"chat template, got {', '.join(map(str, unknown))}"
            )
        effort = named.get(_EFFORT_NAME, options.reasoning_effort)
        thinking = options.thinking
        switches = [named[name] for name in _THINKING_NAMES if name in named]
        if switches:
            thinking = any(switches)
        if thinking is None:
            thinking = effort is not None
        if effort == "none":
            thinking, effort = False, None
        text = self._encoding.write(
            messages,
            tools=options.tools,
            thinking=thinking,
            effort=effort,
            drop_thinking=bool(named.get(_DROP_NAME, True)),
            continues=continues,
        )
        last = messages[-1]
        if not continues and last.get("role") == "assistant" and last.get("task") is None:
            raise ValueError(
                "the dialogue ends with an answer, and this format begins another only behind a "
                'message of role "user" or "tool"; continue_final_message=True goes on with it'
            )
        lacking = [
            mark
            for mark in dict.fromkeys(self._marks(messages, options))
            if self._tokenizer.token_id(mark) is None
        ]
        if lacking:
            raise ConfigError(
                f"{self._directory}: has no chat template, and its tokenizer lacks tokens of its "
                f"family's own format: {', '.join(lacking)}"
            )
        answer = text[text.rfind(ASSISTANT) :]
        thinks = last.get("task") is None and THINK in answer and THOUGHT not in answer
        return ChatText(text, thinks)

    def _marks(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> Iterator[str]:
        """Yield the marks that a dialogue may need, each a single token in training."""
        yield from (BOS, EOS, USER, ASSISTANT, THINK, THOUGHT)
        if self._encoding.marks_system:
            yield SYSTEM
        if options.tools:
            yield DSML
        for message in messages:
            if message.get("tool_calls") or message.get("tools"):
                yield DSML
            if message.get("role") == "latest_reminder":
                yield REMINDER
            if message.get("task") is not None:
                yield TASKS[message["task"]]

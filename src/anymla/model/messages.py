"""Messages of a dialogue, in the spellings of the OpenAI API and its clients."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

_ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
_TEXT_PARTS = ("text", "input_text", "output_text")
_MOST_SHOWN = 60


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A tool call.

    Attributes:
        name: name of the tool.
        arguments: values of the arguments by name.
        call_id: id by which the tool's result refers to the call; "" without one.
    """

    name: str
    arguments: Mapping[str, Any]
    call_id: str = ""


@dataclasses.dataclass(frozen=True)
class Message:
    """One message, with every spelling of its fields resolved.

    Attributes:
        role: sender: "system", "developer", "user", "assistant", "tool" or "latest_reminder".
        content: text of the message; "" without any.
        has_content: False if the content is missing or null.
        reasoning: thinking before the content; "" without any.
        calls: tool calls of an assistant.
        tools: functions that a system or developer message offers, each with its name.
        response_format: JSON schema that answers follow, or None.
        task: quick instruction that follows the message, or None.
        call_id: id of the call that a tool's message answers; "" without one.
        is_open: True for an assistant's message that goes on: no end-of-text token follows it.
    """

    role: str
    content: str = ""
    has_content: bool = True
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    response_format: Any = None
    task: str | None = None
    call_id: str = ""
    is_open: bool = False


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Check messages and resolve their spellings.

    Args:
        messages: mappings with "role", and "content" as a string, as a list of text parts, or
            missing if there are "tool_calls"; see ``Message`` for the rest. "reasoning" and
            "reasoning_content" are the same field.

    Raises:
        ValueError: there are no messages, or one is malformed; the error names its place.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"messages must be a list of messages, got {_shown(messages)}")
    if not messages:
        raise ValueError("messages must hold at least one message, got none")
    return [_message(f"messages[{place}]", each) for place, each in enumerate(messages)]


def read_tools(tools: Sequence[Mapping[str, Any]] | None, where: str = "tools") -> tuple[Any, ...]:
    """Return the functions in a list of tools.

    Args:
        tools: mappings {"type": "function", "function": {"name": ..., ...}}, or bare functions.
        where: name of the list in error messages.

    Raises:
        ValueError: an entry has another form, or a function has no name.
    """
    if tools is None:
        return ()
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise ValueError(f"{where} must be a list of tools, got {_shown(tools)}")
    found = []
    for place, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                f'{where}[{place}] must be {{"type": "function", "function": {{"name": ...}}}}, '
                f"got {_shown(tool)}"
            )
        found.append(function)
    return tuple(found)


def read_content(content: Any, where: str) -> str:
    """Return the text of a content: a string, null, or text parts joined by blank lines.

    Raises:
        ValueError: the content has another type, or a part is no text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ValueError(f"{where} must be a string or a list of parts, got {_shown(content)}")
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part if isinstance(part, str) else None
        if isinstance(part, Mapping) and kind in _TEXT_PARTS:
            text = part.get("text", "")
        if not isinstance(text, str):
            shown = repr(kind) if isinstance(kind, str) else _shown(part)
            raise ValueError(f'{where}[{place}] must be a part of type "text", got {shown}')
        texts.append(text)
    return "\n\n".join(texts)


def to_json(value: Any, where: str) -> str:
    """Write a value as JSON in one line, with characters beyond ASCII unescaped.

    Raises:
        ValueError: JSON has no such value.
    """
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where} cannot be written as JSON: {error}") from None


def _message(where: str, message: Mapping[str, Any]) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f'{where} must be a mapping with "role" and "content", got {message!r}')
    role = message.get("role")
    if role not in _ROLES:
        known = ", ".join(_ROLES)
        raise ValueError(f"{where}: role must be one of {known}, got {_shown(role)}")
    calls = _calls(f"{where}.tool_calls", message.get("tool_calls"))
    stands_alone = calls or message.get("tools") or _reasoning(message) or role == "tool"
    if "content" not in message and not stands_alone:
        raise ValueError(f'{where}: a message needs "content", or "tool_calls" in its place')
    content = message.get("content")
    return Message(
        role=role,
        content=_result(where, content) if role == "tool" else _content(where, content),
        has_content=content is not None,
        reasoning=_content(f"{where}.reasoning", _reasoning(message), name=""),
        calls=calls,
        tools=read_tools(message.get("tools"), f"{where}.tools"),
        response_format=message.get("response_format"),
        task=message.get("task"),
        call_id=str(message.get("tool_call_id") or ""),
        is_open=bool(message.get("wo_eos")),
    )


def _content(where: str, content: Any, name: str = ".content") -> str:
    return read_content(content, where + name)


def _result(where: str, content: Any) -> str:
    """Return the text of a tool's result; non-text parts are named, objects become JSON."""
    if isinstance(content, Mapping | int | float):
        return to_json(content, f"{where}.content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise ValueError(f"{where}.content must be a string, got {_shown(content)}")
    texts = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type") not in _TEXT_PARTS:
            texts.append(f"[Unsupported {part.get('type')}]")
        else:
            texts.append(read_content([part], f"{where}.content"))
    return "\n\n".join(texts)


def _reasoning(message: Mapping[str, Any]) -> Any:
    reasoning = message.get("reasoning")
    return message.get("reasoning_content") if reasoning is None else reasoning


def _calls(where: str, calls: Any) -> tuple[ToolCall, ...]:
    if calls is None:
        return ()
    if isinstance(calls, str | Mapping) or not isinstance(calls, Sequence):
        raise ValueError(f"{where} must be a list of calls, got {_shown(calls)}")
    return tuple(_call(f"{where}[{place}]", each) for place, each in enumerate(calls))


def _call(where: str, call: Any) -> ToolCall:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(
            f'{where} must be {{"function": {{"name": ..., "arguments": ...}}}}, got {_shown(call)}'
        )
    return ToolCall(
        name=function["name"],
        arguments=_arguments(function.get("arguments")),
        call_id=str(call.get("id") or function.get("id") or ""),
    )


def _arguments(arguments: Any) -> Mapping[str, Any]:
    """Return arguments by name, from an object or its JSON, which some clients encode twice.

    Anything else becomes one argument named "arguments", so that nothing is lost.
    """
    found = arguments
    for _ in range(2):
        if isinstance(found, str):
            try:
                found = json.loads(found)
            except (ValueError, RecursionError):
                break
    if isinstance(found, Mapping):
        return found
    return {} if arguments in (None, "") else {"arguments": arguments}


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."

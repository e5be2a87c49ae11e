"""The parts of an answer of DeepSeek-V4 or V4.1: thinking, text and tool calls.

An answer that breaks the format is never an error: text that cannot be read as a call stays text.
Both families' spellings of calls are read in answers of either.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from typing import Any, Literal

from anymla.model.encoding import DSML, EOS, THINK, THOUGHT

# "tool_calls" is V4's block of calls and " calls" is V4.1's. Models also write the other spellings,
# and sometimes leave the block out.
_BLOCKS = ("tool_calls", "calls", "toolcalls", "tool", "function_calls")
_STARTS = tuple(
    f"<{DSML}{space}{name}"
    for space in ("", " ")
    for name in (*(f"{block}>" for block in _BLOCKS), 'invoke name="')
)
_GAP = "\n\n"  # the format's separator between a text and its calls
_GAPPED_STARTS = (*_STARTS, *(_GAP + start for start in _STARTS))
_START = re.compile("|".join(map(re.escape, _STARTS)))
_BLOCK = re.compile(rf"\n?</?{DSML} ?(?:{'|'.join(_BLOCKS)})>")
_WITHIN_TAG = rf"((?:(?!</?{DSML}).)*?)"
_CALL = re.compile(rf'<{DSML} ?invoke name="{_WITHIN_TAG}"\s*>', re.DOTALL)
_CALL_END = re.compile(rf"</{DSML} ?invoke>")
_PARAMETER = re.compile(
    rf'<{DSML} ?parameter name="{_WITHIN_TAG}"(?: string="(true|false)")?\s*>', re.DOTALL
)
_PARAMETER_END = re.compile(rf"</{DSML} ?parameter>")
_SPACE = re.compile(r"\s*")

ToolCall = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of an answer as it is generated.

    Attributes:
        kind: "reasoning" for thinking, "text" for the answer itself.
        text: text of the piece, not empty.
    """

    kind: Literal["reasoning", "text"]
    text: str


@dataclasses.dataclass(frozen=True)
class Answer:
    """A whole answer.

    Attributes:
        text: the answer itself, without thinking and calls.
        reasoning: thinking before the text.
        tool_calls: calls in the OpenAI API's form: {"id": ..., "type": "function", "function":
            {"name": ..., "arguments": <JSON text>}}.
    """

    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


def parse_answer(text: str, *, thinking: bool = False) -> Answer:
    """Parse an answer into thinking, text and tool calls.

    Args:
        text: text of the answer with its marks; an end-of-text token at its end is dropped.
        thinking: True if the prompt has begun the thinking, so that the answer starts inside it.
    """
    stream = AnswerStream(thinking=thinking)
    parts = [*stream.push(text.removesuffix(EOS)), *stream.finish()]
    return stream.answer(parts)


class AnswerStream:
    """Parses an answer while it is generated.

    Text is held back while it may be the beginning of a mark. Calls are read when the answer ends.

    Attributes:
        tool_calls: calls of the answer, set by ``finish``.
    """

    def __init__(self, *, thinking: bool = False) -> None:
        """Start with empty text.

        Args:
            thinking: True if the prompt has begun the thinking.
        """
        self._thinking = thinking
        # A mark at the very beginning belongs to the prompt: it opens the thinking once more, or
        # closes a thinking that is not open. After the first word it is text.
        self._opens = True
        self._calling = False
        self._held = ""
        self.tool_calls: tuple[ToolCall, ...] = ()

    def push(self, text: str) -> list[Part]:
        """Return the parts that this text makes certain."""
        self._held += text
        parts: list[Part] = []
        while not self._calling and self._held and self._advance(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """Return the rest at the end, and set ``tool_calls``."""
        rest, self._held = self._held, ""
        if not self._calling:
            return self._part(rest)
        self._calling = False
        if self._thinking and THOUGHT in rest:  # the thinking has quoted a call
            thought, _, after = rest.partition(THOUGHT)
            parts = self._part(thought)
            self._thinking = False
            return parts + self.push(after) + self.finish()
        self.tool_calls, rest = _read_calls(rest)
        self._thinking = self._thinking and not self.tool_calls
        return self._part(rest)

    def answer(self, parts: Iterable[Part]) -> Answer:
        """Join all parts that ``push`` and ``finish`` have returned."""
        texts: dict[str, list[str]] = {"reasoning": [], "text": []}
        for part in parts:
            texts[part.kind].append(part.text)
        return Answer("".join(texts["text"]), "".join(texts["reasoning"]), self.tool_calls)

    def _advance(self, parts: list[Part]) -> bool:
        """Consume held text as far as it is certain; return True if more may be certain."""
        if self._opens:
            text = self._held.lstrip()
            marks = (THINK,) if self._thinking else (THINK, THOUGHT)
            found = next((mark for mark in marks if text.startswith(mark)), None)
            if found is None and any(mark.startswith(text) for mark in marks):
                return False
            self._opens = False
            if found is not None:
                self._thinking = found == THINK
                self._held = text[len(found) :]
                return True
        end = self._held.find(THOUGHT) if self._thinking else -1
        start = _START.search(self._held)
        if start and not 0 <= end < start.start():
            before = self._held[: start.start()]
            parts += self._part(before.removesuffix(_GAP))
            gap = _GAP if before.endswith(_GAP) else ""
            self._held = gap + self._held[start.start() :]
            self._calling = True
            return False
        if end >= 0:
            parts += self._part(self._held[:end])
            self._held = self._held[end + len(THOUGHT) :]
            self._thinking = False
            return True
        awaited = (*_GAPPED_STARTS, THOUGHT) if self._thinking else _GAPPED_STARTS
        keep = max(_overlap(self._held, mark) for mark in awaited)
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(certain) :]
        parts += self._part(certain)
        return False

    def _part(self, text: str) -> list[Part]:
        return [Part("reasoning" if self._thinking else "text", text)] if text else []


def _read_calls(raw: str) -> tuple[tuple[ToolCall, ...], str]:
    """Return the calls in a text that begins with their block, and the text that is no call."""
    calls: list[ToolCall] = []
    rest: list[str] = []
    place = 0
    while place < len(raw):
        head = _CALL.search(raw, place)
        found = None if head is None else _read_call(raw, head)
        if head is None or found is None:
            rest.append(_unmarked(raw[place:]) if calls else raw)
            break
        rest.append(_unmarked(raw[place : head.start()]))
        name, arguments, place = found
        calls.append(
            {
                "id": f"call_{len(calls)}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": json.dumps(arguments, ensure_ascii=False),
                },
            }
        )
    return tuple(calls), "".join(text for text in rest if text.strip())


def _unmarked(text: str) -> str:
    """Remove the marks of a block, and the line end at them, from text between or after calls."""
    return _BLOCK.sub("", text).removeprefix("\n")


def _read_call(raw: str, head: re.Match[str]) -> tuple[str, dict[str, Any], int] | None:
    """Return name, arguments and end of the call that begins with ``head``; None if malformed."""
    arguments: dict[str, Any] = {}
    place = _past_space(raw, head.end())
    while parameter := _PARAMETER.match(raw, place):
        end = _PARAMETER_END.search(raw, parameter.end())
        if end is None:
            return None
        name, is_text = parameter.groups()
        value = raw[parameter.end() : end.start()]
        arguments[name] = value if is_text == "true" else _value(value)
        place = _past_space(raw, end.end())
    close = _CALL_END.match(raw, place)
    return None if close is None else (head[1], arguments, close.end())


def _value(text: str) -> Any:
    """Parse a JSON text; return the text itself if it is no JSON or cannot be written again."""
    try:
        value = json.loads(text)
        json.dumps([[value]], ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return text
    return value


def _past_space(raw: str, place: int) -> int:
    space = _SPACE.match(raw, place)
    assert space is not None
    return space.end()


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of the text that is a proper beginning of the mark."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)

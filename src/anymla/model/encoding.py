"""The dialogue format that DeepSeek-V4 and V4.1 were trained on.

Their checkpoints have no chat template. They have a program that writes this text, which is never
run; this module writes the same format. A dialogue is the leading token and then its turns. A
user's turn begins with a token, an assistant's with another. An answer is its thinking,
``</think>``, its content and its tool calls, and ends with the end-of-text token. A tool has no
turn: results are parts of the next user's turn, in the order of the calls. Without tools, the
thinking of answers before the last question is left out, and so are a developer's earlier messages.

Source: encoding/README.md of the checkpoints; that of DeepSeek-V4-Flash-0731 for V4's efforts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anymla.model.messages import Message, ToolCall, read_messages, read_tools, to_json

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
REMINDER = "<｜latest_reminder｜>"
THINK, THOUGHT = "<think>", "</think>"
DSML = "｜DSML｜"
TASKS = {
    name: f"<｜{name}｜>"
    for name in ("action", "query", "authority", "domain", "title", "read_url")
}
# Marks, each a single token of the official tokenizers.
MARKS = (BOS, EOS, SYSTEM, USER, ASSISTANT, REMINDER, THINK, THOUGHT, DSML, *TASKS.values())

# Efforts of the OpenAI API in V4's words. "none" turns thinking off.
_V4_EFFORTS = {
    "minimal": "low",
    "low": "low",
    "medium": "low",
    "high": "high",
    "xhigh": "high",
    "max": "max",
}
# The wording is part of the format: models were trained on these sentences.
_V4_EFFORT_TEXTS = {
    "low": "",
    "high": "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to "
    "resolve the root cause, rigorously stress-testing your logic against all potential paths, "
    "edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, "
    "considered alternative, and rejected hypothesis to ensure absolutely no assumption is left "
    "unchecked.\n\n",
    "max": "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: "
    "exhaustively decompose the problem into its most fundamental components, trace every causal "
    "chain to its root, and resolve the underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple "
    "angles and are certain that no assumption remains unchecked and no error remains "
    "undiscovered.\n\n",
}
_V41_EFFORTS = {"low": 50, "high": 75, "xhigh": 75, "max": 100}
_TOOLS_TEXT = """## Tools

You have access to a set of tools to help answer the user's question. \
You can invoke tools by writing a "<CALLS>" block like the following:

<CALLS>
<CALL name="$TOOL_NAME">
<PARAMETER name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</PARAMETER>
...
</CALL>
<CALL name="$TOOL_NAME2">
...
</CALL>
</CALLS>

String parameters should be specified as is and set `string="true"`. \
For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set \
`string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside \
<think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

SCHEMAS

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
_FORMAT_TEXT = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"


def _v4_effort(effort: str | int) -> str:
    if not isinstance(effort, str) or effort not in _V4_EFFORTS:
        raise ValueError(
            f"reasoning_effort must be low, high, max or none for DeepSeek-V4, got {effort!r}"
        )
    return _V4_EFFORT_TEXTS[_V4_EFFORTS[effort]]


def _v41_effort(effort: str | int) -> str:
    number = _V41_EFFORTS.get(effort) if isinstance(effort, str) else effort
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= 100:
        raise ValueError(
            "reasoning_effort must be low, high, xhigh, max, none or an integer in [1, 100] for "
            f"DeepSeek-V4.1, got {effort!r}"
        )
    return (
        f"Reasoning Effort: {number} "
        "(range 1-100, the higher the value, the more thorough the reasoning)\n\n"
    )


@dataclasses.dataclass(frozen=True)
class Encoding:
    """The format of one family, and its writer.

    Attributes:
        calls: name of the element around tool calls.
        call: name of a call's element.
        parameter: name of a parameter's element.
        marks_system: True if a system message begins with a token of its own. Anywhere but in the
            first place it is then a turn like a user's, which an answer follows.
        effort_text: function from a reasoning effort to the text before a dialogue; raises
            ValueError.
    """

    calls: str
    call: str
    parameter: str
    marks_system: bool
    effort_text: Callable[[str | int], str]

    def write(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
        effort: str | int | None = None,
        drop_thinking: bool = True,
        continues: bool = False,
    ) -> str:
        """Write a dialogue as text, up to where the next answer begins.

        Args:
            messages: messages in the form of ``read_messages``.
            tools: functions that may be called, in the form of ``read_tools``. The first system
                message offers them; one is inserted if there is none.
            thinking: True if the answer begins with thinking.
            effort: thoroughness of the thinking: "low", "high" or "max", for V4.1 also 1 to 100.
                None for "high". It has no effect without thinking.
            drop_thinking: True to leave out earlier thinking; with tools it stays in any case.
            continues: True if the last message is an assistant's that goes on. If it has thinking
                but no content, the thinking goes on.

        Raises:
            ValueError: the format does not support the messages, tools or effort.
        """
        turns = self._turns(read_messages(messages), read_tools(tools))
        if continues:
            turns[-1] = self._continued(turns[-1])
        prefix = self.effort_text("high" if effort is None else effort)
        keeps = not drop_thinking or any(turn.said.tools for turn in turns)
        if thinking and not keeps:
            turns = self._without_old_instructions(turns)
        last = self._last_question(turns)
        parts = [BOS]
        if self.marks_system and (thinking or turns[0].said.role == "system"):
            parts.append(SYSTEM)
        if thinking:
            parts.append(prefix)
        for place, turn in enumerate(turns):
            thinks = thinking and (keeps or place >= last)
            after_task = place > 0 and turns[place - 1].said.task is not None
            thought = thinking and not after_task and (keeps or place > last)
            parts.append(self._turn(turn, place, thought=thought))
            follower = turns[place + 1].said.role if place + 1 < len(turns) else None
            if follower in (None, "assistant", "latest_reminder"):
                parts.append(self._opening(turn.said, place, follower, thinks, thinking))
        return "".join(parts)

    def _turns(self, messages: Sequence[Message], tools: tuple[Any, ...]) -> list[_Turn]:
        """Offer the tools, and move tool results into users' turns in the order of the calls."""
        said = list(messages)
        if tools:
            place = next((n for n, each in enumerate(said) if each.role == "system"), None)
            if place is None:
                said.insert(0, Message("system", tools=tools))
            else:
                said[place] = dataclasses.replace(said[place], tools=tools)
        turns: list[_Turn] = []
        order: dict[str, int] = {}
        for message in said:
            if message.role == "assistant" and message.calls:
                order = {c.call_id: n for n, c in enumerate(message.calls) if c.call_id}
            last = turns[-1] if turns else None
            if message.role not in ("user", "tool"):
                turns.append(_Turn(message))
            elif (
                last is not None
                and last.said.role == "user"
                and (message.role == "tool" or last.said.task is None)
            ):
                last.parts.append(message)
            elif message.role == "tool":
                turns.append(_Turn(Message("user"), [message], order))
            else:
                # In V4 a user's message offers no tools.
                offered = message.tools if self.marks_system else ()
                turns.append(_Turn(dataclasses.replace(message, tools=offered), [message], order))
        return turns

    def _continued(self, turn: _Turn) -> _Turn:
        if turn.said.role != "assistant" or turn.said.calls:
            got = "tool calls" if turn.said.calls else f"role {turn.said.role!r}"
            raise ValueError(f"to be continued, the last message must be an answer, got {got}")
        return _Turn(dataclasses.replace(turn.said, is_open=True), goes_on=True)

    def _without_old_instructions(self, turns: list[_Turn]) -> list[_Turn]:
        """Return the turns without a developer's messages before the last question."""
        last = self._last_question(turns)
        return [t for n, t in enumerate(turns) if t.said.role != "developer" or n >= last]

    def _last_question(self, turns: Sequence[_Turn]) -> int:
        """Return the index of the last turn that an answer follows; -1 for none."""
        return max((n for n, turn in enumerate(turns) if self._asks(turn.said, n)), default=-1)

    def _asks(self, said: Message, place: int) -> bool:
        return said.role in ("user", "developer") or (
            self.marks_system and said.role == "system" and place > 0
        )

    def _turn(self, turn: _Turn, place: int, *, thought: bool) -> str:
        said = turn.said
        match said.role:
            case "user":
                return USER + "\n\n".join(turn.texts())
            case "latest_reminder":
                return REMINDER + said.content
            case "assistant":
                return self._answer(turn, thought=thought)
            case "developer":
                if not said.content:
                    raise ValueError("a message of role 'developer' needs content, got none")
                return USER + self._instructions(said)
        mark = SYSTEM if self.marks_system and place > 0 else ""
        return mark + self._instructions(said)

    def _instructions(self, said: Message) -> str:
        """Write a system's or developer's text, followed by the tools and the format of answers."""
        parts = [said.content]
        if said.tools:
            parts.append(self._tools(said.tools))
        if said.response_format:
            parts.append(_FORMAT_TEXT + to_json(said.response_format, "response_format"))
        return "\n\n".join(parts)

    def _tools(self, tools: Sequence[Mapping[str, Any]]) -> str:
        text = _TOOLS_TEXT
        for word, name in (
            ("CALLS", self.calls),
            ("CALL", self.call),
            ("PARAMETER", self.parameter),
        ):
            for slash in ("", "/"):
                for end in (">", " "):
                    text = text.replace(f"<{slash}{word}{end}", f"<{slash}{DSML}{name}{end}")
        schemas = [to_json(tool, f"tool {tool['name']!r}") for tool in tools]
        return text.replace("SCHEMAS", "\n".join(schemas))

    def _answer(self, turn: _Turn, *, thought: bool) -> str:
        said = turn.said
        parts = []
        if thought:
            parts.append(said.reasoning)
            if not (turn.goes_on and said.reasoning and not said.has_content):
                parts.append(THOUGHT)
        parts.append(said.content)
        if said.calls:
            calls = "\n".join(map(self._call, said.calls))
            parts.append(f"\n\n<{DSML}{self.calls}>\n{calls}\n</{DSML}{self.calls}>")
        if not said.is_open:
            parts.append(EOS)
        return "".join(parts)

    def _call(self, call: ToolCall) -> str:
        lines = [f'<{DSML}{self.call} name="{call.name}">']
        parameters = []
        for name, value in call.arguments.items():
            is_text = isinstance(value, str)
            text = value if is_text else to_json(value, f"the argument {name!r} of {call.name!r}")
            head = f'<{DSML}{self.parameter} name="{name}" string="{str(is_text).lower()}">'
            parameters.append(f"{head}{text}</{DSML}{self.parameter}>")
        lines.append("\n".join(parameters))
        lines.append(f"</{DSML}{self.call}>")
        return "\n".join(lines)

    def _opening(
        self, said: Message, place: int, follower: str | None, thinks: bool, thinking: bool
    ) -> str:
        """Write the text between a turn and the answer to it.

        Args:
            said: message that is answered.
            place: index of the message in the dialogue.
            follower: role of the next turn; None at the end.
            thinks: True if the answer to this turn begins with thinking.
            thinking: True if any answer begins with thinking.
        """
        if said.task is not None:
            if said.task not in TASKS:
                raise ValueError(f"task must be one of {', '.join(TASKS)}, got {said.task!r}")
            token = TASKS[said.task]
            if said.task != "action":
                return token
            return ASSISTANT + (THINK if thinking else THOUGHT) + token
        alone = said.role == "system" and not self.marks_system and follower != "latest_reminder"
        if alone or self._asks(said, place):
            return ASSISTANT + (THINK if thinks else THOUGHT)
        return ""


@dataclasses.dataclass
class _Turn:
    """A turn of the format, made of one message or of several.

    Attributes:
        said: the message; in a user's turn, its first.
        parts: messages of a user's turn: users' texts and tools' results.
        order: positions of the preceding calls, by id.
        goes_on: True if the answer is continued.
    """

    said: Message
    parts: list[Message] = dataclasses.field(default_factory=list)
    order: Mapping[str, int] = dataclasses.field(default_factory=dict)
    goes_on: bool = False

    def texts(self) -> list[str]:
        """Return the texts of the parts, results in the order of their calls."""
        results = sorted(
            (part for part in self.parts if part.role == "tool"),
            key=lambda part: self.order.get(part.call_id, 0),
        )
        ordered = iter(results)
        return [
            part.content
            if part.role == "user"
            else f"<tool_result>{next(ordered).content}</tool_result>"
            for part in self.parts
        ]


ENCODINGS = {
    "deepseek_v4": Encoding("tool_calls", "invoke", "parameter", False, _v4_effort),
    "deepseek_v41": Encoding(" calls", " invoke", " parameter", True, _v41_effort),
}

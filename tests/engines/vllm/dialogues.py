"""Random dialogues and answers, for comparing encodings and parsers of them."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

Message = dict[str, Any]

FAMILIES = ("deepseek_v4", "deepseek_v41")
EFFORTS = {"deepseek_v4": ("low", "high", "max"), "deepseek_v41": ("low", "xhigh", "max", 1, 37)}
_TASKS = ("action", "query", "authority", "domain", "title", "read_url")
_PLAIN = [
    "",
    "hi",
    "Größe 你好 🚢",
    "a\n\nb",
    "  spaces  ",
    '\t\\ "quoted"',
    "{x} $A",
    "</p>",
    "\x00",
]
_NAMES = ["city", "a b", "Größe", "x-1", "数"]  # vLLM's parser loses names with quotes
_MARKED = [
    "<think>x</think>",
    "<｜DSML｜tool_calls>",
    "</｜DSML｜parameter>",
    "<tool_result>no</tool_result>",
    "<｜User｜>",
    "<CALL> SCHEMAS",
]


class Maker:
    """Makes dialogues of one seed.

    Attributes:
        rng: where choices come from.
        family: model type.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.family = self.rng.choice(FAMILIES)

    def maybe(self, share: float) -> bool:
        return self.rng.random() < share

    def text(self, *, marked: bool = True) -> str:
        words = _PLAIN + _MARKED * marked
        return self.rng.choice(words) + self.rng.choice(["", " ", "\n"]) + self.rng.choice(words)

    def value(self, depth: int = 0, *, marked: bool = True) -> Any:
        kind = self.rng.randrange(7 if depth < 2 else 5)
        if kind < 5:
            return (
                self.text(marked=marked),
                self.rng.randrange(-10, 10**6),
                self.rng.random() * 1e3,
                self.maybe(0.5),
                None,
            )[kind]
        values = [self.value(depth + 1, marked=marked) for _ in range(self.rng.randrange(3))]
        return values if kind == 5 else {self.text(marked=marked): each for each in values}

    def tool(self) -> Message:
        function = {
            "name": self.rng.choice(["get_weather", "搜索", "a-b.c"]),
            "description": self.text(),
            "parameters": {"type": "object", "properties": {self.text(): self.value()}},
        }
        if self.maybe(0.3):
            del function["parameters"]
        return {"type": "function", "function": function}

    def calls(self, *, marked: bool = True) -> list[Message]:
        made = []
        for number in range(self.rng.randrange(1, 4)):
            arguments: Any = {
                self.text() if marked else self.rng.choice(_NAMES): self.value(marked=marked)
                for _ in range(self.rng.randrange(4))
            }
            if self.maybe(0.5):
                arguments = json.dumps(arguments, ensure_ascii=self.maybe(0.5))
            function = {"name": self.rng.choice(["f", "搜索"]), "arguments": arguments}
            call = {"type": "function", "function": function}
            if self.maybe(0.9):
                call["id"] = f"c{number}"
            made.append(call)
        return made

    def dialogue(self, *, rare: bool = True) -> list[Message]:
        """Messages of some turns; with what only the format itself has, if ``rare``."""
        messages: list[Message] = []
        if self.maybe(0.5):
            system: Message = {"role": "system", "content": self.text()}
            if rare and self.maybe(0.2):
                system["tools"] = [self.tool()]
            if rare and self.maybe(0.2):
                system["response_format"] = self.value()
            messages.append(system)
        turns = self.rng.randrange(1, 5)
        for turn in range(turns):
            messages += self._questions(rare)
            if turn < turns - 1 or self.maybe(0.3):
                messages += self._answers(rare)
        if messages[-1]["role"] == "assistant" and self.maybe(0.5):
            messages[-1]["wo_eos"] = True
        return messages

    def _questions(self, rare: bool) -> list[Message]:
        messages: list[Message] = []
        if rare and self.maybe(0.1):
            messages.append({"role": "latest_reminder", "content": self.text()})
        if self.maybe(0.1):
            messages.append({"role": "system", "content": self.text()})
        if rare and self.maybe(0.1):
            messages.append({"role": "developer", "content": "d" + self.text()})
        for _ in range(1 + self.maybe(0.15)):
            message: Message = {"role": "user", "content": self.text()}
            if self.maybe(0.3):
                parts = [{"type": "text", "text": self.text()} for _ in range(1 + self.maybe(0.5))]
                message["content"] = parts
            if rare and self.maybe(0.1):
                message["task"] = self.rng.choice(_TASKS)
            messages.append(message)
        return messages

    def _answers(self, rare: bool) -> list[Message]:
        messages: list[Message] = []
        while True:
            message: Message = {"role": "assistant", "content": self.text()}
            messages.append(message)
            if self.maybe(0.6):
                message["reasoning"] = self.text()
            if rare and self.maybe(0.05):
                message["task"] = "title"
            if not self.maybe(0.4):
                return messages
            message["tool_calls"] = self.calls()
            if self.maybe(0.4):
                message["content"] = None
            elif self.maybe(0.4):
                del message["content"]
            order = list(range(len(message["tool_calls"])))
            self.rng.shuffle(order)
            for number in order:
                result: Message = {"role": "tool", "tool_call_id": f"c{number}"}
                result["content"] = self.text()
                if self.maybe(0.2):
                    result["content"] = [{"type": "text", "text": self.text()}]
                messages.append(result)
            if self.maybe(0.5):
                return messages


def cases(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Dialogues with the options of the encoders themselves."""
    made = []
    for seed in range(first, first + count):
        maker = Maker(seed)
        made.append(
            {
                "family": maker.family,
                "messages": maker.dialogue(),
                "thinking": maker.maybe(0.6),
                "drop_thinking": maker.maybe(0.8),
                "effort": maker.rng.choice(EFFORTS[maker.family]),
            }
        )
    return made


def requests(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Dialogues as a server is sent them: with tools, and names that templates know."""
    made = []
    for seed in range(first, first + count):
        maker = Maker(seed)
        names: dict[str, Any] = {
            maker.rng.choice(["thinking", "enable_thinking"]): maker.maybe(0.6)
        }
        if maker.maybe(0.5):
            names["reasoning_effort"] = maker.rng.choice([*EFFORTS[maker.family], "none"])
        if maker.maybe(0.2):
            names["drop_thinking"] = maker.maybe(0.5)
        messages = maker.dialogue(rare=False)
        while messages[-1]["role"] == "assistant":
            messages.pop()
        tools = (
            [maker.tool() for _ in range(maker.rng.randrange(1, 3))] if maker.maybe(0.5) else None
        )
        made.append({"family": maker.family, "messages": messages, "tools": tools, "names": names})
    return made


def answers(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Assistant messages without marks in their texts, which parsers give back as they are."""
    made = []
    for seed in range(first, first + count):
        maker = Maker(seed)
        thinking = maker.maybe(0.5)
        message: Message = {"role": "assistant", "content": maker.text(marked=False)}
        if thinking:
            message["reasoning"] = maker.text(marked=False)
        if maker.maybe(0.7):
            message["tool_calls"] = maker.calls(marked=False)
        made.append({"family": maker.family, "thinking": thinking, "message": message})
    return made


def flat(messages: list[Message]) -> list[Message]:
    """Messages in the spelling of V4.1's encoder: one text each, reasoning by its longer name."""
    copies = copy.deepcopy(messages)
    for message in copies:
        if "reasoning" in message:
            message["reasoning_content"] = message["reasoning"]
        if isinstance(message.get("content"), list) and message["role"] != "tool":
            message["content"] = "\n\n".join(part["text"] for part in message["content"])
    return copies

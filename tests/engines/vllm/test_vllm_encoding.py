"""Dialogues written, and answers read, as vLLM's own encoders and parsers of both families do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dialogues
import pytest
from servers import look_up, needs_vllm

from anymla.model.answers import parse_answer
from anymla.model.chat import ChatOptions, chat_format
from anymla.model.encoding import ENCODINGS
from anymla.model.tokenizer import Tokenizer
from anymla.testing.tiny_tokenizer import CHAT_VOCAB, write_tokenizer

pytestmark = needs_vllm

COUNT = 1000
ASKED = {
    "cases": dialogues.cases(COUNT, 10_000),
    "requests": dialogues.requests(COUNT, 20_000),
    "answers": dialogues.answers(COUNT, 30_000),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("encoding")
    asked = directory / "asked.json"
    asked.write_text(json.dumps(ASKED), encoding="utf-8")
    return look_up("encode.py", directory, "off", str(asked))


def test_dialogues_are_the_encoders_strings(found: dict[str, Any]) -> None:
    for case, text in zip(ASKED["cases"], found["cases"], strict=True):
        written = ENCODINGS[case["family"]].write(
            case["messages"],
            thinking=case["thinking"],
            drop_thinking=case["drop_thinking"],
            effort=case["effort"],
        )
        assert written == text, case


def test_requests_are_the_servers_prompts(found: dict[str, Any], tmp_path: Path) -> None:
    write_tokenizer(tmp_path, CHAT_VOCAB, 1000)
    tokenizer = Tokenizer.from_dir(tmp_path)
    formats = {name: chat_format(tmp_path, name, tokenizer) for name in ENCODINGS}
    for case, text in zip(ASKED["requests"], found["requests"], strict=True):
        options = ChatOptions(tools=case["tools"], template_options=case["names"])
        assert formats[case["family"]].write(case["messages"], options).text == text, case


def written_calls(message: dict[str, Any]) -> list[list[Any]]:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    arguments = [
        json.loads(call["arguments"]) if isinstance(call["arguments"], str) else call["arguments"]
        for call in calls
    ]
    return [[call["name"], each] for call, each in zip(calls, arguments, strict=True)]


def test_answers_are_read_as_the_servers_parser_reads_them(found: dict[str, Any]) -> None:
    for case, expected in zip(ASKED["answers"], found["answers"], strict=True):
        got = parse_answer(expected["text"], thinking=case["thinking"])
        calls = [
            [call["function"]["name"], json.loads(call["function"]["arguments"])]
            for call in got.tool_calls
        ]
        assert calls == expected["calls"] == written_calls(case["message"]), case
        assert got.reasoning == case["message"].get("reasoning", ""), case
        assert got.reasoning.rstrip() == expected["reasoning"], case
        assert got.text == case["message"]["content"], case
        if not calls:
            assert got.text == expected["content"], case
        elif got.text.strip():  # vLLM leaves the blank line in front of a call in the content
            assert got.text + "\n\n" == expected["content"], case
        else:
            assert not expected["content"], case

"""What vLLM makes of dialogues and answers: ``encode.py ANSWER.json ASKED.json``.

Run by a process of its own, because importing vLLM warns and patches torch. To record what tests
compare with where there is no vLLM: ``encode.py --record tests/model/encoding_recorded.json``.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import dialogues
import vllm
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.deepseek_v4 import DeepSeekV4Parser
from vllm.parser.deepseek_v41 import DeepSeekV41Parser
from vllm.tokenizers import deepseek_v4_encoding, deepseek_v41_encoding
from vllm.tokenizers.deepseek_v4 import DeepseekV4Tokenizer
from vllm.tokenizers.deepseek_v41 import DeepseekV41Tokenizer

from anymla.testing.tiny_tokenizer import CHAT_VOCAB, write_tokenizer

ENCODERS = {"deepseek_v4": deepseek_v4_encoding, "deepseek_v41": deepseek_v41_encoding}
TOKENIZERS = {"deepseek_v4": DeepseekV4Tokenizer, "deepseek_v41": DeepseekV41Tokenizer}
PARSERS = {"deepseek_v4": DeepSeekV4Parser, "deepseek_v41": DeepSeekV41Parser}
RECORDED = 24


def encoded(case: dict[str, Any]) -> str:
    messages = case["messages"]
    text: str = ENCODERS[case["family"]].encode_messages(
        copy.deepcopy(messages) if case["family"] == "deepseek_v4" else dialogues.flat(messages),
        "thinking" if case["thinking"] else "chat",
        drop_thinking=case["drop_thinking"],
        reasoning_effort=case["effort"],
    )
    return text


def answer_text(case: dict[str, Any]) -> str:
    """An answer as the encoder writes it behind its question."""
    question = {"role": "user", "content": "?"}
    before, whole = (
        encoded(case | {"messages": messages, "drop_thinking": False, "effort": "low"})
        for messages in ([question], [question, case["message"] | {"wo_eos": True}])
    )
    assert whole.startswith(before)
    return whole[len(before) :]


class Server:
    """What vLLM's server does with a request and with an answer."""

    def __init__(self, directory: Path) -> None:
        write_tokenizer(directory, CHAT_VOCAB, 1000)
        self.tokenizers = {
            name: kind.from_pretrained(directory) for name, kind in TOKENIZERS.items()
        }

    def rendered(self, case: dict[str, Any]) -> str:
        text: str = self.tokenizers[case["family"]].apply_chat_template(
            copy.deepcopy(case["messages"]), tools=case["tools"], tokenize=False, **case["names"]
        )
        return text

    def parsed(self, case: dict[str, Any], text: str) -> dict[str, Any]:
        parser = PARSERS[case["family"]](
            self.tokenizers[case["family"]],
            None,
            chat_template_kwargs={"thinking": case["thinking"]},
        )
        tools = [{"type": "function", "function": {"name": name}} for name in ("f", "搜索")]
        request = ChatCompletionRequest(
            model="tiny", messages=[{"role": "user", "content": "?"}], tools=tools
        )
        reasoning, content, calls = parser.parse(text, request, enable_auto_tools=True)
        return {
            "reasoning": reasoning or "",
            "content": content or "",
            "calls": [[call.name, json.loads(call.arguments)] for call in calls or ()],
        }


def everything(asked: dict[str, Any], directory: Path) -> dict[str, Any]:
    server = Server(directory)
    texts = [answer_text(case) for case in asked["answers"]]
    return {
        "vllm": vllm.__version__,
        "cases": [encoded(case) for case in asked["cases"]],
        "requests": [server.rendered(case) for case in asked["requests"]],
        "answers": [
            {"text": text, **server.parsed(case, text)}
            for case, text in zip(asked["answers"], texts, strict=True)
        ],
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        if sys.argv[1] == "--record":
            asked = {
                "cases": dialogues.cases(RECORDED),
                "requests": dialogues.requests(RECORDED),
                "answers": dialogues.answers(RECORDED),
            }
            found = {"asked": asked, "found": everything(asked, Path(name))}
            text = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
            Path(sys.argv[2]).write_text(text + "\n", encoding="utf-8")
            return
        asked = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
        answer = everything(asked, Path(name))
        Path(sys.argv[1]).write_text(json.dumps(answer), encoding="utf-8")


main()

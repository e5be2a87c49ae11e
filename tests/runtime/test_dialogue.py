"""Answers taken apart as they come, and dialogues whose caches stay between the turns."""

import json
import random

import pytest

from anymla import LLM
from anymla.model.tokenizer import Tokenizer
from anymla.ops.memory import NotEnoughMemory
from anymla.runtime import dialogue as module
from anymla.runtime.dialogue import ChatAnswer
from anymla.runtime.engine import StepReport
from anymla.runtime.request import Completion, Request, Timings
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint
from anymla.testing.tiny_tokenizer import CHAT_VOCAB, EOS, write_tokenizer

SIZES = {
    "weights": "bf16",
    "hidden": 64,
    "heads": 2,
    "o_groups": 1,
    "q_lora": 32,
    "o_lora": 32,
    "index_heads": 2,
    "index_topk": 8,
    "experts": 4,
    "experts_per_token": 2,
    "moe_size": 32,
    "window": 16,
}
OPTIONS = {
    "v4 mtp": TinyOptions(ratios=(0, 4, 128), **SIZES),
    "v4 dspark": TinyOptions(ratios=(0, 4, 128), drafter="dspark", markov_rank=24, **SIZES),
    "v4.1": TinyOptions.shared(ratios=(0, 2, 2, 1, 1), **SIZES),
}
NEW = 70  # tokens of an answer, far more than the window

CALL = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)


class Says:
    """An engine whose requests are answered with a given text, some tokens a step."""

    def __init__(self, tokens):
        self.tokens = list(tokens)
        self.said = []

    def submit(self, request):
        self.request = request

    def step(self):
        new = self.tokens[:2]
        del self.tokens[:2]
        self.said += new
        return StepReport(0, {"0": new}, [] if self.tokens else [self._done("stop")])

    def cancel(self, name):
        assert name == "0"
        self.tokens.clear()
        return self._done("stop")

    def _done(self, reason):
        said = tuple(self.said)
        return Completion(self.request, said, reason, (0.0,) * len(said), None, 0, 0, Timings())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, CHAT_VOCAB, 1000)
    return Tokenizer.from_dir(directory)


def answer(tokenizer, text, *, thinks=False, **options):
    tokens = tokenizer.encode(text, leading=False)
    request = Request("0", (0, 1), len(tokens), stop_ids=frozenset([1]))
    return ChatAnswer(Says(tokens), request, tokenizer, prompt="?", thinks=thinks, **options)


def test_thinking_text_and_calls_come_apart(tokenizer) -> None:
    given = answer(tokenizer, f"let me see</think>Wait.\n\n{CALL}{EOS}", thinks=True)
    parts = list(given)
    assert [part.kind for part in parts] == sorted((p.kind for p in parts), reverse=False)
    assert "".join(part.text for part in parts) == "let me seeWait."
    result = given.result
    assert (result.reasoning, result.text) == ("let me see", "Wait.")
    (call,) = result.tool_calls
    assert call["function"]["name"] == "f"
    assert json.loads(call["function"]["arguments"]) == {"city": "Köln"}
    assert result.finish_reason == "stop"
    assert list(given) == []


def test_a_stop_string_cuts_an_answer(tokenizer) -> None:
    given = answer(tokenizer, "one two three", stop=("two",))
    assert "".join(part.text for part in given) == "one " == given.result.text
    assert len(given.result.token_ids) == len("one two")


def test_an_answer_that_is_stopped_keeps_what_was_said(tokenizer) -> None:
    given = answer(tokenizer, "a long answer")
    said = next(iter(given)).text
    given.stop()
    said += "".join(part.text for part in given)
    assert said == given.result.text == "a "
    assert given.result.finish_reason == "stop"


def test_an_answer_that_nobody_reads_on_is_cancelled(tokenizer) -> None:
    given = answer(tokenizer, "a long answer")
    engine = given._coming.gi_frame.f_locals["engine"]
    coming = iter(given)
    next(coming)
    coming.close()
    assert engine.tokens == []


@pytest.fixture(scope="module", params=OPTIONS)
def llm(request, tmp_path_factory):
    """Small models in float32, with drafts where there are any."""
    directory = tmp_path_factory.mktemp("llm")
    write_tiny_checkpoint(directory, OPTIONS[request.param])
    return LLM(directory, dtype="fp32", kv_cache="fp32", device="cpu", chunk_size=64)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A small model in float32 without drafts."""
    directory = tmp_path_factory.mktemp("plain")
    write_tiny_checkpoint(directory, OPTIONS["v4 mtp"])
    return LLM(directory, dtype="fp32", kv_cache="fp32", device="cpu", drafts="off")


def words(seed, count):
    return " ".join(random.Random(seed).choices(["sea", "ship", "Größe", "two", "gone"], k=count))


@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "thinking"])
def test_a_turn_reads_what_is_new_and_says_what_a_fresh_engine_says(llm, thinking) -> None:
    before = said = 0
    for given in turns(llm, 2 if thinking else 3, thinking=thinking):
        cached = given.completion.cached
        if not before:
            assert cached == 0
        elif thinking:  # earlier thinking is left out, so that what was said moves
            assert before - 16 <= cached < before
        else:
            assert cached == before + said - 1
        before, said = len(given.result.prompt_token_ids), len(given.result.token_ids)


def test_with_tools_earlier_thinking_stays(plain) -> None:
    first, second = turns(plain, 2, thinking=True, tools=[{"name": "f"}])
    before = len(first.result.prompt_token_ids) + len(first.result.token_ids)
    assert second.completion.cached == before - 1


def turns(llm, count, *, thinking, tools=None):
    """Answers of a dialogue, each compared with that of a fresh engine to the same prompt."""
    dialogue = llm.dialogue()
    messages = [{"role": "system", "content": words(0, 20)}]
    for turn in range(count):
        messages.append({"role": "user", "content": words(turn, 5)})
        options = {"max_new_tokens": NEW, "seed": turn, "temperature": 0.9 * (turn % 2)}
        effort = "low" if thinking else None
        given = llm.stream_chat(
            messages, dialogue=dialogue, reasoning_effort=effort, tools=tools, **options
        )
        list(given)
        result = given.result
        (alone,) = llm.generate([result.prompt_token_ids], **options)
        assert alone.token_ids == result.token_ids
        assert bool(result.reasoning) == thinking
        messages.append(
            {"role": "assistant", "content": result.text, "reasoning_content": result.reasoning}
        )
        yield given


def test_a_prompt_is_spelled_as_without_a_dialogue(plain) -> None:
    """But for the answers, of which the tokens that were generated are taken."""
    dialogue = plain.dialogue()
    messages = [{"role": "user", "content": "hello"}]
    first = plain.chat(messages, dialogue=dialogue, max_new_tokens=30)
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "and?"},
    ]
    second = plain.chat(messages, dialogue=dialogue, max_new_tokens=3).prompt_token_ids
    whole = plain.chat_prompt(messages)
    start, end = len(first.prompt_token_ids), len(whole) - 8
    assert second[:start] == tuple(whole[:start]) == first.prompt_token_ids
    assert second[-8:] == tuple(whole[end:])
    assert second[start:-8] == tuple(token for token in first.token_ids if token != 1)


def test_a_dialogue_that_outgrows_its_engine_is_read_anew_once(plain, monkeypatch) -> None:
    monkeypatch.setattr(module, "_FIRST_ROOM", 200)
    dialogue = plain.dialogue()
    messages = [{"role": "user", "content": "hello"}]
    cached = []
    for _ in range(4):
        given = plain.stream_chat(messages, dialogue=dialogue, max_new_tokens=60, ignore_eos=True)
        list(given)
        cached.append(given.completion.cached)
        messages.append({"role": "assistant", "content": given.result.text})
        messages.append({"role": "user", "content": "and?"})
    assert [bool(each) for each in cached] == [False, True, False, True]


def test_too_little_memory_for_room_ahead_is_no_error(plain, monkeypatch) -> None:
    sizes = []

    def refuse(model, options):
        sizes.append(options.max_seq_len)
        if options.max_seq_len > 1000:
            raise NotEnoughMemory("too much")
        return plain.engine([Request("x", (0,), options.max_seq_len - 1)])

    monkeypatch.setattr(module, "Engine", refuse)
    assert plain.chat("hello", dialogue=plain.dialogue(), max_new_tokens=3).text is not None
    assert sizes[0] > 1000 > sizes[1]

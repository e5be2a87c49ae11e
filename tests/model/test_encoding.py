"""DeepSeek-V4's and V4.1's own format of dialogues, and the choice between it and a template."""

import json
from pathlib import Path

import pytest

from anymla.model.chat import ChatOptions, chat_format
from anymla.model.config_family import FAMILIES
from anymla.model.config_fields import ConfigError
from anymla.model.encoding import ENCODINGS, MARKS
from anymla.model.tokenizer import Tokenizer
from anymla.testing.tiny_tokenizer import CHAT_VOCAB, MIN_VOCAB, write_tokenizer

RECORDED = json.loads(Path(__file__).with_name("encoding_recorded.json").read_text("utf-8"))
V4, V41 = ENCODINGS["deepseek_v4"], ENCODINGS["deepseek_v41"]
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
HI = [{"role": "user", "content": "hi"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture
def directory(tmp_path):
    write_tokenizer(tmp_path, CHAT_VOCAB, 1000)
    return tmp_path


def write(directory, messages, family="deepseek_v4", **options):
    chat = chat_format(directory, family, Tokenizer.from_dir(directory))
    return chat.write(messages, ChatOptions(**options))


def test_dialogues_are_those_that_vllm_writes() -> None:
    assert len(RECORDED["asked"]["cases"]) > 20
    for case, text in zip(RECORDED["asked"]["cases"], RECORDED["found"]["cases"], strict=True):
        written = ENCODINGS[case["family"]].write(
            case["messages"],
            thinking=case["thinking"],
            drop_thinking=case["drop_thinking"],
            effort=case["effort"],
        )
        assert written == text, case


def test_requests_are_the_prompts_of_vllms_server(directory) -> None:
    asked, found = RECORDED["asked"]["requests"], RECORDED["found"]["requests"]
    for case, text in zip(asked, found, strict=True):
        options = {"tools": case["tools"], "template_options": case["names"]}
        assert write(directory, case["messages"], case["family"], **options).text == text, case


def test_a_question_by_hand(directory) -> None:
    plain = write(directory, HI)
    assert (plain.text, plain.thinks) == (f"{BOS}<｜User｜>hi<｜Assistant｜></think>", False)
    thinking = write(directory, HI, thinking=True, reasoning_effort="low")
    assert (thinking.text, thinking.thinks) == (f"{BOS}<｜User｜>hi<｜Assistant｜><think>", True)
    shared = write(directory, HI, "deepseek_v41", thinking=True)
    assert shared.text == (
        f"{BOS}<｜System｜>Reasoning Effort: 75 (range 1-100, the higher the value, the more "
        "thorough the reasoning)\n\n<｜User｜>hi<｜Assistant｜><think>"
    )


def test_every_family_has_a_format() -> None:
    assert {family.encoding for family in FAMILIES.values()} == set(ENCODINGS)


@pytest.mark.parametrize("encoding", [V4, V41])
@pytest.mark.parametrize("spelling", ["reasoning", "reasoning_content"])
def test_both_spellings_of_reasoning(encoding, spelling) -> None:
    said = {"role": "assistant", "content": "yes", spelling: "let me see"}
    text = encoding.write([*HI, said], thinking=True, effort="low", drop_thinking=False)
    assert text.endswith(f"<think>let me see</think>yes{EOS}")


@pytest.mark.parametrize("encoding", [V4, V41])
def test_spellings_of_calls_and_contents_are_one(encoding) -> None:
    calls = [
        [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]
        for arguments in ({"a": "é", "n": [1, None]}, '{"a": "é", "n": [1, null]}')
    ]
    calls += [
        [
            {
                "function": {
                    "name": "f",
                    "arguments": json.dumps(calls[1][0]["function"]["arguments"]),
                }
            }
        ],
        [{"name": "f", "arguments": {"a": "é", "n": [1, None]}}],
    ]
    result = {"role": "tool", "tool_call_id": "c", "content": '{"t": 1}'}
    texts = {
        encoding.write([*HI, {"role": "assistant", "tool_calls": each, **content}, end])
        for each in calls
        for content in ({}, {"content": None}, {"content": ""}, {"content": []})
        for end in (result, result | {"content": [{"type": "text", "text": '{"t": 1}'}]},
                    result | {"content": {"t": 1}})
    }  # fmt: skip
    (text,) = texts
    assert "｜DSML｜" in text
    assert '<tool_result>{"t": 1}</tool_result><｜Assistant｜></think>' in text


def test_arguments_that_are_no_object_are_not_lost() -> None:
    def calls(arguments):
        call = {"name": "f", "arguments": arguments}
        return V4.write([*HI, {"role": "assistant", "tool_calls": [call]}])

    assert '<｜DSML｜parameter name="arguments" string="true">[1</｜DSML｜parameter>' in calls("[1")
    assert "parameter" not in calls("")
    assert calls("") == calls(None) == calls({}) == calls("{}")


def test_an_answer_is_continued(directory) -> None:
    start = {"role": "assistant", "content": "Sure"}
    for options in ({}, {"continue_final_message": True}):
        for mark in ({}, {"prefix": True}, {"wo_eos": True}):
            plain = write(directory, [*HI, start | mark], **options)
            assert plain.text.endswith("<｜Assistant｜></think>Sure")
            assert not plain.thinks
    thought = {"role": "assistant", "reasoning_content": "Let me"}
    open_ = write(directory, [*HI, thought], thinking=True)
    assert open_.text.endswith("<｜Assistant｜><think>Let me")
    assert open_.thinks
    closed = write(directory, [*HI, thought | {"content": ""}], thinking=True)
    assert closed.text.endswith("<think>Let me</think>")
    assert not closed.thinks


def test_what_cannot_be_answered_is_said(directory) -> None:
    answer = {"role": "assistant", "content": "yes"}
    calls = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}
    with pytest.raises(ValueError, match="the dialogue ends with an answer"):
        write(directory, [*HI, answer], continue_final_message=False)
    with pytest.raises(ValueError, match="the dialogue ends with an answer"):
        write(directory, [*HI, calls])
    with pytest.raises(ValueError, match="must be an answer, got tool calls"):
        write(directory, [*HI, calls], continue_final_message=True)
    with pytest.raises(ValueError, match="must be an answer, got role 'user'"):
        write(directory, HI, continue_final_message=True)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must hold at least one message"),
        (["hi"], r"messages\[0\] must be a mapping"),
        ([{"content": "hi"}], r"messages\[0\]: role must be one of .*, got None"),
        ([{"role": "bot", "content": "hi"}], r"messages\[0\]: role must be one of .*, got 'bot'"),
        ([*HI, {"role": "user"}], r'messages\[1\]: a message needs "content"'),
        ([{"role": "user", "content": 5}], r"messages\[0\].content must be a string"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"messages\[0\].content\[0\] must be a part of type \"text\", got 'image_url'",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": None}]}],
            r"messages\[0\].content\[0\] must be a part of type",
        ),
        (
            [*HI, {"role": "assistant", "tool_calls": [{"function": {}}]}],
            r"messages\[1\].tool_calls\[0\] must be",
        ),
        (
            [*HI, {"role": "assistant", "tool_calls": "f"}],
            r"messages\[1\].tool_calls must be a list",
        ),
        ([{"role": "user", "content": "q", "task": "cook"}], "task must be one of action, "),
        ([{"role": "developer", "content": ""}, *HI], "'developer' needs content"),
    ],
)
def test_malformed_messages_are_named(directory, messages, message) -> None:
    with pytest.raises(ValueError, match=message) as error:
        write(directory, messages)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": {"name": "f"}}, "tools must be a list"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\] must be "),
        ({"tools": [print]}, r"tools\[0\] must be "),
        ({"tools": [{"function": {"name": "f", "x": {1}}}]}, "tool 'f' cannot be written as JSON"),
        ({"reasoning_effort": "huge"}, "low, high, max or none for DeepSeek-V4, got 'huge'"),
        ({"reasoning_effort": 50}, "low, high, max or none for DeepSeek-V4, got 50"),
        ({"template_options": {"tone": "dry"}}, "may hold thinking, .*, got tone"),
    ],
)
def test_what_the_format_does_not_have_is_refused(directory, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        write(directory, HI, **options)


@pytest.mark.parametrize("effort", [0, 101, True, 2.5, "medium", "50"])
def test_efforts_that_v41_does_not_have(directory, effort) -> None:
    with pytest.raises(ValueError, match=r"an integer in \[1, 100\] for DeepSeek-V4.1"):
        write(directory, HI, "deepseek_v41", reasoning_effort=effort)


def test_an_effort_turns_thinking_on_and_none_turns_it_off(directory) -> None:
    assert write(directory, HI, reasoning_effort="max").thinks
    assert "Beyond maximum" in write(directory, HI, reasoning_effort="max").text
    assert not write(directory, HI, reasoning_effort="none").thinks
    assert not write(directory, HI, thinking=True, reasoning_effort="none").thinks
    assert write(directory, HI, thinking=False, reasoning_effort="max") == write(directory, HI)
    assert write(directory, HI, template_options={"enable_thinking": True}).thinks


def test_a_task_is_answered_without_thinking(directory) -> None:
    for task in ("action", "title"):
        text = write(directory, [HI[0] | {"task": task}], thinking=True)
        assert text.text.endswith(f"<｜{task}｜>")
        assert not text.thinks


def test_a_tokenizer_that_lacks_the_tokens_is_named(tmp_path) -> None:
    write_tokenizer(tmp_path, MIN_VOCAB, 1000)
    with pytest.raises(
        ConfigError, match="has no chat template, and its tokenizer lacks tokens"
    ) as e:
        write(tmp_path, HI)
    assert str(e.value).endswith("<｜User｜>, <｜Assistant｜>, <think>, </think>")
    write_tokenizer(tmp_path, MIN_VOCAB + 6, 1000)  # all but those of tools and tasks
    assert write(tmp_path, HI).text
    with pytest.raises(ConfigError, match=r"format: ｜DSML｜$"):
        write(tmp_path, HI, tools=[WEATHER])
    with pytest.raises(ConfigError, match=r"format: <｜title｜>$"):
        write(tmp_path, [HI[0] | {"task": "title"}])


def test_every_mark_is_one_token(directory) -> None:
    tokenizer = Tokenizer.from_dir(directory)
    assert all(len(tokenizer.encode(mark, leading=False)) == 1 for mark in MARKS)
    ids = tokenizer.encode("<think>a</think>", leading=False)
    assert tokenizer.decode(ids) == "a"
    stream = tokenizer.stream(shown=("<think>", "</think>", "no token"))
    assert "".join(map(stream.push, ids)) == "<think>a</think>"


def template(directory, source):
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": source}))


def test_a_template_wins_and_sees_what_it_may_ask_for(directory) -> None:
    template(
        directory,
        "{{ messages[0].content }}|{{ tools | length if tools else 'no tools' }}|{{ thinking }}|"
        "{{ enable_thinking }}|{{ reasoning_effort }}|{{ tone }}|{{ add_generation_prompt }}",
    )
    assert write(directory, HI).text == "hi|no tools||||||True".replace("||||||", "|||||")
    asked = write(directory, HI, tools=[WEATHER], thinking=True, template_options={"tone": "dry"})
    assert asked.text == "hi|1|True|True||dry|True"
    assert (
        write(directory, HI, reasoning_effort="none").text == "hi|no tools|False|False|none||True"
    )
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]
    assert write(directory, parts).text.startswith("a\n\nb|")


def test_what_a_template_would_ignore_is_refused(directory) -> None:
    template(directory, "{{ messages[0].content }}")
    assert write(directory, HI, thinking=False, tools=[]).text == "hi"
    with pytest.raises(ConfigError, match="the chat template has no place for tools"):
        write(directory, HI, tools=[WEATHER])
    for options in ({"thinking": True}, {"reasoning_effort": "high"}):
        with pytest.raises(ConfigError, match="the chat template has no switch for thinking"):
            write(directory, HI, **options)
    with pytest.raises(ValueError, match="must not hold messages"):
        write(directory, HI, template_options={"messages": []})
    template(directory, "{{ messages[0].content }}<think>")  # it always thinks
    assert write(directory, HI, thinking=True).thinks


def test_a_template_says_whether_the_answer_begins_with_thinking(directory) -> None:
    template(directory, "{{ messages[0].content }}{% if thinking %}<think>\n{% endif %}")
    assert write(directory, HI, thinking=True).thinks
    assert not write(directory, HI).thinks


def test_a_template_continues_an_answer(directory) -> None:
    template(
        directory,
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}",
    )
    said = [*HI, {"role": "assistant", "content": "Sure, "}]
    assert write(directory, said).text == "<user>hi<end><assistant>Sure,"
    anew = write(directory, said, continue_final_message=False).text
    assert anew == "<user>hi<end><assistant>Sure,<end><assistant>"
    with pytest.raises(ValueError, match="must hold text, got none"):
        write(directory, [*HI, {"role": "assistant", "content": " "}])
    template(directory, "{{ messages[0].content }}")
    with pytest.raises(ConfigError, match="leaves out some of the message that is to be continued"):
        write(directory, said)


def test_code_beside_a_checkpoint_is_never_run(directory) -> None:
    (directory / "encoding").mkdir()
    (directory / "encoding" / "encoding_dsv4.py").write_text("raise SystemExit('it ran')\n")
    assert write(directory, HI).text == f"{BOS}<｜User｜>hi<｜Assistant｜></think>"

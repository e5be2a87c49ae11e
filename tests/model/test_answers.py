"""Answers taken apart: thinking, text and tool calls."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anymla.model.answers import Answer, AnswerStream, parse_answer
from anymla.model.encoding import ENCODINGS

RECORDED = json.loads(Path(__file__).with_name("encoding_recorded.json").read_text("utf-8"))
HI = {"role": "user", "content": "hi"}
CALL = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="a" string="true">5</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)
F5 = [("f", {"a": "5"})]


def calls(answer: Answer) -> list[tuple[str, object]]:
    assert [call["id"] for call in answer.tool_calls] == [
        f"call_{n}" for n in range(len(answer.tool_calls))
    ]
    functions = [call["function"] for call in answer.tool_calls]
    return [(each["name"], json.loads(each["arguments"])) for each in functions]


def in_pieces(text: str, *, thinking: bool, cuts: list[int]) -> Answer:
    stream = AnswerStream(thinking=thinking)
    parts, start = [], 0
    for cut in sorted({min(cut, len(text)) for cut in cuts} | {len(text)}):
        parts += stream.push(text[start:cut])
        start = cut
    parts += stream.finish()
    assert all(part.text for part in parts)
    return stream.answer(parts)


def test_answers_are_read_as_vllm_reads_them() -> None:
    asked, found = RECORDED["asked"]["answers"], RECORDED["found"]["answers"]
    assert sum(bool(each["calls"]) for each in found) > 5
    for case, expected in zip(asked, found, strict=True):
        got = parse_answer(expected["text"], thinking=case["thinking"])
        assert calls(got) == [tuple(each) for each in expected["calls"]]
        assert got.text == case["message"]["content"]
        assert got.reasoning == case["message"].get("reasoning", "")


names = st.text(min_size=1).filter(lambda text: '"' not in text and "｜DSML｜" not in text)
texts = st.text().filter(lambda text: "｜DSML｜" not in text and "think>" not in text)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
).filter(lambda value: "Infinity" not in json.dumps(value))


@given(
    encoding=st.sampled_from(list(ENCODINGS.values())),
    thinking=st.booleans(),
    text=texts,
    reasoning=texts,
    made=st.lists(st.tuples(names, st.dictionaries(names, values, max_size=3)), max_size=3),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_what_is_written_is_read_back(encoding, thinking, text, reasoning, made, cuts) -> None:
    said = {"role": "assistant", "content": text, "wo_eos": True}
    said["reasoning"] = reasoning if thinking else ""
    said["tool_calls"] = [{"name": name, "arguments": arguments} for name, arguments in made]
    options = {"thinking": thinking, "drop_thinking": False}
    before = encoding.write([HI], **options)
    whole = encoding.write([HI, said], **options).removeprefix(before)
    got = parse_answer(whole, thinking=thinking)
    assert (got.text, got.reasoning) == (text, said["reasoning"])
    assert calls(got) == made
    assert in_pieces(whole, thinking=thinking, cuts=cuts) == got


PIECES = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<｜DSML｜tool_calls>",
        "</｜DSML｜tool_calls>",
        '<｜DSML｜invoke name="f">',
        "</｜DSML｜invoke>",
        '<｜DSML｜parameter name="x" string="true">',
        '<｜DSML｜parameter name="y">',
        "</｜DSML｜parameter>",
        "<｜DSML｜ calls>",
        '<｜DSML｜ invoke name="',
        "<｜DSML｜",
        "<",
        "\n",
        "\n\n",
        " ",
        "word",
        "[" * 3000,
        "9" * 5000,
    ]
)


@given(
    pieces=st.lists(PIECES, max_size=14),
    thinking=st.booleans(),
    cuts=st.lists(st.integers(0, 300), max_size=12),
)
def test_nothing_is_refused_and_no_word_is_lost(pieces, thinking, cuts) -> None:
    text = "".join(pieces)
    got = parse_answer(text, thinking=thinking)
    assert in_pieces(text, thinking=thinking, cuts=cuts) == got
    said = (
        got.reasoning + got.text + "".join(call["function"]["arguments"] for call in got.tool_calls)
    )
    assert said.count("word") == text.count("word") or '"x": ' in said or '"y": ' in said


@pytest.mark.parametrize(
    ("text", "thinking", "expected"),
    [
        ("hello", False, ("hello", "")),
        ("hm</think>hello", True, ("hello", "hm")),
        ("never closed", True, ("", "never closed")),
        ("<think>hm</think>hello", True, ("hello", "hm")),  # opened once more
        ("<think>hm</think>hello", False, ("hello", "hm")),  # opened where the prompt did not
        ("</think>hello", False, ("hello", "")),  # closed once more
        ("the tag <think> and </think>", False, ("the tag <think> and </think>", "")),
        ("hm</think>the tag <think>", True, ("the tag <think>", "hm")),
        ("a < b <｜ c", False, ("a < b <｜ c", "")),
        (f"I would write {CALL[:30]}", False, (f"I would write {CALL[:30]}", "")),
        (CALL[:-40], False, (CALL[:-40], "")),
        ("hello<｜end▁of▁sentence｜>", False, ("hello", "")),
        ("", True, ("", "")),
    ],
)
def test_answers_without_calls(text, thinking, expected) -> None:
    got = parse_answer(text, thinking=thinking)
    assert (got.text, got.reasoning, got.tool_calls) == (*expected, ())


@pytest.mark.parametrize(
    ("text", "thinking", "expected", "made"),
    [
        (f"so\n\n{CALL}", False, ("so", ""), F5),
        (f"so\n\n\n{CALL}\n", False, ("so\n", ""), F5),
        (CALL.replace("tool_calls", "toolcalls"), False, ("", ""), F5),
        (CALL.replace("｜DSML｜", "｜DSML｜ ").replace("tool_", ""), False, ("", ""), F5),
        (CALL[19:-20], False, ("", ""), F5),  # without the block around
        (f"hm\n\n{CALL}", True, ("", "hm"), F5),  # thinking that was not closed
        (f"as {CALL} would</think>no", True, ("no", f"as {CALL} would"), []),  # quoted
        (f"{CALL} and so on", False, (" and so on", ""), F5),
        (f"{CALL}\n{CALL}", False, ("", ""), F5 * 2),
        (CALL[:-19] + '<｜DSML｜invoke name="g">', False, ('<｜DSML｜invoke name="g">', ""), F5),
        (CALL.replace(' string="true"', ""), False, ("", ""), [("f", {"a": 5})]),
        (CALL.replace("true", "false"), False, ("", ""), [("f", {"a": 5})]),
        (
            CALL.replace("true", "false").replace("5", "five"),
            False,
            ("", ""),
            [("f", {"a": "five"})],
        ),
        (CALL.replace("true", "false").replace("5", "NaN"), False, ("", ""), [("f", {"a": "NaN"})]),
        (
            CALL.replace("true", "false").replace("5", "1e999"),
            False,
            ("", ""),
            [("f", {"a": "1e999"})],
        ),
        (
            CALL.replace("true", "false").replace("5", '"\\ud800"'),
            False,
            ("", ""),
            [("f", {"a": '"\\ud800"'})],
        ),
        (CALL.replace('"a"', '"a"b"'), False, ("", ""), [("f", {'a"b': "5"})]),
        (
            CALL.replace(">5<", '><｜DSML｜parameter name="q" string="true">6<'),
            False,
            ("", ""),
            [("f", {"a": '<｜DSML｜parameter name="q" string="true">6'})],
        ),
    ],
)
def test_answers_with_calls(text, thinking, expected, made) -> None:
    got = parse_answer(text, thinking=thinking)
    assert ((got.text, got.reasoning), calls(got)) == (expected, made)


def test_text_streams_as_soon_as_it_cannot_be_a_mark() -> None:
    stream = AnswerStream(thinking=True)
    said = [stream.push(piece) for piece in ("let ", "me", "</th", "ink>", "a <b", "\n", "\nc")]
    assert [[(part.kind, part.text) for part in parts] for parts in said] == [
        [("reasoning", "let ")],
        [("reasoning", "me")],
        [],
        [],
        [("text", "a <b")],
        [],
        [("text", "\n\nc")],
    ]
    assert stream.finish() == []

import json

import pytest

from anymla.formats.untrusted import (
    MOST_DEPTH,
    Refused,
    parse_json,
    parse_object,
    read_bytes,
    read_object,
)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"a": [1, -2, 2**64 - 1, 1.5, None, True, "ä\n"]},
        [],
        "\U0001f600",
        5e-324,
        [[[[]]]],
    ],
)
def test_ordinary_values_are_read(value):
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON: Expecting value"),
        ("{", "not JSON: "),
        (b"\xff", "not UTF-8: invalid start byte at byte 0"),
        ("[NaN]", "NaN is not JSON"),
        ("[-Infinity]", "-Infinity is not JSON"),
        ("1e400", "the number 1e400 is too large"),
        ("-1" + "0" * 400 + ".0", "the number -1000000000000000000 is too large"),
        (str(2**64), "the integer 18446744073709551616 does not fit in 64 bits"),
        ("-" + "9" * 9999, r"the integer -9{19}\.\.\. does not fit in 64 bits"),
        (r'{"a": ["\ud800"]}', "half of a surrogate pair"),
        (r'{"\udfff": 1}', "half of a surrogate pair"),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(Refused, match=message) as caught:
        parse_json(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_containers_are_counted_before_they_are_made():
    for text in ("[" + "[]," * (1 << 22) + "0]", b'{"":[' + b"{}," * (1 << 22) + b"0]}"):
        with pytest.raises(Refused, match=r"^more than 4194304 lists and objects$"):
            parse_json(text)


def test_depth_is_limited():
    deepest = "[" * MOST_DEPTH + "]" * MOST_DEPTH
    assert parse_json(deepest) is not None
    for text in (f"[{deepest}]", '{"a":' * 70 + "0" + "}" * 70, "[" * 100_000, '{"":' * 100_000):
        with pytest.raises(Refused, match=r"nested more than 64 deep"):
            parse_json(text)


@pytest.mark.parametrize(
    ("text", "kind"), [("[]", "a list"), ("null", "null"), ("1", "a number"), ('"{}"', "a string")]
)
def test_an_object_is_asked_for(text, kind):
    with pytest.raises(Refused, match=f"not a JSON object, but {kind}"):
        parse_object(text)


def test_a_file_is_read_up_to_a_bound(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": 1}')
    assert read_object(path, most=8) == {"a": 1}
    with pytest.raises(Refused, match="longer than 7 bytes"):
        read_object(path, most=7)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "b")

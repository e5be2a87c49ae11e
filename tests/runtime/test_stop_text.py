import pytest
from hypothesis import given
from hypothesis import strategies as st

from anymla.model.tokenizer import TextStream
from anymla.runtime.stop_text import StopText

LETTERS = {n: bytes([n]) for n in range(256)}


def _read(text, stop):
    reader = StopText(TextStream(LETTERS), stop)
    parts = [reader.push(byte) for byte in text.encode()]
    return reader, parts, "".join(parts) + reader.finish()


@given(text=st.text("abc", max_size=12), stop=st.text("abc", min_size=1, max_size=4))
def test_text_ends_where_the_stop_string_begins(text, stop):
    reader, parts, out = _read(text, [stop])
    assert out == text.split(stop)[0]
    assert reader.stopped == (stop in text)
    # What was given away never had to be taken back.
    assert out.startswith("".join(parts))
    assert reader.tokens == (text.index(stop) + len(stop) if stop in text else len(text))


@given(text=st.text("ab", max_size=12), stops=st.lists(st.text("ab", min_size=1, max_size=3)))
def test_without_a_stop_string_nothing_is_lost(text, stops):
    reader, _, out = _read(text, stops)
    if not any(stop in text for stop in stops):
        assert out == text
        assert not reader.stopped


def test_text_comes_as_soon_as_it_is_certain():
    reader = StopText(TextStream(LETTERS), ["END"])
    given_away = [reader.push(ord(letter)) for letter in "an ENTRY"]
    assert given_away == ["a", "n", " ", "", "", "ENT", "R", "Y"]


def test_characters_of_several_tokens_are_one():
    assert _read("aé€b", ["€"])[2] == "aé"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="a stop string must not be empty"):
        StopText(TextStream(LETTERS), ["a", ""])

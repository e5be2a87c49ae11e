import io
import json
import sys

import pytest
from click.testing import CliRunner

from anymla.cli.main import main
from anymla.cli.terminal import escaped, one_line, say


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain äöü 你好 \U0001f468\u200d\U0001f469", "plain äöü 你好 \U0001f468\u200d\U0001f469"),
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b[2J\x07\r", r"\x1b[2J\x07\r"),
        ("\x00\x7f\x9b31m", r"\x00\x7f\x9b31m"),
        ("a\u202eb\u2028\ud800", r"a\u202eb\u2028\ud800"),
    ],
)
def test_what_a_terminal_would_obey_is_escaped(text, shown):
    assert escaped(text) == shown


def test_a_long_message_keeps_both_ends():
    message = one_line("begin " + "x" * 10**6 + "\n\x1b[0m end")
    assert len(message) == 400
    assert message.startswith("begin xxx")
    assert message.endswith(r"x \x1b[0m end")
    assert one_line("short\n\tmessage ") == "short message"


def test_only_a_terminal_gets_escapes(monkeypatch):
    for stream, shown in ((Terminal(), "\\x1b[2J\n"), (io.StringIO(), "\x1b[2J\n")):
        monkeypatch.setattr(sys, "stdout", stream)
        say("\x1b[2J")
        assert stream.getvalue() == shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "--checkpoint", "\x1b[2J" + "x" * 5000],
        ["inspect", "--cache", "/\x1b[2J\x9b" + "x" * 5000],
        ["inspect", "\x1b[2J" + "x" * 5000],
        ["inspect", "--\x1b[2J" + "x" * 5000],
        ["inspect", "--entries", "\x1b[2J" + "x" * 5000],
        ["\x1b[2J" + "x" * 5000],
        ["make-tiny", "x", "--ratios", "\x1b[2J" + "x" * 5000],
    ],
)
def test_errors_are_short_and_printable(arguments):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "\x1b" not in result.stderr
    assert r"\x1b[2J" in result.stderr
    assert len(result.stderr.splitlines()[-1]) < 600


def test_generated_text_on_a_terminal(tiny, monkeypatch):
    """The text of a batch and of one prompt, from a tokenizer that answers with control bytes."""
    from anymla.model.tokenizer import TextStream

    monkeypatch.setattr(TextStream, "push", lambda self, token: "\x1b]0;x\x07")
    for terminal in (False, True):
        stdout = Terminal() if terminal else io.StringIO()
        monkeypatch.setattr(sys, "stdout", stdout)
        options = ["--max-new-tokens", "2", "--ignore-eos"]
        main(
            ["generate", "--checkpoint", str(tiny), "--prompt", "a", *options],
            standalone_mode=False,
        )
        assert ("\x1b" in stdout.getvalue()) is not terminal
        assert (r"\x1b]0;x\x07" * 2 in stdout.getvalue()) is terminal


def test_a_name_in_a_checkpoint_on_a_terminal(tiny, tmp_path, monkeypatch):
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    header = {"\x1b[2J": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    stdout = Terminal()
    monkeypatch.setattr(sys, "stdout", stdout)
    main(["inspect", "--checkpoint", str(tmp_path)], standalone_mode=False)
    assert r"\x1b[2J" in stdout.getvalue()
    assert "\x1b" not in stdout.getvalue()

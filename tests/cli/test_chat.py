import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from anymla.cli.main import main
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint

CHECKPOINT = pathlib.Path(__file__).parents[2] / "examples" / "tiny" / "checkpoint"
FACT = "The ship came home. The passkey is 482193. Nobody saw her again."
SPEED = re.compile(
    r"(\d+) tokens?(?:, \d+\.\d tokens/s)? \(prompt: (\d+) new of (\d+)(?:, \d+\.\d tokens/s)?\)"
    r"(, cut by --max-new-tokens)?"
)


def chat(checkpoint, *arguments, given):
    words = ["chat", "--checkpoint", checkpoint, "--dtype", "fp32", "--temperature", 0, *arguments]
    return CliRunner().invoke(main, list(map(str, words)), input=given)


def speeds(result) -> list[list[int]]:
    """Tokens, tokens read and tokens of the prompt of each answer."""
    found = [SPEED.fullmatch(line) for line in result.stderr.splitlines()]
    return [list(map(int, each.groups()[:3])) for each in found if each]


def test_lines_are_answered_and_remembered() -> None:
    result = chat(
        CHECKPOINT, "--system", FACT, given="What is the passkey?\n\nTell me the passkey."
    )
    assert result.exit_code == 0, result.output
    first, second = result.stdout.splitlines()
    assert "482193" in first
    assert "482193" in second


def test_a_turn_reads_what_is_new() -> None:
    asked = [f"{FACT} What is the passkey?", "Tell me the passkey.", "What is the passkey?"]
    result = chat(CHECKPOINT, given="\n".join(asked))
    assert result.exit_code == 0, result.output
    assert len(result.stderr.splitlines()) == 3
    first, *others = speeds(result)
    assert first[1] == first[2] > 20
    before = first
    for each in others:
        # The end of the answer before, which has never run, and the next question.
        assert each[1] <= each[2] - before[2] - before[0] + 2 < 15
        before = each


def test_reset_begins_anew_and_exit_ends() -> None:
    result = chat(
        CHECKPOINT,
        "--system",
        FACT,
        given="What is the passkey?\nAnd again?\n/reset\nWhat is the passkey?\n/exit\nMore?\n",
    )
    assert result.exit_code == 0, result.output
    first, _, again = result.stdout.splitlines()
    assert first == again
    said = speeds(result)
    assert said[2][2] == said[0][2] < said[1][2]


@pytest.mark.parametrize("word", ["/exit", "/quit", "/bye"])
def test_commands_are_not_sent(word) -> None:
    result = chat(CHECKPOINT, given=f"/help\n/nothing\n{word}\nhello\n")
    assert (result.exit_code, result.stdout) == (0, "")
    told, unknown = result.stderr.splitlines()
    assert "/reset" in told
    assert unknown.startswith("no command /nothing: ")


def test_a_path_is_a_message() -> None:
    result = chat(CHECKPOINT, "--max-new-tokens", 1, given="/usr/bin is what?\n/a b\n")
    assert len(speeds(result)) == 2


def test_an_answer_ends_before_a_stop_string() -> None:
    result = chat(CHECKPOINT, "--stop", "193", given=f"{FACT} What is the passkey?\n")
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("482\n")


def test_no_line_no_answer() -> None:
    result = chat(CHECKPOINT, given="")
    assert (result.stdout, result.stderr) == ("", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--top-k", -2), "top_k must be at least 0"),
        (("--max-new-tokens", 0), "at least 1, got 0"),
        (("--reasoning-effort", "none", "--stop", ""), "a stop string must not be empty"),
    ],
)
def test_what_cannot_be_meant_is_one_line(arguments, message) -> None:
    result = chat(CHECKPOINT, *arguments, given="hello\n")
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_checkpoint_without_a_template_is_talked_with(tiny) -> None:
    result = chat(tiny, "--max-new-tokens", 6, given="hello\nand you?\n")
    assert result.exit_code == 0, result.output
    (one, two) = speeds(result)
    assert one == [6, 9, 9]  # BOS, User, five bytes, Assistant, </think>
    assert two[1:] == [1 + 1 + 1 + 8 + 2, 9 + 6 + 1 + 1 + 8 + 2]


def test_thinking_is_apart_from_the_answer(tiny) -> None:
    plain = chat(tiny, "--thinking", "--max-new-tokens", 6, given="hello\n")
    assert plain.exit_code == 0, plain.output
    assert plain.stdout == "\n"  # it did not come to an end
    thought, speed = plain.stderr.rsplit("\n", 2)[:2]
    assert thought
    (thorough,) = speeds(plain)
    (calm,) = speeds(
        chat(tiny, "--reasoning-effort", "low", "--max-new-tokens", 6, given="hello\n")
    )
    assert SPEED.fullmatch(speed)
    assert calm[2] == 9 < thorough[2]


def test_an_effort_that_there_is_not_is_one_line(tiny) -> None:
    result = chat(tiny, "--reasoning-effort", "huge", given="hello\n")
    assert result.exit_code == 2
    assert "reasoning_effort must be low, high, max or none" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_tokenizer_without_the_tokens_is_one_line(tmp_path) -> None:
    small = TinyOptions(
        weights="bf16", ratios=(0,), hidden=64, heads=2, o_groups=1, q_lora=32, o_lora=32,
        experts=4, experts_per_token=2, moe_size=32, mtp=0, vocab=258,
    )  # fmt: skip
    write_tiny_checkpoint(tmp_path / "small", small)
    result = chat(tmp_path / "small", given="hello\n")
    assert result.exit_code == 2
    assert "has no chat template, and its tokenizer lacks tokens" in result.stderr
    assert len(result.stderr.splitlines()) == 1


class Terminal:
    """``anymla chat`` on a terminal of its own."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "anymla", "chat", "--temperature", "0", "--dtype", "fp32"]
        self.ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [*command, *map(str, arguments)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self.seen = ""

    def wait_for(self, text: str, seconds: float = 120) -> str:
        """What has come, up to and with ``text``."""
        until = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self.ours], [], [], max(0, until - time.monotonic()))
            assert ready, f"no {text!r} in {self.seen!r}"
            try:
                self.seen += os.read(self.ours, 65536).decode("utf-8", "replace")
            except OSError:
                raise AssertionError(f"ended without {text!r}: {self.seen!r}") from None
        before, after = self.seen.split(text, 1)
        self.seen = after
        return before + text

    def write(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def interrupt_the_prompt(self) -> None:
        """Ctrl-C once it waits for a line: a moment before, input() heeds it at the next key."""
        time.sleep(2)
        self.interrupt()

    def ends_with(self) -> int:
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            os.close(self.ours)


def test_ctrl_c_ends_the_answer_and_then_the_program(tiny) -> None:
    terminal = Terminal("--checkpoint", tiny, "--max-new-tokens", 20_000)
    terminal.wait_for("> ")
    terminal.write("hello\n")
    terminal.wait_for("hello\r\n")
    time.sleep(3)  # the answer is on its way
    terminal.interrupt()
    said = terminal.wait_for("tokens/s)\r\n> ")
    count, _, prompt = map(int, SPEED.search(said).groups()[:3])
    assert 0 < count < 20_000
    terminal.write("more\n")
    time.sleep(2)
    terminal.interrupt()
    said = terminal.wait_for("tokens/s)\r\n> ")
    # The answer that was cut short is part of the dialogue, and has not been read anew.
    _, new, whole = map(int, SPEED.search(said).groups()[:3])
    assert whole == prompt + count + 1 + 1 + 4 + 2
    assert new <= 1 + 1 + 1 + 4 + 2
    terminal.interrupt_the_prompt()
    assert terminal.ends_with() == 130


def test_a_message_that_cannot_be_answered_does_not_end_a_dialogue(tiny) -> None:
    terminal = Terminal("--checkpoint", tiny, "--max-new-tokens", 65_530)
    terminal.wait_for("> ")
    terminal.write("hello, hello\n")
    terminal.wait_for("exceed max_position_embeddings of 65536\r\n> ")
    terminal.write("/exit\n")
    assert terminal.ends_with() == 0


def test_thinking_is_dimmed_on_a_terminal(tiny) -> None:
    terminal = Terminal("--checkpoint", tiny, "--max-new-tokens", 4, "--thinking")
    terminal.wait_for("> ")
    terminal.write("hello\n")
    said = terminal.wait_for("cut by --max-new-tokens\r\n> ")
    assert "\x1b[2m" in said
    assert "\x1b[0m" in said
    terminal.write("/exit\n")
    assert terminal.ends_with() == 0


def test_ctrl_c_at_the_first_message_ends_the_program(tiny) -> None:
    terminal = Terminal("--checkpoint", tiny, "--max-new-tokens", 4)
    terminal.wait_for("> ")
    terminal.interrupt_the_prompt()
    assert terminal.ends_with() == 130

import pathlib

import pytest
from click.testing import CliRunner

from anymla.cli.main import main

CHECKPOINT = pathlib.Path(__file__).parents[2] / "examples" / "tiny" / "checkpoint"
FACT = "The ship came home. The passkey is 482193. Nobody saw her again."


def chat(checkpoint, *arguments, given):
    words = ["chat", "--checkpoint", checkpoint, "--dtype", "fp32", "--temperature", 0, *arguments]
    return CliRunner().invoke(main, list(map(str, words)), input=given)


def test_lines_are_answered_and_remembered() -> None:
    result = chat(
        CHECKPOINT, "--system", FACT, given="What is the passkey?\n\nTell me the passkey."
    )
    assert result.exit_code == 0, result.output
    first, second = result.stdout.splitlines()
    assert "482193" in first
    assert "482193" in second
    assert result.stderr == ""


def test_an_answer_ends_before_a_stop_string() -> None:
    result = chat(CHECKPOINT, "--stop", "193", given=f"{FACT} What is the passkey?\n")
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("482\n")


def test_no_line_no_answer() -> None:
    assert chat(CHECKPOINT, given="").stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--top-k", -2), "top_k must be at least 0"), (("--max-new-tokens", 0), "at least 1, got 0")],
)
def test_what_cannot_be_meant_is_one_line(arguments, message) -> None:
    result = chat(CHECKPOINT, *arguments, given="hello\n")
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_checkpoint_without_a_template_is_refused(tiny) -> None:
    result = chat(tiny, given="hello\n")
    assert result.exit_code == 2
    assert "has no chat template" in result.stderr

import pathlib
import re

import pytest
from click.testing import CliRunner, Result

from anymla.cli import demo as module
from anymla.cli.main import main
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint

SMALL = TinyOptions(ratios=(0, 4), hidden=128, heads=2, o_groups=1, experts=8, moe_size=64)


@pytest.fixture(autouse=True)
def _smaller(monkeypatch) -> None:
    monkeypatch.setattr(module, "TinyOptions", lambda: SMALL)


def demo(*arguments: object, given: str | None = None) -> Result:
    return CliRunner().invoke(main, ["demo", *map(str, arguments)], input=given)


@pytest.mark.parametrize(
    "sizes", [(1, 1, 512), (1, 3, 1), (9, 4, 2)], ids=["one", "one by one", "chunks"]
)
def test_few_tokens_are_checked_as_many_are(tmp_path, sizes) -> None:
    words = zip(("--prompt-tokens", "--new-tokens", "--chunk-size"), sizes, strict=True)
    result = demo(
        "-", "--output", tmp_path, *(x for pair in words for x in pair), given="some text"
    )
    assert result.exit_code == 0, result.output
    assert "OK: log-probabilities, cache bytes and selections agree" in result.stdout
    assert f"reading {sizes[0]} tokens of 1 files" in result.stdout
    assert re.search(r"\d+ MTP drafts verified, which random weights seldom pass", result.stdout)
    assert result.stderr == ""  # bars are for terminals


@pytest.mark.parametrize("count", [0, -1])
@pytest.mark.parametrize("option", ["--prompt-tokens", "--new-tokens", "--chunk-size"])
def test_counts_begin_at_one(tmp_path, option, count) -> None:
    result = demo("-", "--output", tmp_path / "x", option, count, given="a")
    assert result.exit_code == 2
    assert f"{count} is not in the range x>=1" in result.stderr
    assert not (tmp_path / "x").exists()


def test_a_text_that_is_not_utf8_is_named(tmp_path) -> None:
    (tmp_path / "latin1").write_bytes(b"\xfcber")
    result = demo(tmp_path / "latin1", "--output", tmp_path / "x")
    assert result.exit_code == 2
    assert result.stderr == f"Error: {tmp_path}/latin1: not UTF-8: invalid start byte at byte 0\n"
    assert not (tmp_path / "x").exists()


def test_what_is_there_is_left_alone(tmp_path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "mine").write_text("mine")
    result = demo("-", "--output", tmp_path, given="a")
    assert result.exit_code == 2
    assert "is not empty and holds no tiny checkpoint to replace" in result.stderr
    assert (tmp_path / "checkpoint" / "mine").read_text() == "mine"


def test_too_many_tokens_are_refused_before_they_run(tmp_path) -> None:
    result = demo("-", "--output", tmp_path, "--new-tokens", 10**9, given="a")
    assert result.exit_code == 2
    assert "1000000000 new ones exceed max_position_embeddings" in result.stderr


TINY = pathlib.Path(__file__).parents[2] / "examples" / "tiny"


def test_a_trained_checkpoint_speaks_and_finds(tmp_path) -> None:
    sizes = ("--context", 1024, "--prompt-tokens", 200, "--new-tokens", 4)
    result = demo("--checkpoint", TINY / "checkpoint", *sizes, TINY / "persuasion.txt")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line[:5] for line in lines if line.startswith("[")] == [f"[{n}/4]" for n in range(1, 5)]
    assert re.search(r"\d+ of \d+ MTP drafts accepted: 96 tokens in \d+ steps", result.stdout)
    verdicts = {line[4:25].strip(): line[25:30] for line in lines if " probability of " in line}
    assert verdicts == {
        "nothing broken": "right",
        "sink dropped": "right",
        "window off by one": "right",
        "stale index rows": "WRONG",
        "half a page swapped": "WRONG",
    }
    # What the question did not notice, the comparison does.
    noticed = re.findall(r"^    (\S.{19}) ((?:NOT )?noticed)  largest", result.stdout, re.M)
    assert noticed == [
        (f"{'sink dropped':20}", "noticed"),
        (f"{'window off by one':20}", "noticed"),
    ]
    assert lines[-1] == "OK: log-probabilities, cache bytes and selections agree with float64"


def test_a_checkpoint_that_finds_nothing_fails(tmp_path) -> None:
    write_tiny_checkpoint(tmp_path / "random", SMALL)
    result = demo("--checkpoint", tmp_path / "random", "--context", 600, TINY / "persuasion.txt")
    assert result.exit_code == 1
    assert re.search(r"the passkey \d{6} was not found", result.stderr)

"""The help of ``python -m lab``: bare names, examples, and the device that is taken."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner, Result

from anymla.cli.bench_rows import LAB
from lab.__main__ import main

RESULTS = Path(__file__).parents[2] / "benchmarks"


def run(*words: str) -> Result:
    return CliRunner().invoke(main, words, prog_name=LAB)


def every_command(
    group: click.Group = main, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield words, group
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from every_command(command, (*words, name))
        else:
            yield (*words, name), command


COMMANDS = dict(every_command())
NEEDS = [(), ("same-code",), ("same-code", "compare"), ("same-code", "record"), ("xpu-attention",)]


@pytest.mark.parametrize("words", NEEDS, ids=" ".join)
def test_called_bare_in_vain_the_help_is_shown(words) -> None:
    asked, bare = run(*words, "--help"), run(*words)
    assert asked.exit_code == 0
    assert (bare.exit_code, bare.stdout, bare.stderr) == (2, "", asked.stdout)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_examples_of_the_help_are_read(words, tmp_path, monkeypatch) -> None:
    command = COMMANDS[words]
    (tmp_path / "FOLDER").mkdir()
    for name in ("before.jsonl", "after.jsonl", "README.md"):
        (tmp_path / name).touch()
    (tmp_path / "benchmarks").symlink_to(RESULTS)
    monkeypatch.chdir(tmp_path)
    shown = run(*words, "--help").output
    assert command.examples
    for example in command.examples:
        assert f"  {example}\n" in shown
        rest = shlex.split(example)
        rest = rest[rest.index("lab") + 1 :]
        found = main
        while isinstance(found, click.Group) and rest[0] != "--help":
            found = found.get_command(click.Context(found), rest.pop(0))
        if rest != ["--help"]:
            found.make_context(LAB, rest)


def test_a_near_miss_is_named() -> None:
    assert "did you mean compare?" in run("same-code", "comapre").stderr
    assert "did you mean attention?" in run("atention").stderr


@pytest.mark.parametrize("words", [("traffic",), ("full-size", "--model", "tiny")])
def test_the_accelerator_is_taken_if_there_is_one(words, monkeypatch) -> None:
    accelerator = torch.device("xpu")
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: accelerator
    )
    result = run(*words)
    assert result.exit_code == 2
    assert result.stderr == "Error: --device xpu: torch sees no such device on this machine\n"

"""First words: bare names, near misses, other programs' words, and the examples of the help."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner, Result

from anymla.cli.main import main

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "examples/tiny/checkpoint")


def run(*arguments: object, given: str | None = None) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)), input=given)


def every_command(
    group: click.Group = main, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield words, group
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if command.hidden:  # an old name
            continue
        if isinstance(command, click.Group):
            yield from every_command(command, (*words, name))
        else:
            yield (*words, name), command


COMMANDS = dict(every_command())
NEEDS = [
    (),
    ("bench",),
    ("chat",),
    ("demo",),
    ("generate",),
    ("inspect",),
    ("make-tiny",),
    ("replay",),
    ("score",),
    ("warm-up",),
]


def needs_words(command: click.Command) -> bool:
    return isinstance(command, click.Group) or any(each.required for each in command.params)


def test_those_that_need_words_are_listed() -> None:
    assert {words for words, command in COMMANDS.items() if needs_words(command)} <= {*NEEDS}


@pytest.mark.parametrize("words", NEEDS, ids=" ".join)
def test_called_bare_in_vain_the_help_is_shown_as_it_is_formatted(words) -> None:
    asked, bare = run(*words, "--help"), run(*words)
    assert asked.exit_code == 0
    assert (bare.exit_code, bare.stdout, bare.stderr) == (2, "", asked.stdout)
    assert bare.stderr.count("\n") > 5


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (("genrate",), "did you mean generate?"),
        (("bech",), "did you mean bench?"),
        (("bench", "atention"), "did you mean attention?"),
        (("serve", "x"), "pip install '.[vllm]'"),
        (("xyz",), "there are generate, chat, score"),
        (("-m", TINY, "-p", "a"), "a command comes first, as in anymla generate DIR -m ..."),
        ((TINY,), "a command comes first, as in anymla chat /"),
        (("doctor", "--famly", "x"), "--family"),
        (("generate", TINY, "--max-length", 5), "max_new_tokens does not"),
        (("generate", TINY, "-c", 4096), "nothing to set"),
        (("generate", TINY, "--tensor-parallel-size", 2), "torchrun"),
        (("chat", TINY, "--trust-remote-code"), "never run"),
        (("generate", TINY, "--dtype", "fp16", "-p", "a"), "bf16 (bfloat16)"),
        (("generate", TINY, "--device", "gpu", "-p", "a"), "--device gpu: must be cpu, cuda"),
        (("generate", "-p", "a"), "Missing option '--checkpoint DIR'"),
        (("generate", TINY, "--checkpoint", TINY, "-p", "a"), "is given as well"),
        (("generate", "--drafts", "dspak"), "dspark"),
    ],
)
def test_what_is_meant_is_said(typed, meant) -> None:
    result = run(*typed)
    assert result.exit_code == 2
    assert meant in result.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def ours() -> str:
    words = ("--checkpoint", TINY, "--prompt", "In the", "--max-new-tokens", 4, "--seed", 3)
    return run("generate", *words, "--temperature", 1, "--dtype", "fp32").stdout


@pytest.mark.parametrize(
    "typed",
    [
        "generate -m {} -p 'In the' -n 4 -s 3 --temp 1 --dtype float32",
        "generate {} --prompt 'In the' --max_new_tokens 4 --temperature 1 --seed=3 --dtype fp32",
        "generate --model {} -p 'In the' --max-tokens 4 --temp 1 --seed 3 --torch-dtype float32",
        "generate --ckpt-path={} -p 'In the' --n-predict=4 --temp 1 -s 3 --dtype torch.float32",
        "complete {} -p 'In the' -n 4 -s 3 --temp 1 --dtype float --device auto --n-threads 1",
    ],
)
def test_other_programs_words_are_taken(ours, typed) -> None:
    result = run(*shlex.split(typed.format(TINY)))
    assert result.exit_code == 0, result.output
    assert result.stdout == ours  # stderr has the speed


@pytest.mark.parametrize(
    ("typed", "same"),
    [
        (("help",), ("--help",)),
        (("help", "generate"), ("generate", "--help")),
        (("help", "bench", "run"), ("bench", "run", "--help")),
        (("bench", "help"), ("bench", "--help")),
        (("generate", TINY, "-p", "x", "--help"), ("generate", "-h")),
        (("version",), ("--version",)),
        (("make_tiny", "-h"), ("make-tiny", "-h")),
    ],
)
def test_help_and_version_are_where_people_look(typed, same) -> None:
    first, second = run(*typed), run(*same)
    assert (first.exit_code, first.output) == (0, second.output)


# Examples that need what is not in the repository, or minutes: they are read, not run.
READ_ONLY = {
    "anymla doctor --report report.zip",
    "anymla conformance --against flash_mla",
    "anymla replay attention.safetensors",
    "anymla warm-up examples/tiny/checkpoint --max-requests 2 --max-seq-len 512",
    "anymla warm-up --export kernels.zip",
    "anymla warm-up --import kernels.zip",
}
RUN = {"generate", "chat", "score", "inspect", "make-tiny", "warm-up", "conformance", "doctor"}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_examples_of_the_help_are_read(words, tmp_path, monkeypatch) -> None:
    command = COMMANDS[words]
    assert command.examples
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    shown = run(*words, "--help").output
    for example in command.examples:
        assert f"  {example}\n" in shown
        assert len(example) <= 95
        _, _, line = f"| {example}".rpartition("| ")
        program, *rest = shlex.split(line)
        if program == "torchrun":
            rest = rest[rest.index("anymla") + 1 :]
        found = main
        while isinstance(found, click.Group) and rest[0] != "--help":
            found = found.get_command(click.Context(found), rest.pop(0))
        if words:
            assert found in (command, *getattr(command, "commands", {}).values())
        if rest != ["--help"]:
            found.make_context("anymla", rest)


@pytest.mark.parametrize(
    "example",
    [
        example
        for words, command in COMMANDS.items()
        if words and words[0] in RUN
        for example in command.examples
        if example not in READ_ONLY and "torchrun" not in example and "--cache" not in example
    ],
)
def test_the_examples_of_the_help_run(example, tmp_path, monkeypatch) -> None:
    tiny = tmp_path / "examples" / "tiny"
    tiny.mkdir(parents=True)
    (tiny / "checkpoint").symlink_to(TINY)
    (tiny / "README.md").write_text("A text of that name, but a short one.")
    monkeypatch.chdir(tmp_path)
    before, _, line = f"| {example}".rpartition("| ")
    given = shlex.split(before)[-1] if "echo" in before else None
    result = run(*shlex.split(line)[1:], given=given)
    assert result.exit_code == 0, result.output
    if "passkey" in example:
        assert "482193" in result.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("generate", TINY, "-p", "a"),
        ("chat", TINY),
        ("score", TINY, "-f", "README.md", "--json", "x"),
        ("warm-up", TINY),
        ("doctor",),
        ("conformance",),
        ("replay", "x"),
    ],
    ids=lambda words: words[0],
)
def test_the_accelerator_is_taken_if_there_is_one(words, monkeypatch, tmp_path) -> None:
    """By every command: here one that torch pretends to see, and of which it has no devices."""
    monkeypatch.chdir(tmp_path)
    accelerator = torch.device("xpu")
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: accelerator
    )
    result = run(*words)
    assert result.exit_code == 2
    assert result.stderr == "Error: --device xpu: torch sees no such device on this machine\n"

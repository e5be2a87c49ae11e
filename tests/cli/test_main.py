import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner, Result

import anymla
from anymla.cli import main as main_module
from anymla.cli.main import main
from anymla.ops.registry import BackendUnavailable

COMMANDS = ("generate", "score", "inspect", "make-tiny", "demo", "bench")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_lists_every_command(option: str) -> None:
    result = run(option)
    assert result.exit_code == 0
    for name in COMMANDS:
        assert f"\n  {name} " in result.output


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.output) == (0, f"anymla, version {anymla.__version__}\n")


def test_help_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from anymla.cli.main import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_runs_as_a_module() -> None:
    out = subprocess.run(
        [sys.executable, "-m", "anymla", "--version"], check=True, capture_output=True, text=True
    )
    assert out.stdout.endswith(f"{anymla.__version__}\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"Usage: main {name} ")


@pytest.mark.parametrize("arguments", [("nonsense",), ("--nonsense",), ("make-tiny", "a", "b")])
def test_bad_usage_is_exit_code_two(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Error: " in result.stderr


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], Result]:
    """Runs a subcommand that raises what it is given."""

    def invoke(error: BaseException) -> Result:
        @click.command()
        def command() -> None:
            raise error

        fake: Any = types.ModuleType("anymla.cli.failing")
        fake.command = command
        monkeypatch.setitem(sys.modules, "anymla.cli.failing", fake)
        monkeypatch.setitem(main_module._COMMANDS, "failing", ("failing", ""))
        return run("failing")

    return invoke


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FileNotFoundError(2, "No such file or directory", "/x"), "/x: No such file or directory"),
        (OSError("disk on fire"), "disk on fire"),
        (BackendUnavailable("no triton\nhere"), "no triton here"),
        (click.UsageError("a\x1b[2J"), r"a\x1b[2J"),
    ],
)
def test_what_the_machine_lacks_is_one_line(
    failing: Callable[[BaseException], Result], error: BaseException, message: str
) -> None:
    result = failing(error)
    assert result.exit_code == 2
    assert result.stderr.endswith(f"Error: {message}\n")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "\n"),
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
        (OSError(28, "No space left on device", "/x"), 1, "Error: /x: No space left on device\n"),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"), 2, "not UTF-8: "),
        (RecursionError("maximum recursion depth exceeded"), 2, "is nested too deeply\n"),
        (MemoryError(), 1, "Error: out of memory\n"),
        (torch.OutOfMemoryError("CUDA out of memory.\nMore"), 1, "Error: CUDA out of memory.\n"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: x"), 1, "can't allocate memory"),
        (ModuleNotFoundError("x", name="triton.language"), 2, "has no module triton.language\n"),
    ],
)
def test_what_is_done_to_a_command_has_no_traceback(
    failing: Callable[[BaseException], Result], error: BaseException, code: int, message: str
) -> None:
    result = failing(error)
    assert isinstance(result.exception, SystemExit)
    assert result.exit_code == code
    assert message in result.stderr
    assert result.stderr.count("\n") == (code != 141)
    assert result.stdout == ""


@pytest.mark.parametrize("error", [ValueError("ours"), RuntimeError("ours"), AssertionError()])
def test_our_own_mistakes_keep_their_traceback(
    failing: Callable[[BaseException], Result], error: BaseException
) -> None:
    result = failing(error)
    assert result.exception is error
    assert result.exit_code == 1


def test_a_missing_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(main_module._COMMANDS, "absent", ("absent", ""))
    result = run("absent")
    assert result.exit_code == 2
    assert "'absent' cannot run here: this installation has no module anymla.cli.absent" in (
        result.stderr
    )

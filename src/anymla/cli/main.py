"""The command ``anymla``: finds its subcommands, and imports only the requested one.

Exit codes: 0 ok, 1 a check failed or the machine failed (a full disk), 2 unusable input or a
machine that lacks a requirement, 130 ended by Ctrl-C, 141 the reader of the output has gone.
"""

from __future__ import annotations

import importlib
import os

import click

from anymla import __version__
from anymla.cli.commands import Program

# Name, module below anymla.cli (with the command named ``command``), and the line in the help,
# which is repeated here so that a listing imports no command.
_COMMANDS = {
    "generate": ("generate", "Continue prompts with a checkpoint."),
    "chat": ("chat", "Talk with a checkpoint."),
    "score": ("score", "Log-probability of every token of a text."),
    "warm-up": ("warm_up", "Compile ahead what serving a checkpoint will use."),
    "inspect": ("inspect", "What is in a checkpoint, or in a dumped cache page."),
    "make-tiny": ("make_tiny", "Write a small random checkpoint."),
    "demo": ("demo", "Run a tiny checkpoint and check it against float64."),
    "doctor": ("doctor", "Which backends run on this machine, and whether they are right."),
    "conformance": ("conformance", "Judge a backend, or another library, by every known bug."),
    "replay": ("replay", "Judge again what an audit of a live engine dumped."),
    "bench": ("bench", "Time operations, layers and steps on this machine."),
}
# Names of these commands in other programs: ollama's, vLLM's, llama.cpp's.
_OTHER_NAMES = {"run": "chat", "complete": "generate", "perplexity": "score"}
_NOT_HERE = {
    "serve": "a server is vLLM's work, with anymla inside: pip install '.[vllm]', docs/serve.md",
    "convert": "checkpoints are read as they are published, and need no conversion",
    "quantize": "checkpoints are read as they are published, quantised or not",
}
_COMMAND_FIRST = "a command comes first, as in anymla"
_EXAMPLES = (
    "anymla doctor",
    "anymla chat examples/tiny/checkpoint",
    "anymla generate --help",
)


class LazyGroup(Program):
    """A group whose subcommands are modules, imported when they run."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words; ``version`` means ``--version``.

        Raises:
            UsageError: there are options before the command.
        """
        try:
            return super().parse_args(ctx, ["--version"] if args == ["version"] else args)
        except click.NoSuchOption as error:
            said = f"{error.option_name}: {_COMMAND_FIRST} generate DIR {error.option_name} ..."
            raise click.UsageError(said, ctx) from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a subcommand by our name or another program's.

        Raises:
            UsageError: there is no such command; the message suggests one, if possible.
        """
        if args[0] in _NOT_HERE:
            raise click.UsageError(f"No command {args[0]!r}: {_NOT_HERE[args[0]]}", ctx)
        if args[0] not in _COMMANDS and os.path.isdir(args[0]):
            raise click.UsageError(f"{args[0]}: {_COMMAND_FIRST} chat {args[0]}", ctx)
        return super().resolve_command(ctx, [_OTHER_NAMES.get(args[0], args[0]), *args[1:]])

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the names, in the order of the table above."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a subcommand; None for a name that is not in the table."""
        if cmd_name not in _COMMANDS:
            return None
        name = f"anymla.cli.{_COMMANDS[cmd_name][0]}"
        try:
            command: click.Command = importlib.import_module(name).command
        except ModuleNotFoundError as error:
            if error.name is None:
                raise
            raise click.UsageError(
                f"'{cmd_name}' cannot run here: this installation has no module {error.name}"
            ) from error
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the subcommands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(
    cls=LazyGroup, examples=_EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="anymla")
def main() -> None:
    """Run DeepSeek-V4's hybrid sparse attention on any accelerator, or on a plain CPU."""

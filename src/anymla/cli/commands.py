"""The kinds of command that ``anymla`` consists of: their parsing, and their help."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from anymla.cli.manners import manners, never_fail_to_print
from anymla.runtime.spelling import SYNONYMS, right_name


class _Explained(click.Command):
    """A command whose help ends with examples.

    Attributes:
        examples: command lines that run in a clone of the repository.
    """

    def __init__(self, *args: Any, examples: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.examples = tuple(examples)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, one a line and unwrapped."""
        super().format_epilog(ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"{' ' * formatter.current_indent}{example}\n")


class Command(_Explained):
    """A command that shows its help if required arguments are missing, and knows synonyms.

    Underscores and hyphens are equivalent in option names. Names of llama.cpp, vLLM or transformers
    are accepted if an option means the same (``SYNONYMS``); for others the error says what to do
    instead.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.no_args_is_help |= any(each.required for each in self.params)
        self._names = {name for each in self.params for name in (*each.opts, *each.secondary_opts)}
        self.context_settings = {"token_normalize_func": self._ours, **self.context_settings}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words; for an unknown option, suggest the right one if it is known."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = [name.lstrip("-").replace("-", "_") for name in self._names]
            said = right_name(error.option_name.lstrip("-").replace("-", "_"), known)
            if not said or said.startswith("did you mean"):  # click gives this hint itself
                raise
            raise click.UsageError(f"No such option {error.option_name}: {said}.", ctx) from error

    def _ours(self, word: str) -> str:
        """Return an option's name without its hyphens, in this command's spelling."""
        if f"--{word}" in self._names:
            return word
        ours = SYNONYMS.get(word.replace("-", "_"), word).replace("_", "-")
        return ours if f"--{ours}" in self._names else word


class Group(_Explained, click.Group):
    """A group of such commands, which accepts ``help`` and suggests near misses."""

    command_class = Command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words; ``help X`` means ``X --help``."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a subcommand.

        Raises:
            UsageError: there is no such subcommand; the message names the nearest, if one is near.
        """
        name = args[0].replace("_", "-")
        names = self.list_commands(ctx)
        if name in names or name.startswith("-"):
            return super().resolve_command(ctx, [name, *args[1:]])
        said = right_name(name, names) or f"there are {', '.join(names)}"
        raise click.UsageError(f"No such command {args[0]!r}: {said}", ctx)


class Program(Group):
    """The group of all commands; errors of the system or the user are one line, or none."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Parse this group's own words; --help prints from here."""
        never_fail_to_print()
        with manners():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command, which ends in the manner that ``manners`` describes."""
        with manners():
            return super().invoke(ctx)


def command(
    name: str | None = None, *, examples: Sequence[str], **settings: Any
) -> Callable[[Callable[..., Any]], Command]:
    """Make a function a ``Command``, in the manner of ``click.command``.

    Args:
        name: name of the command; None for the function's.
        examples: command lines for its help, which run in a clone of the repository.
        **settings: further arguments of ``click.Command``.
    """
    return click.command(name, cls=Command, examples=examples, **settings)


def group(
    name: str | None = None, *, examples: Sequence[str]
) -> Callable[[Callable[..., Any]], Group]:
    """Make a function a ``Group``; arguments as for ``command``."""
    return click.group(name, cls=Group, examples=examples)

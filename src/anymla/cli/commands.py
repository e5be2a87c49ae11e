"""The kinds of command that all of ``anymla`` is made of: how they are called, and their help."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from anymla.runtime.spelling import SYNONYMS, right_name


class _Explained(click.Command):
    """A command whose help ends with examples.

    Attributes:
        examples: command lines that run where the repository was cloned.
    """

    def __init__(self, *args: Any, examples: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.examples = tuple(examples)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, a line each and none of them wrapped."""
        super().format_epilog(ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"{' ' * formatter.current_indent}{example}\n")


class Command(_Explained):
    """A command that shows its help if called bare in vain, and knows other programs' options.

    Underscores are hyphens in names of options, and what llama.cpp, vLLM or transformers call an
    option is taken for ours if it is the same thing (``SYNONYMS``); of others the error says what
    to do instead.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.no_args_is_help |= any(each.required for each in self.params)
        self._names = {name for each in self.params for name in (*each.opts, *each.secondary_opts)}
        self.context_settings = {"token_normalize_func": self._ours, **self.context_settings}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words; of an option that is not there, say what is meant if that is known."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = [name.lstrip("-").replace("-", "_") for name in self._names]
            said = right_name(error.option_name.lstrip("-").replace("-", "_"), known)
            if not said or said.startswith("did you mean"):  # which click says itself
                raise
            raise click.UsageError(f"No such option {error.option_name}: {said}.", ctx) from error

    def _ours(self, word: str) -> str:
        """An option's name without its hyphens, as this command spells it."""
        if f"--{word}" in self._names:
            return word
        ours = SYNONYMS.get(word.replace("-", "_"), word).replace("_", "-")
        return ours if f"--{ours}" in self._names else word


class Group(_Explained, click.Group):
    """A group of such commands, which takes ``help`` and names near misses."""

    command_class = Command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words; ``help X`` is ``X --help``."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a subcommand.

        Raises:
            UsageError: there is none of that name; with the nearest, if one is near.
        """
        name = args[0].replace("_", "-")
        names = self.list_commands(ctx)
        if name in names or name.startswith("-"):
            return super().resolve_command(ctx, [name, *args[1:]])
        said = right_name(name, names) or f"there are {', '.join(names)}"
        raise click.UsageError(f"No such command {args[0]!r}: {said}", ctx)


def command(
    name: str | None = None, *, examples: Sequence[str], **settings: Any
) -> Callable[[Callable[..., Any]], Command]:
    """Make a ``Command`` of a function, as ``click.command`` does.

    Args:
        name: the command's name; None for the function's.
        examples: command lines for its help, which run where the repository was cloned.
        **settings: further arguments of ``click.Command``.
    """
    return click.command(name, cls=Command, examples=examples, **settings)


def group(
    name: str | None = None, *, examples: Sequence[str]
) -> Callable[[Callable[..., Any]], Group]:
    """Make a ``Group`` of a function; arguments as of ``command``."""
    return click.group(name, cls=Group, examples=examples)

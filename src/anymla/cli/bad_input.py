"""What the user gave cannot be used: one line on stderr and exit code 2."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click

from anymla.cli.terminal import one_line
from anymla.ops.registry import BackendUnavailable


class BadInput(click.ClickException):
    """Shown as ``Error: <one line>``."""

    exit_code = 2

    def __init__(self, message: object) -> None:
        super().__init__(one_line(message))


_ABOUT_INPUT = (ValueError, OSError, BackendUnavailable)


@contextlib.contextmanager
def bad_input(kinds: tuple[type[Exception], ...] = _ABOUT_INPUT) -> Iterator[None]:
    """Turn what the package says of unusable input, files or machines into ``BadInput``.

    Args:
        kinds: exceptions that are about input. The default suits code that reads what the user
            gave; while a model runs, a ValueError would be our own mistake.
    """
    try:
        yield
    except kinds as error:
        if isinstance(error, OSError) and error.filename:
            raise BadInput(f"{error.filename}: {error.strerror}") from error
        raise BadInput(error) from error

"""Output of untrusted text to a terminal: it must not move the cursor, nor fill the screen."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

import click

# C0 without tab and newline, DEL, C1, line separators, overrides of direction, surrogates.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_MOST, _END = 400, 120


def escaped(text: str) -> str:
    """Escape the text's control characters as Python does."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def one_line(message: object, most: int = _MOST) -> str:
    """Shorten a message to one line of at most ``most`` characters, keeping both ends."""
    text = " ".join(escaped(str(message)).split())
    if len(text) <= most:
        return text
    return f"{text[: most - _END - 5]} ... {text[-_END:]}"


def say(text: str, *, nl: bool = True) -> None:
    """Print to stdout: escaped on a terminal, unchanged into a file or a pipe."""
    shown = escaped(text) if sys.stdout.isatty() else text
    # click would remove colours from output into a pipe.
    click.echo(shown, nl=nl, color=True)


@contextlib.contextmanager
def held_stderr() -> Iterator[None]:
    """Hold back output to file descriptor 2, and drop it if an exception is raised.

    Rust prints a panic before Python learns of it; the command reports the exception instead.
    """
    try:
        before = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
        held.seek(0)
        os.write(2, held.read())

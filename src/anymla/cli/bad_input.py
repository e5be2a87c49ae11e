"""What goes wrong for a reason outside this package: one line on stderr and an exit code."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

import click

from anymla.cli.terminal import one_line

# Errors of the machine while it does what it was rightly asked for.
_MACHINE = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
)


class BadInput(click.ClickException):
    """What the user gave cannot be used; shown as ``Error: <one line>``."""

    exit_code = 2

    def __init__(self, message: object) -> None:
        super().__init__(one_line(message))


class MachineFailed(BadInput):
    """The machine gave up (a full disk, no memory) on input that is in order."""

    exit_code = 1


def of_file(error: OSError) -> BadInput:
    """What the system says of a file, with its name."""
    where = f"{error.filename}: " if error.filename else ""
    kind = MachineFailed if error.errno in _MACHINE else BadInput
    return kind(f"{where}{error.strerror or error}")


@contextlib.contextmanager
def bad_input(kinds: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn what the package says of unusable input, files or machines into ``BadInput``.

    Args:
        kinds: exceptions that are about input, if not ValueError, OSError and BackendUnavailable.
            These suit code that reads what the user gave; while a model runs, a ValueError would
            be our own mistake.
    """
    from anymla.ops.registry import BackendUnavailable  # imports torch

    about_input = kinds or (ValueError, OSError, BackendUnavailable)
    try:
        yield
    except BrokenPipeError:
        raise  # nobody reads any more, which is no error
    except about_input as error:
        raise (of_file(error) if isinstance(error, OSError) else BadInput(error)) from error

"""Errors whose cause is outside this package: one line on stderr and an exit code."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

import click

from anymla.cli.terminal import one_line

# Errors of the machine during a valid task.
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
    """Unusable input of the user; shown as ``Error: <one line>``."""

    exit_code = 2

    def __init__(self, message: object) -> None:
        super().__init__(one_line(message))


class MachineFailed(BadInput):
    """Failure of the machine (a full disk, no memory) with valid input."""

    exit_code = 1


def of_file(error: OSError) -> BadInput:
    """Convert the system's error about a file, with the file's name."""
    where = f"{error.filename}: " if error.filename else ""
    kind = MachineFailed if error.errno in _MACHINE else BadInput
    return kind(f"{where}{error.strerror or error}")


@contextlib.contextmanager
def bad_input(kinds: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Convert the package's errors about input, files or machines to ``BadInput``.

    Args:
        kinds: exception types that concern input; ValueError, OSError and BackendUnavailable by
            default. The default suits code that reads a user's input; while a model runs, a
            ValueError would be a fault of this package.
    """
    from anymla.ops.registry import BackendUnavailable  # imports torch

    about_input = kinds or (ValueError, OSError, BackendUnavailable)
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of the output has gone, which is no error
    except about_input as error:
        raise (of_file(error) if isinstance(error, OSError) else BadInput(error)) from error

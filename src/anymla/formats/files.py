"""Errors of writing that name the file, which those of a full disk do not."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from safetensors import SafetensorError

_SYSTEM = re.compile(r"\(os error (\d+)\)")


def open_to_write(path: str | Path, *, append: bool = False) -> IO[str]:
    """Open a text file to be written, in UTF-8; never waits, as for a pipe's reader.

    Raises:
        OSError: it cannot be opened, or is a pipe that nobody reads.
    """
    path, mode = Path(path), "a" if append else "w"
    if not path.is_fifo():
        return path.open(mode, encoding="utf-8")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        raise OSError(error.errno, "a pipe that nobody reads", str(path)) from None
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, mode, encoding="utf-8")


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Raise what the system says while a file is written as an OSError with ``filename``.

    ``open`` names the file by itself, ``write`` and ``close`` do not, and safetensors reports the
    system's errors as text of its own.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except SafetensorError as error:
        system = _SYSTEM.search(str(error))
        if system is None:
            raise
        number = int(system[1])
        raise OSError(number, os.strerror(number), str(path)) from error

"""Files that commands read and write; "-" is stdin or stdout."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import click

from anymla.cli.bad_input import BadInput, bad_input
from anymla.formats.files import naming, open_to_write
from anymla.formats.untrusted import special_kind

STANDARD = Path("-")
# A limit far above a prompt of the longest context, as ids or as escaped JSON.
MAX_TEXT_BYTES = 1 << 25
# Seconds that a pipe waits for its writer; the pipe of a shell's <(..) already has one.
_WRITER_S = 2.0


class OutputFile(click.Path):
    """Path of a file to write: its directory must exist before anything runs.

    Attributes:
        whole: True if the file is replaced by one written beside it, so it may be no device or
            pipe.
    """

    def __init__(self, *, allow_dash: bool = False, whole: bool = False) -> None:
        super().__init__(dir_okay=False, writable=True, allow_dash=allow_dash, path_type=Path)
        self.whole = whole

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check and return the path.

        Raises:
            BadInput: the path is "-" and may not be, has no directory, or is no file.
        """
        option = f"{param.opts[0]} " if param is not None else ""
        path = Path(value)
        if path == STANDARD and not self.allow_dash:
            raise BadInput(f"{option}-: must be a file, not standard output (./- is a file)")
        if path != STANDARD and not path.parent.is_dir():
            raise BadInput(f"{option}{value}: there is no directory {path.parent}")
        if self.whole and path.exists() and not path.is_file():
            raise BadInput(f"{option}{value}: exists and is no file")
        return super().convert(value, param, ctx)


def refuse_overwriting(option: str, output: Path | None, *inputs: Path | None) -> None:
    """Raise BadInput if an output file is also an input."""
    for path in inputs:
        if output is None or path is None or STANDARD in (output, path):
            continue
        if output.exists() and path.exists() and output.samefile(path):
            raise BadInput(f"{option} {output}: would overwrite the input {path}")


def read_text(path: Path) -> str:
    """Read a file's text, or stdin's for "-".

    Raises:
        BadInput: the file cannot be read, is larger than ``MAX_TEXT_BYTES``, or is not UTF-8.
    """
    with bad_input(), _open(path) as file:
        data = bytearray()
        while part := file.read(1 << 20):
            data += part
            if len(data) > MAX_TEXT_BYTES:
                raise BadInput(f"{path}: larger than {MAX_TEXT_BYTES} bytes")
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadInput(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from error


def read_text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file (or of stdin for "-") that are not blank, numbered from 1.

    No more than one line is in memory.

    Raises:
        BadInput: see ``read_text``; the message names the line's number.
    """
    with bad_input(), _open(path) as file:
        number = 0
        while line := file.readline(MAX_TEXT_BYTES + 1):
            number += 1
            if len(line) > MAX_TEXT_BYTES:
                raise BadInput(f"{path} line {number}: longer than {MAX_TEXT_BYTES} bytes")
            try:
                text = line.decode("utf-8").rstrip("\n")
            except UnicodeDecodeError as error:
                why = f"{error.reason} at byte {error.start}"
                raise BadInput(f"{path} line {number}: not UTF-8: {why}") from error
            if text.strip():
                yield number, text


@contextlib.contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """Open a file or a pipe; or, for "-", stdin without the locale's decoding."""
    if path == STANDARD:
        if sys.stdin is None:
            raise BadInput("-: standard input is closed")
        yield sys.stdin.buffer
        return
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode) or stat.S_ISSOCK(mode):
        raise BadInput(f"{path}: not a file, but {special_kind(mode)}")
    with _open_pipe(path) if stat.S_ISFIFO(mode) else path.open("rb") as file:
        yield file


def _open_pipe(path: Path) -> BinaryIO:
    """Open a pipe, waiting for its writer for a moment at most."""
    opened: list[BinaryIO] = []
    thread = threading.Thread(target=lambda: opened.append(path.open("rb")), daemon=True)
    thread.start()
    thread.join(_WRITER_S)
    if not opened:
        # A writer of our own ends the wait.
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        thread.join()
        opened.pop().close()
        raise BadInput(f"{path}: a pipe that nobody writes to")
    return opened[0]


def write_text(path: Path, text: str) -> None:
    """Write a file, or print for "-"; a partly written file is removed.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    if path == STANDARD:
        click.echo(text, nl=False)
        return
    with naming(path):
        file = open_to_write(path)
        try:
            with file:
                file.write(text)
        except OSError:
            if path.is_file():
                path.unlink()
            raise

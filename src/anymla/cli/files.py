"""Files that commands read and write; "-" is stdin or stdout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, BinaryIO

import click

from anymla.cli.bad_input import BadInput, bad_input
from anymla.formats.files import naming

STANDARD = Path("-")
# Far more than a prompt of the longest context, or a batch of them; what is larger is no text.
MAX_TEXT_BYTES = 1 << 30


class OutputFile(click.Path):
    """A file to be written: its directory must exist before anything runs.

    Attributes:
        whole: it is replaced by a file that was written beside it, so it may be no device or pipe.
    """

    def __init__(self, *, allow_dash: bool = False, whole: bool = False) -> None:
        super().__init__(dir_okay=False, writable=True, allow_dash=allow_dash, path_type=Path)
        self.whole = whole

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path.

        Raises:
            BadInput: it is "-" and may not be, has no directory, or is no file.
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
    """Raise BadInput if a file to be written is one that is read."""
    for path in inputs:
        if output is None or path is None or STANDARD in (output, path):
            continue
        if output.exists() and path.exists() and output.samefile(path):
            raise BadInput(f"{option} {output}: would overwrite the input {path}")


def read_text(path: Path) -> str:
    """A file's text, or stdin's for "-".

    Raises:
        BadInput: it cannot be read, is larger than ``MAX_TEXT_BYTES``, or is not UTF-8.
    """
    with bad_input():
        try:
            if path != STANDARD:
                if path.stat().st_size > MAX_TEXT_BYTES:
                    raise BadInput(f"{path}: larger than {MAX_TEXT_BYTES} bytes")
                with path.open("rb") as file:
                    return _bounded(path, file).decode("utf-8")
            if sys.stdin is None:
                raise BadInput("-: standard input is closed")
            # Not sys.stdin's own decoding, which the locale decides.
            return _bounded(path, sys.stdin.buffer).decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadInput(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from error


def _bounded(path: Path, file: BinaryIO) -> bytes:
    """A file's bytes; a pipe and a device may have no end."""
    data = bytearray()
    while part := file.read(1 << 20):
        data += part
        if len(data) > MAX_TEXT_BYTES:
            raise BadInput(f"{path}: larger than {MAX_TEXT_BYTES} bytes")
    return bytes(data)


def write_text(path: Path, text: str) -> None:
    """Write a file, or print for "-"; what could not be written whole is removed.

    Raises:
        OSError: it cannot be written; the error names the file.
    """
    if path == STANDARD:
        click.echo(text, nl=False)
        return
    with naming(path):
        file = path.open("w", encoding="utf-8")
        try:
            with file:
                file.write(text)
        except OSError:
            if path.is_file():
                path.unlink()
            raise

"""Readers of untrusted files and JSON, with bounds on size, depth and numbers."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO

from anymla.formats.foreign_files import kind_of

# safetensors' own limit for a header, the largest JSON in a checkpoint.
MOST_BYTES = 100_000_000
# Limit of nesting; configurations nest four deep.
MOST_DEPTH = 64
# Limit of lists and objects; a tokenizer with merges as pairs has half a million, of 64 bytes or
# more.
MOST_CONTAINERS = 1 << 22
_MOST_INTEGER = 2**64
_MOST_DIGITS = 20
_MOST_WIDE_DIGITS = 100

_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


class Refused(ValueError):
    """Input that is refused; the message is one line that does not name the file."""


def parse_json(text: str | bytes, *, wide: bool = False) -> Any:
    """Parse a JSON text within limits.

    Args:
        text: JSON as text, or as its bytes in UTF-8.
        wide: True to allow integers of up to 100 digits instead of up to 64 bits.

    Raises:
        Refused: the text is no JSON, nests more than ``MOST_DEPTH`` deep, has more than
            ``MOST_CONTAINERS`` lists and objects, a number that is not finite, an integer beyond 64
            bits, or half of a surrogate pair.
    """
    try:
        text = text.decode() if isinstance(text, bytes) else text
        # Brackets within strings count as well; no sound file has so many.
        if text.count("[") + text.count("{") > MOST_CONTAINERS:
            raise Refused(f"more than {MOST_CONTAINERS} lists and objects")
        value = json.loads(
            text,
            parse_constant=_refused,
            parse_float=_finite,
            parse_int=_wide_integer if wide else _integer_of_64_bits,
        )
    except UnicodeDecodeError as error:
        raise Refused(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise Refused(f"not JSON: {error}") from None
    except RecursionError:
        raise _too_deep() from None
    _check_depth(value)
    if _HALF_CHARACTER.search(text):
        _check_characters(value)
    return value


def parse_object(text: str | bytes, *, wide: bool = False) -> dict[str, Any]:
    """Parse a JSON text that must be an object.

    Raises:
        Refused: see ``parse_json``; or the value is no object.
    """
    value = parse_json(text, wide=wide)
    if not isinstance(value, dict):
        raise Refused(f"not a JSON object, but {_KINDS.get(type(value), 'null')}")
    return value


def read_object(path: Path, most: int = MOST_BYTES, *, wide: bool = False) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Args:
        path: path of the file.
        most: largest size of the file in bytes.
        wide: limit of integers, as for ``parse_json``.

    Raises:
        Refused: see ``parse_object``; or the file is longer.
        OSError: the file cannot be read.
    """
    held = read_bytes(path, most)
    try:
        return parse_object(held, wide=wide)
    except Refused:
        if (kind := kind_of(held)) is not None:
            raise Refused(kind) from None
        raise


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Read a file's bytes; never more than ``most`` of them reach memory.

    Raises:
        Refused: the file is longer, or is a pipe, a socket, a device or a directory.
        OSError: the file cannot be read.
    """
    with open_file(path) as file:
        held = file.read(most + 1)
    if len(held) > most:
        raise Refused(f"longer than {most} bytes")
    return held


def open_file(path: str | Path) -> BinaryIO:
    """Open a file to read its bytes, without ever waiting for a pipe's writer.

    Raises:
        Refused: the path is a pipe, a socket, a device or a directory.
        OSError: the file cannot be opened.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise Refused(f"not a file, but {special_kind(mode)}")
    # The file may have been replaced by a pipe since the check.
    descriptor = os.open(
        path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    )
    return os.fdopen(descriptor, "rb")


def special_kind(mode: int) -> str:
    """Name the kind of a directory entry that is no file, with its article.

    Args:
        mode: ``st_mode`` of the entry.
    """
    return next((kind for test, kind in _SPECIAL if test(mode)), "something else")


_SPECIAL = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_KINDS = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "a flag"}


def _refused(word: str) -> float:
    raise Refused(f"{word} is not JSON, and no number to compute with")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise Refused(f"the number {digits[:20]} is too large")
    return number


def _integer_of_64_bits(digits: str) -> int:
    # Python refuses to parse thousands of digits; more than these are out of range in any case.
    if len(digits.lstrip("-")) <= _MOST_DIGITS and abs(number := int(digits)) < _MOST_INTEGER:
        return number
    shown = digits if len(digits) <= _MOST_DIGITS else f"{digits[:_MOST_DIGITS]}..."
    raise Refused(f"the integer {shown} does not fit in 64 bits")


def _wide_integer(digits: str) -> int:
    return int(digits) if len(digits) <= _MOST_WIDE_DIGITS else _integer_of_64_bits(digits)


def _check_depth(value: Any) -> None:
    """Raise unless containers nest at most ``MOST_DEPTH`` deep; one level after the other."""
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        level = _containers(level)
        if not level:
            return
        level = [child for each in level for child in _children(each)]
    raise _too_deep()


def _check_characters(value: Any) -> None:
    level = [value]
    while level:
        for text in level:
            if isinstance(text, str) and not text.isascii():
                try:
                    text.encode()
                except UnicodeEncodeError:
                    raise Refused("a string holds half of a surrogate pair") from None
        level = [
            child
            for each in _containers(level)
            for child in (*each, *(each.values() if isinstance(each, dict) else ()))
        ]


def _containers(values: list[Any]) -> list[Any]:
    return [each for each in values if isinstance(each, (dict, list))]


def _children(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container


def _too_deep() -> Refused:
    return Refused(f"nested more than {MOST_DEPTH} deep")

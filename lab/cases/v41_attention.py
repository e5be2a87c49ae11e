"""Decode attention over V4.1's rows, beside V4's rows and portable Triton.

All subjects run in one process by graph replay over rotating lists (so that rows are cold); times
are medians. Lists are full, and all rows have the same shapes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

from anymla.bench.runner import Case, Clock, Subject, beside
from anymla.formats.page_layout import V41_COMPRESSED_NVFP4, V41_MAIN_FP8
from lab.cases.sparse_attention import Decode, DecodeInputs

PART = "decode attention over V4.1's rows beside V4's"
# Fields that the label already shows.
IN_LABEL = ("batch", "rows", "heads", "extra")
# Layouts of the window's rows and of the entries, by the name of the time's field.
FORMATS = {
    "fp8_us": (V41_MAIN_FP8, V41_MAIN_FP8),
    "nvfp4_us": (V41_MAIN_FP8, V41_COMPRESSED_NVFP4),
}
_V4, _PORTABLE = "v4_us", "portable_us"


@dataclasses.dataclass(frozen=True)
class V41Decode(Decode):
    """Shape of one measured call over V4.1's rows.

    Attributes:
        formats: layouts of the window's rows and of the entries.
    """

    formats: tuple[str, str] = FORMATS["nvfp4_us"]

    @property
    def layouts(self) -> tuple[str, str]:
        """Names of the page layouts of both lists' rows."""
        return self.formats


def shapes() -> Iterator[Decode]:
    """Yield shapes with one query a request: V4.1's models, shards, long lists, windows alone."""
    for heads, extra in ((64, 512), (128, 1024)):
        for batch in (1, 8, 32, 128):
            yield Decode(batch, 1, heads, extra)
    for batch in (32, 128):
        yield Decode(batch, 1, 64, 1024)
    for batch in (1, 32, 128):
        yield Decode(batch, 1, 16, 512)
    for heads, extra in ((32, 512), (64, 4608), (64, 0)):
        yield Decode(128, 1, heads, extra)


def v41_cases(chosen: Iterable[Decode], backend: str) -> Iterator[Case]:
    """Yield cases of every shape over V4's rows, and over V4.1's by ``backend`` and by Triton.

    Args:
        chosen: shapes to measure, whose own rows are ignored.
        backend: backend of ``sparse_attention``.
    """
    for shape in chosen:
        fields = {name: getattr(shape, name) for name in IN_LABEL} | {"backend": backend}
        yield Case(
            PART,
            shape.label,
            functools.partial(_rows, shape, backend),
            fields,
            beside("nvfp4_us", _V4, 1.0, "entries of 288 bytes no slower than V4's of 584"),
        )


def _rows(shape: Decode, backend: str, clock: Clock) -> Iterator[Subject]:
    given: dict[str, Any] = {name: getattr(shape, name) for name in IN_LABEL}
    yield _subject(shape, _V4, backend, clock)
    for field, formats in FORMATS.items():
        yield _subject(V41Decode(**given, formats=formats), field, backend, clock)
    yield _subject(V41Decode(**given), _PORTABLE, "triton", clock)


def _subject(shape: Decode, field: str, backend: str, clock: Clock) -> Subject:
    inputs = DecodeInputs.draw(shape, clock.device)
    error = field.removesuffix("us") + "error"
    return inputs.checked(inputs.attention(backend), field, error)

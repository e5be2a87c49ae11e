"""A process that renders chat templates within limits of time and memory.

Run as ``python -m anymla.model.template_process``, with the seconds of CPU time, mebibytes and
characters that a template may use; ``chat_template`` starts it, and talks to it over its standard
streams. A template is an untrusted program. jinja's sandbox keeps it from Python's internals, but
not from ``'x' * 10**9`` or nested loops. Such attacks have too many forms to detect, so the
system's own limits apply to all of them.

Templates see transformers' names: jinja's own, and those of ``_environment``.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

RENDERED, REFUSED = range(2)
_MOST_SAID = 300

try:
    import resource
except ModuleNotFoundError:  # Windows has no such limits; the caller's timeout remains
    resource = None  # type: ignore[assignment]


class _Refusal(Exception):
    """A template's attempt to exceed its bounds."""


class _Dict:
    """``dict`` in templates: makes dicts, and is no class whose attributes lead elsewhere."""

    def __call__(self, *args: Any, **fields: Any) -> dict[Any, Any]:
        """Return a new dict."""
        return dict(*args, **fields)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Return a new dict of keys with one value."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """``namespace`` in templates, which sets no name that begins with an underscore."""

    def __init__(*args: Any, **fields: Any) -> None:
        # A field may be named "self".
        self, *given = args
        held = dict(*given, **fields)
        for name in held:
            _check_name(name)
        Namespace.__init__(self, held)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace takes no name like {name!r}")


class _Generation(Extension):
    """``{% generation %}``, which marks an assistant's text for a training run."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser: Parser) -> Node:
        """Return a block that renders its contents, with a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_held"), [], [], body).set_lineno(line)

    def _held(self, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(written: str) -> str:
    return datetime.datetime.now().strftime(written)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": _now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


class Renderer:
    """Renders templates; the last one stays compiled."""

    def __init__(self, most: int) -> None:
        """Compile nothing yet.

        Args:
            most: largest number of characters of a text.
        """
        self._most = most
        self._environment = _environment()
        self._source: str | None = None
        self._template: jinja2.Template | None = None

    def __call__(self, source: str, variables: dict[str, Any]) -> tuple[int, str]:
        """Return ``RENDERED`` and a template's text, or ``REFUSED`` and the reason in one line."""
        try:
            if self._template is None or source != self._source:
                self._template = None
                self._template = self._environment.from_string(source)
                self._source = source
        except Exception as error:
            return REFUSED, f"cannot be read: {_said(error)}"
        try:
            parts, count = [], 0
            for part in self._template.generate(**variables):
                count += len(part)
                if count > self._most:
                    raise _Refusal(f"it writes more than {self._most} characters")
                parts.append(part)
            return RENDERED, "".join(parts)
        except Exception as error:
            return REFUSED, f"refuses the messages: {_said(error)}"


def _said(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "it needs more memory than it may have"
    if isinstance(error, RecursionError):
        return "it nests too deeply"
    text = " ".join(str(error).split())[:_MOST_SAID]
    if not isinstance(error, (jinja2.TemplateError, _Refusal)):
        text = f"{type(error).__name__}: {text}"
    line = getattr(error, "lineno", None) or _line_of(error)
    return text if line is None else f"{text} (line {line})"


def _line_of(error: Exception) -> int | None:
    """Return the line of the template in which an error was raised."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _limit_memory(mebibytes: int) -> None:
    if resource is not None:
        size = mebibytes << 20
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (size, size))


@contextlib.contextmanager
def _limited_time(seconds: float) -> Iterator[None]:
    """Let the system end the process once the block has used this CPU time."""
    if not hasattr(signal, "setitimer"):
        yield
        return
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _serve(source: BinaryIO, sink: BinaryIO, seconds: float, characters: int) -> None:
    renderer = Renderer(characters)
    while size := source.read(8):
        # The words come from the process that started this one.
        template, variables = pickle.loads(source.read(int.from_bytes(size, "little")))
        try:
            with _limited_time(seconds):
                status, text = renderer(template, variables)
                written = text.encode("utf-8", "surrogatepass")
        except MemoryError as error:
            status, written = REFUSED, f"refuses the messages: {_said(error)}".encode()
        sink.write(bytes((status,)) + len(written).to_bytes(8, "little") + written)
        sink.flush()


if __name__ == "__main__":
    seconds, mebibytes, characters = sys.argv[1:]
    _limit_memory(int(mebibytes))
    _serve(sys.stdin.buffer, sys.stdout.buffer, float(seconds), int(characters))

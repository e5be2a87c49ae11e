"""Chat templates of checkpoints, which write a dialogue as the text of the training format."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import pickle
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anymla.child_process import python_command, same_modules
from anymla.formats.untrusted import Refused, read_bytes
from anymla.model.config_fields import ConfigError
from anymla.model.tokenizer_config import TokenizerError, named_tokens, read_tokenizer_config

_FILE, _FOLDER, _ENDING = "chat_template.jinja", "additional_chat_templates", ".jinja"
_LARGEST = 1 << 20
_MOST_NAMED = 100
# Limits of a template's run; a dialogue of a million tokens takes a small part of them.
_CPU_SECONDS, _MEBIBYTES, _CHARACTERS = 1.0, 512, 1 << 24
_SECONDS = 60.0  # wall-clock limit, for a busy machine
# Names of an answer's thinking; templates read one or the other.
_THOUGHT = ("reasoning_content", "thinking", "reasoning")
# Text after a message that is to be continued. The blank shows if a template trims messages.
_HERE, _BLANK = "\ue000HERE THE ANSWER GOES ON\ue000", " "


class ChatTemplate:
    """A checkpoint's chat template, or its templates by name.

    Templates are untrusted programs. They run in jinja's sandbox, in a process that is limited to a
    second and half a gibibyte, and see only the dialogue, the names of special tokens and the names
    that transformers provides.
    """

    def __init__(self, source: str | Mapping[str, str], tokens: Mapping[str, str]) -> None:
        """Compile nothing yet.

        Args:
            source: text of the template, or texts of templates by name: "tool_use" is used if tools
                are given and it exists, else "default".
            tokens: texts of special tokens by name ("bos_token", ...).
        """
        self._sources = {"default": source} if isinstance(source, str) else dict(source)
        self._tokens = dict(tokens)

    @classmethod
    def from_dir(cls, directory: str | Path) -> ChatTemplate:
        """Read the template files, or ``chat_template`` of ``tokenizer_config.json``.

        Files are ``chat_template.jinja`` and, by name, ``additional_chat_templates/*.jinja``.

        Raises:
            ConfigError: there is no template, or it cannot be read.
        """
        found = cls.find(directory)
        if found is None:
            raise ConfigError(f"{directory}: has no chat template")
        return found

    @classmethod
    def find(cls, directory: str | Path) -> ChatTemplate | None:
        """Read a template as ``from_dir`` does; None for a checkpoint without one.

        Raises:
            ConfigError: the template cannot be read.
        """
        directory = Path(directory)
        try:
            config = read_tokenizer_config(directory)
        except TokenizerError as error:
            raise ConfigError(str(error)) from None
        sources = _of_files(directory) or _of_config(config.get("chat_template"))
        if not sources:
            return None
        if max(map(len, sources.values())) > _LARGEST:
            raise ConfigError(f"{directory}: its chat template has more than {_LARGEST} characters")
        return cls(sources, named_tokens(config))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Write a dialogue as text, up to where the next answer begins.

        Args:
            messages: mappings with "role" and "content" or "tool_calls"; fields that are None are
                ignored.
            tools: JSON schemas of functions that the model may call.
            documents: texts that the answer may use.
            add_generation_prompt: True to end with the beginning of an answer.
            continue_final_message: True to end inside the last message instead, for the model to
                continue.
            **variables: further variables of the template, such as ``enable_thinking``.

        Raises:
            ValueError: messages, tools or documents have another form.
            ConfigError: the template cannot be read, refuses the messages, or exceeds its limits of
                time, memory or output.
        """
        dialogue = [_message(each) for each in messages]
        if not dialogue:
            raise ValueError("a dialogue needs at least one message")
        tools, documents = _objects("tools", tools), _objects("documents", documents)
        final = None
        if continue_final_message:
            dialogue[-1], final = _marked(dialogue[-1])
        seen = self._tokens | _plain(variables)
        seen |= {"messages": dialogue, "tools": tools, "documents": documents}
        seen["add_generation_prompt"] = add_generation_prompt and not continue_final_message
        text = _PROCESS.render(self._source(tools is not None), seen)
        return text if final is None else _continued(text, final)

    def _source(self, with_tools: bool) -> str:
        names = ("tool_use", "default") if with_tools else ("default",)
        for name in names:
            if name in self._sources:
                return self._sources[name]
        known = ", ".join(sorted(self._sources))
        raise ConfigError(f"the chat template: there is no default one, but {known}")


def _of_files(directory: Path) -> dict[str, str]:
    paths = {"default": directory / _FILE}
    with contextlib.suppress(OSError):
        for path in sorted((directory / _FOLDER).iterdir())[:_MOST_NAMED]:
            if path.name.endswith(_ENDING):
                paths[path.name.removesuffix(_ENDING)] = path
    sources = {}
    for name, path in paths.items():
        try:
            # Line ends are converted as in Python's text files: "\r\n" becomes "\n".
            text = read_bytes(path, _LARGEST).decode("utf-8")
            sources[name] = text.replace("\r\n", "\n").replace("\r", "\n")
        except FileNotFoundError:
            continue
        except UnicodeDecodeError as error:
            why = f"not UTF-8: {error.reason} at byte {error.start}"
            raise ConfigError(f"{path}: cannot be read: {why}") from None
        except (OSError, Refused) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from None
    return sources


def _of_config(value: Any) -> dict[str, str]:
    """Read a template, or a list of objects with "name" and "template"."""
    if isinstance(value, str):
        return {"default": value}
    entries = value if isinstance(value, list) else []
    pairs = [(each.get("name"), each.get("template")) for each in entries if isinstance(each, dict)]
    return {
        name: source for name, source in pairs if isinstance(name, str) and isinstance(source, str)
    }


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a message to the form that templates read."""
    plain = _plain(message)
    if not isinstance(plain, dict):
        raise ValueError(f"a message must be an object, got {type(message).__name__}")
    held = {name: value for name, value in plain.items() if value is not None}
    if not isinstance(held.get("role"), str) or not ("content" in held or "tool_calls" in held):
        raise ValueError(f'a message needs "role" and "content", got {str(plain)[:200]}')
    thought = next((held[name] for name in _THOUGHT if name in held), None)
    if thought is not None:
        held = {"thinking": thought} | held | {"reasoning_content": thought}
    return held


def _objects(name: str, values: Any) -> list[dict[str, Any]] | None:
    if values is None:
        return None
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Sequence):
        raise ValueError(f"{name} must be a list of objects, got {type(values).__name__}")
    for each in values:
        if not isinstance(each, Mapping):
            raise ValueError(f"{name} must hold JSON objects, got {type(each).__name__}")
    return [_plain(each) for each in values]


def _marked(message: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Append a mark to the message's text, the last one of several; return both."""
    content = message.get("content")
    if isinstance(content, str):
        return message | {"content": content + _HERE + _BLANK}, content
    parts = content if isinstance(content, list) else []
    for place, part in reversed(list(enumerate(parts))):
        if isinstance(part, dict) and isinstance(text := part.get("text"), str):
            marked = part | {"text": text + _HERE + _BLANK}
            return message | {"content": [*parts[:place], marked, *parts[place + 1 :]]}, text
    raise ValueError("the last message has no text that could be continued")


def _continued(text: str, final: str) -> str:
    """Cut the text at the mark; drop blanks before it if the template trims messages.

    Args:
        text: rendered dialogue with the mark in it.
        final: text of the message that is to be continued.
    """
    before, mark, behind = text.rpartition(_HERE)
    if not mark or not before.rstrip().endswith(final.strip()):
        raise ConfigError(
            "the chat template leaves out some of the message that is to be continued"
        )
    return before if behind.startswith(_BLANK) else before.rstrip()


def _plain(value: Any) -> Any:
    """Copy to JSON types only, so that no object with methods of its own reaches a template.

    Dataclasses and pydantic's models become dicts, arrays' scalars numbers, any other object its
    type's name in angle brackets.

    Raises:
        ValueError: the value is nested too deeply, or contains itself.
    """
    try:
        return _copied(value)
    except RecursionError:
        raise ValueError("the dialogue is nested too deeply") from None


def _copied(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_copied(name): _copied(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        copied = [_copied(each) for each in value]
        return copied if isinstance(value, list) else tuple(copied)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: _copied(getattr(value, each.name)) for each in dataclasses.fields(value)}
    for name in ("model_dump", "item"):
        if callable(method := getattr(value, name, None)) and not isinstance(value, type):
            with contextlib.suppress(TypeError, ValueError, RuntimeError):
                return _copied(method())
    return f"<{type(value).__name__}>"


class _TemplateProcess:
    """The process that renders templates; the first template starts it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def render(self, source: str, variables: dict[str, Any]) -> str:
        """Render a template; see ``ChatTemplate.render``."""
        words = pickle.dumps((source, variables))
        with self._lock:
            process = self._running()
            late = threading.Timer(_SECONDS, process.kill)
            late.start()
            try:
                is_text, text = _exchange(process, words)
            except (OSError, EOFError):
                self._end()
                raise ConfigError(f"the chat template: {_how_it_ended(process)}") from None
            except BaseException:
                # After Ctrl-C, the process's next output would be read as the answer to another
                # call.
                self._end()
                raise
            finally:
                late.cancel()
        if not is_text:
            raise ConfigError(f"the chat template {text}")
        return text

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        # A forked process shares its parent's pipes, so it must not use them.
        if self._process is not None and self._owner == os.getpid():
            if self._process.poll() is None:
                return self._process
            self._end()
        self._owner = os.getpid()
        limits = map(str, (_CPU_SECONDS, _MEBIBYTES, _CHARACTERS))
        self._process = subprocess.Popen(
            python_command("-m", "anymla.model.template_process", *limits),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | same_modules(),
            start_new_session=True,  # Ctrl-C in a terminal is for the main program only
        )
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()
        process.wait()


def _exchange(process: subprocess.Popen[bytes], words: bytes) -> tuple[bool, str]:
    """Send a request; return True and the text, or False and the reason why there is none."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(len(words).to_bytes(8, "little") + words)
    process.stdin.flush()
    head = process.stdout.read(9)
    size = int.from_bytes(head[1:], "little")
    written = process.stdout.read(size)
    if len(head) < 9 or len(written) < size:
        raise EOFError
    return head[0] == 0, written.decode("utf-8", "surrogatepass")


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    code = process.wait()
    if code == -getattr(signal, "SIGPROF", 0):
        return f"it takes more than {_CPU_SECONDS:g} s"
    if code == -getattr(signal, "SIGKILL", 0):
        return f"it is not rendered within {_SECONDS:g} s, or the system ended its process"
    return f"the process that renders it ended with {code}"


_PROCESS = _TemplateProcess()
atexit.register(_PROCESS.close)

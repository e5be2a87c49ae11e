"""What a checkpoint says of generating text: ``generation_config.json``, and a chat template."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from anymla.formats.untrusted import Refused, read_object
from anymla.model.config_fields import ConfigError, Fields

_FILE = "generation_config.json"
_TEMPLATE_FILE = "chat_template.jinja"
_LARGEST_TEMPLATE = 1 << 20


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """What holds where a caller says nothing else.

    Attributes:
        temperature: 0 where the file does not ask for sampling (``do_sample``).
        top_p: 1 where it is not given.
        top_k: 0 where it is not given: all tokens.
        min_p: 0 where it is not given.
        max_new_tokens: None where it is not given.
        eos_token_ids: ids that end a text besides those of ``config.json``.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_dir(cls, directory: str | Path) -> GenerationDefaults:
        """Read ``generation_config.json``; the defaults above without one.

        Raises:
            ConfigError: it cannot be read, or a field has a value that cannot be meant.
        """
        path = Path(directory) / _FILE
        try:
            fields = Fields(read_object(path), _FILE)
        except FileNotFoundError:
            return cls()
        except (OSError, Refused) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from None
        fields.only("do_sample", True, False)
        ends: tuple[int, ...] = ()
        if fields.has("eos_token_id"):
            several = isinstance(fields.values["eos_token_id"], list | tuple)
            ends = fields.integers("eos_token_id") if several else (fields.integer("eos_token_id"),)
        new = fields.integer("max_new_tokens", minimum=1) if fields.has("max_new_tokens") else None
        if not fields.values.get("do_sample"):
            return cls(max_new_tokens=new, eos_token_ids=ends)
        return cls(
            temperature=_share(fields, "temperature", 1.0),
            top_p=fields.number("top_p", 1.0),
            top_k=fields.integer("top_k", 0),
            min_p=_share(fields, "min_p"),
            max_new_tokens=new,
            eos_token_ids=ends,
        )


def _share(fields: Fields, name: str, default: float = 0.0) -> float:
    """A number that may be 0."""
    if not fields.has(name):
        return default
    return 0.0 if fields.values[name] == 0 else fields.number(name)


class ChatTemplate:
    """Writes a dialogue as the text that a checkpoint was trained on.

    Templates are programs of strangers: they run in jinja's sandbox, see the messages and the
    names of special tokens, and nothing else.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals = {"raise_exception": _refuse}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template cannot be read: {error}") from None
        self._tokens = dict(tokens)

    @classmethod
    def from_dir(cls, directory: str | Path) -> ChatTemplate:
        """Read ``chat_template.jinja``, or ``chat_template`` of ``tokenizer_config.json``.

        Raises:
            ConfigError: there is none, or it cannot be read.
        """
        path = Path(directory) / "tokenizer_config.json"
        try:
            config = read_object(path)
        except FileNotFoundError:
            config = {}
        except (OSError, Refused) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from None
        source = config.get("chat_template")
        file = Path(directory) / _TEMPLATE_FILE
        if file.is_file():
            source = file.read_text(encoding="utf-8")
        if not isinstance(source, str) or len(source) > _LARGEST_TEMPLATE:
            raise ConfigError(f"{directory}: has no chat template")
        return cls(source, {name: _text(config.get(name)) for name in ("bos_token", "eos_token")})

    def render(self, messages: Sequence[Mapping[str, Any]], **names: Any) -> str:
        """The text of a dialogue, up to where the next answer begins.

        Args:
            messages: each with "role", and "content" or "tool_calls".
            **names: what else the template sees, for example ``tools``; with
                ``add_generation_prompt=False`` the text ends with the last message.

        Raises:
            ConfigError: the template refuses them.
        """
        for message in messages:
            told = "content" in message or message.get("tool_calls")
            if not isinstance(message.get("role"), str) or not told:
                raise ValueError(f'a message needs "role" and "content", got {dict(message)!r}')
        given = {"add_generation_prompt": True} | self._tokens | names
        try:
            return self._template.render(given, messages=list(messages))
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template refuses the messages: {error}") from None


def _text(token: Any) -> str:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)

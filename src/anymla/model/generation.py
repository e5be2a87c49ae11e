"""What a checkpoint says of generating text: ``generation_config.json``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from anymla.formats.untrusted import Refused, read_object
from anymla.model.chat_template import ChatTemplate
from anymla.model.config_fields import ConfigError, Fields

__all__ = ["ChatTemplate", "GenerationDefaults"]
_FILE = "generation_config.json"


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

"""Typed access to the fields of a ``config.json``, with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# What kernels keep positions, slots and token ids in is 32 bits wide.
MOST_INTEGER = 2**31 - 1
# Normal numbers of float32, in which the model computes.
_LEAST_NUMBER, _MOST_NUMBER = 2.0**-126, (2 - 2.0**-23) * 2.0**127
_MOST_SHOWN = 160


class ConfigError(ValueError):
    """A configuration that cannot be run; one line: the field, what it is, what is supported."""


def unsupported(field: str, got: object, supported: str) -> ConfigError:
    """The error for a value that is legal JSON but nothing this package can run."""
    shown = repr(got)
    if len(shown) > _MOST_SHOWN:
        shown = f"{shown[:_MOST_SHOWN]}..."
    return ConfigError(f"config: {field} is {shown}, supported: {supported}")


class Fields:
    """The fields of one JSON object; a field that is null counts as absent.

    Attributes:
        values: the object.
        path: its name inside the file, prefixed to field names in messages; "" for the file itself.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self.values = values
        self.path = path

    def name(self, field: str) -> str:
        """Full name of a field."""
        return f"{self.path}.{field}" if self.path else field

    def has(self, field: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(field) is not None

    def integer(
        self,
        field: str,
        default: int | None = None,
        *,
        minimum: int = 0,
        maximum: int = MOST_INTEGER,
    ) -> int:
        """An integer from ``minimum`` to ``maximum``; required unless there is a default."""
        value = self._value(field, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise unsupported(self.name(field), value, f"an integer >= {minimum}")
        if value > maximum:
            raise unsupported(self.name(field), value, f"an integer <= {maximum}")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """A positive number that float32 holds; required unless there is a default."""
        value = self._value(field, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not _LEAST_NUMBER <= value <= _MOST_NUMBER
        ):
            raise unsupported(self.name(field), value, "a positive number that float32 holds")
        return float(value)

    def string(self, field: str, allowed: Sequence[str]) -> str | None:
        """One of the allowed strings, or None where the field is absent."""
        if not self.has(field):
            return None
        self.only(field, *allowed)
        return str(self.values[field])

    def only(self, field: str, *allowed: object) -> None:
        """Check that the field, if present, has one of these values."""
        value = self.values.get(field)
        # 1 == True in Python, but a configuration that says 1 for a flag is another one.
        if value is not None and not any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed
        ):
            raise unsupported(self.name(field), value, " or ".join(repr(one) for one in allowed))

    def integers(self, field: str) -> tuple[int, ...]:
        """A list of integers >= 0."""
        value = self._value(field, None)
        if not isinstance(value, list | tuple):
            raise unsupported(self.name(field), value, "a list of integers")
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int) or item < 0:
                raise unsupported(self.name(field), value, "a list of integers >= 0")
            if item > MOST_INTEGER:
                raise unsupported(self.name(field), item, f"integers <= {MOST_INTEGER}")
        return tuple(value)

    def section(self, field: str) -> Fields:
        """The object under that name; empty where the field is absent."""
        value = self.values.get(field)
        if value is not None and not isinstance(value, Mapping):
            raise unsupported(self.name(field), value, "an object")
        return Fields(value or {}, self.name(field))

    def _value(self, field: str, default: Any) -> Any:
        value = self.values.get(field)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"config: {self.name(field)} is missing")
        return value

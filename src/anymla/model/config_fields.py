"""Typed access to the fields of a ``config.json``, with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Kernels hold positions, slots and token ids in 32 bits.
MOST_INTEGER = 2**31 - 1
# Normal numbers of float32, the dtype that the model computes in.
_LEAST_NUMBER, _MOST_NUMBER = 2.0**-126, (2 - 2.0**-23) * 2.0**127
_MOST_SHOWN = 160


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names field, value and supported values."""


def unsupported(field: str, got: object, supported: str) -> ConfigError:
    """Create the error for a value that is legal JSON but not supported."""
    shown = repr(got)
    if len(shown) > _MOST_SHOWN:
        shown = f"{shown[:_MOST_SHOWN]}..."
    return ConfigError(f"config: {field} is {shown}, supported: {supported}")


class Fields:
    """The fields of one JSON object; a field that is null counts as absent.

    Attributes:
        values: the JSON object.
        path: name of the object inside the file, a prefix of field names in messages; "" for the
            file itself.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self.values = values
        self.path = path

    def name(self, field: str) -> str:
        """Return the full name of a field."""
        return f"{self.path}.{field}" if self.path else field

    def has(self, field: str) -> bool:
        """True if the field is present and not null."""
        return self.values.get(field) is not None

    def integer(
        self,
        field: str,
        default: int | None = None,
        *,
        minimum: int = 0,
        maximum: int = MOST_INTEGER,
    ) -> int:
        """Read an integer from ``minimum`` to ``maximum``; required unless there is a default."""
        value = self._value(field, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise unsupported(self.name(field), value, f"an integer >= {minimum}")
        if value > maximum:
            raise unsupported(self.name(field), value, f"an integer <= {maximum}")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """Read a positive number in float32's range; required unless there is a default."""
        value = self._value(field, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not _LEAST_NUMBER <= value <= _MOST_NUMBER
        ):
            raise unsupported(self.name(field), value, "a positive number that float32 holds")
        return float(value)

    def string(self, field: str, allowed: Sequence[str]) -> str | None:
        """Read one of the allowed strings; None if the field is absent."""
        if not self.has(field):
            return None
        self.only(field, *allowed)
        return str(self.values[field])

    def only(self, field: str, *allowed: object) -> None:
        """Check that the field, if present, has one of these values."""
        value = self.values.get(field)
        # 1 == True in Python, but 1 is not a valid flag in a configuration.
        if value is not None and not any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed
        ):
            raise unsupported(self.name(field), value, " or ".join(repr(one) for one in allowed))

    def integers(self, field: str) -> tuple[int, ...]:
        """Read a list of integers >= 0."""
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
        """Return the object under that name; empty if the field is absent."""
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

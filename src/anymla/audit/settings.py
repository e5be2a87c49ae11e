"""Settings of an audit: its frequency, its extent, and the place of its dumps."""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of an audit.

    Attributes:
        every: period in steps; one step in so many is audited.
        requests: number of tokens looked at in such a step, each of another request.
        layers: number of layers of each compress ratio looked at in such a step, in turn.
        seed: seed of the choice of tokens; the same seed and traffic give the same choice.
        directory: directory of dumps; "" for none.
        dumps: most dumps that are written.
        mebibytes: largest size of a dump in MiB.
        judges: number of processes that judge.
    """

    every: int = 200
    requests: int = 2
    layers: int = 1
    seed: int = 0
    directory: str = ""
    dumps: int = 20
    mebibytes: int = 256
    judges: int = 1

    def __post_init__(self) -> None:
        """Raise ValueError for counts out of range."""
        for field in dataclasses.fields(self):
            least = {"seed": 0, "dumps": 0}.get(field.name, 1)
            value = getattr(self, field.name)
            if isinstance(value, int) and value < least:
                raise ValueError(f"audit: {field.name} must be at least {least}, got {value}")

    @classmethod
    def of(cls, text: str) -> Settings:
        """Parse settings of the form ``"every=200,requests=2"``.

        Raises:
            ValueError: a name is unknown, or a value is no number.
        """
        known = {field.name: field.type for field in dataclasses.fields(cls)}
        values: dict[str, int | str] = {}
        for part in filter(None, (each.strip() for each in text.split(","))):
            name, _, value = part.partition("=")
            if name not in known:
                raise ValueError(f"audit: no setting {name!r}; known: {', '.join(known)}")
            try:
                values[name] = str(Path(value)) if name == "directory" else int(value)
            except ValueError:
                raise ValueError(f"audit: {name} must be a number, got {value!r}") from None
        return cls(**values)  # type: ignore[arg-type]

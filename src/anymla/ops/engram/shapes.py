"""Named shapes of Engram: V4.1-Flash's tables and streams, and tokens of a step."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class EngramShape:
    """Sizes of a model's n-grams.

    Attributes:
        hidden: channels D of a stream.
        streams: N.
        columns: rows C of a table that a token reads.
        width: channels W of a row.
        block: neighbours of a row that share a scale.
    """

    hidden: int
    streams: int
    columns: int
    width: int
    block: int


V41_FLASH = EngramShape(hidden=5120, streams=4, columns=24, width=256, block=32)
# Tokens of a step: both tiles of rows.
TOKENS = (1, 4096)

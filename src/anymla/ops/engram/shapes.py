"""Named shapes of Engram: V4.1-Flash's tables and streams, and token numbers of a step."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class EngramShape:
    """Sizes of one model's n-gram memory.

    Attributes:
        hidden: number of channels D of a stream.
        streams: number of streams N.
        columns: number of table rows C that a token reads.
        width: number of channels W of a table row.
        block: number of neighbouring channels of a row that share a scale.
    """

    hidden: int
    streams: int
    columns: int
    width: int
    block: int


V41_FLASH = EngramShape(hidden=5120, streams=4, columns=24, width=256, block=32)
# Token numbers of a step, one for each tile of rows.
TOKENS = (1, 4096)

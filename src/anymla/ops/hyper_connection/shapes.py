"""Named shapes of hyper-connections: residual streams of V4 and V4.1, and tokens of a step."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class StreamsShape:
    """Streams of a model.

    Attributes:
        hidden: channels D of a stream.
        streams: N.
    """

    hidden: int
    streams: int = 4

    @property
    def mixes(self) -> int:
        """Gates of a site."""
        return (2 + self.streams) * self.streams


V4_FLASH = StreamsShape(4096)
V4_PRO = StreamsShape(7168)
V41_FLASH = StreamsShape(5120)
# Tokens of a step, one for every way that ``config`` knows.
TOKENS = (1, 17, 33, 65, 129, 513, 2048)
# Of them one with each number of slices.
FEW = (1, 65, 129, 513, 2048)

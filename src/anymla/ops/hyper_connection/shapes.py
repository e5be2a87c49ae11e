"""Named shapes of hyper-connections: V4's and V4.1's residual streams, and token numbers."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class StreamsShape:
    """Sizes of one model's residual streams.

    Attributes:
        hidden: number of channels D of a stream.
        streams: number of streams N.
    """

    hidden: int
    streams: int = 4

    @property
    def mixes(self) -> int:
        """Number of gates of a site, over pre, post and comb."""
        return (2 + self.streams) * self.streams


V4_FLASH = StreamsShape(4096)
V4_PRO = StreamsShape(7168)
V41_FLASH = StreamsShape(5120)
# Token numbers of a step, one for each path through ``config``.
TOKENS = (1, 17, 33, 65, 129, 513, 2048)
# Token numbers among these with distinct numbers of slices.
FEW = (1, 65, 129, 513, 2048)

"""Named real shapes of what is normed, rotated and inserted, which builds and tests share."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Sizes of a model's rows.

    Attributes:
        hidden: channels of the residual stream.
        q_rank: channels of the query latent.
        heads: query heads.
        channels: of a head and of a key-value row.
        index_channels: of an index head and of an index key.
        rope: channels that are rotated, the last of a head.
        page_size: entries of a page of the main cache.
    """

    hidden: int
    q_rank: int
    heads: int
    channels: int
    index_channels: int
    rope: int
    page_size: int

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of all rows that are normed."""
        return self.index_channels, self.channels, self.q_rank, self.hidden


V4_FLASH = ModelShape(4096, 1024, 64, 512, 128, 64, 64)
V4_PRO = ModelShape(7168, 1536, 128, 512, 128, 64, 64)
MODELS = (V4_FLASH, V4_PRO)
# Heads of a rank, from one on: tensor parallelism splits them.
HEADS = (1, 2, 4, 8)

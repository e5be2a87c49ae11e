"""Named shapes of sparse attention, shared by tests, benchmarks and tuning."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """One call of sparse attention.

    Attributes:
        tokens: query rows T.
        heads: query heads H.
        window: slots of the first scope per token.
        entries: slots of the second scope per token.
        dim: head dim D.
        values: leading channels of a row that are the value; None for all.
    """

    tokens: int
    heads: int
    window: int
    entries: int
    dim: int = 512
    values: int | None = None

    @property
    def slots(self) -> int:
        """Slots per token over both scopes."""
        return self.window + self.entries

    @property
    def out_dim(self) -> int:
        """Channels of the output."""
        return self.dim if self.values is None else self.values

    @property
    def flops(self) -> int:
        """Multiplications and additions of the two matrix products."""
        return 2 * self.tokens * self.heads * self.slots * (self.dim + self.out_dim)


FLASH_DECODE = AttentionShape(tokens=4, heads=64, window=128, entries=512)
PRO_DECODE = AttentionShape(tokens=4, heads=128, window=128, entries=1024)
WINDOW_DECODE = AttentionShape(tokens=4, heads=64, window=128, entries=0)
V32_DECODE = AttentionShape(tokens=4, heads=128, window=2048, entries=0, dim=576, values=512)

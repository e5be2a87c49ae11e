"""What one layer is, as data: the attention layer reads this and nothing else."""

from __future__ import annotations

import dataclasses

WINDOW_GROUP = "window"
INDEX_GROUP = "index"
INDEX_STATE_GROUP = "state_index"
# Not a cache group: rows of ``Step.dense`` that a block drafter's stage attends to.
CONTEXT_ROWS = "context"


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One decoder layer's attention.

    Attributes:
        index: position in the network; draft layers follow the backbone.
        role: "backbone", "mtp" or "dspark".
        ratio: tokens a compressed entry stands for; 0 means window only.
        overlap: an entry also pools the window before its own (ratio 4).
        selects: a lightning indexer chooses among the entries; otherwise all are attended.
        window: tokens of the sliding window, the query's own included.
        selection_width: entries the indexer keeps for a query; 0 without indexer.
    """

    index: int
    role: str
    ratio: int
    overlap: bool
    selects: bool
    window: int
    selection_width: int

    @property
    def pooled_tokens(self) -> int:
        """Tokens an entry is pooled from, which is how long partial states must be kept."""
        return self.ratio * (2 if self.overlap else 1)

    @property
    def compressed_group(self) -> str | None:
        """Cache group of the compressed entries."""
        return f"c{self.ratio}" if self.ratio else None

    @property
    def listed(self) -> str | None:
        """Key of ``Step.dense`` for the rows beside the window's; None where there are none."""
        return CONTEXT_ROWS if self.role == "dspark" else self.compressed_group

    @property
    def state_group(self) -> str | None:
        """Cache group of the compressor's partial states."""
        return f"state_c{self.ratio}" if self.ratio else None

    @property
    def groups(self) -> tuple[str, ...]:
        """All cache groups this layer keeps rows in."""
        named = [WINDOW_GROUP, self.compressed_group, self.state_group]
        if self.selects:
            named += [INDEX_GROUP, INDEX_STATE_GROUP]
        return tuple(name for name in named if name)

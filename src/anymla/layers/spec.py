"""What one layer is, as data: the attention layer reads this and nothing else."""

from __future__ import annotations

import dataclasses

WINDOW_GROUP = "window"
# Not a cache group: rows of ``Step.dense`` that a block drafter's stage attends to.
CONTEXT_ROWS = "context"
# DeepSeek-V4 selects at one ratio alone, whose index keys need no number.
_ONLY_INDEXED_RATIO = 4


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Selection in two levels: one layer keeps blocks of entries, later ones select within them.

    Attributes:
        source: the layer that keeps blocks; its own selection is not narrowed.
        blocks: how many it keeps for a query.
        block_size: entries of a block.
    """

    source: int
    blocks: int
    block_size: int

    @property
    def least_entries(self) -> int:
        """What they hold at the least: the newest block may have a single visible entry."""
        return (self.blocks - 1) * self.block_size + 1

    def narrows(self, entries: int) -> bool:
        """Whether some block is dropped of so many visible entries."""
        return entries > self.blocks * self.block_size


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One decoder layer's attention.

    Attributes:
        index: position in the network; draft layers follow the backbone.
        role: "backbone", "mtp" or "dspark".
        ratio: tokens a compressed entry stands for; 0 means window only.
        overlap: an entry also pools the window before its own (ratio 4 of DeepSeek-V4).
        selects: a lightning indexer chooses among the entries.
        window: tokens of the sliding window, the query's own included.
        selection_width: entries the indexer keeps for a query; 0 without indexer.
        kv_source: layer whose entries it attends to, and scores the keys of; None: its own.
        index_source: layer whose selection it attends to; None: its own, or all entries.
        candidates: narrow the selection, or are kept by it; None: neither.
        shares_selection: later layers attend to its selection.
        position_bias: the compressor's scores have a bias by position within the window.
        latent_keys: index keys are projected from the entries, before those are rotated; otherwise
            a compressor of their own pools them.
        hadamard: MXFP4 index keys and queries are rotated by the Hadamard matrix.
        norms_heads: query heads are divided by their root mean square.
    """

    index: int
    role: str
    ratio: int
    overlap: bool
    selects: bool
    window: int
    selection_width: int
    kv_source: int | None = None
    index_source: int | None = None
    candidates: Candidates | None = None
    shares_selection: bool = False
    position_bias: bool = True
    latent_keys: bool = False
    hadamard: bool = True
    norms_heads: bool = True

    @property
    def compresses(self) -> bool:
        """Whether it writes compressed entries."""
        return bool(self.ratio) and self.kv_source in (None, self.index)

    @property
    def keeps_keys(self) -> bool:
        """Whether it writes index keys."""
        return self.compresses and self.selects

    @property
    def keeps_states(self) -> bool:
        """Whether entries wait for tokens: an entry of one token is complete at once."""
        return self.compresses and not (self.ratio == 1 and self.latent_keys)

    @property
    def attends_to_all(self) -> bool:
        """Whether nothing selects among its entries."""
        return bool(self.ratio) and not self.selects and self.index_source is None

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
        return f"state_c{self.ratio}" if self.keeps_states else None

    @property
    def index_group(self) -> str:
        """Cache group of the index keys that it writes or scores."""
        return "index" if self.ratio == _ONLY_INDEXED_RATIO else f"index_c{self.ratio}"

    @property
    def index_state_group(self) -> str | None:
        """Cache group of the index compressor's partial states."""
        pools = self.keeps_keys and not self.latent_keys
        return f"state_{self.index_group}" if pools else None

    @property
    def groups(self) -> tuple[str, ...]:
        """All cache groups this layer keeps rows in."""
        named = [WINDOW_GROUP, self.compressed_group if self.compresses else None, self.state_group]
        named += [self.index_group if self.keeps_keys else None, self.index_state_group]
        return tuple(name for name in named if name)

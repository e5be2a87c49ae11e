"""Description of one layer as data; the attention layer reads nothing else."""

from __future__ import annotations

import dataclasses

WINDOW_GROUP = "window"
# Key of rows in ``Step.dense`` that a block drafter's stage attends to; not a cache group.
CONTEXT_ROWS = "context"
# DeepSeek-V4 selects at one ratio only, so its index group's name carries no number.
_ONLY_INDEXED_RATIO = 4


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Selection in two levels: one layer keeps blocks of entries, later ones select within them.

    Attributes:
        source: index of the layer that keeps blocks; its own selection is not narrowed.
        blocks: number of blocks that it keeps for a query.
        block_size: number of entries per block.
    """

    source: int
    blocks: int
    block_size: int

    @property
    def least_entries(self) -> int:
        """Return the fewest entries in the blocks, of which the newest may show a single one."""
        return (self.blocks - 1) * self.block_size + 1

    def narrows(self, entries: int) -> bool:
        """True if some block of ``entries`` visible entries is dropped."""
        return entries > self.blocks * self.block_size


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """Description of one decoder layer's attention.

    Attributes:
        index: position in the network; draft layers follow the backbone.
        role: kind of layer: "backbone", "mtp" or "dspark".
        ratio: tokens per compressed entry; 0 for a layer with a window only.
        overlap: True if an entry also pools the window before its own (ratio 4 of DeepSeek-V4).
        selects: True if a lightning indexer selects among the entries.
        window: tokens of the sliding window, the query's own included.
        selection_width: number of entries that the indexer keeps for a query; 0 without indexer.
        kv_source: index of the layer whose entries and index keys it reads; None for its own.
        index_source: index of the layer whose selection it attends to; None for its own, or for all
            entries.
        candidates: blocks that narrow the selection, or are kept by it; None for neither.
        shares_selection: True if later layers attend to its selection.
        position_bias: True if the compressor's scores have a bias by position within the window.
        latent_keys: True if index keys are projected from the entries before those are rotated;
            False if a compressor of their own pools them.
        hadamard: True if MXFP4 index keys and queries are rotated by the Hadamard matrix.
        norms_heads: True if query heads are divided by their root mean square.
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
        """True if the layer writes compressed entries."""
        return bool(self.ratio) and self.kv_source in (None, self.index)

    @property
    def keeps_keys(self) -> bool:
        """True if the layer writes index keys."""
        return self.compresses and self.selects

    @property
    def keeps_states(self) -> bool:
        """True if entries have partial states; an entry of one token is complete at once."""
        return self.compresses and not (self.ratio == 1 and self.latent_keys)

    @property
    def attends_to_all(self) -> bool:
        """True if nothing selects among the layer's entries."""
        return bool(self.ratio) and not self.selects and self.index_source is None

    @property
    def pooled_tokens(self) -> int:
        """Number of tokens that an entry is pooled from, for which partial states are kept."""
        return self.ratio * (2 if self.overlap else 1)

    @property
    def compressed_group(self) -> str | None:
        """Cache group of the compressed entries."""
        return f"c{self.ratio}" if self.ratio else None

    @property
    def listed(self) -> str | None:
        """Key of ``Step.dense`` for the rows other than the window's; None without any."""
        return CONTEXT_ROWS if self.role == "dspark" else self.compressed_group

    @property
    def state_group(self) -> str | None:
        """Cache group of the compressor's partial states."""
        return f"state_c{self.ratio}" if self.keeps_states else None

    @property
    def index_group(self) -> str:
        """Cache group of the index keys that the layer writes or scores."""
        return "index" if self.ratio == _ONLY_INDEXED_RATIO else f"index_c{self.ratio}"

    @property
    def index_state_group(self) -> str | None:
        """Cache group of the index compressor's partial states."""
        pools = self.keeps_keys and not self.latent_keys
        return f"state_{self.index_group}" if pools else None

    @property
    def groups(self) -> tuple[str, ...]:
        """All cache groups in which this layer keeps rows."""
        named = [WINDOW_GROUP, self.compressed_group if self.compresses else None, self.state_group]
        named += [self.index_group if self.keeps_keys else None, self.index_state_group]
        return tuple(name for name in named if name)

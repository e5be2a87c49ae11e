"""All that one forward step knows about its batch, as plain tensors shared by every layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from torch import Tensor

from anymla.layers.plans import Plans
from anymla.layers.rows import GroupStep, NgramRows, PrefillRows, RequestRows, Rows
from anymla.layers.side_stream import INLINE, SideStream

Recorder = Callable[[str, int, Tensor], None]


@dataclasses.dataclass(frozen=True)
class Step:
    """A batch of tokens: decode requests first, then prefill chunks.

    Attributes:
        token_ids: int64 [T]; -1 for padding.
        positions: int64 [T], absolute, 0-based.
        token_to_req: int32 [T], request row of each token; -1 for padding.
        is_valid: bool [T], false for padding.
        seq_lens: int32 [R], lengths including this step's tokens.
        query_start_loc: int32 [R + 1], prefix sums of the query lengths.
        query_lens: the query lengths on the host.
        num_decodes: how many of the requests are decodes.
        max_seq_len: largest entry of ``seq_lens``, on the host.
        groups: by cache group.
        window: rows of the sliding window.
        dense: by compressed group, the rows of all visible entries, wherever a layer attends to all
            of them: without an indexer, or with one that selects as many; in a drafter's block,
            the rows of its context.
        index_lens: by group of index keys, int32 [T], entries visible to each token's indexer.
        padded: some tokens may be padding, as in a step of fixed size.
        chunks: by compressed group, or the window's for layers without one, what the prefill
            requests can see, where attention reads it as one workspace instead of by slots; or what
            all requests can see, in decode steps of several queries each.
        side: where work goes that may run beside the query's projection.
        plans: of attention by slots, made by the first layer of a kind.
        selections: by layer, what later layers attend to as well: int32 [T, K], in entries of the
            request, and the rows of those.
        candidates: by layer, int32 [T, n], blocks of entries that later layers select within.
        ngrams: by layer that reads n-grams, the rows of its table; those of padding hold anything.
        recorder: called as (kind, layer index, tensor) with what a layer decided: "topk" with the
            request-local selection [T, K], "candidates" with the blocks [T, n] that later layers
            select within, "experts" with the expert ids [T, k].
    """

    token_ids: Tensor
    positions: Tensor
    token_to_req: Tensor
    is_valid: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    query_lens: tuple[int, ...]
    num_decodes: int
    max_seq_len: int
    groups: Mapping[str, GroupStep]
    window: Rows
    dense: Mapping[str, Rows]
    index_lens: Mapping[str, Tensor]
    padded: bool = False
    chunks: Mapping[str, PrefillRows | RequestRows] = dataclasses.field(default_factory=dict)
    side: SideStream = INLINE
    plans: Plans = dataclasses.field(default_factory=Plans)
    selections: dict[int, tuple[Tensor, Rows]] = dataclasses.field(default_factory=dict)
    candidates: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    ngrams: Mapping[int, NgramRows] = dataclasses.field(default_factory=dict)
    recorder: Recorder | None = None

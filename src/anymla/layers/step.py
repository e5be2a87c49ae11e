"""The metadata of one forward step, as plain tensors shared by every layer."""

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
        token_ids: int64 [T] token ids; -1 for padding.
        positions: int64 [T], absolute position of each token, from 0.
        token_to_req: int32 [T], request row of each token; -1 for padding.
        is_valid: bool [T], False for padding.
        seq_lens: int32 [R], lengths in tokens including this step's.
        query_start_loc: int32 [R + 1], prefix sums of the query lengths.
        query_lens: number of tokens of each request, on the host.
        num_decodes: number of leading requests that are decodes.
        max_seq_len: largest entry of ``seq_lens``, on the host.
        groups: metadata by cache group.
        window: listed rows of the sliding window.
        dense: rows of all visible entries by compressed group, for groups in which a layer attends
            to all of them: without an indexer, or with one that selects as many. In a drafter's
            block, the rows of its context.
        index_lens: int32 [T] by group of index keys, entries visible to each token's indexer.
        padded: True if some tokens may be padding, as in a step of fixed size.
        chunks: rows that the prefill requests see, by compressed group, or by the window's for
            layers without one, if attention reads them as one workspace instead of by slots. In
            decode steps of several queries a request, the rows that all requests see.
        side: further streams, for work that may run in parallel with the query's projection.
        plans: plans of attention by slots, built by the first layer of a kind.
        selections: by layer, the selection that later layers attend to as well: int32 [T, K], in
            entries of the request, and its rows.
        candidates: int32 [T, n] by layer, blocks of entries that later layers select within.
        ngrams: by layer that reads n-grams, the rows of its table; undefined for padding.
        recorder: callback (kind, layer index, tensor) for a layer's decisions: "topk" with the
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

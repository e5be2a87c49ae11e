"""The lightning indexer: a cheap score for every compressed entry, of which the best are kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from anymla.formats.page_layout import INDEX_FP8, INDEX_MXFP4
from anymla.layers.compressor import Compressor
from anymla.layers.linear import Linear
from anymla.layers.rope_table import RopeTable
from anymla.layers.spec import INDEX_GROUP, INDEX_STATE_GROUP
from anymla.layers.step import GroupStep, Rows, Step
from anymla.ops.indexer import indexer_q_rope_quant, select_topk
from anymla.ops.indexer.interface_select import LEAST_SCRATCH_BYTES, SCRATCH_BYTES
from anymla.ops.selection import compute_global_topk_indices_and_lens


@dataclasses.dataclass(frozen=True)
class IndexQueries:
    """A step's index queries, as ``indexer_q_rope_quant`` returns them.

    Attributes:
        q: [T, heads, 128], or packed.
        scales: of packed queries, else None.
        weights: float32 [T, heads].
    """

    q: Tensor
    scales: Tensor | None
    weights: Tensor


@dataclasses.dataclass(frozen=True)
class SlotTarget:
    """Where the slots of chosen entries go.

    Attributes:
        block_table: int32 [R, P], pages of the entries.
        page_size: entries of a page.
        slots: int32 [T, width], written.
        counts: int32 [T], written.
    """

    block_table: Tensor
    page_size: int
    slots: Tensor
    counts: Tensor

    def arguments(self, requests: slice, tokens: slice) -> dict[str, Any]:
        """What ``select_topk`` is told for some of them."""
        return {
            "slot_table": self.block_table[requests],
            "slot_page_size": self.page_size,
            "slots": self.slots[tokens],
            "counts": self.counts[tokens],
        }


class Indexer(nn.Module):
    """``score[t, w] = sum_h weight[t, h] * relu(q[t, h] . key[w])``, best ``width`` entries.

    Attributes:
        wq_b: query projection from the normalised latent.
        weights_proj: head weights from the layer's input.
        compressor: writes the index keys.
        heads: number of index heads.
        width: entries kept for a query.
        quantize_q: quantise queries like the keys; False where activations stay unquantised.
    """

    def __init__(
        self,
        *,
        wq_b: Linear,
        weights_proj: Linear,
        compressor: Compressor,
        heads: int,
        width: int,
        rope: RopeTable,
        quantize_q: bool,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.wq_b = wq_b
        self.weights_proj = weights_proj
        self.compressor = compressor
        self.heads = heads
        self.width = width
        self.rope = rope
        self.quantize_q = quantize_q
        self.backend = backend

    def forward(
        self, x: Tensor, latent: Tensor, step: Step, cache: Tensor, state: Tensor, layout: str
    ) -> Tensor:
        """Write the step's index keys, then choose entries for every token.

        Args:
            x: [T, hidden], the layer's normalised input.
            latent: [T, q_lora_rank], the normalised query latent.
            step: the batch.
            cache: index pages of ``layout``, written.
            state: partial states of the index compressor, written.
            layout: layout id of ``cache``.

        Returns:
            int32 [T, width], request-local entries, valid ones first, then -1.
        """
        self.write_keys(x, step, cache, state, layout)
        return self.select(self.queries(x, latent, step, layout), step, cache, layout)

    def chooses(self, step: Step) -> bool:
        """Whether entries are scored: not if all of them fit in the selection."""
        return self._most(step) > self.width

    def queries(
        self,
        x: Tensor,
        latent: Tensor,
        step: Step,
        layout: str,
        *,
        q: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> IndexQueries | None:
        """What entries are scored with, or None.

        Args:
            x: as for ``forward``, like all that is not named here.
            latent: as there.
            step: as there.
            layout: as there.
            q: ``wq_b`` of the latent, if it is known.
            weights: ``weights_proj`` of x, if it is known.
        """
        if not self.chooses(step):
            return None
        weights = self.weights_proj(x) if weights is None else weights
        q = self.wq_b(latent) if q is None else q
        q = q.unflatten(-1, (self.heads, -1))
        quant = {INDEX_FP8: "fp8", INDEX_MXFP4: "mxfp4"}.get(layout, "none")
        q, q_scales, weights = indexer_q_rope_quant(
            q,
            weights,
            step.positions,
            self.rope.upto(step.max_seq_len),
            softmax_scale=q.shape[-1] ** -0.5,
            head_scale=self.heads**-0.5,
            quant=quant if self.quantize_q else "none",
            hadamard=layout == INDEX_MXFP4,
            backend=self.backend,
        )
        return IndexQueries(q, q_scales if q_scales.numel() else None, weights)

    def select(
        self, queries: IndexQueries | None, step: Step, cache: Tensor, layout: str
    ) -> Tensor:
        """Choose entries, whose keys must have been written; see ``forward``."""
        return self._select(queries, step, cache, layout, None)

    def select_rows(
        self,
        queries: IndexQueries | None,
        step: Step,
        cache: Tensor,
        layout: str,
        group: GroupStep,
    ) -> tuple[Tensor, Rows]:
        """As ``select``, and where the chosen entries lie in the cache of ``group``."""
        if queries is None:
            selected = self.select(queries, step, cache, layout)
            slots, counts = compute_global_topk_indices_and_lens(
                selected,
                step.token_to_req,
                group.block_table,
                group.page_size,
                step.is_valid,
                backend=self.backend,
            )
            return selected, Rows(slots, counts)
        tokens = len(queries.q)
        slots = torch.empty(tokens, self.width, dtype=torch.int32, device=cache.device)
        counts = torch.empty(tokens, dtype=torch.int32, device=cache.device)
        target = SlotTarget(group.block_table, group.page_size, slots, counts)
        return self._select(queries, step, cache, layout, target), Rows(slots, counts)

    def _select(
        self,
        queries: IndexQueries | None,
        step: Step,
        cache: Tensor,
        layout: str,
        target: SlotTarget | None,
    ) -> Tensor:
        assert step.index_lens is not None
        if queries is None:
            return all_entries(step.index_lens, self.width)
        tokens, requested = len(queries.q), sum(step.query_lens)
        selected = torch.empty(tokens, self.width, dtype=torch.int32, device=cache.device)
        if requested < tokens:  # what belongs to no request
            selected[requested:] = -1
            if target is not None:
                target.slots[requested:] = -1
                target.counts[requested:] = 0
        return select_entries(
            queries.q,
            queries.scales,
            queries.weights,
            step.index_lens,
            cache,
            step.groups[INDEX_GROUP].block_table,
            query_lens=step.query_lens,
            num_decodes=step.num_decodes,
            max_context=self._most(step),
            layout=layout,
            out=selected,
            target=target,
            token_to_req=step.token_to_req,
            backend=self.backend,
        )

    def write_keys(
        self,
        x: Tensor,
        step: Step,
        cache: Tensor,
        state: Tensor,
        layout: str,
        *,
        projected: bool = False,
    ) -> None:
        """Write the step's index keys and choose nothing; arguments of ``forward``.

        With ``projected``, x is what the compressor takes then.
        """
        self.compressor(
            x,
            step,
            state,
            step.groups[INDEX_STATE_GROUP],
            cache,
            step.groups[INDEX_GROUP],
            layout,
            hadamard=layout == INDEX_MXFP4,
            projected=projected,
        )

    def _most(self, step: Step) -> int:
        """Entries that the longest request has."""
        return step.max_seq_len // self.compressor.ape.shape[0]


def select_entries(
    q: Tensor,
    q_scales: Tensor | None,
    weights: Tensor,
    visible: Tensor,
    cache: Tensor,
    block_table: Tensor,
    *,
    query_lens: tuple[int, ...],
    num_decodes: int,
    max_context: int,
    layout: str,
    out: Tensor,
    target: SlotTarget | None = None,
    token_to_req: Tensor | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
    backend: str | None = None,
) -> Tensor:
    """Score every visible entry of every token and keep the best.

    Args:
        q: [T, H, 128] (or packed) index queries, from ``indexer_q_rope_quant``.
        q_scales: of packed queries, from there.
        weights: [T, H] float32, from there.
        visible: int32 [T], entries that each token may select.
        cache: index pages of ``layout``.
        block_table: int32 [R, P], pages of each request.
        query_lens: tokens of each request, in batch order.
        num_decodes: how many of the first requests are decodes.
        max_context: at least the largest of ``visible``.
        layout: layout id of ``cache``.
        out: int32 [T or more, width] to write into.
        target: also write where the entries lie in another cache.
        token_to_req: int32 [T], request of each token; without it, requests of unequal lengths
            take a call each.
        scratch_bytes: bound of the memory that scores take; raised to what one token needs.
        backend: of the operations.

    Returns:
        ``out``: request-local entries, ascending, then -1.
    """
    scratch_bytes = max(scratch_bytes, LEAST_SCRATCH_BYTES, 8 * max_context)
    for call in selection_calls(query_lens, num_decodes, ragged=token_to_req is not None):
        tokens = slice(call.first_token, call.end_token)
        # Ragged calls name the requests of the whole batch.
        requests = slice(None) if call.ragged else slice(call.first_request, call.end_request)
        more = {} if target is None else target.arguments(requests, tokens)
        select_topk(
            q[tokens],
            cache,
            weights[tokens],
            visible[tokens],
            block_table[requests],
            out.shape[1],
            max_context=max_context,
            token_to_req=token_to_req[tokens] if call.ragged and token_to_req is not None else None,
            layout=layout,
            q_scales=None if q_scales is None else q_scales[tokens],
            scratch_bytes=scratch_bytes,
            out=out[tokens],
            backend=backend,
            **more,
        )
    return out


@dataclasses.dataclass(frozen=True)
class SelectionCall:
    """Consecutive requests whose tokens select in one call.

    Attributes:
        first_request, end_request: the requests.
        first_token, end_token: their tokens.
        ragged: the requests have different numbers of tokens.
    """

    first_request: int
    end_request: int
    first_token: int
    end_token: int
    ragged: bool


def selection_calls(
    query_lens: tuple[int, ...], num_decodes: int, *, ragged: bool
) -> Iterator[SelectionCall]:
    """Cut a step into calls: decodes of equal lengths, and everything else.

    Decodes have a call to themselves because their tokens share no keys, or few, and are scored in
    other tiles than prefills.

    Args:
        query_lens: tokens of each request, in batch order.
        num_decodes: how many of the first requests are decodes.
        ragged: a call may take requests of different lengths.
    """
    starts = [0, *accumulate(query_lens)]
    edges = [0] if len(set(query_lens[:num_decodes])) != 1 else [0, num_decodes]
    if not ragged:
        edges += range(edges[-1] + 1, len(query_lens))
    for first, end in pairwise((*edges, len(query_lens))):
        if starts[first] < starts[end]:
            uneven = len(set(query_lens[first:end])) > 1
            yield SelectionCall(first, end, starts[first], starts[end], uneven)


def all_entries(visible: Tensor, width: int) -> Tensor:
    """The selection where every visible entry fits: 0, 1, ... then -1.

    Args:
        visible: int32 [T], entries visible to each token, at most ``width``.
        width: columns of the result.

    Returns:
        int32 [T, width].
    """
    entry = torch.arange(width, dtype=torch.int32, device=visible.device)
    return torch.where(entry < visible.unsqueeze(1), entry, -1)

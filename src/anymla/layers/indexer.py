"""The lightning indexer: a cheap score for every compressed entry, of which the best are kept."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from anymla.formats.page_layout import INDEX_FP8, INDEX_MXFP4
from anymla.formats.quantized_rows import QuantizedRows
from anymla.layers.compressor import Compressor, LatentCompressor
from anymla.layers.linear import Linear
from anymla.layers.rope_table import RopeTable
from anymla.layers.rows import GroupStep, Rows
from anymla.layers.selection import SlotTarget, TwoLevels, all_entries, select_entries
from anymla.layers.spec import LayerSpec
from anymla.layers.step import Step
from anymla.ops.indexer import indexer_q_rope_quant
from anymla.ops.norm_rope import rms_norm
from anymla.ops.step_indices import compute_global_topk_indices_and_lens


@dataclasses.dataclass(frozen=True)
class IndexQueries:
    """Index queries of a step, as ``indexer_q_rope_quant`` returns them.

    Attributes:
        q: queries [T, heads, 128], or their packed form.
        scales: scales of packed queries, else None.
        weights: float32 [T, heads], weights of the heads.
    """

    q: Tensor
    scales: Tensor | None
    weights: Tensor


@dataclasses.dataclass(frozen=True)
class LatentKeys:
    """Index keys projected from compressed entries: ``k_norm(latent wk^T)``, then rotated.

    Attributes:
        wk: projection from an entry to a key.
        norm: float32 [Di], RMSNorm weight of the keys.
        eps: epsilon of the norm.
    """

    wk: Linear
    norm: Tensor
    eps: float


class Indexer(nn.Module):
    """``score[t, w] = sum_h weight[t, h] * relu(q[t, h] . key[w])``, best ``width`` entries.

    Attributes:
        wq_b: query projection from the normalised latent.
        weights_proj: projection from the layer's input to head weights.
        spec: description of the layer.
        compressor: compressor of the index keys; None if they are projected, or another layer's.
        keys: projection of the index keys; None if they are pooled, or another layer's.
        heads: number of index heads.
        width: number of entries kept for a query.
        quantize_q: True to quantise queries like the keys; False if activations stay unquantised.
    """

    def __init__(
        self,
        *,
        wq_b: Linear,
        weights_proj: Linear,
        spec: LayerSpec,
        compressor: Compressor | None,
        keys: LatentKeys | None = None,
        heads: int,
        rope: RopeTable,
        quantize_q: bool,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.wq_b = wq_b
        self.weights_proj = weights_proj
        self.spec = spec
        self.compressor = compressor
        self.keys = keys
        self.heads = heads
        self.width = spec.selection_width
        self.rope = rope
        self.quantize_q = quantize_q
        self.backend = backend

    def chooses(self, step: Step) -> bool:
        """True if entries are scored, which is not needed if all of them fit in the selection."""
        return self._most(step) > self.width

    def queries(
        self,
        x: Tensor,
        latent: Tensor,
        step: Step,
        layout: str,
        *,
        coded: QuantizedRows | None = None,
        q: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> IndexQueries | None:
        """Compute the index queries; None if no entries are scored.

        Args:
            x: [T, hidden], the layer's normalised input.
            latent: [T, q_lora_rank], the normalised query latent.
            step: metadata of the batch.
            layout: layout id of the index pages.
            coded: latent in FP8, if it is already computed.
            q: ``wq_b`` of the latent, if it is already computed.
            weights: ``weights_proj`` of x, if it is already computed.
        """
        if not self.chooses(step):
            return None
        weights = self.weights_proj(x) if weights is None else weights
        q = self.wq_b(latent, coded) if q is None else q
        q = q.unflatten(-1, (self.heads, -1))
        quant = {INDEX_FP8: "fp8", INDEX_MXFP4: "mxfp4"}.get(layout, "none")
        q, q_scales, weights = indexer_q_rope_quant(
            q,
            weights,
            step.positions,
            self.rope.table_for(step.max_seq_len),
            softmax_scale=q.shape[-1] ** -0.5,
            head_scale=self.heads**-0.5,
            quant=quant if self.quantize_q else "none",
            hadamard=self.spec.hadamard and layout == INDEX_MXFP4,
            backend=self.backend,
        )
        return IndexQueries(q, q_scales if q_scales.numel() else None, weights)

    def select(
        self, queries: IndexQueries | None, step: Step, cache: Tensor, layout: str
    ) -> Tensor:
        """Select entries, whose keys must have been written.

        Returns:
            int32 [T, width], request-local entries, valid ones first, then -1.
        """
        return self._select(queries, step, cache, layout, None)

    def select_rows(
        self,
        queries: IndexQueries | None,
        step: Step,
        cache: Tensor,
        layout: str,
        group: GroupStep,
    ) -> tuple[Tensor, Rows]:
        """Select entries as ``select`` does, and find their slots in the cache of ``group``."""
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
        visible = step.index_lens[self.spec.index_group]
        if queries is None:
            return all_entries(visible, self.width)
        tokens, requested = len(queries.q), sum(step.query_lens)
        selected = torch.empty(tokens, self.width, dtype=torch.int32, device=cache.device)
        if requested < tokens:  # rows of no request
            selected[requested:] = -1
            if target is not None:
                target.slots[requested:] = -1
                target.counts[requested:] = 0
        return select_entries(
            queries.q,
            queries.scales,
            queries.weights,
            visible,
            cache,
            step.groups[self.spec.index_group].block_table,
            query_lens=step.query_lens,
            num_decodes=step.num_decodes,
            max_context=self._most(step),
            layout=layout,
            out=selected,
            target=target,
            token_to_req=step.token_to_req,
            levels=self._levels(step, tokens, cache.device),
            backend=self.backend,
        )

    def _levels(self, step: Step, tokens: int, device: torch.device) -> TwoLevels | None:
        """Return the blocks to keep, or to select within; None if no block is dropped."""
        candidates = self.spec.candidates
        if candidates is None or not candidates.narrows(self._most(step)):
            return None
        keeps = candidates.source == self.spec.index
        if keeps:
            size = (tokens, candidates.blocks)
            blocks = torch.full(size, -1, dtype=torch.int32, device=device)
            step.candidates[candidates.source] = blocks
        return TwoLevels(step.candidates[candidates.source], candidates.block_size, keeps)

    def kept_blocks(self, step: Step) -> Tensor:
        """Return the blocks [T, n] that the layer has kept in this step, for a recorder."""
        candidates = self.spec.candidates
        assert candidates is not None
        kept = step.candidates.get(candidates.source)
        if kept is not None:
            return kept
        visible = step.index_lens[self.spec.index_group]
        count = (visible + candidates.block_size - 1) // candidates.block_size
        return all_entries(count, candidates.blocks)

    def write_latent_keys(
        self,
        latent: Tensor,
        compressor: LatentCompressor,
        step: Step,
        cache: Tensor,
        layout: str,
    ) -> None:
        """Write the step's index keys, projected from its entries.

        Args:
            latent: [T, D], output of ``compressor``.
            compressor: compressor of the layer.
            step: metadata of the batch.
            cache: index pages in ``layout``, written.
            layout: layout id of ``cache``.
        """
        assert self.keys is not None
        keys = rms_norm(self.keys.wk(latent), self.keys.norm, self.keys.eps, backend=self.backend)
        compressor.insert(keys, step, cache, step.groups[self.spec.index_group], layout)

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
        """Write the step's index keys; arguments as for ``Compressor.forward``."""
        assert self.compressor is not None
        assert self.spec.index_state_group is not None
        self.compressor(
            x,
            step,
            state,
            step.groups[self.spec.index_state_group],
            cache,
            step.groups[self.spec.index_group],
            layout,
            hadamard=self.spec.hadamard and layout == INDEX_MXFP4,
            projected=projected,
        )

    def _most(self, step: Step) -> int:
        """Return the number of entries of the longest request."""
        return step.max_seq_len // self.spec.ratio

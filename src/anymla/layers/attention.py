"""DeepSeek-V4 attention: a sliding window, compressed entries and a learned sink per head."""

from __future__ import annotations

import contextlib

from torch import Tensor, nn

from anymla.formats.quantized_rows import QuantizedRows
from anymla.layers import codes
from anymla.layers.caches import LayerCache
from anymla.layers.compressor import Compressor, LatentCompressor, SharedProjection
from anymla.layers.heads import AttentionInputs, Heads
from anymla.layers.indexer import Indexer, IndexQueries
from anymla.layers.linear import Linear, LinearPair
from anymla.layers.output_projection import OutputProjection
from anymla.layers.rope_table import RopeTable
from anymla.layers.rows import Rows
from anymla.layers.spec import WINDOW_GROUP, LayerSpec
from anymla.layers.step import Step
from anymla.ops.kv_cache import quantize_and_insert_k_cache
from anymla.ops.norm_rope import fused_q_kv_rmsnorm, qnorm_rope_kv_insert, rms_norm, rope

# Up to this many tokens a product takes as long as reading its weight, so one launch less is a
# gain.
_MOST_PAIRED_TOKENS = 256


class AttentionLayer(nn.Module):
    """Attention of one layer; ``spec`` selects its compression ratio and its other variants.

    If ranks share the layer, each has some heads and their output groups. The caches, and the
    modules that write them, are the same on all ranks.

    Attributes:
        spec: description of the layer.
        wq_a_wkv: query projection to the latent, merged with the projection to the single key that
            all heads share; that key is the value as well.
        wq_b: query projection from the latent to the heads.
        q_norm, kv_norm: RMSNorm weights [q_lora_rank] and [D].
        heads: attention of the heads over the rows that are listed for them.
        compressor, indexer: modules of the layer; None if the spec has none.
        projections: merged projections of both compressors and of the index heads' weights, if
            there are two compressors.
        queries: ``wq_b`` merged with the indexer's, for few tokens; None on a CPU, where weights
            stay in their mapped files.
        output: inverse RoPE and output projection.
    """

    def __init__(
        self,
        *,
        spec: LayerSpec,
        wq_a: Linear,
        wq_b: Linear,
        wkv: Linear,
        q_norm: Tensor,
        kv_norm: Tensor,
        sink: Tensor,
        compressor: Compressor | None,
        indexer: Indexer | None,
        output: OutputProjection,
        rope: RopeTable,
        eps: float,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.wq_a_wkv = LinearPair(wq_a, wkv)
        self.wq_b = wq_b
        self.q_norm = q_norm
        self.kv_norm = kv_norm
        self.heads = Heads(sink, output.groups, backend)
        self.compressor = compressor
        self.indexer = indexer
        self.projections = SharedProjection.of(
            compressor,
            None if indexer is None else indexer.compressor,
            None if indexer is None else indexer.weights_proj,
        )
        self.queries: LinearPair | None = None
        if indexer is not None and wq_b.packed.weight.device.type != "cpu":
            self.queries = LinearPair(wq_b, indexer.wq_b)
        self.output = output
        self.rope = rope
        self.eps = eps
        self.backend = backend

    @property
    def reads_codes(self) -> bool:
        """True if it saves a launch to pass the input in quantised form as well."""
        return self.wq_a_wkv.reads_codes

    def forward(
        self, x: Tensor, step: Step, cache: LayerCache, quantised: QuantizedRows | None = None
    ) -> Tensor:
        """Attend [T, hidden] -> [T, hidden]; the step's own rows are written to the caches first.

        A query may read its own window row, and an entry that its own token completes, so every
        write of the step precedes the first read. The compressor and the indexer need only the
        layer's input and the latent, and may run in parallel with the projections (``step.side``).
        """
        cos_sin = self.rope.table_for(step.max_seq_len)
        weights = self._write_caches(x, step, cache)
        latent, kv = self.wq_a_wkv(x, quantised)
        coded = codes.allocate(self.wq_b.reads_codes, latent)
        latent, kv = fused_q_kv_rmsnorm(
            latent,
            kv,
            self.q_norm,
            self.kv_norm,
            self.eps,
            backend=self.backend,
            **codes.as_kwargs(coded),
        )
        projected, index_q = self._project_queries(latent, coded, step)
        with step.side.beside(first=True) if self._chooses(step) else contextlib.nullcontext():
            queries = None
            if self.indexer is not None and self._chooses(step):
                queries = self.indexer.queries(
                    x, latent, step, cache.format.index, coded=coded, q=index_q, weights=weights
                )
            selected, entries = self._choice(queries, step, cache)
        q = self._rotate_and_insert(projected, kv, step, cache, cos_sin)
        step.side.join()
        inputs = AttentionInputs.of(self.spec, step, cache, entries, selected)
        if self.output.quantize_heads:
            attended = self.heads.quantised(q, inputs, step.positions, cos_sin)
            return self.output.of_quantized(*attended, q.dtype)
        out: Tensor = self.output(self.heads.attend(q, inputs), step.positions, cos_sin)
        return out

    def write_rows(self, x: Tensor, step: Step, cache: LayerCache) -> None:
        """Write window rows without attending.

        Args:
            x: [T, hidden], input that the rows are projected from.
            step: step of those tokens at their positions; padding writes nothing.
            cache: caches of the layer.
        """
        kv = rms_norm(self.wq_a_wkv.second(x), self.kv_norm, self.eps, backend=self.backend)
        self._insert(kv, step, cache, self.rope.table_for(step.max_seq_len))

    def _rotate_and_insert(
        self, q: Tensor, kv: Tensor, step: Step, cache: LayerCache, cos_sin: Tensor
    ) -> Tensor:
        """Return the rotated heads [T, H, D], normed if the layer norms them; write window rows."""
        if not self.spec.norms_heads:
            self._insert(kv, step, cache, cos_sin)
            rotated: Tensor = rope(q, step.positions, cos_sin, backend=self.backend)
            return rotated
        normed: Tensor = qnorm_rope_kv_insert(
            q,
            kv,
            cache.window,
            step.groups[WINDOW_GROUP].slot_mapping,
            step.positions,
            cos_sin,
            self.eps,
            layout=cache.format.main,
            out=q if q.is_contiguous() else None,
            backend=self.backend,
        )
        return normed

    def _insert(self, kv: Tensor, step: Step, cache: LayerCache, cos_sin: Tensor) -> None:
        """Rotate normed rows [T, D] and write them to the window cache."""
        rows = rope(kv.unsqueeze(1), step.positions, cos_sin, backend=self.backend).squeeze(1)
        quantize_and_insert_k_cache(
            rows,
            cache.window,
            step.groups[WINDOW_GROUP].slot_mapping,
            layout=cache.format.main,
            backend=self.backend,
        )

    def _write_caches(self, x: Tensor, step: Step, cache: LayerCache) -> Tensor | None:
        """Write the step's entries and index keys; return the index heads' weights, if computed."""
        if isinstance(self.compressor, LatentCompressor):
            with step.side.beside(first=True):
                self._write_latent(self.compressor, x, step, cache)
            return None
        own, index, weights, projected_at = x, x, None, None
        if self.indexer is not None and self.indexer.compressor is not None:
            # The path from the input to the selection is the longest; entries are not on it.
            with step.side.beside(first=True):
                if self.projections is not None:
                    own, index, weights = self.projections(x)
                    projected_at = step.side.mark()
                self._write_keys(index, step, cache)
        if self.compressor is not None:
            with step.side.beside(after=projected_at):
                self._write_entries(own, step, cache)
        return weights

    def _write_latent(
        self, compressor: LatentCompressor, x: Tensor, step: Step, cache: LayerCache
    ) -> None:
        """Write the step's entries, and the index keys that are projected from them."""
        spec = self.spec
        assert self.indexer is not None
        assert spec.compressed_group is not None
        assert cache.compressed is not None
        assert cache.index is not None
        states = None if spec.state_group is None else step.groups[spec.state_group]
        latent = compressor.latent(x, step, cache.state, states)
        self.indexer.write_latent_keys(latent, compressor, step, cache.index, cache.format.index)
        entries = step.groups[spec.compressed_group]
        compressor.insert(latent, step, cache.compressed, entries, cache.format.entries)

    def _write_entries(self, x: Tensor, step: Step, cache: LayerCache) -> None:
        """Write the step's compressed entries, from the input or from its projection."""
        spec = self.spec
        assert self.compressor is not None
        assert spec.compressed_group is not None
        assert spec.state_group is not None
        assert cache.compressed is not None
        assert cache.state is not None
        self.compressor(
            x,
            step,
            cache.state,
            step.groups[spec.state_group],
            cache.compressed,
            step.groups[spec.compressed_group],
            cache.format.entries,
            projected=self.projections is not None,
        )

    def _write_keys(self, x: Tensor, step: Step, cache: LayerCache) -> None:
        """Write the step's index keys, from the input or from its projection."""
        assert self.indexer is not None
        assert cache.index is not None
        assert cache.index_state is not None
        self.indexer.write_keys(
            x,
            step,
            cache.index,
            cache.index_state,
            cache.format.index,
            projected=self.projections is not None,
        )

    def _project_queries(
        self, latent: Tensor, coded: QuantizedRows | None, step: Step
    ) -> tuple[Tensor, Tensor | None]:
        """Return this rank's head queries [T, H, D], and the indexer's if they are merged."""
        pair, few = self.queries, len(latent) <= _MOST_PAIRED_TOKENS
        if pair is None or not few or not self._chooses(step):
            projected, index_q = self.wq_b(latent, coded), None
        else:
            projected, index_q = pair(latent, coded)
        return projected.unflatten(-1, (self.heads.count, -1)), index_q

    def _chooses(self, step: Step) -> bool:
        """True if this step scores entries."""
        return (
            self.indexer is not None
            and not self._attends_to_all(step)
            and self.indexer.chooses(step)
        )

    def _attends_to_all(self, step: Step) -> bool:
        """True if the step lists every entry; a recorder wants the selection in any case."""
        return self.spec.compressed_group in step.dense and step.recorder is None

    def _choice(
        self, queries: IndexQueries | None, step: Step, cache: LayerCache
    ) -> tuple[Tensor | None, Rows | None]:
        """Select the compressed entries that each token attends to.

        Returns:
            The indexer's selection, int32 [T, K] in entries of its request, or None; and its rows,
            or the rows of all entries, or None without entries.
        """
        listed = self.spec.listed
        if listed is None:
            return None, None
        if self._attends_to_all(step):
            return None, step.dense[listed]
        if self.indexer is None:
            source = self.spec.index_source
            return (None, step.dense[listed]) if source is None else step.selections[source]
        assert cache.index is not None
        selected, rows = self.indexer.select_rows(
            queries, step, cache.index, cache.format.index, step.groups[listed]
        )
        if self.spec.shares_selection:
            step.selections[self.spec.index] = selected, rows
        if step.recorder is not None:
            step.recorder("topk", self.spec.index, selected)
            candidates = self.spec.candidates
            if candidates is not None and candidates.source == self.spec.index:
                step.recorder("candidates", self.spec.index, self.indexer.kept_blocks(step))
        return selected, rows

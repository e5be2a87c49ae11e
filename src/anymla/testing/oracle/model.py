"""The whole network in float64, over a whole sequence at once."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

import torch
from torch import Tensor

from anymla.testing.oracle.attention import (
    AttentionOracle,
    IndexQueries,
    LayerRows,
    RowRounding,
    membership,
    spans,
)
from anymla.testing.oracle.blocks import (
    Gates,
    Site,
    collapse,
    expert_scores,
    hyper_post,
    mixture,
    rms_norm,
    stream_count,
)
from anymla.testing.oracle.config import OracleConfig
from anymla.testing.oracle.engram import add_engram, normalised_ids, rows_of
from anymla.testing.oracle.judge import Judge
from anymla.testing.oracle.rounding import hadamard
from anymla.testing.oracle.selection import best
from anymla.testing.oracle.weights import Weights

KV_ROUNDING = {
    "exact": RowRounding(),
    "fp32": RowRounding("rows_fp32_512", "rows_fp32_128"),
    "bf16": RowRounding("rows_bf16_512", "rows_bf16_128"),
    "fp8": RowRounding("v4_main_fp8", "v4_index_fp8"),
    "fp8-mxfp4-index": RowRounding("v4_main_fp8", "v4_index_mxfp4"),
    "fp8-nvfp4": RowRounding("v4_main_fp8", "v4_index_fp8", "v41_compressed_nvfp4"),
    "nvfp4": RowRounding("v41_main_fp8", "v4_index_mxfp4", "v41_compressed_nvfp4"),
}


@dataclasses.dataclass(frozen=True)
class OracleResult:
    """Result of a sequence.

    Attributes:
        logits: float64 [T, vocab], logits of the token after each position.
        streams: float64 [T, N, D], streams after the last layer.
        layers: streams after each layer, if requested.
        entered: streams that each layer's first site reads, if requested.
    """

    logits: Tensor
    streams: Tensor
    layers: tuple[Tensor, ...]
    entered: tuple[Tensor, ...]

    def logprobs(self, token_ids: Sequence[int]) -> Tensor:
        """Return log-probabilities of tokens 1 .. n-1 given those before each: float64 [n - 1].

        ``token_ids`` may have one token more than were run.
        """
        following = torch.as_tensor(token_ids[1:])
        table = self.logits[: len(following)].log_softmax(-1)
        return table.gather(1, following.unsqueeze(1)).squeeze(1)


@dataclasses.dataclass
class _Given(Gates):
    """Inputs of a run's layers, and values that they pass on.

    Attributes:
        rounding: layouts that round cache rows.
        judge: judge of a recorded run, or None.
        rows: rows that later layers read as well, by layer.
        chosen: selected entries by layer.
        kept: bool [T, E], mask of entries that later layers select within.
    """

    rounding: RowRounding = KV_ROUNDING["exact"]
    judge: Judge | None = None
    rows: dict[int, LayerRows] = dataclasses.field(default_factory=dict)
    chosen: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    kept: Tensor | None = None


class OracleModel:
    """DeepSeek-V4 or V4.1 from a checkpoint directory.

    Attributes:
        directory: directory of the checkpoint and its tokenizer.
        config: numbers of its config.json.
        weights: tensors of the checkpoint.
    """

    def __init__(self, directory: str | pathlib.Path) -> None:
        self.directory = directory
        self.config = OracleConfig.from_dir(directory)
        self.weights = Weights(directory, self.config.weight_block)

    def run(
        self,
        token_ids: Sequence[int],
        *,
        kv: str = "exact",
        judge: Judge | None = None,
        keep_layers: bool = False,
    ) -> OracleResult:
        """Run the network over a sequence.

        Args:
            token_ids: T token ids.
            kv: rounding of cache rows before they are read: "exact", "fp32", "bf16", "fp8"
                "fp8-mxfp4-index" or "nvfp4".
            judge: judge of a recorded run, whose cache rows and selections are used after they have
                been judged; None for the oracle's own.
            keep_layers: True to keep the streams before and after each layer.
        """
        ids = torch.as_tensor(token_ids)
        h = self._embed(ids).unsqueeze(1).repeat(1, stream_count(self.weights), 1)
        kept, entered = [], []
        given = _Given(rounding=KV_ROUNDING[kv], judge=judge)
        for index in range(self.config.layers):
            h = self._remember(h, token_ids, index, judge)
            if keep_layers:
                entered.append(h)
            h = self._layer(h, ids, index, f"layers.{index}", given)
            if keep_layers:
                kept.append(h)
        if given.pre is None:
            collapsed = Site.of(self.weights, "hc_head").head(h, self.config)
        else:
            collapsed = collapse(h, given.pre)
        logits = self._logits(collapsed, "norm.weight")
        return OracleResult(logits, h, tuple(kept), tuple(entered))

    def run_draft(self, streams: Tensor, next_ids: Sequence[int], *, kv: str = "exact") -> Tensor:
        """Compute logits [T, vocab] of the first draft layer at positions 0 .. T-1.

        Args:
            streams: streams [T, N, D] of the backbone.
            next_ids: token that follows each position.
            kv: rounding of cache rows, as in ``run``.
        """
        prefix, eps = "mtp.0", self.config.norm_eps
        embedded = rms_norm(
            self._embed(torch.as_tensor(next_ids)), self.weights[f"{prefix}.enorm.weight"], eps
        )
        normed = rms_norm(streams, self.weights[f"{prefix}.hnorm.weight"], eps)
        h = self.weights.apply(embedded, f"{prefix}.e_proj").unsqueeze(1)
        h = h + self.weights.apply(normed, f"{prefix}.h_proj")
        ids = torch.as_tensor(next_ids)
        given = _Given(rounding=KV_ROUNDING[kv])
        h = self._layer(h, ids, self.config.layers, prefix, given)
        collapsed = Site.of(self.weights, f"{prefix}.hc_head").head(h, self.config)
        return self._logits(collapsed, f"{prefix}.norm.weight")

    def _remember(
        self, h: Tensor, token_ids: Sequence[int], index: int, judge: Judge | None
    ) -> Tensor:
        """Return the streams [T, N, D] with the contribution of the layer's n-grams."""
        engram = self.config.engram
        if engram is None or index not in engram.layers:
            return h
        *tokens, pad = normalised_ids(self.directory, [*token_ids, engram.pad_token])
        rows = rows_of(engram, index, tokens, pad)
        prefix, error = f"layers.{index}.engram", 0.0 if judge is None else judge.error[index]
        h, more = add_engram(h, rows, self.weights, prefix, self.config.norm_eps, error)
        if judge is not None:
            judge.add_error(more)
        return h

    def _embed(self, ids: Tensor) -> Tensor:
        return self.weights["embed.weight"][ids]

    def _logits(self, x: Tensor, norm: str) -> Tensor:
        return rms_norm(x, self.weights[norm], self.config.norm_eps) @ self.weights["head.weight"].T

    def _layer(
        self,
        h: Tensor,
        ids: Tensor,
        index: int,
        prefix: str,
        given: _Given,
    ) -> Tensor:
        config, weights, judge = self.config, self.weights, given.judge
        y, post, comb = given.enter(Site.of(weights, f"{prefix}.hc_attn"), h, config)
        x = rms_norm(y, weights[f"{prefix}.attn_norm.weight"], config.norm_eps)
        h = hyper_post(self._attention(x, index, prefix, given), h, post, comb)

        y, post, comb = given.enter(Site.of(weights, f"{prefix}.hc_ffn"), h, config)
        x = rms_norm(y, weights[f"{prefix}.ffn_norm.weight"], config.norm_eps)
        scores = expert_scores(x, weights, f"{prefix}.ffn")
        chosen = self._experts(scores, ids, index, prefix, judge)
        u = mixture(x, scores, chosen, weights, f"{prefix}.ffn", config)
        return hyper_post(u, h, post, comb)

    def _attention(self, x: Tensor, index: int, prefix: str, given: _Given) -> Tensor:
        judge, rounding, sharing = given.judge, given.rounding, self.config.sharing
        positions = torch.arange(len(x))
        layer = AttentionOracle(self.config, self.weights, index, f"{prefix}.attn")
        q, index_queries = layer.queries(x, positions)
        exact = layer.rows(x, positions)
        rotates = sharing is None
        rotated = rotates and rounding.index == "v4_index_mxfp4"
        if judge is None:
            rows = exact.rounded(rounding, rotates=rotates)
        else:
            rows, rotated = judge.rows(index, exact, layer.ratio, rotates=rotates)
        if sharing is not None and layer.ratio:
            source = sharing.source(sharing.kv, index)
            given.rows.setdefault(source, rows)
            rows.compressed, rows.index = given.rows[source].compressed, given.rows[source].index
        if index_queries is not None and rotated:
            index_queries = IndexQueries(hadamard(index_queries.q), index_queries.weights)
        if sharing is not None and sharing.candidates is not None and index_queries is not None:
            source, blocks, size = sharing.candidates
            assert rows.index is not None
            if index > source:
                layer.kept = given.kept
            elif index == source:
                scores = layer.block_scores(index_queries, rows.index, size)
                if judge is None:
                    kept = best(scores, scores > -torch.inf, blocks)
                else:
                    bound = index_queries.magnitudes(rows.index)
                    kept = judge.candidates(index, scores, blocks, bound)
                members = membership(kept, scores.shape[1])
                given.kept = members.repeat_interleave(size, 1)
        chosen = self._entries(layer, index, index_queries, rows, judge)
        layer.kept = None
        if chosen is not None:
            given.chosen[index] = chosen
        elif sharing is not None and layer.ratio:
            chosen = given.chosen[sharing.source(sharing.index, index)]
        return layer.output(layer.attend(q, rows, chosen), positions)

    def _entries(
        self,
        layer: AttentionOracle,
        index: int,
        queries: IndexQueries | None,
        rows: LayerRows,
        judge: Judge | None,
    ) -> Tensor | None:
        """Return selected entries [T, K]; None without an indexer."""
        if queries is None:
            return None
        assert rows.index is not None
        if judge is None:
            parts = [layer.select(queries, rows.index, block) for block in spans(len(queries.q))]
            return torch.cat(parts)
        chosen = judge.recording.decisions(index, "topk", len(queries.q))
        for block in spans(len(queries.q)):
            judge.entries(index, layer, queries, rows.index, chosen, block)
        return chosen

    def _experts(
        self, scores: Tensor, ids: Tensor, index: int, prefix: str, judge: Judge | None
    ) -> Tensor:
        k = self.config.experts_per_token
        if index < self.config.hash_layers:
            table = self.weights[f"{prefix}.ffn.gate.tid2eid"][ids].long()
            return table if judge is None else judge.hashed_experts(index, table)
        biased = scores + self.weights[f"{prefix}.ffn.gate.bias"]
        if judge is None:
            return best(biased, torch.ones_like(biased, dtype=torch.bool), k)
        return judge.experts(index, biased, k)

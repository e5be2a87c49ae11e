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
    spans,
)
from anymla.testing.oracle.blocks import (
    Site,
    expert_scores,
    hyper_post,
    mixture,
    rms_norm,
)
from anymla.testing.oracle.config import OracleConfig
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
}


@dataclasses.dataclass(frozen=True)
class OracleResult:
    """What a sequence gives.

    Attributes:
        logits: float64 [T, vocab], of the token after each position.
        streams: float64 [T, N, D], after the last layer.
        layers: the streams after each layer, if they were asked for.
    """

    logits: Tensor
    streams: Tensor
    layers: tuple[Tensor, ...]

    def logprobs(self, token_ids: Sequence[int]) -> Tensor:
        """Log-probability of tokens 1 .. n-1 given those before each: float64 [n - 1].

        ``token_ids`` may have one token more than were run.
        """
        following = torch.as_tensor(token_ids[1:])
        table = self.logits[: len(following)].log_softmax(-1)
        return table.gather(1, following.unsqueeze(1)).squeeze(1)


class OracleModel:
    """DeepSeek-V4 from a checkpoint directory.

    Attributes:
        config: the numbers of its config.json.
        weights: its tensors.
    """

    def __init__(self, directory: str | pathlib.Path) -> None:
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
        """Run a sequence.

        Args:
            token_ids: T tokens.
            kv: how cache rows are rounded before they are read: "exact", "fp32", "bf16", "fp8"
                or "fp8-mxfp4-index".
            judge: a recorded run to follow instead: its cache rows are read and its selections
                taken, after both have been judged.
            keep_layers: keep the streams after each layer.
        """
        ids = torch.as_tensor(token_ids)
        h = self._embed(ids).unsqueeze(1).repeat(1, self._streams, 1)
        kept = []
        for index in range(self.config.layers):
            h = self._layer(h, ids, index, f"layers.{index}", KV_ROUNDING[kv], judge)
            if keep_layers:
                kept.append(h)
        collapsed = Site.of(self.weights, "hc_head").head(h, self.config)
        return OracleResult(self._logits(collapsed, "norm.weight"), h, tuple(kept))

    def run_draft(self, streams: Tensor, next_ids: Sequence[int], *, kv: str = "exact") -> Tensor:
        """Logits [T, vocab] of the first draft layer at positions 0 .. T-1.

        Args:
            streams: [T, N, D], of the backbone.
            next_ids: the token that follows each position.
            kv: as in ``run``.
        """
        prefix, eps = "mtp.0", self.config.norm_eps
        embedded = rms_norm(
            self._embed(torch.as_tensor(next_ids)), self.weights[f"{prefix}.enorm.weight"], eps
        )
        normed = rms_norm(streams, self.weights[f"{prefix}.hnorm.weight"], eps)
        h = self.weights.apply(embedded, f"{prefix}.e_proj").unsqueeze(1)
        h = h + self.weights.apply(normed, f"{prefix}.h_proj")
        ids = torch.as_tensor(next_ids)
        h = self._layer(h, ids, self.config.layers, prefix, KV_ROUNDING[kv], None)
        collapsed = Site.of(self.weights, f"{prefix}.hc_head").head(h, self.config)
        return self._logits(collapsed, f"{prefix}.norm.weight")

    @property
    def _streams(self) -> int:
        return len(self.weights["hc_head_base"])

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
        rounding: RowRounding,
        judge: Judge | None,
    ) -> Tensor:
        config, weights = self.config, self.weights
        site = Site.of(weights, f"{prefix}.hc_attn")
        y, post, comb = site.pre(h, config)
        x = rms_norm(y, weights[f"{prefix}.attn_norm.weight"], config.norm_eps)
        h = hyper_post(self._attention(x, index, prefix, rounding, judge), h, post, comb)

        site = Site.of(weights, f"{prefix}.hc_ffn")
        y, post, comb = site.pre(h, config)
        x = rms_norm(y, weights[f"{prefix}.ffn_norm.weight"], config.norm_eps)
        scores = expert_scores(x, weights, f"{prefix}.ffn")
        chosen = self._experts(scores, ids, index, prefix, judge)
        u = mixture(x, scores, chosen, weights, f"{prefix}.ffn", config)
        return hyper_post(u, h, post, comb)

    def _attention(
        self, x: Tensor, index: int, prefix: str, rounding: RowRounding, judge: Judge | None
    ) -> Tensor:
        positions = torch.arange(len(x))
        layer = AttentionOracle(self.config, self.weights, index, f"{prefix}.attn")
        q, index_queries = layer.queries(x, positions)
        exact = layer.rows(x, positions)
        rotated = rounding.index == "v4_index_mxfp4"
        if judge is None:
            rows = exact.rounded(rounding)
        else:
            rows, rotated = judge.rows(index, exact)
        if index_queries is not None and rotated:
            index_queries = IndexQueries(hadamard(index_queries.q), index_queries.weights)
        chosen = self._entries(layer, index, index_queries, rows, judge)
        return layer.output(layer.attend(q, rows, chosen), positions)

    def _entries(
        self,
        layer: AttentionOracle,
        index: int,
        queries: IndexQueries | None,
        rows: LayerRows,
        judge: Judge | None,
    ) -> Tensor | None:
        """Selected entries [T, K]; None where there is no indexer."""
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

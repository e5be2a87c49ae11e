"""The DSpark drafter in float64: dense, unpaged, one block of one text at a time."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Sequence

import torch
from torch import Tensor

from anymla.testing.oracle.attention import AttentionOracle, LayerRows
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
from anymla.testing.oracle.config import DSpark, OracleConfig
from anymla.testing.oracle.model import KV_ROUNDING, OracleResult
from anymla.testing.oracle.selection import best
from anymla.testing.oracle.weights import Weights


@dataclasses.dataclass(frozen=True)
class OracleBlock:
    """Prediction of a block for the tokens after its anchor.

    Attributes:
        tokens: k predicted token ids.
        logits: float64 [k, vocab], the Markov bias included.
        confidence: float64 [k], logits of the probability that each token is right if those before
            it are; None without a confidence head.
    """

    tokens: tuple[int, ...]
    logits: Tensor
    confidence: Tensor | None


class DSparkOracle:
    """The DSpark drafter of a checkpoint directory.

    Attributes:
        config: numbers of its config.json.
        weights: tensors of the checkpoint.
        stages: number of ``mtp.N`` prefixes.
    """

    def __init__(self, directory: str | pathlib.Path) -> None:
        self.config = OracleConfig.from_dir(directory)
        self.weights = Weights(directory, self.config.weight_block)
        self.stages = next(
            n for n in itertools.count() if f"mtp.{n}.attn_norm.weight" not in self.weights
        )

    @property
    def dspark(self) -> DSpark:
        """Numbers of the drafter's configuration."""
        assert self.config.dspark is not None, "the checkpoint has no DSpark drafter"
        return self.config.dspark

    def taps(self, backbone: OracleResult) -> Tensor:
        """Return the means [T, taps, D] of the streams at the target layers.

        Args:
            backbone: result of a run that kept the streams of its layers.
        """
        layers = backbone.layers if self.config.sharing is None else backbone.entered
        return torch.stack([layers[n].mean(1) for n in self.dspark.target_layers], 1)

    def context(self, taps: Tensor, *, kv: str = "exact") -> list[Tensor]:
        """Return each stage's rows [T, 512] of positions 0 .. T-1, as read back from a cache.

        Args:
            taps: [T, taps, D], outputs of the backbone's tapped layers.
            kv: rounding of cache rows, as in ``OracleModel.run``.
        """
        x = self.weights.apply(taps.flatten(1), "mtp.0.main_proj")
        x = rms_norm(x, self.weights["mtp.0.main_norm.weight"], self.config.norm_eps)
        return [
            self._rows(self._attention(stage), x, torch.arange(len(x)), kv)
            for stage in range(self.stages)
        ]

    def block(
        self,
        context: Sequence[Tensor],
        anchor: int,
        *,
        size: int | None = None,
        kv: str = "exact",
        tokens: Sequence[int] | None = None,
    ) -> OracleBlock:
        """Guess the tokens after an anchor.

        Args:
            context: rows [T, 512] of each stage; the anchor is at position T, and the window counts
                from there.
            anchor: token id of the anchor.
            size: number of rows of the block; None for the trained number.
            kv: rounding of cache rows, as in ``OracleModel.run``.
            tokens: given choices, left to right; None for the best of each row.
        """
        size = self.dspark.block_size if size is None else size
        ids = torch.tensor([anchor] + [self.dspark.noise_token] * (size - 1))
        embedded = self.weights["embed.weight"][ids]
        h = embedded.unsqueeze(1).repeat(1, stream_count(self.weights), 1)
        positions = len(context[0]) + torch.arange(size)
        gates = Gates()
        for stage, rows in enumerate(context):
            h = self._stage(stage, h, positions, rows[-self.config.window :], kv, gates)
        last = f"mtp.{self.stages - 1}"
        if gates.pre is None:
            x = Site.of(self.weights, f"{last}.hc_head").head(h, self.config)
        else:
            x = collapse(h, gates.pre)
        normed = rms_norm(x, self.weights[f"{last}.norm.weight"], self.config.norm_eps)
        return self._heads(f"{last}.", x, normed @ self.weights["head.weight"].T, anchor, tokens)

    def _heads(
        self, last: str, x: Tensor, base: Tensor, anchor: int, given: Sequence[int] | None
    ) -> OracleBlock:
        tables = ("markov_w1", "markov_w2") if self.config.sharing is None else ("embed", "head")
        w1, w2 = (self.weights[f"{last}markov_head.{table}.weight"] for table in tables)
        name = f"{last}confidence_head.proj.weight"
        sure = self.weights[name][0] if name in self.weights else None
        chosen: list[int] = []
        logits, confidence = [], []
        for i, row in enumerate(base):
            before = w1[chosen[-1] if chosen else anchor]
            logits.append(row + w2 @ before)
            if sure is not None:
                confidence.append(torch.cat((x[i], before)) @ sure)
            chosen.append(int(logits[-1].argmax()) if given is None else given[i])
        return OracleBlock(
            tuple(chosen), torch.stack(logits), torch.stack(confidence) if confidence else None
        )

    def _stage(
        self,
        stage: int,
        h: Tensor,
        positions: Tensor,
        context: Tensor,
        kv: str,
        gates: Gates,
    ) -> Tensor:
        config, weights, prefix = self.config, self.weights, f"mtp.{stage}"
        y, post, comb = gates.enter(Site.of(weights, f"{prefix}.hc_attn"), h, config)
        x = rms_norm(y, weights[f"{prefix}.attn_norm.weight"], config.norm_eps)
        h = hyper_post(self._attend(stage, x, positions, context, kv), h, post, comb)

        y, post, comb = gates.enter(Site.of(weights, f"{prefix}.hc_ffn"), h, config)
        x = rms_norm(y, weights[f"{prefix}.ffn_norm.weight"], config.norm_eps)
        scores = expert_scores(x, weights, f"{prefix}.ffn")
        biased = scores + weights[f"{prefix}.ffn.gate.bias"]
        everyone = torch.ones_like(biased, dtype=torch.bool)
        chosen = best(biased, everyone, self.dspark.experts_per_token)
        u = mixture(x, scores, chosen, weights, f"{prefix}.ffn", config)
        return hyper_post(u, h, post, comb)

    def _attend(self, stage: int, x: Tensor, positions: Tensor, context: Tensor, kv: str) -> Tensor:
        """Attend with every row to the same keys: the context, and the whole block."""
        layer = self._attention(stage)
        q, _ = layer.queries(x, positions)
        keys = torch.cat((context, self._rows(layer, x, positions, kv)))
        scores = torch.einsum("thd,nd->thn", q, keys) * self.config.head_dim**-0.5
        sink = self.weights[f"mtp.{stage}.attn.attn_sink"].view(1, -1, 1).expand(len(x), -1, 1)
        weight = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        return layer.output(torch.einsum("thn,nd->thd", weight, keys), positions)

    def _rows(self, layer: AttentionOracle, x: Tensor, positions: Tensor, kv: str) -> Tensor:
        return LayerRows(layer.rows(x, positions).window).rounded(KV_ROUNDING[kv]).window

    def _attention(self, stage: int) -> AttentionOracle:
        index = self.config.layers + stage
        return AttentionOracle(self.config, self.weights, index, f"mtp.{stage}.attn")

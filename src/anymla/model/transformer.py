"""The whole network: embedding, decoder layers, head, and the draft layers behind them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from anymla.layers.attention import AttentionLayer
from anymla.layers.caches import LayerCache
from anymla.layers.decoder import DecoderLayer
from anymla.layers.hyper_connection import HyperConnectionHead, Streams
from anymla.layers.mtp import DraftLayer
from anymla.layers.ranks import ALONE, Ranks
from anymla.layers.spec import LayerSpec
from anymla.layers.step import Step
from anymla.model.config import ModelConfig
from anymla.ops.linear import linear_float32
from anymla.ops.linear.config import plain_backend


class Transformer(nn.Module):
    """DeepSeek-V4.

    Attributes:
        config: the checkpoint's configuration.
        layer_specs: one spec a layer, backbone first, then draft layers.
        dtype: dtype of the activations.
        embedding: [vocab, hidden].
        layers: the backbone.
        head: collapses the streams after the last layer.
        lm_head: float32, or the activations' dtype [vocab, hidden].
        drafts: MTP layers; may be empty.
        ranks: the processes that share the network.
    """

    def __init__(
        self,
        *,
        config: ModelConfig,
        layer_specs: tuple[LayerSpec, ...],
        dtype: torch.dtype,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        head: HyperConnectionHead,
        lm_head: Tensor,
        drafts: Sequence[DraftLayer],
        ranks: Ranks = ALONE,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.layer_specs = layer_specs
        self.dtype = dtype
        self.embedding = embedding
        self.layers = nn.ModuleList(layers)
        self.head = head
        self.lm_head = lm_head
        self.drafts = nn.ModuleList(drafts)
        self.ranks = ranks
        self.backend = backend

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    def reserve(self, max_seq_len: int) -> list[Tensor]:
        """Make the rotary tables cover a length, so that shorter steps never replace them.

        Returns:
            The tables; whoever records their addresses must keep them.
        """
        return [
            module.rope.table_for(max_seq_len)
            for module in self.modules()
            if isinstance(module, AttentionLayer)
        ]

    @torch.no_grad()
    def forward(
        self, step: Step, caches: Sequence[LayerCache], *, only: Sequence[int] | None = None
    ) -> Tensor:
        """Run the backbone.

        Args:
            step: the batch.
            caches: one a backbone layer; written.
            only: run these layers; None for all.

        Returns:
            [T, N, hidden], the streams after the last layer.
        """
        # All streams begin as the same rows, which are there once.
        h = self.embed(step.token_ids).unsqueeze(1).expand(-1, self.config.hc_mult, -1)
        streams = Streams(h)
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            if only is None or index in only:
                streams = layer(streams, step, cache)
        return streams.flush(self.backend)

    def kinds_of_layers(self) -> list[int]:
        """The first layer of every kind: which attention, and how it routes."""
        first: dict[tuple[object, ...], int] = {}
        for index, (layer, spec) in enumerate(zip(self.layers, self.layer_specs, strict=False)):
            assert isinstance(layer, DecoderLayer)
            hashed = layer.ffn.router.token_experts is not None
            first.setdefault((spec.ratio, spec.selects, hashed), index)
        return sorted(first.values())

    @torch.no_grad()
    def logits(self, h: Tensor) -> Tensor:
        """Next-token logits, float32 [n, vocab], of backbone streams [n, N, hidden]."""
        return self._logits(self.head(h))

    @torch.no_grad()
    def mtp_forward(
        self, h: Tensor, next_ids: Tensor, step: Step, cache: LayerCache, draft: int = 0
    ) -> Tensor:
        """Run a draft layer.

        Args:
            h: [T, N, hidden], backbone streams, or this layer's own output for a further draft.
            next_ids: int64 [T], the token that follows each position.
            step: the batch at the positions of ``h``.
            cache: the draft layer's caches; written.
            draft: which draft layer.

        Returns:
            [T, N, hidden], to be read by ``mtp_logits``.
        """
        out: Tensor = self.drafts[draft](h, self.embed(next_ids), step, cache)
        return out

    @torch.no_grad()
    def mtp_logits(self, h: Tensor, draft: int = 0) -> Tensor:
        """Logits, float32 [n, vocab], of a draft layer's streams [n, N, hidden]."""
        layer = self.drafts[draft]
        assert isinstance(layer, DraftLayer)
        return self._logits(layer.head(h))

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings [T, hidden] of int64 ids [T], in the activations' dtype."""
        return self.embedding[token_ids].to(self.dtype)

    def _logits(self, x: Tensor) -> Tensor:
        out: Tensor = linear_float32(x, self.lm_head, backend=plain_backend(self.backend))
        return out

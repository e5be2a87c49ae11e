"""The multi-token-prediction layer: drafts the token after next from the backbone's streams."""

from __future__ import annotations

from torch import Tensor, nn

from anymla.layers.caches import LayerCache
from anymla.layers.decoder import DecoderLayer
from anymla.layers.hyper_connection import HyperConnectionHead, Streams
from anymla.layers.linear import Linear
from anymla.layers.step import Step
from anymla.ops.norm_rope import rms_norm


class DraftLayer(nn.Module):
    """One multi-token-prediction layer.

    Attributes:
        e_proj, h_proj: [hidden, hidden] projections of the next token's embedding and of each
            stream.
        e_norm, h_norm: RMSNorm weights [hidden] before them.
        block: an ordinary decoder layer, window only.
        head: collapses the streams; the embedding and the lm head are the backbone's.
    """

    def __init__(
        self,
        *,
        e_proj: Linear,
        h_proj: Linear,
        e_norm: Tensor,
        h_norm: Tensor,
        block: DecoderLayer,
        head: HyperConnectionHead,
        eps: float,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.e_proj = e_proj
        self.h_proj = h_proj
        self.e_norm = e_norm
        self.h_norm = h_norm
        self.block = block
        self.head = head
        self.eps = eps
        self.backend = backend

    def forward(self, h: Tensor, next_embedding: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """Compute draft streams.

        Args:
            h: [T, N, hidden], streams of the backbone after its last layer (or this layer's own
                output for a further draft).
            next_embedding: [T, hidden], embedding of the token that follows each position.
            step: metadata of the batch at the positions of ``h``.
            cache: caches of this layer.

        Returns:
            Draft streams of the layer, [T, N, hidden].
        """
        e = self.e_proj(rms_norm(next_embedding, self.e_norm, self.eps, backend=self.backend))
        g = self.h_proj(rms_norm(h, self.h_norm, self.eps, backend=self.backend))
        streams: Streams = self.block(Streams(e.unsqueeze(1) + g), step, cache)
        return streams.flush(self.backend)

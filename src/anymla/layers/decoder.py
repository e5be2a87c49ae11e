"""One decoder layer: attention and experts, each inside a hyper-connection site."""

from __future__ import annotations

from torch import Tensor, nn

from anymla.layers.attention import AttentionLayer
from anymla.layers.caches import LayerCache
from anymla.layers.hyper_connection import HyperConnection
from anymla.layers.moe import MixtureOfExperts
from anymla.layers.step import Step


class DecoderLayer(nn.Module):
    """Streams in, streams out.

    Attributes:
        attention_site, ffn_site: the hyper-connections with the norms in front.
        attention: the attention layer.
        ffn: the mixture of experts.
    """

    def __init__(
        self,
        *,
        attention_site: HyperConnection,
        attention: AttentionLayer,
        ffn_site: HyperConnection,
        ffn: MixtureOfExperts,
    ) -> None:
        super().__init__()
        self.attention_site = attention_site
        self.attention = attention
        self.ffn_site = ffn_site
        self.ffn = ffn

    def forward(self, h: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """Map streams [T, N, hidden] to streams [T, N, hidden]."""
        x, mix = self.attention_site.enter(h)
        u = self.attention(x, step, cache)
        h, x, mix = self.ffn_site.follow(u, h, mix)
        u = self.ffn(x, step)
        return self.ffn_site.leave(u, h, mix)

"""One decoder layer: attention and experts, each inside a hyper-connection site."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from anymla.layers.attention import AttentionLayer
from anymla.layers.caches import LayerCache
from anymla.layers.engram import Engram
from anymla.layers.hyper_connection import HyperConnection, Streams
from anymla.layers.moe import MixtureOfExperts
from anymla.layers.step import Step


class DecoderLayer(nn.Module):
    """One decoder layer, which maps streams to streams.

    Attributes:
        engram: n-gram memory that is added to the streams first, or None.
        attention_site, ffn_site: hyper-connections with the norms before the sub-layers.
        attention: attention of the layer.
        ffn: mixture of experts.
    """

    def __init__(
        self,
        *,
        attention_site: HyperConnection,
        attention: AttentionLayer,
        ffn_site: HyperConnection,
        ffn: MixtureOfExperts,
        engram: Engram | None = None,
    ) -> None:
        super().__init__()
        self.engram = engram
        self.attention_site = attention_site
        self.attention = attention
        self.ffn_site = ffn_site
        self.ffn = ffn

    def forward(
        self,
        streams: Streams,
        step: Step,
        cache: LayerCache,
        entering: Callable[[Tensor], None] | None = None,
    ) -> Streams:
        """Run both sub-layers.

        The output of the second sub-layer is returned to the streams by the next site, in the same
        operation as its own work; ``flush`` returns it after the last layer.

        Args:
            streams: streams after the previous layer.
            step: metadata of the batch.
            cache: caches of this layer, written.
            entering: callback with the streams [T, N, hidden] once the previous layer's output is
                returned.
        """
        if self.engram is not None:
            h = self.engram(streams.flush(self.engram.backend), step)
            streams = Streams(h, pre=streams.pre)
        at = self.attention_site.enter(streams, quantises=self.attention.reads_codes)
        if entering is not None:
            entering(at.h)
        streams = at.with_output(self.attention(at.x, step, cache, at.quantised))
        at = self.ffn_site.enter(streams, quantises=self.ffn.reads_codes)
        return at.with_output(self.ffn(at.x, step, at.quantised))

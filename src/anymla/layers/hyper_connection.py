"""Manifold-constrained hyper-connections: parallel residual streams, mixed around a sub-layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from anymla.formats.quantized_rows import QuantizedRows
from anymla.layers import codes
from anymla.ops.hyper_connection import (
    hc_collapse_norm,
    hc_gates,
    hc_head,
    hc_post,
    hc_post_pre_norm,
    hc_pre,
)
from anymla.ops.norm_rope import rms_norm


@dataclasses.dataclass(frozen=True)
class Mix:
    """How a site's output returns to the streams: ``post`` [T, N] and ``comb`` [T, N, N]."""

    post: Tensor
    comb: Tensor


@dataclasses.dataclass(frozen=True)
class Streams:
    """The parallel residual streams between two sub-layers.

    Attributes:
        h: [T, N, hidden], streams.
        output: [T, hidden], what a sub-layer has yet to return to them; None for nothing.
        mix: how it returns.
        pre: [T, N], gates of the last site, through which a delayed site reads the streams; None
            before the first site, where the first stream is read.
    """

    h: Tensor
    output: Tensor | None = None
    mix: Mix | None = None
    pre: Tensor | None = None

    def flush(self, backend: str | None = None) -> Tensor:
        """The streams with the output returned."""
        if self.output is None:
            return self.h
        assert self.mix is not None
        h: Tensor = hc_post(self.output, self.h, self.mix.post, self.mix.comb, backend=backend)
        return h


@dataclasses.dataclass(frozen=True)
class Entered:
    """What comes out of the streams where a sub-layer begins.

    Attributes:
        h: [T, N, hidden], streams.
        x: [T, hidden], the sub-layer's normalised input.
        quantised: x in FP8, or None.
        mix: how its output returns.
        pre: [T, N], the site's gates that the next site reads through, if it is delayed.
    """

    h: Tensor
    x: Tensor
    quantised: QuantizedRows | None
    mix: Mix
    pre: Tensor | None = None

    def with_output(self, output: Tensor) -> Streams:
        """The streams behind the sub-layer, whose output has yet to return to them."""
        return Streams(self.h, output, self.mix, self.pre)


@dataclasses.dataclass(frozen=True)
class HyperConnectionOptions:
    """Constants of all sites of a model.

    Attributes:
        norm_eps: of the norms.
        eps: of the gates.
        iterations: of Sinkhorn's normalisation.
        delayed: a site reads the streams through the gates of the site before it.
    """

    norm_eps: float
    eps: float
    iterations: int
    delayed: bool = False


class _Collapse(nn.Module):
    """The weights of a place where streams become one."""

    def __init__(
        self,
        *,
        fn: Tensor,
        base: Tensor,
        scale: Tensor,
        norm: Tensor,
        options: HyperConnectionOptions,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.fn = fn
        self.base = base
        self.scale = scale
        self.norm = norm
        self.options = options
        self.backend = backend


class HyperConnection(_Collapse):
    """The site around one sub-layer, together with the RMSNorm in front of it.

    Attributes:
        fn: float32 [(2 + N) * N, N * hidden].
        base: float32 [(2 + N) * N].
        scale: float32 [3], of the pre, post and comb gates.
        norm: [hidden], RMSNorm weight of the sub-layer's input.
    """

    def enter(self, streams: Streams, *, quantises: bool = False) -> Entered:
        """Collapse the streams to the sub-layer's normalised input.

        What the sub-layer before has yet to return is returned first, in the same operation.

        Args:
            streams: the streams.
            quantises: give the input in FP8 as well.
        """
        quantised = codes.allocate(quantises, streams.h)
        options: dict[str, Any] = codes.as_kwargs(quantised) | {
            "norm_eps": self.options.norm_eps,
            "hc_eps": self.options.eps,
            "iters": self.options.iterations,
            "backend": self.backend,
        }
        if self.options.delayed:
            return self._enter_delayed(streams, quantised)
        if streams.output is not None:
            assert streams.mix is not None
            h, x, post, comb = hc_post_pre_norm(
                streams.output,
                streams.h,
                streams.mix.post,
                streams.mix.comb,
                self.fn,
                self.base,
                self.scale,
                self.norm,
                **options,
            )
            return Entered(h, x, quantised, Mix(post, comb))
        x, post, comb = hc_pre(
            streams.h, self.fn, self.base, self.scale, norm_weight=self.norm, **options
        )
        return Entered(streams.h, x, quantised, Mix(post, comb))

    def _enter_delayed(self, streams: Streams, quantised: QuantizedRows | None) -> Entered:
        """Gates of these streams for what follows; the input through those of the site before."""
        h = streams.flush(self.backend)
        pre, post, comb = hc_gates(
            h,
            self.fn,
            self.base,
            self.scale,
            norm_eps=self.options.norm_eps,
            hc_eps=self.options.eps,
            iters=self.options.iterations,
            backend=self.backend,
        )
        x = collapsed(h, streams.pre, self.norm, self.options, self.backend, quantised)
        return Entered(h, x, quantised, Mix(post, comb), pre)


def collapsed(
    h: Tensor,
    pre: Tensor | None,
    norm: Tensor | None,
    options: HyperConnectionOptions,
    backend: str | None,
    quantised: QuantizedRows | None = None,
) -> Tensor:
    """[T, hidden] of streams, read through gates, normalised with a weight.

    Without gates, the first stream is read.
    """
    if pre is None:
        pre = h.new_zeros(h.shape[:2], dtype=torch.promote_types(h.dtype, torch.float32))
        pre[:, 0] = 1
    x: Tensor = hc_collapse_norm(
        h, pre, norm, norm_eps=options.norm_eps, backend=backend, **codes.as_kwargs(quantised)
    )
    return x


class DelayedHead(nn.Module):
    """The head of a network of delayed sites: it reads through the last site's gates.

    What leaves the network is the collapsed streams, normalised: one row a token.

    Attributes:
        norm: [hidden], weight of the final RMSNorm.
    """

    def __init__(
        self, *, norm: Tensor, options: HyperConnectionOptions, backend: str | None = None
    ) -> None:
        super().__init__()
        self.norm = norm
        self.options = options
        self.backend = backend

    def leave(self, streams: Streams) -> Tensor:
        """What the last layer's streams, all returned, leave for ``forward``: [T, 1, hidden]."""
        at = collapsed(streams.h, streams.pre, self.norm, self.options, self.backend)
        return at.unsqueeze(1)

    def forward(self, h: Tensor) -> Tensor:
        """Map [n, 1, hidden] to [n, hidden]."""
        return h.squeeze(1)

    def collapse(self, streams: Streams) -> Tensor:
        """[T, hidden] of streams, all returned; not normed."""
        return collapsed(streams.h, streams.pre, None, self.options, self.backend)

    def normed(self, y: Tensor) -> Tensor:
        """Normalise [..., hidden]."""
        out: Tensor = rms_norm(y, self.norm, self.options.norm_eps, backend=self.backend)
        return out


class HyperConnectionHead(_Collapse):
    """Collapse the streams after the last layer and normalise.

    Attributes:
        fn: float32 [N, N * hidden].
        base: float32 [N].
        scale: float32 [1].
        norm: [hidden], weight of the final RMSNorm.
    """

    def leave(self, streams: Streams) -> Tensor:
        """What the last layer's streams, all returned, leave for ``forward``: [T, N, hidden]."""
        return streams.h

    def forward(self, h: Tensor) -> Tensor:
        """Map streams [n, N, hidden] to [n, hidden]."""
        return self.normed(self.collapse(Streams(h)))

    def collapse(self, streams: Streams) -> Tensor:
        """[T, hidden] of streams, all returned; not normed."""
        y: Tensor = hc_head(
            streams.h,
            self.fn,
            self.base,
            self.scale,
            norm_eps=self.options.norm_eps,
            hc_eps=self.options.eps,
            backend=self.backend,
        )
        return y

    def normed(self, y: Tensor) -> Tensor:
        """Normalise [..., hidden]."""
        out: Tensor = rms_norm(y, self.norm, self.options.norm_eps, backend=self.backend)
        return out

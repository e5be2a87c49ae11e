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
    """Weights that return an output to the streams: ``post`` [T, N] and ``comb`` [T, N, N]."""

    post: Tensor
    comb: Tensor


@dataclasses.dataclass(frozen=True)
class Streams:
    """The parallel residual streams between two sub-layers.

    Attributes:
        h: [T, N, hidden], state of all streams.
        output: [T, hidden], output of a sub-layer that is not yet returned to them; None for none.
        mix: weights that return the output.
        pre: [T, N], gates of the last site, through which a delayed site reads the streams; None
            before the first site, which reads the first stream.
    """

    h: Tensor
    output: Tensor | None = None
    mix: Mix | None = None
    pre: Tensor | None = None

    def flush(self, backend: str | None = None) -> Tensor:
        """Return the streams after the output has been returned to them."""
        if self.output is None:
            return self.h
        assert self.mix is not None
        h: Tensor = hc_post(self.output, self.h, self.mix.post, self.mix.comb, backend=backend)
        return h


@dataclasses.dataclass(frozen=True)
class Entered:
    """Input of a sub-layer, and the streams where it begins.

    Attributes:
        h: [T, N, hidden], streams where the sub-layer begins.
        x: [T, hidden], the sub-layer's normalised input.
        quantised: x in FP8, or None.
        mix: weights that return the sub-layer's output.
        pre: [T, N], gates through which the next site reads if it is delayed.
    """

    h: Tensor
    x: Tensor
    quantised: QuantizedRows | None
    mix: Mix
    pre: Tensor | None = None

    def with_output(self, output: Tensor) -> Streams:
        """Return the streams after the sub-layer, whose output is not yet returned to them."""
        return Streams(self.h, output, self.mix, self.pre)


@dataclasses.dataclass(frozen=True)
class HyperConnectionOptions:
    """Constants of all sites of a model.

    Attributes:
        norm_eps: epsilon of the norms.
        eps: epsilon of the gates.
        iterations: number of Sinkhorn iterations.
        delayed: True if a site reads the streams through the gates of the site before it.
    """

    norm_eps: float
    eps: float
    iterations: int
    delayed: bool = False


class _Collapse(nn.Module):
    """Weights of a place where the streams are collapsed to one."""

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
        fn: float32 [(2 + N) * N, N * hidden], projection to the gates.
        base: float32 [(2 + N) * N], bias of the gates.
        scale: float32 [3], factors of the pre, post and comb gates.
        norm: [hidden], RMSNorm weight of the sub-layer's input.
    """

    def enter(self, streams: Streams, *, quantises: bool = False) -> Entered:
        """Collapse the streams to the sub-layer's normalised input.

        The output of the sub-layer before is returned first, in the same operation.

        Args:
            streams: streams before the site.
            quantises: True to give the input in FP8 as well.
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
        """Compute these streams' gates for the next site; read through the last site's gates."""
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
    """Read streams [T, N, hidden] through gates, and normalise the result [T, hidden].

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

    The network ends with the collapsed, normalised streams: one row a token.

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
        """Collapse the last layer's streams, all returned, to [T, 1, hidden] for ``forward``."""
        at = collapsed(streams.h, streams.pre, self.norm, self.options, self.backend)
        return at.unsqueeze(1)

    def forward(self, h: Tensor) -> Tensor:
        """Map [n, 1, hidden] to [n, hidden]."""
        return h.squeeze(1)

    def collapse(self, streams: Streams) -> Tensor:
        """Collapse streams, all returned, to [T, hidden]; not normed."""
        return collapsed(streams.h, streams.pre, None, self.options, self.backend)

    def normed(self, y: Tensor) -> Tensor:
        """Normalise [..., hidden]."""
        out: Tensor = rms_norm(y, self.norm, self.options.norm_eps, backend=self.backend)
        return out


class HyperConnectionHead(_Collapse):
    """Collapse the streams after the last layer and normalise.

    Attributes:
        fn: float32 [N, N * hidden], projection to the gates.
        base: float32 [N], bias of the gates.
        scale: float32 [1], factor of the gates.
        norm: [hidden], weight of the final RMSNorm.
    """

    def leave(self, streams: Streams) -> Tensor:
        """Return the last layer's streams [T, N, hidden], all returned, for ``forward``."""
        return streams.h

    def forward(self, h: Tensor) -> Tensor:
        """Map streams [n, N, hidden] to [n, hidden]."""
        return self.normed(self.collapse(Streams(h)))

    def collapse(self, streams: Streams) -> Tensor:
        """Collapse streams, all returned, to [T, hidden]; not normed."""
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
